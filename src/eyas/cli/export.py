"""``eyas export``: a draft head for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from eyas.cli.models import tell
from eyas.cli.options import notice
from eyas.errors import CheckpointError

if TYPE_CHECKING:
    from eyas.tree import Floats


def export_command(
    head: Annotated[str, Argument(help="A head directory, or a shipped head: 'default', 'eagle2', 'eagle3'.")],
    engine: Annotated[Literal["sglang", "vllm"], Option("--for", help="Who is to draft with it.")],
    out: Annotated[Path, Option(help="Where the exported head goes: a directory.")],
    target: Annotated[
        str | None,
        Option(
            help="Its model, whose lm_head is copied into an EAGLE-3 head without one. Default: the default model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a draft head as SGLang or vLLM read it."""
    from eyas.checkpoints.export import export_head
    from eyas.loading import head_directory

    folder = head_directory(head) or Path(head)
    done = export_head(folder, engine, out, lambda: _lm_head(folder, target))
    print(f"wrote {out}; start it with\n\n  {done.command}\n")
    for note in done.notes:
        print(note)


def _lm_head(head: Path, target: str | None) -> Floats:
    """[V, H] of the target; whoever names another model than the head's hears of it."""
    from eyas.loading import trained_for_another
    from eyas.models import load_source

    source = load_source(target, tell)
    if foreign := trained_for_another(head, source):
        notice(f"{head} was trained for {foreign}, {source.name} has other weights; its lm_head is copied all the same")
    if source.lm_head_name not in source.tensors:
        raise CheckpointError(f"{source.name} has no lm_head; --target is the model that the head drafts for")
    return source.tensors.float32(source.lm_head_name)
