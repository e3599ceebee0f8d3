"""Results files: a single run, or a suite of runs. JSON, compressed where the name ends in .gz."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench.run import SCHEMA
from eyas.bench.summary import summarise
from eyas.errors import CheckpointError, InvalidInputError

SUITE_SCHEMA = 1
"""Version of a suite's results file; its key is ``eyas_suite``."""

Run = Mapping[str, Any]
"""Results of one run, as ``eyas bench --out`` writes them."""


def load_runs(path: Path) -> list[dict[str, Any]]:
    """The runs in a results file: one, or those of a suite that have answers.

    Raises:
        CheckpointError: no such file, or something else in it.
        InvalidInputError: a run that was interrupted before its first question was done.
    """
    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the results {path}: {error}") from None
    if not isinstance(data, dict):
        data = {}
    runs = data.get("runs", []) if data.get("eyas_suite") == SUITE_SCHEMA else [data]
    if not all(isinstance(run, dict) and run.get("eyas_bench") == SCHEMA for run in runs):
        raise CheckpointError(f"{path} is not a results file of this version; make one with eyas bench --out FILE")
    answered = [run for run in runs if run["rows"]]
    if not answered:
        raise InvalidInputError(f"{path} holds no answers: the run was interrupted before its first question was done")
    return answered


def suite(name: str, runs: Sequence[Run], *, complete: bool) -> dict[str, Any]:
    """A suite's results, ready to be written."""
    return {"eyas_suite": SUITE_SCHEMA, "suite": name, "complete": complete, "runs": list(runs)}


def joined(runs: Sequence[Run]) -> dict[str, Any]:
    """Runs of the same methods under the same settings over different question files, as one run.

    Raises:
        InvalidInputError: runs that differ in more than their questions, or share some.
    """
    first = runs[0]
    for run in runs[1:]:
        for key in ("methods", "settings", "target", "machine"):
            if run[key] != first[key]:
                raise InvalidInputError(f"runs whose {key} differ cannot be joined")
    files = [file for run in runs for file in run["summary"]["files"]]
    if repeated := next((file for file in files if files.count(file) > 1), None):
        raise InvalidInputError(f"runs that both asked {repeated} cannot be joined")
    rows = [row for run in runs for row in run["rows"]]
    return {
        **first,
        "command": "; ".join(run["command"] for run in runs),
        "questions": sum(run["questions"] for run in runs),
        "seconds": sum(run["seconds"] for run in runs),
        "complete": all(run["complete"] for run in runs),
        "skipped": [skipped for run in runs for skipped in run["skipped"]],
        "summary": summarise(rows, first["methods"], greedy=first["settings"]["temperature"] == 0),
        "rows": rows,
    }
