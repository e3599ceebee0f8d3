"""``eyas export``: a draft head for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option


def export_command(
    head: Annotated[str, Argument(help="A head directory, or 'default' for the shipped head.")],
    engine: Annotated[Literal["sglang", "vllm"], Option("--for", help="Who is to draft with it.")],
    out: Annotated[Path, Option(help="Where the exported head goes: a directory.")],
) -> None:
    """Write a draft head as SGLang or vLLM read it."""
    from eyas.checkpoints.export import export_head
    from eyas.loading import head_directory

    done = export_head(head_directory(head) or head, engine, out)
    print(f"wrote {out}; start it with\n\n  {done.command}\n")
    for note in done.notes:
        print(note)
