"""The comparison with other engines: protocol, workers, race, numbers and table, with no engine installed."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eyas.models import load_source
from peers import cli, protocol
from peers.environments import failure, requirement_name, wanted
from peers.lineup import choose, default_lineup
from peers.models import write_hf
from peers.protocol import Answer, ProtocolError, Request, cut, decode, encode, read_answer, read_request
from peers.race import Prompt, Rules, race
from peers.summary import summarise
from peers.table import align, to_text
from peers.worker import Worker
from support.gguf_files import random_tensors, tiny_config, write_gguf

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

# --- protocol ------------------------------------------------------------------------------------------------------


class Counting:
    """Answers with last prompt id + 1, + 2, ..., one id a step."""

    def facts(self) -> dict[str, Any]:
        return {"counting": 1}

    def answer(self, request: Request) -> Answer:
        first = request.prompt[-1] + 1
        return Answer(cut(range(first, first + 99), request), 0.5, 0.25)


def spoken(lines: list[str], load: Any) -> list[dict[str, Any]]:
    out = io.StringIO()
    protocol.serve(load, iter(lines), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_serve_loads_with_the_settings_and_answers_each_line() -> None:
    seen: list[dict[str, Any]] = []

    def load(settings: dict[str, Any]) -> Counting:
        seen.append(settings)
        return Counting()

    ask = {"prompt": [1, 7], "tokens": 3, "stop": []}
    said = spoken([encode({"threads": 2}), encode(ask), encode(ask | {"stop": [9]})], load)
    assert seen == [{"threads": 2}]
    assert said[0] == {"ready": {"counting": 1}}
    assert [message["token_ids"] for message in said[1:]] == [[8, 9, 10], [8, 9]]


def test_serve_tells_the_driver_why_loading_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def load(settings: dict[str, Any]) -> Counting:
        raise RuntimeError("no such model\nlong story")

    assert spoken([encode({})], load) == [{"error": "RuntimeError: no such model"}]
    assert "long story" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"), [(3, (), [5, 6, 7]), (9, (6,), [5, 6]), (1, (6,), [5]), (9, (), [5, 6, 7, 8])]
)
def test_cut_ends_where_the_request_says(tokens: int, stop: tuple[int, ...], expected: list[int]) -> None:
    assert cut([5, 6, 7, 8], Request([1], tokens, stop)) == expected


def test_messages_that_are_not_what_is_due_are_refused() -> None:
    with pytest.raises(ProtocolError, match="expected a JSON object, got 'loading"):
        decode("loading weights...\n")
    with pytest.raises(ProtocolError, match="not a request"):
        read_request({"prompt": [1]})
    with pytest.raises(ProtocolError, match="not an answer"):
        read_answer({"token_ids": [1]})
    with pytest.raises(ProtocolError, match="out of memory"):
        read_answer({"error": "out of memory"})


# --- workers and race ----------------------------------------------------------------------------------------------

WORKER = """
import sys
from peers.protocol import Answer, cut, private_stdout, serve
print("a library's chatter")
class Engine:
    def __init__(self, settings):
        self.step, self.fails = settings["step"], settings.get("fails")
    def facts(self):
        return {"step": self.step}
    def answer(self, request):
        if request.prompt[-1] == self.fails:
            sys.exit(3)
        print("more chatter")
        first = request.prompt[-1]
        ids = [first + self.step * i for i in range(1, 1 + request.tokens)]
        return Answer(cut(ids, request), self.step * 1.0, 0.1)
