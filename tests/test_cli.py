"""The command line, with a table in place of the model: contracts for scripts, mistakes, interrupts."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from typer import Option

from eyas.cli import main
from eyas.cli.data import AnswerOptions, SynthesisOptions
from eyas.cli.interrupt import deferred_interrupt
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, drafter_for, spread
from eyas.cli.train import TrainOptions
from eyas.errors import InvalidInputError
from eyas.generate import Session
from eyas.loading import ENGINES
from eyas.plan import CHOICES, MEASURED, DraftSettings
from eyas.policies import POLICIES
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.train.answer import AnswerSettings
from eyas.train.recipes.eagle3 import Eagle3Recipe
from eyas.train.settings import TrainSettings
from eyas.train.synthesize import SynthesisSettings
from support.table_cli import load_table, use_table

QUESTION = "w9 w10"


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Runner:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str, stdin: str = "") -> Ran:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        captured = self._capsys.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)


@pytest.fixture
def eyas(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


# --- generate --------------------------------------------------------------------------------------------------


def test_generate_json_has_exactly_the_promised_keys(eyas: Runner) -> None:
    result = eyas("generate", QUESTION, "--json", "--max-tokens", "12", "--ignore-eos").json
    assert set(result) == {"text", "token_ids", "finish_reason", "usage", "stats"}
    assert result["finish_reason"] == "length"
    assert len(result["token_ids"]) == 12
    assert result["usage"] == {"prompt_tokens": 6, "completion_tokens": 12}
    stats = result["stats"]
    assert set(stats) == {
        "cycles",
        "draft_tokens",
        "accepted_tokens",
        "acceptance_length",
        "acceptance_rate",
        "tokens_per_second",
        "seconds",
    }
    assert set(stats["seconds"]) == {"prefill", "draft", "policy", "verify", "accept", "commit"}
    assert stats["acceptance_length"] == 11 / stats["cycles"]
    assert stats["accepted_tokens"] >= 11 - stats["cycles"]


def test_compare_adds_the_baseline(eyas: Runner) -> None:
    result = eyas("generate", QUESTION, "--json", "--compare", "--max-tokens", "12", "--ignore-eos").json
    plain = result["baseline"]
    assert set(plain) == {"text", "token_ids", "finish_reason", "usage", "stats"}
    assert plain["stats"]["cycles"] == 11
    assert result["identical"] is True
    assert result["divergence"] is None
    assert plain["text"] == result["text"]
    rates = [each["stats"]["tokens_per_second"] for each in (result, plain)]
    assert result["speedup"] == pytest.approx(rates[0] / rates[1])


def test_compare_says_nothing_about_sampled_answers(eyas: Runner) -> None:
    result = eyas("generate", QUESTION, "--json", "--compare", "--max-tokens", "5", "--temperature", "1").json
    assert result["identical"] is None


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_every_policy_gives_the_plain_answer(eyas: Runner, policy: str) -> None:
    common = ("generate", QUESTION, "--json", "--max-tokens", "20", "--ignore-eos")
    shape = {"dynamic": ("--num-steps", "3", "--topk", "3"), "chain": ("--num-steps", "3")}.get(policy, ())
    ours = eyas(*common, "--policy", policy, "--num-draft-tokens", "7", *shape).json
    assert ours["token_ids"] == eyas(*common, "--draft", "none").json["token_ids"]
    assert ours["stats"]["draft_tokens"] > 0


def test_streamed_and_whole_text_agree(eyas: Runner) -> None:
    common = ("generate", QUESTION, "--max-tokens", "15", "--ignore-eos")
    streamed, whole = eyas(*common, "--stream"), eyas(*common, "--no-stream")
    assert streamed.code == whole.code == 0
    assert streamed.out == whole.out == eyas(*common, "--json").json["text"] + "\n"
    assert "15 tokens (length)" in whole.err
    assert "tau" in whole.err


def test_the_prompt_may_come_from_standard_input(eyas: Runner) -> None:
    piped = eyas("generate", "-", "--json", "--max-tokens", "4", stdin=f"{QUESTION}\n").json
    assert piped["token_ids"] == eyas("generate", QUESTION, "--json", "--max-tokens", "4").json["token_ids"]


def test_raw_and_system_change_the_prompt(eyas: Runner) -> None:
    def prompt_tokens(*more: str) -> int:
        return int(
            eyas("generate", f"begin {QUESTION}", "--json", "--max-tokens", "2", *more).json["usage"]["prompt_tokens"]
        )

    assert prompt_tokens("--raw") == 3
    assert prompt_tokens() == 7
    assert prompt_tokens("--system", "w11") == 10


def test_a_stop_string_ends_the_answer(eyas: Runner) -> None:
    common = ("generate", QUESTION, "--json", "--max-tokens", "12", "--ignore-eos")
    words = eyas(*common).json["text"].split(" ")
    result = eyas(*common, "--stop", words[5], "--stop", "never").json
    assert result["finish_reason"] == "stop"
    assert result["text"] == " ".join(words[:5]) + " "


@pytest.mark.parametrize("cap", range(1, 17))
def test_every_count_is_the_cap(eyas: Runner, cap: int) -> None:
    budget = ("--policy", "dynamic", "--num-steps", "4", "--topk", "3", "--num-draft-tokens", "12")  # blocks of 5
    common = ("generate", QUESTION, "--ignore-eos", "--max-tokens", str(cap), *budget)
    result = eyas(*common, "--json").json
    stats = result["stats"]
    assert result["finish_reason"] == "length"
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"] == cap
    assert stats["cycles"] * stats["acceptance_length"] == pytest.approx(cap - 1)
    assert cap - 1 - stats["cycles"] <= stats["accepted_tokens"] <= min(cap - 1, stats["draft_tokens"])
    for way in ("--stream", "--no-stream"):
        ran = eyas(*common, way)
        assert ran.out == result["text"] + "\n"
        assert f"[{cap} tokens (length)" in ran.err


def cut(text: str, stops: list[str]) -> str:
    """Up to the first stop string, as a reader going by character would find it."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, complete))]
    return text


