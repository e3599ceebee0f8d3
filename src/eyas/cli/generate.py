"""``eyas generate``: one prompt, one answer, and on request plain decoding beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated

from typer import Argument, Option

from eyas.cli.inspect import Viewer, print_trees
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.cli.output import print_json
from eyas.cli.prompts import encode_prompt, read_prompt
from eyas.completion import Completion, Divergence, collect, divergence
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.plan import PLAIN, DraftPlan
from eyas.way import Way

WARM_UP_TOKENS = 8
"""Tokens answered and thrown away before a comparison, so that neither side pays for first touches."""


@spread
def generate_command(
    prompt: Annotated[str, Argument(help="The question; - reads standard input.", show_default=False)],
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    raw: Annotated[bool, Option("--raw", help="Go on with the plain text: no chat template.")] = False,
    system: Annotated[str | None, Option(help="A system message.", show_default=False)] = None,
    stream: Annotated[
        bool | None,
        Option(help="Print the text as it comes. Default: to a terminal only.", show_default=False),
    ] = None,
    compare: Annotated[bool, Option("--compare", help="Answer again by plain decoding and compare.")] = False,
    show_tree: Annotated[
        bool, Option("--show-tree", help="Draw the draft tree of the cycle that accepted most.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a prompt."""
    if as_json and (show_tree or stream):
        unheard = [name for name, given in (("--show-tree", show_tree), ("--stream", stream)) if given]
        raise InvalidInputError(f"--json prints one object and nothing else; leave out {' and '.join(unheard)}")
    prompt = read_prompt(prompt)
    params, stop = sampling.sampling(), sampling.stopping()
    settings = draft.settings(model.target, greedy=params.greedy)  # mistakes are told before a model is loaded
    loaded = model.load_for(settings.draft)
    plan = model.planner(settings, loaded, greedy=params.greedy).plan()
    tokenizer = loaded.tokenizer
    ids = encode_prompt(tokenizer, prompt, raw=raw, system=system)

    def answer(plan: DraftPlan, watch: Callable[[Step], object] | None = None, limit: int = 0) -> Completion:
        session = Session(loaded.target, plan.drafter)
        until = replace(stop, max_tokens=limit, min_tokens=0) if limit else stop
        steps = generate(
            session,
            ids,
            policy=plan.policy,
            gate=plan.gate,
            draw=plan.draw,
            params=params,
            stop=until,
            tokenizer=tokenizer,
        )
        return collect(steps, len(ids), watch)

    if compare:
        for each in (plan, PLAIN):
            answer(each, limit=WARM_UP_TOKENS)
    streaming = not as_json and (sys.stdout.isatty() if stream is None else stream)
    viewer = Viewer(tokenizer.token_text)

    def watch(step: Step) -> None:
        if streaming:
            print_step(step)
        if show_tree:
            viewer.watch(step)

    ours = answer(plan, watch)
    plain = answer(PLAIN) if compare else None
    parted = None
    if plain is not None and params.greedy:
        parted = divergence(loaded.target, ids, ours.token_ids, plain.token_ids)
    if as_json:
        result = ours.as_dict() if plain is None else comparison(ours, plain, params.greedy, parted)
        print_json(result)
        return
    print("" if streaming else ours.text)
    report(ours, plain, plan.way, params.greedy, parted)
    if viewer.best is not None:
        print_trees([viewer.best.without_dropped()])


def print_step(step: Step) -> None:
    """Print a step's text at once."""
    print(step.text, end="", flush=True)


def speedup(ours: Completion, plain: Completion) -> float | None:
    """Ratio of decoding rates; None where an answer was too short to have one."""
    slow = plain.stats.tokens_per_second
    return ours.stats.tokens_per_second / slow if slow and ours.stats.cycles else None


def comparison(
    ours: Completion, plain: Completion, greedy: bool, parted: Divergence | None = None
) -> dict[str, object]:
    """The JSON object of ``--compare``. ``identical`` is null for sampled answers: those agree in distribution, and
    two draws need not be the same. ``divergence`` says where greedy ones part, null where they do not."""
    return {
        **ours.as_dict(),
        "baseline": plain.as_dict(),
        "speedup": speedup(ours, plain),
        "identical": parted is None if greedy else None,
        "divergence": parted and asdict(parted),
    }


def report(
    ours: Completion, plain: Completion | None, way: Way, greedy: bool, parted: Divergence | None = None
) -> None:
    """A few lines about speed, for people: on standard error, so that standard output holds the answer alone."""
    stats = ours.stats
    line = f"{len(ours.token_ids)} tokens ({ours.finish_reason}), {stats.tokens_per_second:.1f} tokens/s"
    if way.drafts:
        line += (
            f"; {way}: {stats.cycles} cycles, tau {stats.acceptance_length:.2f}, "
            f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted"
        )
    print(f"[{line}]", file=sys.stderr)
    if plain is None:
        return
    ratio = speedup(ours, plain)
    verdict = "not compared (sampled)" if not greedy else "yes"
    if parted is not None:
        gap = "" if parted.gap is None else f", logits {parted.gap:.3g} apart there"
        verdict = f"NO, they part at token {parted.token}{gap}"
    print(
        f"[plain decoding: {len(plain.token_ids)} tokens, {plain.stats.tokens_per_second:.1f} tokens/s; "
        f"speed-up {'-' if ratio is None else f'{ratio:.2f}x'}; identical: {verdict}]",
        file=sys.stderr,
    )
