"""``eyas inspect``: every cycle's draft tree, in the terminal and as SVG or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.cli.prompts import encode_prompt, read_prompt
from eyas.completion import Completion, collect
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.inspect import CycleView, to_html, to_svg, view_cycle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@spread
def inspect_command(
    prompt: Annotated[str, Argument(help="The question; - reads standard input.", show_default=False)],
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    raw: Annotated[bool, Option("--raw", help="Go on with the plain text: no chat template.")] = False,
    system: Annotated[str | None, Option(help="A system message.", show_default=False)] = None,
    cycle: Annotated[int | None, Option(help="Show this cycle only, counted from 1.", show_default=False)] = None,
    all_candidates: Annotated[bool, Option("--all", help="Show candidates that were not verified, too.")] = False,
    svg: Annotated[Path | None, Option(help="Write the trees as SVG.", show_default=False)] = None,
    html: Annotated[Path | None, Option(help="Write a page with a slider.", show_default=False)] = None,
) -> None:
    """Show how draft trees grow and what the model takes of them."""
    prompt = read_prompt(prompt)
    params, stop = sampling.sampling(), sampling.stopping()
    settings = draft.settings(model.target, greedy=params.greedy)  # mistakes are told before a model is loaded
    if settings.draft == "none":
        raise InvalidInputError("plain decoding has no draft trees; choose a head with --draft")
    loaded = model.load_for(settings.draft)
    plan = model.planner(settings, loaded, greedy=params.greedy).plan()
    if plan.drafter is None:
        raise InvalidInputError("eyas tune measured that drafting does not pay here; for trees all the same: --policy")
    tokenizer = loaded.tokenizer
    ids = encode_prompt(tokenizer, prompt, raw=raw, system=system)
    viewer = Viewer(tokenizer.token_text)
    session = Session(loaded.target, plan.drafter)
    steps = generate(
        session, ids, policy=plan.policy, gate=plan.gate, draw=plan.draw, params=params, stop=stop, tokenizer=tokenizer
    )
    answer = collect(steps, len(ids), viewer.watch)
    cycles = [each if all_candidates else each.without_dropped() for each in viewer.pick(cycle)]
    if svg is not None:
        write_page(svg, to_svg(cycles))
    if html is not None:
        facts = f"{loaded.target.info.name}, {plan.way} tree, {facts_of(answer)}"
        opening = "" if cycle else viewer.opening
        write_page(html, to_html(cycles, title=" ".join(prompt.split())[:120], facts=facts, opening=opening))
    if svg is None and html is None:
        print_trees(cycles)
        print(facts_of(answer))


class Viewer:
    """Collects the cycles of an answer as they come."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self.opening = ""
        self.cycles: list[CycleView] = []

    def watch(self, step: Step) -> None:
        if step.cycle is None:
            self.opening = step.text
        else:
            self.cycles.append(view_cycle(len(self.cycles) + 1, step, self._token_text))

    def pick(self, number: int | None) -> Sequence[CycleView]:
        """All cycles, or the one with this number.

        Raises:
            InvalidInputError: there is no such cycle, or none at all.
        """
        if not self.cycles:
            raise InvalidInputError("the answer ended with its first token, before any draft; ask for a longer one")
        if number is None:
            return self.cycles
        if not 1 <= number <= len(self.cycles):
            raise InvalidInputError(f"--cycle {number}: the answer has cycles 1 to {len(self.cycles)}")
        return self.cycles[number - 1 : number]

    @property
    def best(self) -> CycleView | None:
        """The cycle that accepted most."""
        return max(self.cycles, key=lambda cycle: cycle.num_accepted, default=None)


def print_trees(cycles: Sequence[CycleView]) -> None:
    """Draw trees on standard output."""
    from rich.console import Console

    from eyas.inspect.terminal import LEGEND, to_rich

    console = Console(highlight=False)
    for cycle in cycles:
        console.print(to_rich(cycle))
    console.print(LEGEND)


def write_page(path: Path, text: str) -> None:
    """Write a file and say so.

    Raises:
        InvalidInputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}")


def facts_of(answer: Completion) -> str:
    """One line about an answer."""
    stats = answer.stats
    return (
        f"{len(answer.token_ids)} tokens in {stats.cycles} cycles, tau {stats.acceptance_length:.2f}, "
        f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted"
    )
