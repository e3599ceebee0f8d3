"""Draft trees in the terminal."""

from __future__ import annotations

from rich.text import Text
from rich.tree import Tree

from eyas.inspect.view import CycleView, NodeView, short, visible

LEGEND = Text.assemble(
    ("●", "bold green"),
    " accepted  ○ verified, rejected  ",
    ("·", "dim"),
    " dropped before verification  ▸ expanded  ",
    ("★", "bold magenta"),
    " the target's own token  c: confidence  V: path value",
)


def to_rich(cycle: CycleView) -> Tree:
    """A tree for ``rich.print``, captioned."""
    root = Tree(Text(cycle.summary, "bold"), guide_style="dim")
    _grow(cycle, 0, root)
    return root


def _grow(cycle: CycleView, index: int, above: Tree) -> None:
    branch = above.add(_label(cycle.nodes[index], is_root=index == 0))
    if cycle.next_text is not None and index == cycle.last_accepted:
        branch.add(Text(f"★ {visible(cycle.next_text)}  {cycle.next_kind}", "bold magenta"))
    for child in cycle.children[index]:
        _grow(cycle, child, branch)


def _label(node: NodeView, is_root: bool) -> Text:
    style = "bold green" if node.accepted else "" if node.kept else "dim"
    mark = "●" if node.accepted else "○" if node.kept else "·"
    label = Text(f"{mark} {node.text}", style)
    if is_root:
        return label.append("  root", "dim")
    label.append(f"  c {short(node.confidence)}  V {short(node.value)}", "not bold" if node.kept else "dim")
    return label.append("  ▸" if node.expanded else "", "cyan")
