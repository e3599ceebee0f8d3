"""Tables over one run or several: beside the paper, method over method, the ablation, tau against m. Reads JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.bench.intervals import (
    Interval,
    acceptance_length_gain_interval,
    acceptance_length_interval,
    speedup_interval,
)
from eyas.bench.methods import ABLATIONS, BASELINE, REFERENCE
from eyas.bench.paper import ABLATION, ABLATION_SPEEDUPS, MEANS, TEMPERATURES, Mean
from eyas.bench.results import Run
from eyas.bench.summary import per_question
from eyas.bench.table import Table, between, number, times

EAGLE_NAMES = {"static": "EAGLE", "dynamic": "EAGLE-2"}
"""What the paper calls our methods."""


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name of each run: its temperature, and a number where that is not enough."""
    plain = [f"T={run['settings']['temperature']:g}" for run in runs]
    return [
        label if plain.count(label) == 1 else f"{label} ({plain[: index + 1].count(label)})"
        for index, label in enumerate(plain)
    ]


def comparisons(runs: Sequence[Run]) -> Iterator[Table]:
    """Those tables that the runs have something for."""
    if any(method in run["methods"] for run in runs for method in EAGLE_NAMES):
        yield beside_the_paper(runs)
    over = over_static(runs)
    if over.lines:
        yield over
    if any(method in run["methods"] for run in runs for method in ABLATIONS):
        yield ablation(runs)
    curves = tau_by_budget(runs)
    if curves:
        yield _against_m(curves)


def beside_the_paper(runs: Sequence[Run]) -> Table:
    """Means over the sets, ours in the first line."""
    columns = [(temperature, method) for temperature in TEMPERATURES for method in EAGLE_NAMES]
    ours: list[str] = []
    for temperature, method in columns:
        found = next(
            (
                run["summary"]["total"][method]["mean_of_files"]
                for run in runs
                if run["settings"]["temperature"] == temperature and method in run["methods"]
            ),
            None,
        )
        ours.append(f"{times(found['speedup'])} / {number(found['acceptance_length'], 2)}" if found else "-")
    lines = [(f"{runs[0]['target']['name']}, here", *ours)]
    for target in dict.fromkeys(mean.target for mean in MEANS):
        means = {mean.temperature: mean for mean in MEANS if mean.target == target}
        lines.append((target, *(f"{means[t].speedups[m]:.2f}x / {means[t].taus[m]:.2f}" for t, m in columns)))
    return Table(
        "Beside the paper (on GPUs): speed-up / tau, mean over the sets",
        ("target", *(f"{EAGLE_NAMES[method]}, T={temperature:g}" for temperature, method in columns)),
        lines,
    )


def over_static(runs: Sequence[Run]) -> Table:
    """Every tree over EAGLE's static one: ratio of sums over all questions, 95 % intervals."""
    lines: list[tuple[str, ...]] = []
    for label, run in zip(labels(runs), runs, strict=True):
        if "static" not in run["methods"]:
            continue
        total, static = run["summary"]["total"], per_question(run["rows"], "static")
        for method in run["methods"]:
            if method in (BASELINE, REFERENCE, "static", *ABLATIONS):
                continue
            ours = per_question(run["rows"], method)
            means = [mean for mean in MEANS if mean.temperature == run["settings"]["temperature"]]
            known = method == "dynamic" and means
            lines.append(
                (
                    f"{method}, {label}",
                    times(_over(total, method, "tokens_per_second")),
                    between(speedup_interval(ours, static), "x"),
                    times(_over(total, method, "acceptance_length")),
                    between(acceptance_length_gain_interval(ours, static), "x"),
                    *((_paper_gain(means, "speedups"), _paper_gain(means, "taus")) if known else ("-", "-")),
                )
            )
    headings = ("method", "tokens/s", "95 %", "tau", "95 %", "paper: speed", "paper: tau")
    return Table("Over EAGLE's static tree", headings, lines)


def _over(total: Mapping[str, Any], method: str, key: str) -> float | None:
    ours, static = total[method][key], total["static"][key]
    return ours / static if ours and static else None


def _paper_gain(means: Sequence[Mean], what: str) -> str:
    gains = [getattr(mean, what)["dynamic"] / getattr(mean, what)["static"] for mean in means]
    return between((min(gains), max(gains)), "x")


def ablation(runs: Sequence[Run]) -> Table:
    """EAGLE-2 with neither of its stages, with either, with both."""
    headings = ["expansion and reranking by value"]
    for label in labels(runs):
        headings += [f"tau, {label}", "95 %", f"speed-up, {label}", "95 %"]
    lines: list[tuple[str, ...]] = []
    for name, method in ABLATION:
        line = [f"{name} ({method})"]
        for run in runs:
            numbers = run["summary"]["total"].get(method)
            if numbers is None:
                line += ["-"] * 4
                continue
            rows = per_question(run["rows"], method)
            plain = per_question(run["rows"], BASELINE)
            line += [number(numbers["acceptance_length"], 2), between(acceptance_length_interval(rows))]
            line += [times(numbers["speedup"]["ratio_of_sums"]), between(speedup_interval(rows, plain), "x")]
        lines.append((*line, times(ABLATION_SPEEDUPS.get(method))))
    return Table("Ablation", (*headings, "paper: Vicuna-7B, MT-bench, T=0"), lines)


Curves = dict[str, dict[int, tuple[float, Interval | None]]]
"""Policy and run -> num_draft_tokens -> tau, its interval."""


def tau_by_budget(runs: Sequence[Run]) -> Curves:
    """tau against m, of those policies that were measured with several m in one run or several of one temperature."""
    curves: Curves = {}
    for run in runs:
        for method, budget in run.get("budgets", {}).items():
            tau = run["summary"]["total"][method]["acceptance_length"]
            if tau is None:
                continue
            stem, _, rest = method.partition("@")
            name = f"{stem}{rest.lstrip('0123456789')}, T={run['settings']['temperature']:g}"
            interval = acceptance_length_interval(per_question(run["rows"], method))
            curves.setdefault(name, {})[budget["num_draft_tokens"]] = tau, interval
    return {name: dict(sorted(points.items())) for name, points in curves.items() if len(points) > 1}


def _against_m(curves: Curves) -> Table:
    sizes = sorted({m for points in curves.values() for m in points})
    lines = [(str(m), *(number(points[m][0], 2) if m in points else "-" for points in curves.values())) for m in sizes]
    return Table("Acceptance length (tau) against m", ("draft tokens (m)", *curves), lines)
