"""From the names a user gives to a target and a drafter that fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.checkpoints.eagle3 import Eagle3Checkpoint
from eyas.checkpoints.head_files import head_fingerprint, head_metadata
from eyas.checkpoints.head_layout import check_fits
from eyas.checkpoints.heads import head_feature_levels, load_head
from eyas.drafters.base import Drafter
from eyas.errors import InvalidInputError
from eyas.fetch import Progress
from eyas.models import DEFAULT_NAMES, ModelSource, load_source
from eyas.native.config import WEIGHT_TYPES
from eyas.targets.base import Target
from eyas.text import TextTokenizer

ENGINES = ("auto", "native", "transformers")
DATA = Path(__file__).parent / "data"
DEFAULT_HEAD = DATA / "smollm2-135m-eagle3"
SHIPPED_HEADS = {"default": DEFAULT_HEAD, "eagle2": DATA / "smollm2-135m-eagle", "eagle3": DEFAULT_HEAD}
"""Heads that come with Eyas, all for the default model, by the names a user gives."""
MAX_THREADS = 1024
"""More than any machine gains from, fewer than any refuses to start."""


@dataclass(frozen=True)
class LoadedTarget:
    """A model ready to answer.

    Attributes:
        target: runs it.
        source: where it came from; config, tokenizer and weights as stored.
    """

    target: Target
    source: ModelSource

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.source.tokenizer


def load_target(
    name: str | None = None,
    *,
    engine: str = "auto",
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    feature_levels: int | None = None,
    progress: Progress | None = None,
) -> LoadedTarget:
    """Find a model and load it.

    Args:
        name: a Hugging Face directory, a hub id, a GGUF file; None for the default model, fetched on first use.
        engine: "native" (CPU), "transformers" (anywhere), or "auto": native where it can run the model.
        dtype: weight type; "auto" takes the engine's best for the device.
        device: "cpu", "cuda", ...; anything but the CPU needs the transformers engine.
        threads: CPU threads; None uses all cores.
        feature_levels: hidden states per feature row that the draft head needs: 1, 3 for EAGLE-3, 4 for data. None: as
            many as the model's default head reads, 1 for a model without.
        progress: told about downloads, one line each.

    Raises:
        InvalidInputError: an unknown engine or dtype, a device that is not there, or no sensible number of threads.
        CheckpointError, FetchError, UnsupportedModelError: see ``eyas.models.load_source`` and the engines.
    """
    if engine not in ENGINES:
        raise InvalidInputError(f"unknown engine {engine!r}; choose one of {', '.join(ENGINES)}")
    if dtype not in ("auto", *WEIGHT_TYPES):
        raise InvalidInputError(
            f"unknown dtype {dtype!r}; choose one of auto, {', '.join(WEIGHT_TYPES)} (int8 and q4: native engine only)"
        )
    check_threads(threads)
    source = load_source(name, progress)
    if feature_levels is None:
        feature_levels = head_feature_levels(DEFAULT_HEAD) if source.name in DEFAULT_NAMES else 1
    if engine == "native" or (engine == "auto" and _native_runs(source, device, dtype)):
        from eyas.targets.native import NativeTarget

        if device != "cpu":
            raise InvalidInputError(f"the native engine runs on the CPU, not on {device}; use --engine transformers")
        native = NativeTarget.load(source, dtype=dtype, threads=threads, feature_levels=feature_levels)
        return LoadedTarget(native, source)
    from eyas.targets.hf import load_hf

    return LoadedTarget(
        load_hf(source, dtype=dtype, device=device, threads=threads, feature_levels=feature_levels), source
    )


def check_threads(threads: int | None) -> None:
    """InvalidInputError where no machine has so many (or so few) threads; None stands for all cores."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InvalidInputError(f"threads must be between 1 and {MAX_THREADS}, got {threads}")


def load_drafter(name: str | None, loaded: LoadedTarget) -> Drafter | None:
    """The drafter called ``name`` for a loaded target.

    Args:
        name: "none" or None (plain decoding), "ngram" (repetitions in the text), a head directory, a small model (as
            ``load_target`` takes it), or one of ``SHIPPED_HEADS``: for the default model, another target is refused.
        loaded: the target it drafts for.

    Raises:
        InvalidInputError: a shipped head for another target; a small model with another tokenizer.
        CheckpointError: a head that is damaged or made for another model.
    """
    if name is None or name == "none":
        return None
    if name == "ngram":
        from eyas.drafters.ngram import NgramDrafter

        return NgramDrafter()
    if names_model(name):
        return _small_model(name, loaded)
    check_drafter(name, loaded.source.name)
    checkpoint = load_head(SHIPPED_HEADS.get(name, name))
    check_fits(checkpoint, loaded.target.info)
    return _head_drafter(checkpoint, loaded)


def ships_heads_for(target: str | None) -> bool:
    """Whether ``SHIPPED_HEADS`` are for the target of this name (see ``load_target``)."""
    return target is None or target.lower() in DEFAULT_NAMES


