"""Draft trees as one self-contained HTML page: the answer as it grew, and a slider through its cycles."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from eyas.inspect.svg import STYLE, document, draw
from eyas.inspect.view import CycleView

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root{{color-scheme:light dark;--bg:#f8f9fa;--fg:#1f2933;--soft:#7b8794;--line:#e4e7eb;--hit:#b7e4c7}}
@media (prefers-color-scheme:dark){{:root{{--bg:#151b22;--fg:#e4e7eb;--soft:#9aa5b1;--line:#323f4b;--hit:#2d6a4f}}}}
body{{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:72rem;margin:auto;padding:1.5rem}}h1{{font-size:1.1rem;margin:0 0 .3rem}}
p{{margin:.3rem 0;color:var(--soft)}}#text{{white-space:pre-wrap;color:var(--fg);border:1px solid var(--line);
border-radius:8px;padding:.8rem;max-height:10rem;overflow:auto}}#text span[data-n]{{color:var(--soft);opacity:.35}}
#text .past{{color:var(--fg)!important;opacity:1!important}}#text .now{{background:var(--hit);opacity:1!important;
color:var(--fg)!important;border-radius:3px}}nav{{display:flex;gap:.8rem;align-items:center;margin:1rem 0}}
nav input{{flex:1;accent-color:#2d6a4f}}nav output{{min-width:6rem;text-align:right;color:var(--soft)}}
section{{overflow-x:auto;border:1px solid var(--line);border-radius:8px}}section[hidden]{{display:none}}
{style}</style></head><body><main>
<h1>{title}</h1><p>{facts}</p>
<p>Green: accepted. White: verified, rejected. Dashed grey: dropped before verification. Violet: the target's own token.
Triangle: expanded. c: confidence, V: path value. Arrow keys move the slider.</p>
<div id="text">{text}</div>
<nav><input id="at" type="range" min="1" max="{count}" value="1" aria-label="cycle"><output id="of"></output></nav>
{sections}
</main><script>
const at=document.getElementById("at"),of=document.getElementById("of");
function show(){{const n=+at.value;of.textContent=n+" of "+at.max;
document.querySelectorAll("section").forEach((s,i)=>s.hidden=i+1!==n);
document.querySelectorAll("#text span[data-n]").forEach(s=>{{const m=+s.dataset.n;
s.className=m<n?"past":m===n?"now":"";if(m===n)s.scrollIntoView({{block:"nearest"}})}})}}
at.addEventListener("input",show);show();at.focus();
</script></body></html>
"""


def to_html(cycles: Sequence[CycleView], *, title: str = "Draft trees", facts: str = "", opening: str = "") -> str:
    """A page that needs nothing from the network.

    Args:
        cycles: at least one.
        title: heading, such as the prompt.
        facts: a line below it, such as settings and acceptance length.
        opening: text of the answer before the first cycle (the prefill's token).
    """
    sections: list[str] = []
    for cycle in cycles:
        body, (width, height) = draw(cycle)
        sections.append(f"<section{' hidden' if sections else ''}>{document(body, width, height)}</section>")
    spans = [f'<span data-n="{n}">{escape(cycle.text)}</span>' for n, cycle in enumerate(cycles, 1)]
    return _PAGE.format(
        title=escape(title),
        facts=escape(facts),
        style=STYLE,
        text=escape(opening) + "".join(spans),
        count=len(cycles),
        sections="\n".join(sections),
    )
