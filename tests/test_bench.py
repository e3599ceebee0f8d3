"""The bench: questions are read strictly, methods interleave, numbers follow from rows, reports from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.bench.intervals import acceptance_length_interval, speedup_interval
from eyas.bench.methods import ABLATIONS, METHODS, EyasMethod, MethodName, method_plan, parse_methods
from eyas.bench.plots import comparison_plots, draw, run_plots, write_svgs
from eyas.bench.questions import Question, load_questions
from eyas.bench.report import sections, to_html, to_markdown
from eyas.bench.results import joined, load_runs, suite
from eyas.bench.run import Bench, BenchSettings, write_json
from eyas.bench.summary import question_speedups, summarise
from eyas.drafters.base import Drafter
from eyas.drafters.grafted import GraftedDrafter
from eyas.errors import CheckpointError, EyasError, InvalidInputError
from eyas.metrics import PHASES
from eyas.plan import MEASURED, PLAIN, DraftPlan, DraftSettings, Planner
from eyas.policies import DynamicPolicy
from eyas.profile import ProfileKey
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.way import PLAINLY, Way
from support.profiles import made_up_profile
from support.table_cli import load_table

BUDGET: dict[str, Any] = {"num_steps": 3, "topk": 3, "num_draft_tokens": 6}


def write_questions(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def make_bench(names: str = "none,chain,static,dynamic", temperature: float = 0.0, **settings: Any) -> Bench:
    loaded, drafter = load_table(max_positions=128)
    params = SamplingParams(temperature=temperature)
    key = ProfileKey.of(loaded.target.info, "", ("scripted", ""))
    planner = Planner(DraftSettings(**BUDGET), loaded.target, drafter, made_up_profile(key))
    methods = [
        EyasMethod(str(name), loaded.target, loaded.tokenizer, params, method_plan(name, planner))
        for name in parse_methods(names)
    ]
    stop = StopParams(max_tokens=20)
    return Bench(methods, BenchSettings(stop, params.greedy, **settings), loaded.tokenizer.encode_chat)


QUESTIONS = [
    Question("one", 1, "", ("w9 w10", "w11")),
    Question("two", 1, "", ("w12",)),
    Question("one", 2, "", ("w13 w14",)),
]


# --- questions -------------------------------------------------------------------------------------------------


def test_questions_come_one_of_each_file_in_turn(tmp_path: Path) -> None:
    a = write_questions(tmp_path / "a.jsonl", *({"question_id": i, "turns": [f"q{i}", "more"]} for i in range(3)))
    b = write_questions(tmp_path / "b.jsonl", {"turns": ["x\u2028y"], "category": "c"})
    questions = load_questions([a, b])
    assert [(q.file, q.question_id) for q in questions] == [("a", 0), ("b", 1), ("a", 1), ("a", 2)]
    assert questions[0].turns == ("q0", "more")
    assert questions[1].turns == ("x\u2028y",)
    assert questions[1].category == "c"
    assert [q.question_id for q in load_questions([a], 2)] == [0, 1]
    assert load_questions([a], first_turn=True)[0].turns == ("q0",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{broken\n', r"q\.jsonl, line 2 is not JSON"),
        ('\n\n{"turns": []}', r"q\.jsonl, line 3 needs 'turns'"),
        ('{"turns": ["a", 1]}', "line 1 needs 'turns'"),
        ('{"turns": [" "]}', "line 1 needs 'turns'"),
        ('["a"]', "line 1 needs 'turns'"),
        ('{"turns": "a"}', "line 1 needs 'turns'"),
        ('{"turns": ["a"], "question_id": [1]}', "question_id must be"),
        ("", "holds no questions"),
    ],
)
def test_bad_question_files_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        load_questions([file])


def test_question_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"missing\.jsonl"):
        load_questions([tmp_path / "missing.jsonl"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(InvalidInputError, match=r"latin\.jsonl"):
        load_questions([tmp_path / "latin.jsonl"])
    with pytest.raises(InvalidInputError, match="no question file"):
        load_questions([])
    good = write_questions(tmp_path / "a.jsonl", {"turns": ["a"]})
    with pytest.raises(InvalidInputError, match="two question files are called a"):
        load_questions([good, good])
    with pytest.raises(InvalidInputError, match="limit"):
        load_questions([good], 0)


# --- methods ---------------------------------------------------------------------------------------------------


def plans() -> tuple[Drafter, Callable[[str], DraftPlan]]:
    """A drafter, and how methods draft with it, by name."""
    loaded, drafter = load_table()
    planner = Planner(DraftSettings(**BUDGET), loaded.target, drafter)
    return drafter, lambda name: method_plan(MethodName.parse(name), planner)


def test_methods_have_their_policies() -> None:
    drafter, plan = plans()
    assert plan("none") == PLAIN
    assert plan("dynamic").policy == DynamicPolicy(3, 3, 6)
    assert plan("dynamic-no-value").policy == DynamicPolicy(3, 3, 6, value=False)
    assert plan("dynamic-neither").policy == DynamicPolicy(3, 3, 6, value=False, rerank=False)
    for name in METHODS[1:]:
        if name not in MEASURED:
            assert plan(name).policy.num_draft_tokens <= 6
            assert plan(name).drafter is drafter
            grafted = plan(name + "+graft")
            assert isinstance(grafted.drafter, GraftedDrafter)
            assert grafted.policy == plan(name).policy
    for name in MEASURED:
        with pytest.raises(InvalidInputError, match="eyas tune"):
            plan(name)
    assert parse_methods(" none, dynamic+graft ") == [MethodName(PLAINLY), MethodName(Way("dynamic", graft=True))]
    assert set(ABLATIONS) < set(METHODS)


def test_methods_may_have_a_budget_of_their_own() -> None:
    _, plan = plans()
    assert plan("dynamic@20").policy == DynamicPolicy(3, 3, 20)
    assert plan("static@4").policy.num_draft_tokens == 4
    assert plan("dynamic-no-value@20").policy == DynamicPolicy(3, 3, 20, value=False)
    grafted = plan("dynamic@20+graft")
    assert isinstance(grafted.drafter, GraftedDrafter) and grafted.policy.num_draft_tokens == 20
    for name in ("dynamic@0", "dynamic@9999"):
        with pytest.raises(InvalidInputError, match="num_draft_tokens must be"):
            parse_methods(name)


def test_a_methods_name_is_printed_as_it_was_read() -> None:
    for name in (*METHODS, "dynamic@20", "static@4+graft", "dynamic-neither@3+likeliest", "auto+likeliest+graft"):
        assert str(MethodName.parse(name)) == name


@pytest.mark.parametrize(
    "names", ["", "none,nothing", "none,none", ",", "none+graft", "dynamic+x", "none@4", "dynamic@", "dynamic@x", "@3"]
)
def test_bad_method_lists(names: str) -> None:
    with pytest.raises(InvalidInputError, match="method"):
        parse_methods(names)


@pytest.mark.parametrize(
    "name", ["none+graft", "none@4", "dynamic+x", "dynamic@", "dynamic@x", "dynamic@3@4", "@3", "dynamic+drawn"]
)
def test_bad_variants(name: str) -> None:
    with pytest.raises(InvalidInputError, match="unknown method"):
        parse_methods(name)


# --- running ---------------------------------------------------------------------------------------------------


def test_every_method_answers_every_question_alike() -> None:
    methods = [*METHODS, "dynamic+graft", "budgeted+graft", "dynamic-neither+graft"]
    bench = make_bench(",".join(methods), repeats=2)
    assert bench.run(QUESTIONS)
    assert len(bench.rows) == len(QUESTIONS) * len(methods) * 2
    answers = {(row["file"], row["question_id"], json.dumps(row["token_ids"])) for row in bench.rows}
    assert len(answers) == len(QUESTIONS)
    first = bench.rows[0]
    assert len(first["token_ids"]) == len(first["prompt_tokens"]) == 2  # both turns
    # the second prompt holds the first answer
    assert first["prompt_tokens"][1] > first["prompt_tokens"][0] + len(first["token_ids"][0]) - 1
    for row in bench.rows:
        assert set(row["seconds"]) == set(PHASES)
        assert row["cycle_tokens"] == sum(len(ids) - 1 for ids in row["token_ids"])
        assert sum(row["accepted_lengths"]) == row["cycles"]
        drafted = sum(count for count, _ in row["calibration"])
        assert drafted <= row["draft_tokens"]
        assert (drafted == 0) == (row["method"] == "none")
    summary = bench.summary()
    assert summary["total"]["dynamic"]["identical"]["none"] == {"same": 3, "of": 3}
    assert summary["total"]["dynamic"]["acceptance_length"] > 1.2
    assert set(summary["files"]) == {"one", "two"}


def test_the_order_of_the_methods_rotates() -> None:
    bench = make_bench()
    bench.run(QUESTIONS)
    orders = [[row["method"] for row in bench.rows[i : i + 4]] for i in range(0, 12, 4)]
    assert orders == [
        ["none", "chain", "static", "dynamic"],
        ["chain", "static", "dynamic", "none"],
        ["static", "dynamic", "none", "chain"],
    ]


def test_sampling_repeats_under_its_seed_and_is_not_compared() -> None:
    def answers(seed: int) -> list[list[list[int]]]:
        bench = make_bench("none,dynamic", temperature=1.0, seed=seed)
        bench.run(QUESTIONS)
        assert bench.summary()["total"]["dynamic"]["identical"] == {"none": None, "transformers": None}
        return [row["token_ids"] for row in bench.rows]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_an_interrupt_keeps_whole_questions() -> None:
    bench = make_bench()
    counted = 0

    def interrupted() -> bool:
        nonlocal counted
        counted += len(bench.rows) == 4  # the first question is done
        return counted > 3

    bench.interrupted = interrupted
    assert not bench.run(QUESTIONS)
    assert [row["question_id"] for row in bench.rows] == [1, 1, 1, 1]
    assert {row["file"] for row in bench.rows} == {"one"}


def test_questions_that_do_not_fit_are_skipped_for_all_methods() -> None:
    bench = make_bench()
    long = Question("one", 9, "", (" ".join(["w9"] * 200),))
    assert bench.run([long, QUESTIONS[1]])
    assert [(one["file"], one["question_id"]) for one in bench.skipped] == [("one", 9)]
    assert "200" not in {row["question_id"] for row in bench.rows}
    assert len(bench.rows) == 4


# --- summaries -------------------------------------------------------------------------------------------------


def row(method: str, question: int, tokens: int, cycles: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "file": "f",
        "question_id": question,
        "category": "",
        "method": method,
        "repeat": 0,
        "token_ids": [[7] * (tokens + 1)],
        "cycle_tokens": tokens,
        "cycles": cycles,
        "draft_tokens": 0 if method == "none" else 10 * cycles,
        "accepted_tokens": tokens - cycles,
        "acceptance_length": tokens / cycles if cycles else 0.0,
        "seconds": dict.fromkeys(PHASES, 0.0) | {"prefill": 1.0, "verify": 0.75 * seconds, "commit": 0.25 * seconds},
        "accepted_lengths": [0, cycles],
        "calibration": [[cycles, 1]] * 20,
    } | more


ROWS = [
    row("none", 1, 10, 10, 10.0),
    row("dynamic", 1, 10, 5, 5.0),  # twice as fast
    row("none", 2, 20, 20, 20.0),
    row("dynamic", 2, 20, 5, 4.0),  # five times
    row("none", 3, 0, 0, 0.0),  # one token: nothing decoded
    row("dynamic", 3, 0, 0, 0.0),
]


def test_summary_by_hand() -> None:
    total = summarise(ROWS, ["none", "dynamic"], greedy=True)["total"]
    fast = total["dynamic"]
    assert fast["questions"] == 3
    assert fast["acceptance_length"] == 30 / 10
    assert fast["acceptance_length_mean"] == (2 + 4) / 2
    assert fast["acceptance_rate"] == 20 / 100
    assert fast["tokens_per_second"] == pytest.approx(30 / 9)
    assert fast["speedup"]["median"] == pytest.approx(3.5)
    assert fast["speedup"]["ratio_of_sums"] == pytest.approx(30 / 9)
    assert fast["speedup"]["with_prefill"] == pytest.approx(33 / 12)
    assert fast["overhead"] == pytest.approx(0.25)
    assert fast["identical"] == {"none": {"same": 3, "of": 3}, "transformers": None}
    assert fast["mean_of_files"]["acceptance_length"] == 3.0
    assert total["none"]["speedup"]["ratio_of_sums"] == 1.0


def test_summary_takes_medians_over_repeats() -> None:
    repeats = [row("dynamic", 1, 10, 5, seconds, repeat=i) for i, seconds in enumerate([5.0, 50.0, 4.0])]
    total = summarise([ROWS[0], *repeats], ["none", "dynamic"], greedy=True)["total"]
    assert total["dynamic"]["tokens_per_second"] == pytest.approx(2.0)
    assert total["dynamic"]["questions"] == 1


def test_a_single_different_token_is_counted() -> None:
    other = row("dynamic", 2, 20, 5, 4.0, token_ids=[[7] * 20 + [8]])
    total = summarise([*ROWS[:3], other], ["none", "dynamic"], greedy=True)["total"]
    assert total["dynamic"]["identical"]["none"] == {"same": 1, "of": 2}
    # in a later repeat, too
    late = [row("dynamic", 1, 10, 5, 5.0, repeat=1, token_ids=[[8] * 11])]
    total = summarise([*ROWS, *late], ["none", "dynamic"], greedy=True)["total"]
    assert total["dynamic"]["identical"]["none"] == {"same": 2, "of": 3}


def test_what_cannot_be_said_is_none() -> None:
    alone = summarise([ROWS[1]], ["dynamic"], greedy=True)["total"]["dynamic"]
    assert alone["speedup"] == {"median": None, "ratio_of_sums": None, "with_prefill": None}
    assert alone["identical"] == {"none": None, "transformers": None}
    empty = summarise([], ["none", "dynamic"], greedy=True)
    assert empty["total"]["dynamic"]["acceptance_length"] is None
    json.dumps(empty, allow_nan=False)


def test_intervals() -> None:
    ours = {i: row("dynamic", i, 10, 5, 5.0) for i in range(8)}
    plain = {i: row("none", i, 10, 10, 10.0) for i in range(8)}
    assert acceptance_length_interval(ours) == (2.0, 2.0)
    assert speedup_interval(ours, plain) == pytest.approx((2.0, 2.0))
    ours[0] = row("dynamic", 0, 10, 2, 2.0)
    low, high = acceptance_length_interval(ours) or (0.0, 0.0)
    assert low == 2.0
    assert 2.1 < high < 5.0
    assert acceptance_length_interval({0: ours[0]}) is None
    assert question_speedups({0: ours[0]}, plain) == [pytest.approx(5.0)]


# --- files and reports -----------------------------------------------------------------------------------------


def results(rows: Sequence[dict[str, Any]] = ROWS, **more: Any) -> dict[str, Any]:
    methods = ["none", "dynamic"]
    return {
        "eyas_bench": 1,
        "command": "eyas bench --questions f|g.jsonl",
        "machine": {"cpu": "A <fast> one", "cores": 2, "memory_bytes": 2**34},
        "versions": {"python": "3.11", "torch": None},
        "commit": None,
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 12.0,
        "questions": 3,
        "settings": {
            "draft": "default",
            **BUDGET,
            "max_tokens": 20,
            "temperature": 0.0,
            "seed": 0,
            "repeats": 1,
        },
        "target": {"name": "table", "engine": "table", "dtype": "float32"},
        "methods": methods,
        "complete": True,
        "skipped": [],
        "summary": summarise(rows, methods, greedy=True),
        "rows": list(rows),
    } | more


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidInputError, match="cannot write"):
        write_json(tmp_path / "no" / "r.json", {})


def test_markdown_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    text = to_markdown(sections([results()], lambda data, plots: write_svgs(draw(data, plots), report)))
    assert "| dynamic | 3.00 | 20.0 % | 3.3 | 3.33x | 3.50x | 25.0 % | 3/3 |" in text
    assert "A <fast> one, 2 cores, 16 GiB" in text
    images = sorted(path.name for path in tmp_path.iterdir())
    assert len(images) == 5
    assert "report-acceptance-by-depth-t-0.svg" in images
    assert all(f"({image})" in text for image in images)
    assert "Interrupted" not in text
    assert "Interrupted" in to_markdown(sections([results(complete=False)]))


def test_html_report() -> None:
    parts = sections([results()], draw)
    page = to_html(parts)
    assert "A &lt;fast&gt; one" in page
    assert page.count("<figure><svg") == 5
    assert page.count("<h3>") == sum(len(part.tables) for part in parts) + 5


def test_plots_without_drafting_or_baseline() -> None:
    assert list(run_plots(results([ROWS[0]], methods=["none"]))) == ["Where a cycle's time goes"]
    assert "Speed-up over plain decoding" not in run_plots(results([ROWS[1]], methods=["dynamic"]))


def test_results_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    cases: list[tuple[str, type[EyasError]]] = [
        ("{broken", CheckpointError),
        ("[]", CheckpointError),
        ('{"eyas_bench": 99}', CheckpointError),
        ('{"eyas_suite": 1, "runs": [{}]}', CheckpointError),
        ('{"eyas_suite": 1, "runs": []}', InvalidInputError),
        (json.dumps(results([])), InvalidInputError),
    ]
    for text, error in cases:
        path.write_text(text)
        with pytest.raises(error, match=r"r\.json"):
            load_runs(path)
    with pytest.raises(CheckpointError, match=r"none\.json"):
        load_runs(tmp_path / "none.json")
    path.write_text(json.dumps(results()))
    assert load_runs(path)[0]["rows"] == ROWS


def test_compressed_results_are_the_same(tmp_path: Path) -> None:
    plain, small = tmp_path / "r.json", tmp_path / "r.json.gz"
    for path in (plain, small):
        write_json(path, results())
    assert load_runs(plain) == load_runs(small)
    assert small.stat().st_size < plain.stat().st_size / 2
    small.write_bytes(small.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot read"):
        load_runs(small)


# --- comparisons -----------------------------------------------------------------------------------------------


def run_of(methods: dict[str, int], temperature: float = 0.0, file: str = "f") -> dict[str, Any]:
    """Two questions of 20 tokens by each method, in so many cycles of one second."""
    rows = [row(name, i, 20, cycles, cycles, file=file) for name, cycles in methods.items() for i in (1, 2)]
    made = results(rows, methods=list(methods))
    made["settings"] = {**made["settings"], "temperature": temperature}
    sizes = {name: {"num_draft_tokens": int((name + "@10").split("@")[1])} for name in methods if name != "none"}
    return made | {"budgets": sizes, "summary": summarise(rows, list(methods), greedy=temperature == 0)}


def lines(runs: Sequence[dict[str, Any]], title: str) -> dict[str, Sequence[str]]:
    table = next(table for table in sections(runs)[0].tables if table.title.startswith(title))
    assert all(len(line) == len(table.headings) for line in table.lines)
    return {line[0]: line[1:] for line in table.lines}


def test_ours_stands_beside_the_papers_means() -> None:
    runs = [run_of({"none": 20, "static": 10, "dynamic": 8}), run_of({"none": 20, "dynamic": 10}, temperature=1.0)]
    beside = lines(runs, "Beside the paper")
    assert beside["table, here"] == ("2.00x / 2.00", "2.50x / 2.50", "-", "2.00x / 2.00")
    assert beside["Vicuna-7B"] == ("2.78x / 3.79", "3.39x / 4.68", "2.18x / 3.20", "2.94x / 4.20")
    assert len(beside) == 5
    over = lines(runs, "Over EAGLE's static tree")
    assert list(over) == ["dynamic, T=0"]
    assert over["dynamic, T=0"] == (
        *("1.25x", "1.25x to 1.25x", "1.25x", "1.25x to 1.25x"),
        *("1.22x to 1.37x", "1.20x to 1.25x"),
    )


def test_ablation_has_the_papers_order() -> None:
    cycles = {"none": 20, "dynamic": 5, "dynamic-no-value": 8, "dynamic-no-rerank": 8, "dynamic-neither": 10}
    table = lines([run_of(cycles)], "Ablation")
    assert [line[0] for line in table.values()] == ["2.00", "2.50", "2.50", "4.00"]
    assert [line[-1] for line in table.values()] == ["2.81x", "-", "-", "3.62x"]


def test_tau_against_m() -> None:
    one = run_of({"none": 20, "dynamic": 10, "dynamic@20": 8, "static": 10})
    assert lines([one], "Acceptance length (tau) against m") == {"10": ("2.00",), "20": ("2.50",)}
    assert draw({"runs": [one]}, comparison_plots([one]))["Acceptance length against draft tokens"].startswith("<svg")
    # runs of one temperature complete each other, others do not
    runs = [run_of({"dynamic@5": 10}), run_of({"dynamic@9": 8}), run_of({"dynamic@7": 8}, temperature=1.0)]
    assert lines(runs, "Acceptance length (tau) against m") == {"5": ("2.00",), "9": ("2.50",)}
    assert not comparison_plots([run_of({"dynamic": 8, "static": 10})])


def test_runs_over_different_files_can_be_joined() -> None:
    halves = [run_of({"none": 20, "dynamic": 10}, file=name) for name in ("a", "b")]
    whole = joined(halves)
    assert list(whole["summary"]["files"]) == ["a", "b"]
    assert whole["summary"]["total"]["dynamic"]["questions"] == 4
    with pytest.raises(InvalidInputError, match="both asked a"):
        joined([halves[0], halves[0]])
    with pytest.raises(InvalidInputError, match="methods differ"):
        joined([halves[0], run_of({"none": 20}, file="c")])


def test_a_suite_is_read_as_its_runs(tmp_path: Path) -> None:
    runs = [run_of({"none": 20, "dynamic": 10}), run_of({"none": 20, "dynamic": 10}, temperature=1.0)]
    unfinished = run_of({"none": 20}) | {"rows": []}
    write_json(tmp_path / "s.json", suite("paper", [*runs, unfinished], complete=False))
    assert load_runs(tmp_path / "s.json") == runs
    assert [part.title for part in sections([*runs, runs[1]])] == ["Comparisons", "T=0", "T=1 (1)", "T=1 (2)"]


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="repeats"):
        BenchSettings(StopParams(), greedy=True, repeats=0)
