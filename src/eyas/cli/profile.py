"""``eyas profile``: what a pass costs on this machine, beside what its memory allows."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from typer import Option

from eyas.cli.models import tell
from eyas.cli.options import drafter_for


def profile_command(
    target: Annotated[str | None, Option(help="The model. Default: the default model.", show_default=False)] = None,
    draft: Annotated[
        str, Option(help="A head directory, 'default', 'eagle2', 'eagle3' (shipped for the default model), or 'none'.")
    ] = "default",
    dtype: Annotated[
        str | None, Option(help="Weight types, comma-separated. Default: all.", show_default=False)
    ] = None,
    threads: Annotated[int | None, Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    context: Annotated[int, Option(min=1, help="Tokens in the cache.")] = 256,
    repeats: Annotated[int, Option(min=1, help="Measurements of each; medians are shown.")] = 15,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the native engine: memory, arithmetic, and passes over 1 to 64 tokens."""
    from eyas.bench.profile import TYPES, profile, table
    from eyas.environment import command_line
    from eyas.loading import check_threads, head_directory
    from eyas.models import load_source

    check_threads(threads)
    head = head_directory(drafter_for(target, draft))
    result = profile(
        load_source(target, tell),
        types=TYPES if dtype is None else [name.strip() for name in dtype.split(",")],
        context=context,
        repeats=repeats,
        threads=threads,
        draft=None if head is None else str(head),
        tell=tell,
    )
    result = {"command": command_line(["eyas", *sys.argv[1:]]), **result}
    print(json.dumps(result, allow_nan=False) if as_json else table(result))