def check_drafter(name: str, target: str | None) -> None:
    """InvalidInputError where the drafter called ``name`` is a head shipped for another target. Names are enough to
    tell: nothing needs to be loaded."""
    if name in SHIPPED_HEADS and not ships_heads_for(target):
        raise InvalidInputError(
            f"no draft head is shipped for {target}; name one (--draft DIRECTORY), train one (eyas train), draft with "
            "what the text repeats (--draft ngram), or decode plainly (--draft none)"
        )


def head_directory(name: str | None) -> Path | None:
    """Where the head called ``name`` lies (see ``load_drafter``); None for anything but a head."""
    if name in SHIPPED_HEADS:
        return SHIPPED_HEADS[name]
    return None if name in (None, "none", "ngram") or names_model(name) else Path(name).expanduser()


def trained_for_another(head: Path, source: ModelSource) -> str | None:
    """The name of the model that a head was trained for, where its weights are not those of ``source``; None where they
    are, or where the head does not say."""
    metadata = head_metadata(head)
    trained_for = metadata.get("target_fingerprint")
    if trained_for is None or trained_for == source.fingerprint():
        return None
    return metadata.get("target", "another model")


def head_notice(draft: str, loaded: LoadedTarget) -> str | None:
    """What to tell a user whose head was trained for other weights than the target's; None where there is nothing."""
    folder = head_directory(draft)
    if folder is None or draft in SHIPPED_HEADS:  # they serve only the model they were trained for
        return None
    foreign = trained_for_another(folder, loaded.source)
    return foreign and (
        f"draft head {folder} was trained for {foreign}, and {loaded.source.name} has other weights: answers stay "
        "exact, but fewer guesses may be accepted"
    )


def names_model(name: str) -> bool:
    """Whether ``--draft name`` is a model of its own, not a head: the default model by its own name, a GGUF file, a
    hub id, or a directory with a tokenizer, which heads do not have."""
    if name.lower() in DEFAULT_NAMES:
        return name != "default"
    path = Path(name).expanduser()
    if path.is_dir():
        return (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file()
    return path.suffix.lower() == ".gguf" or (name.count("/") == 1 and not name.startswith((".", "/", "~")))


def drafter_identity(name: str) -> tuple[str, str]:
    """(where a drafter comes from, fingerprint of its weights): what a profile of it is valid for."""
    if folder := head_directory(name):
        return (name if name in SHIPPED_HEADS else str(folder.resolve())), head_fingerprint(folder)
    return name, "" if name in ("none", "ngram") else load_source(name).fingerprint()


def _small_model(name: str, loaded: LoadedTarget) -> Drafter:
    """A whole model, on the engine that runs the target."""
    from eyas.drafters.small_model import SmallModelDrafter, check_tokenizers

    info = loaded.target.info
    source = load_source(name)
    check_tokenizers(loaded.tokenizer, source.tokenizer, name)
    if info.engine == "native":
        from eyas.targets.native import NativeTarget

        assert isinstance(loaded.target, NativeTarget)
        return SmallModelDrafter(NativeTarget.load(source, dtype=info.dtype, pool=loaded.target.pool), info.vocab_size)
    from eyas.targets.hf import HFTarget, load_hf

    assert isinstance(loaded.target, HFTarget)
    model = load_hf(source, dtype=info.dtype, device=str(loaded.target.model.device))
    return SmallModelDrafter(model, info.vocab_size)


def feature_levels(drafter: str | None) -> int:
    """The feature levels with which a target must be loaded for the drafter of this name (see ``load_drafter``).

    Raises:
        CheckpointError: there is no draft head of that name.
    """
    directory = head_directory(drafter)
    return 1 if directory is None else head_feature_levels(directory)


def _head_drafter(checkpoint: EagleCheckpoint | Eagle3Checkpoint, loaded: LoadedTarget) -> Drafter:
    """The head on the engine that runs its target."""
    if loaded.target.info.engine == "native":
        from eyas.drafters.native_eagle import NativeEagleDrafter
        from eyas.targets.native import NativeTarget

        assert isinstance(loaded.target, NativeTarget)
        return NativeEagleDrafter(checkpoint, loaded.target)
    from eyas.drafters.eagle import EagleDrafter
    from eyas.drafters.eagle3 import Eagle3Drafter
    from eyas.targets.hf import HFTarget

    assert isinstance(loaded.target, HFTarget)
    target = loaded.target
    embedding, lm_head = target.embedding_weight, target.lm_head_weight
    if isinstance(checkpoint, Eagle3Checkpoint):
        return Eagle3Drafter.from_checkpoint(checkpoint, embedding, lm_head, name=checkpoint.name)
    return EagleDrafter.from_checkpoint(checkpoint, embedding, lm_head, name=checkpoint.name)


def _native_runs(source: ModelSource, device: str, dtype: str) -> bool:
    """Whether the native engine is built here and can run this model as asked."""
    if device != "cpu":
        return False
    from eyas import native

    return native.available() and native.supports(source.config, dtype)