@pytest.mark.parametrize("template", [(), ("--raw",)], ids=["chat", "raw"])
def test_stop_strings_streamed_and_whole(eyas: Runner, template: tuple[str, ...]) -> None:
    common = ("generate", f"begin {QUESTION}", "--ignore-eos", "--max-tokens", "16", *template)
    text = eyas(*common, "--draft", "none", "--json").json["text"]
    words = text.split(" ")
    for stops in (
        [words[0]],  # at once
        [f"{words[3]} {words[4]}"],  # two words
        [f"{words[2]} {words[3]}?", "\nUser:"],  # begun and never finished
        [words[5], words[5] + " "],  # the shorter one is complete first
        [words[6][1:] + " " + words[7][:1], "zz"],
    ):
        options = [word for stop in stops for word in ("--stop", stop)]
        wanted = cut(text, stops)
        result = eyas(*common, *options, "--json").json
        assert result["text"] == wanted
        assert result["finish_reason"] == ("length" if wanted == text else "stop")
        for way in ("--stream", "--no-stream"):
            assert eyas(*common, *options, way).out == wanted + "\n"
        if wanted == text:
            assert stops[-1] == "\nUser:"


def test_a_seed_repeats_a_sampled_answer(eyas: Runner) -> None:
    def sampled(seed: int) -> list[int]:
        options = ("--temperature", "1", "--seed", str(seed), "--max-tokens", "20", "--ignore-eos")
        return list(eyas("generate", QUESTION, "--json", *options).json["token_ids"])

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(5)}) > 1


