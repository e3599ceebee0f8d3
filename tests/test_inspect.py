"""Views of cycles say exactly what happened; drawings hold every node and nothing a file could not bear."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.inspect import CycleView, NodeView, to_html, to_rich, to_svg, view_cycle
from eyas.inspect.svg import shorten
from eyas.inspect.view import short, visible
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.stopping import StopParams
from support.table_cli import load_table

SVG = "{http://www.w3.org/2000/svg}"


def steps_of(policy: TreePolicy, max_tokens: int = 30) -> tuple[list[Step], list[CycleView]]:
    loaded, drafter = load_table(eos=False)
    tokenizer = loaded.tokenizer
    prompt = tokenizer.encode("begin w9 w10")
    stop = StopParams(max_tokens=max_tokens)
    session = Session(loaded.target, drafter)
    steps = list(generate(session, prompt, policy=policy, stop=stop, tokenizer=tokenizer))
    views = [view_cycle(n, step, tokenizer.token_text) for n, step in enumerate(steps[1:], 1)]
    return steps, views


def handmade() -> CycleView:
    def node(parent: int, depth: int, text: str, **fate: bool) -> NodeView:
        flags = {"expanded": False, "kept": True, "accepted": False} | fate
        return NodeView(parent, depth, 1, text, 0.5, 0.5**depth, **flags)

    nodes = (
        node(-1, 0, "root", accepted=True, expanded=True),
        node(0, 1, "yes", accepted=True, expanded=True),
        node(0, 1, "<no> & 안녕하세요 세상아", kept=False),
        node(1, 2, "late"),
    )
    return CycleView(1, nodes, "\x0b</svg>", "recovered", "yes it is")


@pytest.mark.parametrize("policy", [DynamicPolicy(3, 3, 6), StaticPolicy.eagle1(8), StaticPolicy.chain(3)])
def test_a_view_tells_what_the_cycle_did(policy: TreePolicy) -> None:
    steps, views = steps_of(policy)
    for step, view in zip(steps[1:], views, strict=True):
        assert step.cycle is not None
        tree, path = step.cycle.tree, step.cycle.acceptance.path
        assert view.num_kept == tree.num_draft_tokens
        kept = [node for node in view.nodes if node.kept]
        assert [node.token for node in kept] == tree.tokens.tolist()
        assert [node.depth for node in kept] == tree.depths.tolist()
        # the accepted nodes and the target's own token are the step's tokens
        accepted = [node.token for node in view.nodes if node.accepted][1:]
        assert accepted == list(step.tokens)[: len(path) - 1]
        assert (view.next_text is None) == (len(step.tokens) < len(path))
        # every candidate that the policy saw is there, and every expanded one has children
        candidates = step.cycle.trace.candidates
        if candidates is None:  # no room left to draft
            assert len(tree) == 1
            assert view.next_kind == "plain"
            continue
        assert view.num_candidates == len(candidates) - 1
        for index, node in enumerate(view.nodes):
            assert node.expanded == bool(view.children[index])
            if node.parent >= 0:
                parent = view.nodes[node.parent]
                assert node.depth == parent.depth + 1
                assert node.value == pytest.approx(parent.value * node.confidence, rel=1e-5)
    assert any(view.num_accepted >= 1 for view in views)


def test_without_dropped_leaves_the_verified_tree() -> None:
    steps, views = steps_of(DynamicPolicy(3, 3, 6))
    for step, view in zip(steps[1:], views, strict=True):
        assert step.cycle is not None
        bare = view.without_dropped()
        assert bare.num_candidates == view.num_kept == bare.num_kept
        assert [node.parent for node in bare.nodes] == step.cycle.tree.parents.tolist()
    assert any(view.num_kept < view.num_candidates for view in views)


def test_a_block_cut_by_a_stop_shows_no_token_past_the_end() -> None:
    for limit in range(2, 12):
        steps, views = steps_of(DynamicPolicy(4, 3, 8), max_tokens=limit)
        shown = sum(view.num_accepted + (view.next_text is not None) for view in views)
        assert shown == limit - 1
        assert len(steps[-1].tokens) == views[-1].num_accepted + (views[-1].next_text is not None)


def test_a_prefill_has_no_tree() -> None:
    steps, _ = steps_of(DynamicPolicy())
    with pytest.raises(InvalidInputError, match="prefill"):
        view_cycle(0, steps[0], str)


def test_a_drafter_that_hides_its_candidates_still_has_its_tree_drawn() -> None:
    steps, views = steps_of(DynamicPolicy(3, 3, 6))
    cycle = steps[1].cycle
    assert cycle is not None
    cycle.trace.candidates = None
    view = view_cycle(1, steps[1], lambda token: f"w{token}")
    bare = views[0].without_dropped()
    assert [(node.parent, node.token, node.accepted) for node in view.nodes] == [
        (node.parent, node.token, node.accepted) for node in bare.nodes
    ]
    assert [node.confidence for node in view.nodes] == pytest.approx([node.confidence for node in bare.nodes])


def test_svg_holds_every_node_once_and_is_valid_xml() -> None:
    _, views = steps_of(DynamicPolicy(3, 3, 6))
    root = ET.fromstring(to_svg(views))
    boxes = root.findall(f".//{SVG}rect")
    own = sum(view.next_text is not None for view in views)
    assert len(boxes) == sum(len(view.nodes) for view in views) + own
    captions = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "cap"]
    assert captions == [view.summary for view in views]
    # boxes of one drawing never overlap
    for group in root.findall(f"{SVG}g"):
        places = [box.get("transform") for box in group.findall(f"{SVG}g")]
        assert len(set(places)) == len(places)


def test_svg_survives_hostile_text() -> None:
    root = ET.fromstring(to_svg([handmade()]))
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert "\\x0b</svg>" in labels
    assert any(label and label.startswith("<no> &") and label.endswith("…") for label in labels)
    styles = [group.get("class") for group in root.findall(f"{SVG}g/{SVG}g")]
    assert styles == ["acc", "acc", "drop", "", "next"]


def test_html_shows_each_cycle_and_its_text() -> None:
    page = to_html([handmade(), handmade()], title="a <b> & c", facts="2 cycles", opening="Well, ")
    assert page.count("<section") == page.count("</section>") == 2
    assert page.count("<section hidden>") == 1
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert 'Well, <span data-n="1">yes it is</span><span data-n="2">yes it is</span>' in page
    assert 'max="2"' in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_terminal_tree_marks_every_fate() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(to_rich(handmade()))
    lines = console.export_text().splitlines()
    console.file.close()
    assert lines[0].startswith("cycle 1: 2 draft tokens verified, 1 accepted, + \\x0b</svg> (recovered)")
    assert [line.lstrip("│├└─ ")[:1] for line in lines[1:]] == ["●", "●", "★", "○", "·"]
    assert "c 0.50  V 0.25" in lines[4]


def test_visible_text() -> None:
    assert visible(" a\n\tb\x00é�") == "·a⏎⇥b\\x00é�"


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00"), (0.5, "0.50"), (0.06, "0.06"), (0.004, "0.004")])
def test_short_probabilities(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("label", "text"), [("abcd", "abcd"), ("abcde", "abc…"), ("안녕", "안녕"), ("안녕하", "안…"), ("", "")]
)
def test_shorten_counts_columns(label: str, text: str) -> None:
    assert shorten(label, 4) == text
