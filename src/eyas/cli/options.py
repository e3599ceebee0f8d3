"""Options that several commands share: named, explained and given their defaults once.

Each group is a frozen dataclass. A command takes whole groups as parameters and ``spread`` shows their fields to
typer as single options, so ``eyas generate`` and ``eyas bench`` can never drift apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Option

from eyas.plan import DraftSettings, Planner, load_planner
from eyas.policies import DynamicPolicy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.way import Way

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from eyas.loading import LoadedTarget

_model = partial(Option, rich_help_panel="Model")
_drafting = partial(Option, rich_help_panel="Drafting")
_sampling = partial(Option, rich_help_panel="Sampling and stopping")


def notice(line: str) -> None:
    """Tell the user something that is no error."""
    print(f"eyas: {line}", file=sys.stderr, flush=True)


def drafter_for(target: str | None, draft: str) -> str:
    """Who drafts for a target where the user says ``--draft draft``. The default is a head that was trained for the
    default model alone; others get n-grams, which serve any, and one line says so.

    Raises:
        InvalidInputError: a head by name that was shipped for another target.
    """
    from eyas.loading import check_drafter, ships_heads_for

    if draft == "default" and not ships_heads_for(target):
        notice(f"no draft head is shipped for {target}: what the text repeats drafts (--draft ngram)")
        return "ngram"
    check_drafter(draft, target)
    return draft


@dataclass(frozen=True)
class ModelOptions:
    """Which model answers, and on what."""

    target: Annotated[
        str | None,
        _model(
            help="The model: a Hugging Face directory, a hub id or a GGUF file. "
            "Default: SmolLM2-135M-Instruct, fetched on first use.",
            show_default=False,
        ),
    ] = None
    engine: Annotated[Literal["auto", "native", "transformers"], _model(help="What runs it.")] = "auto"
    dtype: Annotated[str, _model(help="Weight type: auto, float32, bfloat16; native also int8, q4.")] = "auto"
    device: Annotated[str, _model(help="cpu, cuda, cuda:1, ...")] = "cpu"
    threads: Annotated[int | None, _model(help="CPU threads. Default: all cores.", show_default=False)] = None

    def load_for(self, draft: str) -> LoadedTarget:
        """The model, with the features that the drafter of this name reads."""
        from eyas.loading import feature_levels

        return self.load(feature_levels(draft))

    def load(self, feature_levels: int = 1) -> LoadedTarget:
        from eyas.loading import load_target

        return load_target(
            self.target,
            engine=self.engine,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            feature_levels=feature_levels,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )

    def planner(
        self, settings: DraftSettings, loaded: LoadedTarget, *, greedy: bool, ways: Sequence[Way] | None = None
    ) -> Planner:
        """Load the drafter, and the profile if there is one; see ``eyas.plan.load_planner``."""
        return load_planner(
            settings,
            loaded,
            greedy=greedy,
            ways=ways,
            threads=self.threads,
            device=self.device,
            notice=notice,
        )


@dataclass(frozen=True)
class DraftOptions:
    """Who guesses, and how the tree grows."""

    draft: Annotated[
        str,
        _drafting(
            help="Who drafts: 'eagle2', 'eagle3' (heads shipped for the default model), 'default' (the better one; "
            "'ngram' for other models), a head directory, a small model with the same tokens (directory, hub id, GGUF "
            "file), 'ngram' (repetitions in the text), or 'none'."
        ),
    ] = "default"
    policy: Annotated[
        Literal["auto", "dynamic", "static", "chain", "sequoia", "budgeted"],
        _drafting(
            help="How the draft tree grows. auto: the fastest that eyas tune measured, else what should be by the "
            "head's forecast and a second of timing, else dynamic. dynamic: EAGLE-2. static: EAGLE-1's tree, or "
            "--template. sequoia, budgeted: by acceptance and costs (a head's forecast, or eyas tune)."
        ),
    ] = "auto"
    template: Annotated[
        Path | None,
        _drafting(help="A static tree: a JSON file of rank paths like [[0], [1], [0, 0]].", show_default=False),
    ] = None
    graft: Annotated[
        bool | None,
        _drafting(
            "--graft/--no-graft",
            help="Let repetitions in the text join the tree. Default: auto does so where it is the fastest; else off.",
            show_default=False,
        ),
    ] = None
    draw: Annotated[
        bool | None,
        _drafting(
            "--draw/--no-draw",
            help="Where answers are sampled: draw draft tokens from the drafter's distribution, or take its likeliest. "
            "Default: auto takes the faster; else drawn, but likeliest for sequoia, budgeted and grafted trees.",
            show_default=False,
        ),
    ] = None
    num_steps: Annotated[
        int | None,
        _drafting(
            help="Levels of the tree, one drafter pass each. With this or one of the next two, auto is dynamic. "
            f"Default: {DynamicPolicy.num_steps}; auto, budgeted and sequoia choose by what was measured.",
            show_default=False,
        ),
    ] = None
    topk: Annotated[
        int | None,
        _drafting(
            help=f"Nodes expanded per level, and children of each. Default: {DynamicPolicy.topk}; see --num-steps.",
            show_default=False,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        _drafting(
            help="Nodes verified per cycle, root excluded. "
            f"Default: {DynamicPolicy.num_draft_tokens}; see --num-steps.",
            show_default=False,
        ),
    ] = None
    profile: Annotated[
        Path | None, _drafting(help="A certain profile of eyas tune instead of the usual one.", show_default=False)
    ] = None

    def settings(self, target: str | None, *, greedy: bool = False) -> DraftSettings:
        """What the user wants of a target, checked before anything is loaded; ``greedy`` answers draw nothing."""
        settings = DraftSettings(**{**asdict(self), "draft": drafter_for(target, self.draft)})
        if greedy:
            settings.check_greedy()
        return settings


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and when the answer ends."""

    temperature: Annotated[float, _sampling(help="0 is greedy.")] = SamplingParams.temperature
    top_k: Annotated[int, _sampling(help="Keep the k likeliest tokens; 0 keeps all.")] = SamplingParams.top_k
    top_p: Annotated[float, _sampling(help="Keep tokens up to this mass; 1 keeps all.")] = SamplingParams.top_p
    min_p: Annotated[float, _sampling(help="Drop tokens below this share of the likeliest; 0 keeps all.")] = (
        SamplingParams.min_p
    )
    repetition_penalty: Annotated[float, _sampling(help="1 is off.")] = SamplingParams.repetition_penalty
    presence_penalty: Annotated[float, _sampling(help="0 is off.")] = SamplingParams.presence_penalty
    frequency_penalty: Annotated[float, _sampling(help="0 is off.")] = SamplingParams.frequency_penalty
    seed: Annotated[int | None, _sampling(help="Makes sampling repeatable.", show_default=False)] = None
    max_tokens: Annotated[int, _sampling(help="Longest answer, in tokens.")] = 256
    min_tokens: Annotated[int, _sampling(help="Shortest answer, in tokens.")] = StopParams.min_tokens
    stop: Annotated[
        list[str], _sampling(help="End just before this text; may be given more than once.", show_default=False)
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on past the model's own end.")] = False

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
        )

    def stopping(self) -> StopParams:
        return StopParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_strings=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


def given(options: DataclassInstance) -> dict[str, Any]:
    """Those options of a group that the user set: all but the None."""
    return {name: value for name, value in asdict(options).items() if value is not None}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's option groups as options of the command itself.

    Raises:
        TypeError: two groups (or a group and the command) use one name.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            members = [parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)]
        else:
            assert isinstance(hint, type)
            members = _options(hint)
            groups[parameter.name] = (hint, [member.name for member in members])
        for member in members:
            if member.name in parameters:
                raise TypeError(f"{command.__name__}: two parameters are called {member.name}")
            parameters[member.name] = member

    def flat(**values: Any) -> None:
        for name, (group, members) in groups.items():
            values[name] = group(**{member: values.pop(member) for member in members})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    flat.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return flat


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    default = group()
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(default, option.name),
            annotation=hints[option.name],
        )
        for option in fields(group)
    ]
