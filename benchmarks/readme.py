"""Writes the numbers in README.md and docs/numbers.md from ``benchmarks/results/``: ``python benchmarks/readme.py``.

``benchmarks/results/numbers.toml`` alone says what is shown:

    [machines]                       # what the results' own "cpu" does not tell, in plain words
    "Xeon with AMX" = "two virtual cores of a Xeon with AMX"

README.md gets one headline table, a row for each weight type on each machine:

    [[headline]]                     # once for each machine
    machine = "Xeon with AMX"
    files = ["a.json", "b.json"]     # of eyas bench with the methods none and auto, one weight type each
    peers = "peers.json"             # of benchmarks/peers, for the last column; may be left out
    note = "What a reader must know to judge the numbers."    # likewise

docs/numbers.md gets the parts, in this order:

    [[part]]
    title = "What it shows"
    machine = "Xeon with AMX"
    files = ["a.json", "b.json"]     # of eyas bench; several: one run over different question files
    columns = ["tau", "identical"]   # of the table of all files; left out: all of them
    tables = ["Ablation"]            # further tables of the report, by how their titles begin
    slower = 1.03                    # also say how many questions took more than so many times plain decoding's time
    note = "What a reader must know to judge the numbers."

A part may also show one file of benchmarks/peers, ``eyas profile --json`` or ``eyas perplexity --json``, which have
tables of their own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from eyas.bench.methods import BASELINE
from eyas.bench.report import sections
from eyas.bench.results import Run, joined, load_runs
from eyas.bench.summary import per_question
from eyas.bench.table import HEADINGS, Table, identical, number, percent, row_of, times
from eyas.errors import EyasError, InvalidInputError
from peers import table as peers_table

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- numbers: written by python benchmarks/readme.py -->"
END = "<!-- end of numbers -->"

HEADLINE = (
    "machine",
    "weights",
    "plain, tokens/s",
    "auto, tokens/s",
    "speed-up",
    "tau",
    "accepted",
    "identical",
    "x fastest peer",
)
PASSES = ("weights", "1 row, ms", *(f"{rows} rows" for rows in (2, 4, 8, 12, 16, 32)))
QUALITY = ("weights", "perplexity", "change", "logits off", "same token")
PEER_TYPES = {"bfloat16": "bf16"}
"""Weight types that benchmarks/peers calls by another name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the sections; with ``--check`` only say whether they are as they should be."""
    parser = argparse.ArgumentParser(description="Write the documents' numbers from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a section is not up to date")
    check = parser.parse_args(arguments).check
    try:
        documents = {name: filled(name, section) for name, section in written(ROOT / "benchmarks" / "results").items()}
    except EyasError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    stale = {name: text for name, text in documents.items() if text != _read(name)}
    if check and stale:
        print(f"{', '.join(stale)}: not what benchmarks/results says; run python benchmarks/readme.py", file=sys.stderr)
        return 1
    for name, text in stale.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


def written(folder: Path) -> dict[str, str]:
    """What belongs between the markers, by document."""
    return {"README.md": headline(folder), "docs/numbers.md": numbers(folder)}


def filled(name: str, section: str) -> str:
    """The document ``name`` with ``section`` between its markers; see ``between_markers``."""
    return between_markers(name, _read(name), section)


def between_markers(name: str, text: str, section: str) -> str:
    """``text`` with ``section`` between its markers.

    Raises:
        InvalidInputError: no markers, or more than one pair.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidInputError(f"{name} needs one pair of the lines {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{rest.split(END)[1]}"


def headline(folder: Path) -> str:
    """README.md's section as Markdown: plain decoding beside ``auto``, for each machine and weight type.

    Args:
        folder: results and their ``numbers.toml``.

    Raises:
        CheckpointError, InvalidInputError: files that are not there, do not hold what the list asks for, or were
            measured in different ways.
    """
    listed = _listed(folder)
    rows, settings = [], []
    for block in _blocks(listed, "headline", {"machine", "files"}):
        runs = [run for name in block["files"] for run in load_runs(folder / name)]
        peers = _json(folder / block["peers"]) if "peers" in block else None
        rows += [_headline_row(block["machine"], run, peers) for run in runs]
        settings.append(f"**{block['machine']}**: {_headline_setting(_machine(listed, block), runs, peers, block)}")
    return "\n\n".join(["\n".join(Table("", HEADLINE, rows).markdown()), *settings])


def _headline_row(machine: str, run: Run, peers: Mapping[str, Any] | None) -> tuple[str, ...]:
    total, dtype = run["summary"]["total"], run["target"]["dtype"]
    if missing := {BASELINE, "auto"} - total.keys():
        raise InvalidInputError(f"numbers.toml: the headline needs {' and '.join(sorted(missing))}, got {list(total)}")
    plain, auto = total[BASELINE], total["auto"]
    over_peer = {line["name"]: line["over_fastest_peer"] for line in peers["summary"]["lines"]} if peers else {}
    return (
        machine,
        dtype,
        number(plain["tokens_per_second"], 1),
        number(auto["tokens_per_second"], 1),
        times(auto["speedup"]["ratio_of_sums"]),
        number(auto["acceptance_length"], 2),
        percent(auto["acceptance_rate"]),
        identical(auto["identical"]),
        times(over_peer.get(f"eyas {PEER_TYPES.get(dtype, dtype)} best")),
    )


def _headline_setting(
    machine: str, runs: Sequence[Run], peers: Mapping[str, Any] | None, block: Mapping[str, Any]
) -> str:
    """How the runs were made, which must be the same way for all."""
    asked = {(run["target"]["name"], _asked(run, count_sets=True), _engine(run), run["machine"]["cpu"]) for run in runs}
    if len(asked) != 1:
        raise InvalidInputError(f"numbers.toml: a headline's runs differ in weights alone, but here are {asked}")
    model, questions, engine, _ = asked.pop()
    sentences = [f"{machine}; {engine}; {model}, {questions}."]
    if peers:
        sentences.append(f"Fastest peer: {_fastest_peer(peers)}, {_peers_asked(peers)}.")
    return " ".join([*sentences, *([block["note"].strip()] if "note" in block else [])])


def numbers(folder: Path) -> str:
    """docs/numbers.md's section as Markdown.

    Args:
        folder: results and their ``numbers.toml``.

    Raises:
        CheckpointError, InvalidInputError: files that are not there, or do not hold what the list asks for.
    """
    listed = _listed(folder)
    parts = _blocks(listed, "part", {"title", "machine", "files"})
    return "\n\n".join("\n".join(_part(part, _machine(listed, part), folder)) for part in parts)


def _listed(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "numbers.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(f"cannot read {folder / 'numbers.toml'}: {error}") from None


def _blocks(listed: Mapping[str, Any], kind: str, needed: Set[str]) -> Sequence[Mapping[str, Any]]:
    """The blocks ``[[kind]]`` of the list, each with what it needs."""
    blocks = listed.get(kind)
    if not isinstance(blocks, list) or not blocks:
        raise InvalidInputError(f"numbers.toml: there is no [[{kind}]]")
    for block in blocks:
        if missing := needed - block.keys():
            raise InvalidInputError(f"numbers.toml: a {kind} lacks {' and '.join(sorted(missing))}")
    return blocks


def _machine(listed: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    """The machine of a block in plain words."""
    known = listed.get("machines", {})
    if block["machine"] not in known:
        raise InvalidInputError(
            f"numbers.toml: no machine {block['machine']!r}; there are {', '.join(known) or 'none'}"
        )
    return str(known[block["machine"]])


def _part(part: Mapping[str, Any], machine: str, folder: Path) -> Iterator[str]:
    files = [folder / name for name in part["files"]]
    source = "from " + " and ".join(f"`benchmarks/results/{file.name}`" for file in files)
    yield f"### {part['title']}"
    other = _other(_json(files[0]), machine) if len(files) == 1 else None
    if other is not None:
        yield from ("", f"{other.title} ({source})", "", *other.markdown())
    else:
        runs = [run for file in files for run in load_runs(file)]
        runs = [joined(runs)] if len(files) > 1 else runs
        for run in runs:
            yield from (
                "",
                f"{_setting(run, machine)} ({source})",
                "",
                *_all_files(run, part.get("columns")).markdown(),
            )
            if "slower" in part:
                yield from ("", *_slower(run, part["slower"]))
        for wanted in part.get("tables", []):
            table = _find(runs, wanted)
            yield from ("", f"{table.title}:", "", *table.markdown())
    if note := part.get("note"):
        yield from ("", note.strip())


def _setting(run: Run, machine: str) -> str:
    target = run["target"]
    plans = [f"; auto is {plan}" for method, plan in run["plans"].items() if method == "auto"]
    return (
        f"{target['name']}, {target['dtype']}, drafter {run['settings']['draft']}, {_asked(run)}; {machine}; "
        f"{_engine(run)}{''.join(plans)}; {_commit(run)}"
        f"{'' if run['complete'] else '; interrupted before the last question'}"
    )


def _asked(run: Run, *, count_sets: bool = False) -> str:
    settings, files = run["settings"], run["summary"]["files"]
    chosen = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    count = max(one["questions"] for one in run["summary"]["total"].values())
    turns = ", first turns" if settings["first_turn"] else ""
    return (
        f"{chosen}; {count} questions of {f'{len(files)} sets' if count_sets else ', '.join(files)}{turns}, "
        f"at most {settings['max_tokens']} tokens"
    )


def _engine(run: Run) -> str:
    kernels = run["target"].get("kernels")
    using = f" with {kernels} kernels" if kernels else ""
    return f"{run['target']['engine']} engine{using}, {_threads(run['settings']['threads'])}"


def _commit(data: Mapping[str, Any]) -> str:
    commit = data["commit"] or "unknown"
    return f"commit {commit[:10]}{' with changes' if commit.endswith('-dirty') else ''}"


def _threads(count: int | None) -> str:
    return "all threads" if count is None else f"{count} thread{'s' if count > 1 else ''}"


def _all_files(run: Run, columns: Sequence[str] | None) -> Table:
    """The report's first table, cut to some columns."""
    if unknown := set(columns or ()) - set(HEADINGS):
        raise InvalidInputError(f"numbers.toml: no column {', '.join(unknown)}; there are {', '.join(HEADINGS)}")
    kept = [i for i, name in enumerate(HEADINGS) if not columns or name == "method" or name in columns]
    rows = [row_of(method, found) for method, found in run["summary"]["total"].items()]
    return Table("", [HEADINGS[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _slower(run: Run, factor: float) -> Iterator[str]:
    """How many questions took more than ``factor`` times as long as with plain decoding, the prefill included."""
    seconds = {
        method: {key: sum(row["seconds"].values()) for key, row in per_question(run["rows"], method).items()}
        for method in run["summary"]["total"]
    }
    plain = seconds.pop(BASELINE)
    for method, ours in seconds.items():
        ratios = {key: ours[key] / plain[key] for key in ours if key in plain}
        by_file = Counter(file for (file, _), ratio in ratios.items() if ratio > factor)
        yield (
            f"With `{method}`, {by_file.total()} of {len(ratios)} questions took more than {factor:g} times as long as "
            f"with plain decoding ({', '.join(f'{count} of {file}' for file, count in by_file.most_common()) or 'none'}"
            f"); the slowest took {max(ratios.values()):.2f} times as long."
        )


def _find(runs: Sequence[Run], wanted: str) -> Table:
    tables = [table for part in sections(runs) for table in part.tables]
    for table in tables:
        if table.title.startswith(wanted):
            return table
    raise InvalidInputError(
        f"numbers.toml: no table {wanted!r}; there are {', '.join(table.title for table in tables)}"
    )


def _json(file: Path) -> Any:
    try:
        content = file.read_bytes()
        return json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    except (OSError, EOFError, ValueError) as error:
        raise InvalidInputError(f"cannot read the results {file}: {error}") from None


def _other(data: Any, machine: str) -> Table | None:
    """The table of what ``eyas bench`` did not write; its title says how it was measured."""
    kinds = {"peers_bench": _peers, "bandwidth_gb_s": _passes, "predicted": _quality}
    return next((table(data, machine) for key, table in kinds.items() if isinstance(data, dict) and key in data), None)


def _peers(data: Mapping[str, Any], machine: str) -> Table:
    title = f"{data['model']['name']}, greedy; {_peers_asked(data)}; {machine}; fastest peer: {_fastest_peer(data)}"
    return Table(title, peers_table.HEADINGS, [peers_table.row_of(line) for line in data["summary"]["lines"]])


def _fastest_peer(data: Mapping[str, Any]) -> str:
    return str(data["summary"]["fastest_peer"] or "none")


def _peers_asked(data: Mapping[str, Any]) -> str:
    count = max((line["questions"] for line in data["summary"]["lines"]), default=0)
    return f"{count} questions, {data['settings']['tokens']} tokens each"


def _passes(data: Mapping[str, Any], machine: str) -> Table:
    """What a pass over several tokens costs, beside one over a single token."""
    title = (
        f"{data['model']}, {data['context']} tokens in the cache; {machine}, "
        f"{_threads(data['threads'])}, {data['kernels']} kernels; reads {data['bandwidth_gb_s']:.1f} GB/s; "
        f"{_commit(data)}"
    )
    lines = []
    for kind, timings in data["weights"].items():
        cost = timings["forward_ms"]
        ratios = [times(cost[rows.split()[0]] / cost["1"]) for rows in PASSES[2:]]
        lines.append((kind, number(cost["1"], 1), *ratios))
    return Table(title, PASSES, lines)


def _quality(data: Mapping[str, Any], machine: str) -> Table:
    """What weight types cost in quality."""
    lines = [("transformers float32", number(data["reference"]["perplexity"], 2), "-", "-", "-")]
    lines += [
        (
            kind,
            number(found["perplexity"], 2),
            f"{100 * found['change']:+.2f} %",
            percent(found["logits_error"]),
            percent(found["same_argmax"]),
        )
        for kind, found in data["types"].items()
    ]
    title = (
        f"{data['model']}, {data['tokens']} tokens of {data['file']} in windows of {data['window']}; "
        f"{machine}; {_commit(data)}"
    )
    return Table(title, QUALITY, lines)


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
