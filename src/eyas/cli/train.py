"""``eyas train``: a draft head from answers that ``eyas data answer`` stored."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from eyas.cli.models import tell
from eyas.cli.options import given, notice, spread
from eyas.cli.output import check_directory
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from eyas.heads.config import Eagle3Config, EagleConfig
    from eyas.models import ModelSource
    from eyas.train.trainer import TargetWeights, Trainer


@dataclass(frozen=True)
class TrainOptions:
    """The most used fields of ``TrainSettings``; None leaves its default."""

    steps: Annotated[int | None, Option(help="Optimiser steps. Default: 2000.", show_default=False)] = None
    rows: Annotated[int | None, Option(help="Rows per batch. Default: 4.", show_default=False)] = None
    row_size: Annotated[int | None, Option(help="Tokens per row. Default: 512.", show_default=False)] = None
    optimizer: Annotated[
        Literal["adamw", "muon"] | None,
        Option(
            help="muon is for matrices, beside adamw for the rest. Default: adamw, muon for eagle3.", show_default=False
        ),
    ] = None
    learning_rate: Annotated[
        float | None, Option(help="Highest learning rate of adamw. Default: 0.001.", show_default=False)
    ] = None
    matrix_learning_rate: Annotated[
        float | None, Option(help="Highest learning rate of muon. Default: 0.05.", show_default=False)
    ] = None
    warmup: Annotated[int | None, Option(help="Steps until they are reached. Default: 50.", show_default=False)] = None
    noise: Annotated[
        float | None, Option(help="Noise on the features. Default: 0.1, 0.0 for eagle3.", show_default=False)
    ] = None
    regression_weight: Annotated[
        float | None, Option(help="Weight of the feature loss. Default: 1.0.", show_default=False)
    ] = None
    distillation_weight: Annotated[
        float | None, Option(help="Weight of the token loss. Default: 0.1.", show_default=False)
    ] = None
    hard_share: Annotated[
        float | None,
        Option(
            help="Of what greedy answers teach, the share of the model's first choice alone. Default: 0.0.",
            show_default=False,
        ),
    ] = None
    unroll: Annotated[
        int | None, Option(help="Own steps learned from. Default: 1, 4 for eagle3.", show_default=False)
    ] = None
    unroll_after: Annotated[int | None, Option(help="Steps before that begins. Default: 0.", show_default=False)] = None
    unroll_decay: Annotated[
        float | None, Option(help="Weight of each further step. Default: 0.8.", show_default=False)
    ] = None
    ema: Annotated[
        float | None, Option(help="Decay of averaged weights; 0 is off. Default: 0.0.", show_default=False)
    ] = None
    seed: Annotated[int | None, Option(help="Decides all randomness. Default: 0.", show_default=False)] = None
    evaluate_every: Annotated[
        int | None, Option(help="Steps between measurements. Default: 200.", show_default=False)
    ] = None


@spread
def train_command(
    stores: Annotated[list[Path], Argument(help="What 'eyas data answer' wrote.")],
    options: TrainOptions,
    out: Annotated[Path, Option(help="The run: a directory; continued if it is there.", show_default=False)],
    target: Annotated[str | None, Option(help="The model that answered. Default: the default model.")] = None,
    draft_vocab_size: Annotated[
        int | None, Option(help="Score only so many tokens, the most frequent ones.", show_default=False)
    ] = None,
    intermediate_size: Annotated[
        int | None, Option(help="MLP width. Default: the model's.", show_default=False)
    ] = None,
    kind: Annotated[
        Literal["eagle", "eagle3"], Option(help="The kind of head; eagle3 needs answers with its features.")
    ] = "eagle",
    layers: Annotated[int, Option(help="Decoder layers of the head; each costs as much as the first.")] = 1,
    init_from: Annotated[
        str | None,
        Option(
            help="A head of the same kind, no larger, whose weights a new run begins with.",
            show_default=False,
        ),
    ] = None,
    own_lm_head: Annotated[
        bool, Option("--own-lm-head", help="Train an EAGLE-3 head's lm_head, too; else it uses the model's.")
    ] = False,
    device: Annotated[
        str | None, Option(help="cpu, cuda, ... Default: a GPU if there is one, else the CPU.", show_default=False)
    ] = None,
    threads: Annotated[int | None, Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Also write metrics for TensorBoard, to OUT/tensorboard.")
    ] = False,
) -> None:
    """Train a draft head; stop and go on whenever you like. Several processes (accelerate launch -m eyas.cli train ...)
    share each batch."""
    from eyas.models import load_source

    check_directory(out)
    if own_lm_head and kind != "eagle3":
        raise InvalidInputError("--own-lm-head is for EAGLE-3 heads; the target's lm_head scores an EAGLE-1/2 head")
    source = load_source(target, tell)
    import torch

    from eyas.checkpoints.heads import load_head
    from eyas.environment import portable
    from eyas.loading import check_threads, head_directory
    from eyas.train.checkpoint import begun_run
    from eyas.train.checks import check_stores
    from eyas.train.native import native_drafter
    from eyas.train.precision import denormals_flushed
    from eyas.train.processes import joined
    from eyas.train.recipes import recipe_for
    from eyas.train.settings import TrainSettings
    from eyas.train.store import FeatureStore
    from eyas.train.trainer import Trainer

    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    with denormals_flushed(), joined(device) as processes:
        weights = target_weights(source)
        check_stores([FeatureStore(path) for path in stores], weights.lm_head)
        metadata = {"target": portable(source.name), "target_fingerprint": source.fingerprint()}
        begun = processes.from_first(lambda: begun_run(out))
        own_lm_head = own_lm_head or (begun is not None and not begun.target_lm_head)
        config = head_config(source, draft_vocab_size, intermediate_size, kind, layers, own_lm_head=own_lm_head)
        kept = {"optimizer": begun.optimizer} if begun else {}
        settings = TrainSettings(**{**recipe_for(config).defaults, **kept, **given(options)})
        if options.matrix_learning_rate is not None and settings.optimizer != "muon":
            raise InvalidInputError("--matrix-learning-rate is Muon's, and this run has AdamW; add --optimizer muon")
        start = None
        if begun:
            init_from = begun.init_from
        elif init_from is not None:
            folder = head_directory(init_from) or init_from
            start = processes.from_first(lambda: load_head(folder))
        if init_from is not None:
            metadata["init_from"] = portable(init_from)
        make_drafter = None
        if processes.first and processes.device.type == "cpu":
            make_drafter = native_drafter(source, config, threads=torch.get_num_threads())
        trainer = Trainer(
            stores,
            weights,
            config,
            settings,
            out,
            metadata=metadata,
            processes=processes,
            start=start,
            make_drafter=make_drafter,
        )
        if processes.first:
            _train_and_tell(trainer, tensorboard)
        else:
            trainer.run()


def target_weights(source: ModelSource) -> TargetWeights:
    """What training needs of the target."""
    import torch

    from eyas.train.trainer import TargetWeights

    def matrix(name: str) -> torch.Tensor:
        return torch.from_numpy(source.tensors.float32(name).copy())

    embedding = matrix("model.embed_tokens.weight")
    lm_head = matrix("lm_head.weight") if source.lm_head_name == "lm_head.weight" else embedding
    return TargetWeights(embedding, lm_head, matrix("model.norm.weight"))


def _train_and_tell(trainer: Trainer, tensorboard: bool) -> None:
    """Run, with advice, a progress bar, and the outcome as JSON."""
    from eyas.train.checks import vocabulary_advice
    from eyas.train.tensorboard import TensorBoardLog

    board = TensorBoardLog(trainer.out / "tensorboard") if tensorboard else None
    size = trainer.head.config.draft_vocab_size
    held_out = trainer.epochs.held_out()
    if not held_out:
        notice("so few prompts leave none to measure with: the last head is kept, and gets no forecast")
    if held_out and size is not None and (advice := vocabulary_advice(trainer.draft_coverage(), size)):
        notice(advice)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn(
        "loss {task.fields[loss]:.3f}  top-1 {task.fields[agreement]:.3f}  {task.fields[rate]:.0f} tokens/s"
    )
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("train", total=trainer.settings.steps, loss=0.0, agreement=0.0, rate=0.0)

        def progress(metrics: dict[str, Any]) -> None:
            if board:
                board.write(metrics)
            bar.update(
                task,
                completed=metrics["step"],
                loss=metrics["loss"],
                agreement=metrics["agreement"][0],
                rate=metrics["tokens_per_second"],
            )
            if "held_out_acceptance_length" in metrics:
                console.print(f"step {metrics['step']}: held-out tau {metrics['held_out_acceptance_length']:.3f}")

        try:
            state = trainer.run(progress)
        finally:
            if board:
                board.close()
    print(
        json.dumps(
            {
                "head": str(trainer.out / "head"),
                "step": state.step,
                "tokens": state.tokens,
                "best_tau": state.best or None,
            }
        )
    )


def head_config(
    source: ModelSource,
    draft_vocab_size: int | None,
    intermediate_size: int | None,
    kind: str = "eagle",
    layers: int = 1,
    *,
    own_lm_head: bool = False,
) -> EagleConfig | Eagle3Config:
    """The shape of a new head for a target: its own attention shape, no biases, so that every engine can load it.

    Args:
        own_lm_head: of an EAGLE-3 head; else the target's scores.

    Raises:
        InvalidInputError: a draft vocabulary larger than the target's, or a number of layers that the kind has not.
    """
    from eyas.heads.config import Eagle3Config, EagleConfig

    config = source.config
    heads = config["num_attention_heads"]
    if draft_vocab_size is not None and not 1 <= draft_vocab_size <= config["vocab_size"]:
        raise InvalidInputError(f"draft_vocab_size must lie in 1..{config['vocab_size']}, got {draft_vocab_size}")
    make = partial(Eagle3Config, target_lm_head=not own_lm_head) if kind == "eagle3" else EagleConfig
    return make(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"] if intermediate_size is None else intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        num_layers=layers,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=config.get("rope_theta") or 10000.0,
        rope_scaling=config.get("rope_scaling"),
        max_position_embeddings=config["max_position_embeddings"],
        draft_vocab_size=draft_vocab_size,
    )
