"""Looking at draft trees: what a drafter proposed, what was verified, what the target took."""

from eyas.inspect.page import to_html
from eyas.inspect.svg import to_svg
from eyas.inspect.terminal import to_rich
from eyas.inspect.view import CycleView, NodeView, view_cycle

__all__ = ["CycleView", "NodeView", "to_html", "to_rich", "to_svg", "view_cycle"]
