"""The command: parse, call, print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.bench.questions import Question, load_questions
from eyas.bench.run import write_json
from eyas.environment import command_line, commit, machine, portable, versions
from eyas.errors import EyasError, InvalidInputError
from eyas.models import ModelSource, load_source
from peers.bench import Bench
from peers.environments import Environments
from peers.lineup import Contestant, choose, default_lineup
from peers.models import Models
from peers.race import Prompt, Row, Rules
from peers.summary import summarise
from peers.table import to_text

SCHEMA = 1
"""Version of the results file."""

HERE = Path(__file__).resolve().parent
TUNE_PROMPTS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        return report(options.report) if options.report else compare(options)
    except (EyasError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what is in the results file is kept", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python benchmarks/peers", description="Set up other engines and measure them beside Eyas."
    )
    add = made.add_argument
    add("questions", nargs="*", type=Path, help="JSON lines with 'turns'; the first turn of each is asked")
    add("--out", type=Path, help="results as JSON")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="contestants, like 'llamacpp*' '*int8*'")
    add("--list", action="store_true", help="print the contestants and stop")
    add("--setup-only", action="store_true", help="make environments and models and stop")
    add("--report", type=Path, metavar="RESULTS", help="print the table of an earlier run and stop")
    add("--limit", type=int, help="questions of each file")
    add("--tokens", type=int, default=128, help="tokens of each answer (default 128)")
    add("--stop-at-eos", action="store_true", help="let answers end by themselves; --tokens is then the most")
    add("--repeats", type=int, default=1, help="times each question is asked (default 1)")
    add("--trial", type=int, default=3, metavar="N", help="questions settings are tried on; 0: no trial (default 3)")
    add("--settings", type=Path, metavar="RESULTS", help="take the settings that an earlier run chose")
    add("--target", help="the model, as for eyas (default: the built-in one); llama.cpp needs a GGUF file")
    add("--head", default="default", help="Eyas's draft head, a directory (default: the one shipped)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (default: all cores)")
    add("--envs", type=Path, default=HERE / ".envs", help="where environments and models are kept")
    add("--jobs", type=int, help="compiler processes at once while installing")
    add("--nice", type=int, default=0, help="lower the priority of installs by this much")
    return made


def compare(options: argparse.Namespace) -> int:
    """Set up, try, race, write, print."""
    lineup = choose(default_lineup(options.head), options.only)
    if options.list:
        print("\n".join(f"{one.name}{f'  ({one.excuse})' if one.excuse else ''}" for one in lineup))
        return 0
    check(options)
    known = read_settings(options.settings) if options.settings else {}
    started = datetime.now(UTC)
    source = load_source(options.target, progress=tell)
    bench = prepare(options, lineup, source)
    load_average = os.getloadavg()
    bench.setup()
    if options.setup_only:
        for name, reason in bench.missing.items():
            print(f"{name}: {reason}")
        return 0
    bench.choose(known)
    facts = {
        "peers_bench": SCHEMA,
        "command": command_line(["python", "benchmarks/peers", *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": load_average,
        "versions": versions(),
        "commit": commit(),
        "model": {"name": source.name, "file": source.path.name, "fingerprint": source.fingerprint()},
        "settings": {
            key: portable(str(value)) if isinstance(value, Path) else value for key, value in vars(options).items()
        }
        | {"questions": [file.name for file in options.questions]},
    }

    def save(rows: list[Row]) -> dict[str, Any]:
        results = facts | results_of(bench, rows)
        if options.out:
            write_json(options.out, results)
        return results

    save([])  # what the trial found is not lost if the race is broken off
    results = save(bench.run(save))
    print(to_text(results))
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work before the work is done.

    Raises:
        InvalidInputError: what it is.
    """
    for name, least in (("tokens", 2), ("repeats", 1), ("trial", 0), ("threads", 1)):
        if getattr(options, name) < least:
            raise InvalidInputError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    if options.out and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise InvalidInputError(f"cannot write {options.out}: a directory, or in a directory that is not there")
    if not options.questions and not options.setup_only:
        raise InvalidInputError("no question file given; name one or more JSON-lines files")


def prepare(options: argparse.Namespace, lineup: Sequence[Contestant], source: ModelSource) -> Bench:
    """A bench over the first ``--limit`` questions; trials take questions from the end of each file."""
    questions: list[Question] = []
    measured: list[Question] = []
    if options.questions:
        questions = load_questions(options.questions, first_turn=True)
        measured = load_questions(options.questions, options.limit, first_turn=True)

    def encoded(chosen: Sequence[Question]) -> list[Prompt]:
        chat = source.tokenizer.encode_chat
        return [Prompt(one.file, one.question_id, chat([{"role": "user", "content": one.turns[0]}])) for one in chosen]

    last_first = encoded(questions[::-1][: max(options.trial, TUNE_PROMPTS)])
    prompts = encoded(measured)
    room = source.config["max_position_embeddings"]
    longest = max((len(prompt.token_ids) for prompt in [*prompts, *last_first]), default=0) + options.tokens
    if longest > room:
        raise InvalidInputError(
            f"the longest prompt and its answer need {longest} positions, the model has {room}; use a lower --tokens, "
            "or leave out the file with the long questions"
        )
    environments = Environments(options.envs.absolute(), options.jobs, options.nice)
    return Bench(
        source=source,
        lineup=lineup,
        environments=environments,
        models=Models(source, environments.root / "models", environments),
        threads=options.threads,
        prompts=prompts,
        trial_prompts=last_first[: options.trial],
        warm_up_prompt=last_first[-1] if last_first else Prompt("", 0, []),
        tune_prompts=last_first[:TUNE_PROMPTS],
        rules=Rules(options.tokens, source.eos_token_ids if options.stop_at_eos else (), options.repeats),
        positions=-(-(longest + 64) // 256) * 256,  # room for draft tokens past the end
        tell=tell,
    )


def results_of(bench: Bench, rows: list[Row]) -> dict[str, Any]:
    """What a run has found so far."""
    return {
        "prompts": [
            {"file": one.file, "question_id": one.question_id, "token_ids": one.token_ids} for one in bench.prompts
        ],
        "contestants": {
            one.name: {
                "engine": one.engine,
                "model": one.model,
                "settings": bench.chosen.get(one.name),
                "trial": bench.trials.get(one.name, []),
                "facts": bench.facts.get(one.name, {}),
            }
            for one in bench.lineup
        },
        "missing": bench.missing,
        "summary": summarise(
            rows, {one.name: one.plain for one in bench.lineup}, [one.name for one in bench.lineup if one.peer]
        ),
        "rows": rows,
    }


def read_results(path: Path) -> dict[str, Any]:
    """A results file.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}") from None
    if not isinstance(results, dict) or results.get("peers_bench") != SCHEMA:
        raise InvalidInputError(f"{path} is no results file of this command (peers_bench: {SCHEMA})")
    return results


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Contestant -> settings that an earlier run chose."""
    contestants = read_results(path)["contestants"]
    return {name: one["settings"] for name, one in contestants.items() if one["settings"] is not None}


def report(path: Path) -> int:
    """Print an earlier run's table."""
    print(to_text(read_results(path)))
    return 0


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
