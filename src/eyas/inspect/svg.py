"""Draft trees as SVG: root on the left, a column per level, the accepted path in green."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from unicodedata import east_asian_width

from eyas.inspect.view import CycleView, NodeView, short, visible

COLUMN, ROW = 158, 34  # distance between levels and between leaves, in pixels
BOX_WIDTH, BOX_HEIGHT = 118, 27
MARGIN, CAPTION = 14, 34
LONGEST_LABEL = 15  # columns of text that fit a box

STYLE = """\
text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2933}
.cap{font:600 13px system-ui,sans-serif}.num{font-size:9px;fill:#7b8794}
rect{fill:#fff;stroke:#9aa5b1}path{fill:none;stroke:#9aa5b1;stroke-linecap:round}
.acc rect{fill:#d8f3dc;stroke:#2d6a4f;stroke-width:1.6}path.acc{stroke:#2d6a4f}
.drop{opacity:.45}.drop rect{stroke-dasharray:3 3}path.drop{stroke-dasharray:3 3}
.next rect{fill:#f3e8ff;stroke:#7b2cbf;stroke-width:1.6}path.next{stroke:#7b2cbf;stroke-dasharray:5 4}
.exp{fill:#0b7285;stroke:none}
@media (prefers-color-scheme:dark){text{fill:#e4e7eb}.num{fill:#9aa5b1}rect{fill:#26303b;stroke:#616e7c}
path{stroke:#616e7c}.acc rect{fill:#1b4332;stroke:#52b788}path.acc{stroke:#52b788}
.next rect{fill:#3c1a5b;stroke:#c77dff}path.next{stroke:#c77dff}.exp{fill:#3bc9db}}"""


@dataclass(frozen=True)
class _Place:
    x: float
    y: float


def to_svg(cycles: Sequence[CycleView]) -> str:
    """One SVG document with the cycles below each other; it follows the reader's light or dark theme."""
    parts: list[str] = []
    width = top = 0
    for cycle in cycles:
        body, (wide, high) = draw(cycle)
        parts.append(f'<g transform="translate(0 {top})">{body}</g>')
        width, top = max(width, wide), top + high
    return document("".join(parts), width, top, STYLE)


def document(body: str, width: int, height: int, style: str = "") -> str:
    """An ``svg`` element around drawn cycles; an HTML page brings the style itself."""
    styled = f"<style>{style}</style>" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">{styled}{body}</svg>'
    )


def draw(cycle: CycleView) -> tuple[str, tuple[int, int]]:
    """SVG elements of one cycle and their (width, height) in pixels."""
    places, next_place, leaves = _layout(cycle)
    edges: list[str] = []
    boxes: list[str] = []
    for index, node in enumerate(cycle.nodes):
        style = "acc" if node.accepted else "" if node.kept else "drop"
        if node.parent >= 0:
            edges.append(_edge(places[node.parent], places[index], style, 1 + 2.5 * node.value))
        boxes.append(_node(node, places[index], style))
    if next_place is not None:
        edges.append(_edge(places[cycle.last_accepted], next_place, "next", 2))
        boxes.append(_box(next_place, "next", visible(cycle.next_text or ""), cycle.next_kind, f"{cycle.next_kind}"))
    columns = 1 + max(max(node.depth for node in cycle.nodes), cycle.nodes[cycle.last_accepted].depth + 1)
    caption = f'<text class="cap" x="{MARGIN}" y="22">{escape(cycle.summary)}</text>'
    width = 2 * MARGIN + max((columns - 1) * COLUMN + BOX_WIDTH, 8 * len(cycle.summary))
    return caption + "".join(edges) + "".join(boxes), (width, CAPTION + leaves * ROW + MARGIN)


def _layout(cycle: CycleView) -> tuple[list[_Place], _Place | None, int]:
    """Where each node goes, where the target's own token goes, and how many rows that takes.

    Leaves take a row each from top to bottom, an inner node stands at the middle of its children.
    """
    places = [_Place(0, 0)] * len(cycle.nodes)
    next_place: _Place | None = None
    row = 0

    def take_row(depth: int) -> _Place:
        nonlocal row
        row += 1
        return _Place(MARGIN + depth * COLUMN, CAPTION + (row - 1) * ROW)

    def place(index: int) -> float:
        nonlocal next_place
        depth = cycle.nodes[index].depth
        below: list[float] = []
        if cycle.next_text is not None and index == cycle.last_accepted:
            next_place = take_row(depth + 1)
            below.append(next_place.y)
        below += [place(child) for child in cycle.children[index]]
        middle = (below[0] + below[-1]) / 2 if below else take_row(depth).y
        places[index] = _Place(MARGIN + depth * COLUMN, middle)
        return middle

    place(0)
    return places, next_place, row


def _edge(start: _Place, end: _Place, style: str, thickness: float) -> str:
    x0, y0 = start.x + BOX_WIDTH, start.y + BOX_HEIGHT / 2
    x1, y1 = end.x, end.y + BOX_HEIGHT / 2
    bend = (x1 - x0) / 2
    return (
        f'<path class="{style}" stroke-width="{thickness:.1f}" '
        f'd="M{x0:.0f} {y0:.1f}C{x0 + bend:.0f} {y0:.1f} {x1 - bend:.0f} {y1:.1f} {x1:.0f} {y1:.1f}"/>'
    )


def _node(node: NodeView, at: _Place, style: str) -> str:
    if node.parent < 0:
        return _box(at, style, node.text, "root", f"root, token {node.token}")
    fate = "accepted" if node.accepted else "verified, rejected" if node.kept else "dropped before verification"
    title = (
        f"{node.text}\ntoken {node.token}\nconfidence {node.confidence:.4f}\npath value {node.value:.4f}\n"
        f"{'expanded, ' if node.expanded else ''}{fate}"
    )
    box = _box(at, style, node.text, f"c {short(node.confidence)}  V {short(node.value)}", title)
    if not node.expanded:
        return box
    x, y = at.x + BOX_WIDTH, at.y + BOX_HEIGHT / 2
    return f'{box}<path class="exp {style}" d="M{x - 8:.0f} {y - 4:.1f}l6 4-6 4z"/>'


def _box(at: _Place, style: str, label: str, small: str, title: str) -> str:
    return (
        f'<g class="{style}" transform="translate({at.x:.0f} {at.y:.1f})"><title>{escape(title)}</title>'
        f'<rect width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="8" y="12">{escape(shorten(label))}</text><text class="num" x="8" y="23">{escape(small)}</text></g>'
    )


def shorten(label: str, columns: int = LONGEST_LABEL) -> str:
    """A label cut to so many columns of a fixed-width font; East Asian wide characters take two."""
    used = 0
    for index, char in enumerate(label):
        used += 2 if east_asian_width(char) in "WF" else 1
        if used > columns - (index + 1 < len(label)):
            return label[:index] + "…"
    return label