serve(Engine, sys.stdin, out)
"""


def start(stack: ExitStack, folder: Path, **settings: Any) -> Worker:
    code = WORKER.replace('print("a', 'out = private_stdout()\nprint("a')
    command = [sys.executable, "-c", code]
    variables = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    worker = stack.enter_context(Worker(command, settings, variables, folder / f"{settings['step']}.log"))
    worker.wait_ready(60)
    return worker


def prompts_of(*last: int) -> list[Prompt]:
    return [Prompt("file", number, [1, token]) for number, token in enumerate(last)]


def test_a_race_asks_everyone_everything_in_turn_and_goes_on_without_the_fallen(tmp_path: Path) -> None:
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        workers = {"one": start(stack, tmp_path, step=1), "two": start(stack, tmp_path, step=2, fails=20)}
        assert workers["two"].facts == {"step": 2}
        rows = race(workers, prompts_of(10, 20, 30), Rules(2), failures.__setitem__)
    assert [(row["contestant"], row["question_id"], row["token_ids"]) for row in rows] == [
        ("one", 0, [11, 12]),
        ("two", 0, [12, 14]),
        ("one", 1, [21, 22]),
        ("one", 2, [31, 32]),
    ]
    assert list(failures) == ["two"]
    assert "status 3" in failures["two"] and "2.log" in failures["two"]
    assert "chatter" in (tmp_path / "1.log").read_text()


def state(worker: Worker) -> str:
    """The process's state letter: T is stopped."""
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of processes from /proc")
def test_workers_are_stopped_while_nobody_asks_and_gone_when_closed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        worker = start(stack, tmp_path, step=1)
        for _ in range(100_000):  # a signal takes a moment to arrive
            if state(worker) == "T":
                break
        assert state(worker) == "T"
        assert worker.ask(Request([1], 1), 60).token_ids == [2]
    assert worker._process.returncode is not None


def test_a_worker_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Worker(command, {}, os.environ, tmp_path / "log") as worker, pytest.raises(ProtocolError, match="within 0 s"):
        worker.wait_ready(0.05)


# --- numbers and table ---------------------------------------------------------------------------------------------


def row(contestant: str, question: int, seconds: float, ids: list[int], first: float = 0.0, repeat: int = 0) -> Any:
    return {
        "file": "f",
        "question_id": question,
        "contestant": contestant,
        "repeat": repeat,
        "prompt_tokens": 5,
        "token_ids": ids,
        "seconds": seconds,
        "first_seconds": first,
    }


ROWS = [
    row("slow", 0, 4.0, [1, 2, 3, 4]), row("fast", 0, 2.0, [1, 2, 3, 4]), row("ours", 0, 1.0, [1, 2, 3, 4], 0.25),
    row("slow", 1, 1.0, [5, 6, 7, 8]), row("fast", 1, 2.0, [5, 6, 7, 8]), row("ours", 1, 0.5, [5, 6, 7, 9], 0.25),
    row("slow", 2, 4.0, [1, 1, 1, 1]), row("fast", 2, 2.0, [1, 1, 1, 1]), row("ours", 2, 0.5, [1, 1, 1, 1], 0.25),
]  # fmt: skip
PLAIN = {"slow": "slow", "fast": "fast", "ours": "fast"}


def test_ratios_are_medians_over_questions_against_the_fastest_peer_and_the_best_of_each_question() -> None:
    summary = summarise(ROWS, PLAIN, ["slow", "fast"])
    assert summary["fastest_peer"] == "fast"
    ours, fast, slow = summary["lines"]  # fastest first
    assert [ours["name"], fast["name"], slow["name"]] == ["ours", "fast", "slow"]
    assert ours["tokens_per_second"] == pytest.approx(12 / 2)
    assert ours["decode_tokens_per_second"] == pytest.approx(9 / 1.25)
    assert ours["first_ms"] == pytest.approx(250)
    assert ours["over_fastest_peer"] == pytest.approx(4)  # 2, 4, 4
    assert ours["over_best_peer"] == pytest.approx(2)  # 2, 2, 4
    assert (ours["identical"], ours["compared"]) == (2, 3)
    assert slow["over_fastest_peer"] == pytest.approx(0.5)


def test_repeats_count_by_their_median() -> None:
    rows = [row("one", 0, seconds, [1, 2], repeat=number) for number, seconds in enumerate((1.0, 9.0, 2.0))]
    (line,) = summarise(rows, {}, ["one"])["lines"]
    assert line["tokens_per_second"] == pytest.approx(1)
    assert line["identical"] is None


def test_the_fastest_peer_is_judged_on_questions_that_all_peers_answered() -> None:
    rows = [row("half", 0, 2.0, [1, 2]), row("whole", 0, 1.0, [1, 2]), row("whole", 1, 100.0, [1, 2])]
    assert summarise(rows, {}, ["half", "whole"])["fastest_peer"] == "whole"