def test_show_tree_draws_the_best_cycle(eyas: Runner) -> None:
    ran = eyas("generate", QUESTION, "--max-tokens", "20", "--ignore-eos", "--show-tree", "--compare")
    assert ran.out.count("draft tokens verified") == 1
    assert "identical: yes" in ran.err


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", " "], "prompt is empty"),
        (["generate", QUESTION, "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["generate", QUESTION, "--temperature", "-1"], "temperature must be between 0"),
        (["generate", QUESTION, "--top-p", "1.5"], "top_p must be between 0 and 1"),
        (["generate", QUESTION, "--topk", "0"], "topk must be at least 1"),
        (["generate", QUESTION, "--num-steps", "0"], "num_steps must be at least 1"),
        (["generate", QUESTION, "--policy", "static", "--num-steps", "3"], "leave out num_steps"),
        (["generate", QUESTION, "--draft", "none", "--policy", "chain"], "leave out --policy chain"),
        (["generate", QUESTION, "--json", "--show-tree", "--stream"], "leave out --show-tree and --stream"),
        (["generate", QUESTION, "--stop", ""], "stop string is empty"),
        (["generate", QUESTION, "--raw", "--system", "x"], "--system needs the chat template"),
        (["generate", " ".join(["w9"] * 600)], "holds 512"),
        (["inspect", QUESTION, "--draft", "none"], "no draft trees"),
        (["inspect", QUESTION, "--cycle", "99", "--max-tokens", "9"], "--cycle 99: the answer has cycles 1 to"),
        (["inspect", QUESTION, "--max-tokens", "1"], "before any draft"),
        (["inspect", QUESTION, "--svg", "/nowhere/at/all.svg"], "cannot write"),
        (["bench"], "no question file"),
        (["bench", "--questions", "/nowhere.jsonl"], "cannot read the questions"),
        (["bench", "--report", "/nowhere.json"], "cannot read the results"),
        (["generate", QUESTION, "--presence-penalty", "1e300"], "presence_penalty must be between"),
        (["profile", "--threads", "0"], "threads must be between 1 and 1024"),
        (["perplexity", __file__, "--threads", "0"], "threads must be between 1 and 1024"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(eyas: Runner, arguments: list[str], message: str) -> None:
    ran = eyas(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.startswith("eyas: ")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "-0.1"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top_k", "-2"),
        ("top_p", "1.1"),
        ("top_p", "nan"),
        ("min_p", "1.5"),
        ("min_p", "-0.5"),
        ("repetition_penalty", "0"),
        ("presence_penalty", "nan"),
        ("frequency_penalty", "-inf"),
        ("seed", "-1"),
    ],
)
def test_sampling_is_refused_in_the_librarys_own_words(eyas: Runner, name: str, value: str) -> None:
    number = int(value) if name in ("top_k", "seed") else float(value)
    with pytest.raises(InvalidInputError) as refused:
        SamplingParams(**{name: number})  # type: ignore[arg-type]
    ran = eyas("generate", QUESTION, f"--{name.replace('_', '-')}", value)
    assert (ran.code, ran.out, ran.err) == (2, "", f"eyas: {refused.value}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["nothing"],
        ["profile", "--repeats", "0"],
        ["generate", "x", "--policy", "best"],
        ["generate", "x", "--topk", "x"],
    ],
)
def test_usage_mistakes_exit_with_2(eyas: Runner, arguments: list[str]) -> None:
    ran = eyas(*arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("draft", ["eagle2", "eagle3"])
@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "bench", "tune", "calibrate", "profile"])
def test_a_head_shipped_for_another_target_is_refused_before_anything_is_loaded(
    eyas: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, draft: str
) -> None:
    for loader in ("eyas.loading.load_target", "eyas.models.load_source"):
        monkeypatch.setattr(loader, lambda *_, **__: pytest.fail("loaded"))
    words = {"generate": [QUESTION], "inspect": [QUESTION], "bench": [str(questions(tmp_path))]}
    ran = eyas(command, *words.get(command, []), "--target", "other/model", "--draft", draft)
    assert ran.code == 2
    assert ran.err.startswith("eyas: no draft head is shipped for other/model; name one (--draft DIRECTORY)")


