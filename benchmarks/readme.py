"""Writes the numbers in README.md from the results under ``benchmarks/results/``: ``python benchmarks/readme.py``.

``benchmarks/results/numbers.toml`` says which files are shown, in which order, with which columns. A part is

    [[part]]
    title = "What it shows"
    files = ["a.json", "b.json"]     # of eyas bench or benchmarks/peers; several: one run over different question files
    columns = ["tau", "identical"]   # of the table of all files; left out: all of them
    tables = ["Ablation"]            # further tables of the report, by how their titles begin
    note = "What a reader must know to judge the numbers."
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench.report import sections
from eyas.bench.results import Run, joined, load_runs
from eyas.bench.table import HEADINGS, Table, row_of
from eyas.errors import EyasError, InvalidInputError
from peers import table as peers_table

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- numbers: written by python benchmarks/readme.py -->"
END = "<!-- end of numbers -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the section; with ``--check`` only say whether it is as it should be."""
    parser = argparse.ArgumentParser(description="Write README.md's numbers from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the section is not up to date")
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    try:
        old = readme.read_text(encoding="utf-8")
        new = filled(old, numbers(ROOT / "benchmarks" / "results"))
    except EyasError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    if options.check and old != new:
        print(
            "README.md's numbers are not those of benchmarks/results; run python benchmarks/readme.py", file=sys.stderr
        )
        return 1
    if old != new:
        readme.write_text(new, encoding="utf-8")
    return 0


def filled(readme: str, section: str) -> str:
    """The document with ``section`` between its markers.

    Raises:
        InvalidInputError: no markers, or more than one pair.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise InvalidInputError(f"README.md needs one pair of the lines {BEGIN} and {END}")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{rest.split(END)[1]}"


def numbers(folder: Path) -> str:
    """The section as Markdown.

    Args:
        folder: results and their ``numbers.toml``.

    Raises:
        CheckpointError, InvalidInputError: files that are not there, or do not hold what the list asks for.
    """
    try:
        listed: Any = tomllib.loads((folder / "numbers.toml").read_text(encoding="utf-8"))
        parts = listed["part"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise InvalidInputError(f"cannot read {folder / 'numbers.toml'}: {error}") from None
    return "\n\n".join("\n".join(_part(part, folder)) for part in parts)


def _part(part: Mapping[str, Any], folder: Path) -> Iterator[str]:
    if missing := {"title", "files"} - part.keys():
        raise InvalidInputError(f"numbers.toml: a part lacks {' and '.join(sorted(missing))}")
    files = [folder / name for name in part["files"]]
    source = "from " + " and ".join(f"`benchmarks/results/{file.name}`" for file in files)
    yield f"### {part['title']}"
    peers = _peers(files[0]) if len(files) == 1 else None
    if peers is not None:
        yield from ("", f"{_peers_setting(peers)} ({source})", "", *_peers_table(peers).markdown())
    else:
        runs = [run for file in files for run in load_runs(file)]
        runs = [joined(runs)] if len(files) > 1 else runs
        for run in runs:
            yield from ("", f"{_setting(run)} ({source})", "", *_all_files(run, part.get("columns")).markdown())
        for wanted in part.get("tables", []):
            table = _find(runs, wanted)
            yield from ("", f"{table.title}:", "", *table.markdown())
    if note := part.get("note"):
        yield from ("", note.strip())


def _setting(run: Run) -> str:
    target, settings, machine = run["target"], run["settings"], run["machine"]
    chosen = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    count = max(one["questions"] for one in run["summary"]["total"].values())
    turns = ", first turns" if settings["first_turn"] else ""
    return (
        f"{target['name']}, {target['engine']} engine, {target['dtype']}, drafter {settings['draft']}, {chosen}; "
        f"{count} questions of {', '.join(run['summary']['files'])}{turns}, at most {settings['max_tokens']} tokens; "
        f"{_machine(machine)}, {_threads(settings['threads'])}; commit {(run['commit'] or 'unknown')[:10]}"
        f"{'' if run['complete'] else '; interrupted before the last question'}"
    )


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


def _threads(count: int | None) -> str:
    return "all threads" if count is None else f"{count} thread{'s' if count > 1 else ''}"


def _all_files(run: Run, columns: Sequence[str] | None) -> Table:
    """The report's first table, cut to some columns."""
    if unknown := set(columns or ()) - set(HEADINGS):
        raise InvalidInputError(f"numbers.toml: no column {', '.join(unknown)}; there are {', '.join(HEADINGS)}")
    kept = [i for i, name in enumerate(HEADINGS) if not columns or name == "method" or name in columns]
    rows = [row_of(method, found) for method, found in run["summary"]["total"].items()]
    return Table("", [HEADINGS[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _find(runs: Sequence[Run], wanted: str) -> Table:
    tables = [table for part in sections(runs) for table in part.tables]
    for table in tables:
        if table.title.startswith(wanted):
            return table
    raise InvalidInputError(
        f"numbers.toml: no table {wanted!r}; there are {', '.join(table.title for table in tables)}"
    )


def _peers(file: Path) -> dict[str, Any] | None:
    """What ``benchmarks/peers`` wrote, if it was that."""
    try:
        content = file.read_bytes()
        data = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    except (OSError, EOFError, ValueError) as error:
        raise InvalidInputError(f"cannot read the results {file}: {error}") from None
    return data if isinstance(data, dict) and "peers_bench" in data else None


def _peers_setting(data: Mapping[str, Any]) -> str:
    settings, count = data["settings"], max((line["questions"] for line in data["summary"]["lines"]), default=0)
    return (
        f"{data['model']['name']}, greedy; {count} questions, {settings['tokens']} tokens each; "
        f"{_machine(data['machine'])}; fastest peer: {data['summary']['fastest_peer'] or 'none'}"
    )


def _peers_table(data: Mapping[str, Any]) -> Table:
    return Table("", peers_table.HEADINGS, [peers_table.row_of(line) for line in data["summary"]["lines"]])


if __name__ == "__main__":
    sys.exit(main())