def test_files_are_summed_up_apart_where_there_are_several() -> None:
    rows = [*ROWS, {**row("ours", 0, 2.0, [1, 2]), "file": "g"}]
    summary = summarise(rows, PLAIN, ["slow", "fast"])
    assert list(summary["files"]) == ["f", "g"]
    assert summary["files"]["g"]["fastest_peer"] is None
    assert summary["files"]["g"]["lines"][0]["over_fastest_peer"] is None


def test_the_table_lists_who_was_measured_and_who_was_not_and_why() -> None:
    results = {"summary": summarise(ROWS, PLAIN, ["slow", "fast"]), "missing": {"other": "does not build"}}
    lines = to_text(results).splitlines()
    assert lines[0] == "all questions: 3 questions; fastest peer: fast"
    assert lines[3].split() == ["ours", "6.0", "7.2", "250", "4.00", "2.00", "2/3"]
    assert lines[-2:] == ["not measured:", "  other: does not build"]


def test_columns_line_up() -> None:
    assert align([("a", "b"), ("long", "1"), ("x", "22")]) == "a      b\n----  --\nlong   1\nx     22"


# --- line-up, environments, models, command ------------------------------------------------------------------------


def test_every_contestant_has_its_plain_decoding_and_settings_in_the_line_up() -> None:
    lineup = default_lineup()
    names = [one.name for one in lineup]
    assert len(set(names)) == len(names)
    assert {one.plain for one in lineup} <= set(names)
    assert all(one.variants for one in lineup)
    assert {one.engine for one in lineup} == {"llamacpp", "openvino", "vllm", "transformers", "eyas"}
    assert all((BENCHMARKS / "peers" / "engines" / f"{one.engine}.py").is_file() for one in lineup)


def test_contestants_are_chosen_by_pattern() -> None:
    lineup = default_lineup()
    assert [one.name for one in choose(lineup, ["vllm*", "eyas q4 plain"])] == [
        "vllm bf16 plain",
        "vllm bf16 lookup",
        "eyas q4 plain",
    ]
    with pytest.raises(ValueError, match="'nobody' matches none of: llamacpp"):
        choose(lineup, ["vllm*", "nobody"])


def test_requirements_are_taken_less_the_unwanted_and_those_of_extras() -> None:
    listed = ["torch==2.13.0+cpu; x", "torchvision; y", "Torch_Audio>=1", "numpy", 'pandas; extra == "bench"']
    assert requirement_name("Torch_Audio>=1") == "torch-audio"
    assert wanted(listed, ("torchvision", "torch-audio")) == ["torch==2.13.0+cpu; x", "numpy"]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("$ pip\nnoise\nERROR: No matching distribution\n\n", "ERROR: No matching distribution"),
        ("Traceback\n  line\nImportError: libx.so: cannot open\n", "ImportError: libx.so: cannot open"),
        ("killed\n", "killed"),
        ("", "failed without a word"),
    ],
)
def test_a_failed_install_is_told_in_one_line(log: str, reason: str) -> None:
    assert failure(log) == reason


def test_the_copy_for_other_engines_is_the_same_model(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors.pop("lm_head.weight", None)
    source = load_source(write_gguf(tmp_path / "tiny.gguf", config, tensors))
    write_hf(source, tmp_path / "hf")
    copy = load_source(tmp_path / "hf")
    assert copy.fingerprint() == source.fingerprint()
    assert copy.eos_token_ids == source.eos_token_ids
    chat = [{"role": "user", "content": "the 12th <|im_end|>"}]
    assert copy.tokenizer.encode_chat(chat) == source.tokenizer.encode_chat(chat)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no question file given"),
        (["q.jsonl", "--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["q.jsonl", "--only", "nobody"], "'nobody' matches none"),
        (["q.jsonl", "--out", "no/such/place.json"], "cannot write no/such/place.json"),
        (["--report", "missing.json"], "cannot read missing.json"),
    ],
)
def test_mistakes_are_told_before_anything_is_installed(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_report_prints_the_table_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"peers_bench": 1, "summary": summarise(ROWS, PLAIN, ["slow", "fast"]), "missing": {}}
    (tmp_path / "r.json").write_text(json.dumps(results))
    assert cli.main(["--report", str(tmp_path / "r.json")]) == 0
    assert "fastest peer: fast" in capsys.readouterr().out