@pytest.mark.parametrize("target", [None, "default", "SmolLM2-135M-Instruct"])
def test_the_default_drafter_of_the_default_model_is_its_head(
    capsys: pytest.CaptureFixture[str], target: str | None
) -> None:
    assert drafter_for(target, "default") == "default"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("draft", ["none", "ngram", "some/head", "model.gguf"])
def test_drafters_that_are_not_shipped_are_anybodys(capsys: pytest.CaptureFixture[str], draft: str) -> None:
    assert drafter_for("other/model", draft) == draft
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "bench"])
def test_the_default_drafter_of_other_models_is_the_n_grams(
    eyas: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    asked: list[str] = []
    _, drafter = load_table()
    monkeypatch.setattr("eyas.loading.load_drafter", lambda name, _: asked.append(name) or drafter)
    words = {"generate": [QUESTION], "inspect": [QUESTION], "bench": [str(questions(tmp_path))]}
    ran = eyas(command, *words.get(command, []), "--target", "other/model", "--policy", "dynamic")
    assert ran.code == 0, ran.err
    assert ran.err.count("eyas: no draft head is shipped for other/model: what the text repeats drafts") == 1
    assert asked == ["ngram"]


def test_commands_about_heads_say_that_other_models_have_none_shipped(
    eyas: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notice = "eyas: no draft head is shipped for other/model: what the text repeats drafts (--draft ngram)\n"
    ran = eyas("calibrate", str(questions(tmp_path)), "--target", "other/model")
    assert ran.code == 2
    assert ran.err == f"{notice}eyas: only a head has a confidence to calibrate, got --draft ngram\n"
    heads: list[str | None] = []
    monkeypatch.setattr("eyas.models.load_source", lambda *_: None)
    monkeypatch.setattr("eyas.bench.profile.profile", lambda *_, draft, **__: heads.append(draft) or {})
    ran = eyas("profile", "--target", "other/model", "--json")
    assert (ran.code, ran.err, heads) == (0, notice, [None])


def test_bugs_of_ours_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("eyas.loading.load_target", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["generate", QUESTION])


@pytest.mark.parametrize("command", [["generate", QUESTION], ["generate", "-"], ["chat"]])
@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_streams_closed_before_the_start(command: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as left:
        main([*command, "--max-tokens", "4"])
    assert left.value.code == (2 if command[-1] == "-" and name == "stdin" else 0)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("arguments", [[], ["--stream"], ["--json"]])
def test_a_full_disk_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(SystemExit) as left:
        main(["generate", QUESTION, "--max-tokens", "4", *arguments])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("eyas: [Errno 28] No space left on device\n")


def test_a_narrow_encoding_spells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(*arguments: str) -> str:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
        with pytest.raises(SystemExit):
            main(["generate", QUESTION, "--max-tokens", "60", "--ignore-eos", *arguments])
        return written.getvalue().decode("ascii")

    assert "안녕" in json.loads(printed("--json"))["text"]
    assert "??" in printed()


def test_version_and_help(eyas: Runner) -> None:
    assert eyas("--version").out.startswith("eyas ")
    text = eyas("--help").out
    for command in ("generate", "chat", "inspect", "bench", "data", "train", "pull", "info", "profile"):
        assert command in text


# --- interrupts ------------------------------------------------------------------------------------------------


def test_ctrl_c_exits_with_130_and_no_traceback(eyas: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.loading.load_target", interrupted)
    ran = eyas("generate", QUESTION)
    assert ran.code == 130
    assert "Traceback" not in ran.err


def test_an_interrupt_waits_for_the_step_and_a_second_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as interrupted:  # noqa: PT012
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_chat_ends_the_answer_and_the_session_goes_on(eyas: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.cli import chat

    pressed: list[int] = []

    def print_and_press(step: Any) -> None:
        print(step.text, end="")
        if not pressed and step.cycle is not None:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat, "print_step", print_and_press)
    ran = eyas("chat", "--max-tokens", "30", "--ignore-eos", stdin="w9\nw10\n")
    assert ran.code == 0
    assert pressed
    assert 30 <= len(ran.out.split()) < 45  # the first answer was cut after its first cycle


def test_ctrl_c_in_bench_keeps_what_is_done(eyas: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.bench.run import Bench

    ask = Bench._ask

    def ask_and_press(self: Bench, *arguments: Any) -> Any:
        if len(self.rows) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, *arguments)

    monkeypatch.setattr(Bench, "_ask", ask_and_press)
    out = tmp_path / "r.json"
    ran = eyas("bench", str(questions(tmp_path)), "--methods", "none,dynamic", "--max-tokens", "8", "--out", str(out))
    assert ran.code == 130
    assert "interrupted" in ran.err
    data = json.loads(out.read_text())
    assert data["complete"] is False
    assert [row["question_id"] for row in data["rows"]] == ["a", "a"]
    assert "Interrupted" in eyas("bench", "--report", str(out)).out


# --- chat ------------------------------------------------------------------------------------------------------


def test_chat_remembers_and_resets(eyas: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, memory=None)
    options = ("chat", "--max-tokens", "8")
    lines = eyas(*options, stdin="w9\nw10\n/reset\nw9\n\n/nonsense\n/exit\nw11\n").out.splitlines()
    assert len(lines) == 3
    assert lines[0] == lines[2] != lines[1]
    cold = eyas(*options, stdin="w10\n").out.splitlines()
    assert cold != lines[1:2]


def test_chat_answers_turn_two_as_a_cold_start_would(eyas: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = eyas("chat", "--max-tokens", "8", stdin="w9\nw10\nw11\n").out
    prefill = Session.prefill
    reused: list[int] = []

    def cold_prefill(self: Session, prompt: Any) -> Any:
        self.cache.truncate(0)
        if self.draft is not None:
            self.draft.truncate(0)
        self.tokens = []
        return prefill(self, prompt)

    def warm_prefill(self: Session, prompt: Any) -> Any:
        before = self.cache.length
        output = prefill(self, prompt)
        reused.append(len(prompt) - len(output.features))
        assert reused[-1] <= before
        return output

    monkeypatch.setattr(Session, "prefill", cold_prefill)
    assert eyas("chat", "--max-tokens", "8", stdin="w9\nw10\nw11\n").out == warm
    monkeypatch.setattr(Session, "prefill", warm_prefill)
    assert eyas("chat", "--max-tokens", "8", stdin="w9\nw10\nw11\n").out == warm
    assert reused[0] == 0
    assert reused[1] > 4
    assert reused[2] > reused[1]


def test_a_turn_that_does_not_fit_is_said_and_chat_goes_on(eyas: Runner) -> None:
    ran = eyas("chat", "--max-tokens", "4", stdin=f"{' '.join(['w9'] * 600)}\nw9\n")
    assert "holds 512" in ran.err
    assert len(ran.out.splitlines()) == 1


# --- inspect ---------------------------------------------------------------------------------------------------


def test_inspect_draws_every_cycle(eyas: Runner, tmp_path: Path) -> None:
    common = ("inspect", QUESTION, "--max-tokens", "20", "--ignore-eos")
    ran = eyas(*common)
    cycles = ran.out.count("draft tokens verified")
    assert f"20 tokens in {cycles} cycles" in ran.out
    assert "dropped" not in ran.out.replace("dropped before verification", "")
    assert eyas(*common, "--cycle", "2").out.count("draft tokens verified") == 1
    assert len(eyas(*common, "--all").out) > len(ran.out)
    svg, html = tmp_path / "t.svg", tmp_path / "t.html"
    ran = eyas(*common, "--svg", str(svg), "--html", str(html))
    assert ran.out == f"wrote {svg}\nwrote {html}\n"
    assert svg.read_text().startswith("<svg")
    assert html.read_text().count("<section") == cycles


# --- bench -----------------------------------------------------------------------------------------------------


def questions(folder: Path, name: str = "q") -> Path:
    path = folder / f"{name}.jsonl"
    records = [{"question_id": "a", "turns": ["w9", "w10"]}, {"question_id": "b", "turns": ["w11 w12"]}]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_bench_writes_results_and_reports(eyas: Runner, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    files = [str(questions(tmp_path, name)) for name in ("one", "two", "three")]
    ran = eyas(
        *("bench", "--questions", *files, "--methods", "none,chain,static,dynamic"),
        *("--limit", "1", "--max-tokens", "10", "--repeats", "2", "--out", str(out)),
    )
    assert ran.code == 0
    assert "all files: 3 questions" in ran.out
    data = json.loads(out.read_text())
    assert data["complete"] is True
    assert len(data["rows"]) == 3 * 4 * 2
    assert {"machine", "versions", "commit", "command", "settings", "summary", "rows"} <= set(data)
    assert data["settings"]["max_tokens"] == 10
    assert data["plans"] == {name: name for name in ("none", "chain", "static", "dynamic")}
    for numbers in data["summary"]["total"].values():
        assert numbers["identical"]["none"] == {"same": 3, "of": 3}
    page = tmp_path / "report.html"
    assert eyas("bench", "--report", str(out), "--out", str(page)).out == f"wrote {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert eyas("bench", "--report", str(out)).out.startswith("# Eyas bench")
    assert eyas("bench", "--report", str(out), "--out", str(tmp_path / "r.pdf")).code == 2


def test_the_papers_suite_in_one_file(eyas: Runner, tmp_path: Path) -> None:
    from eyas.bench import paper

    for name in paper.SETS:
        questions(tmp_path, name)
    out, page = tmp_path / "results.json.gz", tmp_path / "report.html"
    methods = ",".join(name for name in paper.METHODS if name not in MEASURED)
    options = ("bench", "--suite", "paper", "--data", str(tmp_path), "--limit", "1", "--max-tokens", "8")
    ran = eyas(*options, "--methods", f"{methods},dynamic@3,dynamic+likeliest", "--draw", "--out", str(out))
    assert ran.code == 0
    assert "T=0" in ran.out and "T=1" in ran.out
    data = json.loads(gzip.decompress(out.read_bytes()))
    assert (data["eyas_suite"], data["suite"], data["complete"]) == (1, "paper", True)
    greedy, sampled = data["runs"]
    assert [run["settings"]["temperature"] for run in data["runs"]] == [0, 1]
    for run in data["runs"]:
        assert run["eyas_bench"] == 1 and run["complete"] is True
        drawn_or_not = run is sampled  # greedy answers know no difference
        assert ("dynamic+likeliest" in run["summary"]["total"]) == drawn_or_not
        assert len(run["rows"]) == 6 * (8 + drawn_or_not)
        assert list(run["summary"]["files"]) == list(paper.SETS)
        assert run["budgets"]["dynamic@3"]["num_draft_tokens"] == 3
        assert "none" not in run["budgets"]
    assert greedy["summary"]["total"]["dynamic-neither"]["identical"]["none"] == {"same": 6, "of": 6}
    assert sampled["summary"]["total"]["dynamic"]["identical"]["none"] is None
    assert eyas("bench", "--report", str(out), "--out", str(page)).code == 0
    text = page.read_text()
    for title in ("Beside the paper", "Ablation", "Acceptance length against draft tokens", "Speed-up by file"):
        assert title in text


def test_ctrl_c_in_a_suite_keeps_the_runs_that_are_done(
    eyas: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.bench.run import Bench

    ask = Bench._ask

    def ask_and_press(self: Bench, *arguments: Any) -> Any:
        if not self.settings.greedy and len(self.rows) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, *arguments)

    monkeypatch.setattr(Bench, "_ask", ask_and_press)
    out = tmp_path / "r.json"
    options = ("bench", str(questions(tmp_path)), "--suite", "paper", "--methods", "none,dynamic", "--max-tokens", "8")
    assert eyas(*options, "--out", str(out)).code == 130
    data = json.loads(out.read_text())
    assert data["complete"] is False
    assert [(run["complete"], len(run["rows"])) for run in data["runs"]] == [(True, 4), (False, 2)]
    assert eyas("bench", "--report", str(out)).out.count("Interrupted") == 1


def test_a_suite_refuses_before_it_works(eyas: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("bench", "--suite", "paper")
    assert "lacks mt_bench.jsonl" in eyas(*common, "--data", str(tmp_path)).err
    files = (*common, "--questions", str(questions(tmp_path)))
    assert "--temperature" in eyas(*files, "--temperature", "0.5").err
    monkeypatch.setattr("eyas.plan.read_forecast", lambda head, *, greedy: None)
    assert "sequoia needs measurements" in eyas(*files).err


def test_bench_refuses_before_it_works(eyas: Runner, tmp_path: Path) -> None:
    common = ("bench", "--questions", str(questions(tmp_path)))
    assert "cannot write" in eyas(*common, "--out", str(tmp_path / "no" / "r.json")).err
    assert "--draft none" in eyas(*common, "--draft", "none").err
    assert "greedy" in eyas(*common, "--check-reference", "--temperature", "1").err
    assert "never draw" in eyas(*common, "--methods", "none,dynamic+likeliest").err
    assert "--draw is about sampled answers" in eyas(*common, "--methods", "none,dynamic", "--draw").err
    assert eyas(*common, "--draft", "none", "--methods", "none", "--max-tokens", "4").code == 0


# --- options ---------------------------------------------------------------------------------------------------


def test_options_agree_with_what_they_set() -> None:
    assert get_args(get_args(get_type_hints(ModelOptions, include_extras=True)["engine"])[0]) == ENGINES
    policies = get_args(get_args(get_type_hints(DraftOptions, include_extras=True)["policy"])[0])
    assert policies == CHOICES
    assert DraftOptions().settings(None) == DraftSettings()
    assert SamplingOptions().sampling() == SamplingParams()
    assert SamplingOptions(max_tokens=7).stopping() == StopParams(max_tokens=7)


@pytest.mark.parametrize(
    ("options", "settings", "of_eagle3"),
    [
        (AnswerOptions, AnswerSettings, {}),
        (SynthesisOptions, SynthesisSettings, {}),
        (TrainOptions, TrainSettings, Eagle3Recipe.defaults),
    ],
)
def test_help_tells_the_defaults_of_settings(options: type, settings: Any, of_eagle3: Mapping[str, Any]) -> None:
    for name, hint in get_type_hints(options, include_extras=True).items():
        default = getattr(settings, name)
        if default is None:
            continue
        said = f"Default: {default}, {of_eagle3[name]} for eagle3." if name in of_eagle3 else f"Default: {default}."
        assert hint.__metadata__[0].help.endswith(said), name


def test_two_options_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Other:
        seed: Annotated[int, Option()] = 0

    def command(sampling: SamplingOptions, other: Other) -> None: ...

    command.__annotations__ = {"sampling": SamplingOptions, "other": Other, "return": None}
    with pytest.raises(TypeError, match="two parameters are called seed"):
        spread(command)


# --- a process of its own --------------------------------------------------------------------------------------


@pytest.fixture
def environment() -> dict[str, str]:
    source = Path(__file__).parents[1] / "src"
    return {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "80"}


def test_help_starts_without_torch(environment: dict[str, str]) -> None:
    code = (
        "import sys, eyas.cli\n"
        "try: eyas.cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--num-draft-tokens" in done.stdout


def test_a_missing_target_is_a_message(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eyas.cli", "generate", "x", "--target", str(tmp_path / "no.gguf")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("eyas: ")
    assert "Traceback" not in done.stderr
