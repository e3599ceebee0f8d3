"""``eyas perplexity``: what a weight type costs in quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from eyas.cli.models import tell
from eyas.errors import InvalidInputError


def perplexity_command(
    file: Annotated[Path, Argument(help="A text file, UTF-8.", show_default=False)],
    target: Annotated[str | None, Option(help="The model. Default: the default model.", show_default=False)] = None,
    dtype: Annotated[
        str | None, Option(help="Weight types, comma-separated. Default: all.", show_default=False)
    ] = None,
    tokens: Annotated[int, Option(help="Tokens to read, from the beginning.")] = 4096,
    window: Annotated[int, Option(help="Tokens read in a row; each window starts without a past.")] = 512,
    reference: Annotated[bool, Option(help="Compare with transformers in float32; needs the torch extra.")] = True,
    threads: Annotated[int | None, Option(help="CPU threads. Default: all cores.", show_default=False)] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what the native engine's weight types cost in quality, on a text."""
    from eyas.bench.perplexity import perplexity, table
    from eyas.loading import check_threads
    from eyas.models import load_source
    from eyas.native.config import WEIGHT_TYPES

    check_threads(threads)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: cannot be read as text: {error}") from None
    result = perplexity(
        load_source(target, tell),
        text,
        types=WEIGHT_TYPES if dtype is None else [name.strip() for name in dtype.split(",")],
        window=window,
        most=tokens,
        reference=reference,
        threads=threads,
        tell=tell,
    )
    print(json.dumps(result | {"file": str(file)}, allow_nan=False) if as_json else table(result))
