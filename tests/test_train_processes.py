"""Several processes train as one does: two real ones on gloo, beside a single one, in every way of training."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import test_train as eagle
import test_train_eagle3 as eagle3
from eyas.checkpoints.eagle import load_eagle
from eyas.checkpoints.eagle3 import load_eagle3
from eyas.errors import InvalidInputError
from eyas.heads.config import HeadConfig
from eyas.train import trainer as trainer_module
from eyas.train.epochs import HELD_OUT_EVERY
from eyas.train.processes import LAUNCHED, Processes, joined
from eyas.train.settings import TrainSettings
from eyas.train.trainer import Trainer
from support.table_cli import VOCAB, save_table_tokenizer
from support.tiny import tiny_llama

STEPS, HALF = 10, 5
PLAIN = TrainSettings(
    steps=STEPS, rows=2, row_size=24, warmup=2, ema=0.9, noise=0.2, evaluate_every=5, evaluate_documents=2,
    learning_rate=3e-3, prompt_weight=0.3,
)  # fmt: skip
WAYS: dict[str, tuple[HeadConfig, TrainSettings]] = {
    "plain": (replace(eagle.CONFIG, draft_vocab_size=16), PLAIN),
    "unrolled": (eagle.CONFIG, replace(PLAIN, unroll=3, unroll_after=4, prompt_weight=0.0, rows=3)),
    "muon": (replace(eagle.CONFIG, draft_vocab_size=16), replace(PLAIN, optimizer="muon")),
    "eagle3": (replace(eagle3.CONFIG, draft_vocab_size=16), replace(PLAIN, unroll=3, noise=0.0)),
    "eagle3 muon": (
        replace(eagle3.CONFIG, draft_vocab_size=16, target_lm_head=True),
        replace(PLAIN, unroll=3, noise=0.0, optimizer="muon"),
    ),
}


def tolerance(way: str) -> float:
    """How far losses may lie apart; Muon rounds to bfloat16 within, and carries that into the next steps."""
    return 5e-3 if WAYS[way][1].optimizer == "muon" else 1e-4


def trainer(way: str, store: Path, out: Path, processes: Processes) -> Trainer:
    config, settings = WAYS[way]
    return Trainer([store], eagle3.weights(), config, settings, out, processes=processes)


def half(way: str, store: Path, out: Path, processes: Processes) -> None:
    """The first steps of a run, and a checkpoint."""
    run = trainer(way, store, out, processes)
    for _ in range(HALF):
        run._step()
    if processes.first:
        run.save_checkpoint()


def work(folder: Path) -> None:
    """What each of two processes does."""
    torch.set_num_threads(1)
    trainer_module.has_fast_bfloat16 = lambda device: False
    store = folder / "store"
    with joined("cpu") as processes:
        assert processes.count == 2
        group = weakref.ref(torch.distributed.group.WORLD)
        for way in WAYS:
            # The second process has a place of its own: it must not need the first one's files, nor write any.
            mine = folder / ("two" if processes.first else "elsewhere")
            trainer(way, store, mine / way, processes).run()
            half(way, store, mine / f"{way}-half", processes)
            trainer(way, store, (folder / "one" if processes.first else mine) / f"{way}-half", processes).run()
        with pytest.raises(InvalidInputError, match="only the first"):
            processes.from_first(refuse)
        assert processes.least([3 + processes.index, 7 - processes.index]) == (3, 6)
        with pytest.raises(InvalidInputError, match=r"1 rows cannot be shared by 2 processes; --rows 2"):
            Trainer([store], eagle3.weights(), eagle.CONFIG, replace(PLAIN, rows=1), folder / "no", processes=processes)
    # What outlives its destruction has threads, and these can abort the process while Python shuts down.
    assert group() is None


def refuse() -> None:
    raise InvalidInputError("only the first knows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process in ``one``, of two in ``two``; halves of each were finished by the other."""
    folder = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        # In bfloat16 a product's rounding depends on how many rows share it.
        patch.setattr(trainer_module, "has_fast_bfloat16", lambda device: False)
        make_runs(folder)
    return folder


def make_runs(folder: Path) -> None:
    indices = [*range(13), HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1]
    store = eagle3.write_store(folder / "store", [eagle3.document(6 + i % 9, seed=i, index=i) for i in indices])
    for way in WAYS:
        trainer(way, store, folder / "one" / way, Processes()).run()
        half(way, store, folder / "one" / f"{way}-half", Processes())
    launch(2, "-c", f"import pathlib, test_train_processes as t; t.work(pathlib.Path({str(folder)!r}))")
    for way in WAYS:
        trainer(way, store, folder / "two" / f"{way}-half", Processes()).run()


def launch(count: int, *arguments: str) -> None:
    """Start Python ``count`` times as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    running = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0] * count, "\n".join(errors)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(folder: Path, way: str) -> None:
    one, two = lines(folder / "one" / way), lines(folder / "two" / way)
    assert [line["step"] for line in two] == list(range(1, STEPS + 1))
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=tolerance(way))
        assert b["regression"] == pytest.approx(a["regression"], abs=tolerance(way))
        assert b["distillation"] == pytest.approx(a["distillation"], abs=tolerance(way))
        assert b["agreement"] == pytest.approx(a["agreement"], abs=tolerance(way))
        assert (b["tokens"], b["epoch"], b["learning_rate"]) == (a["tokens"], a["epoch"], a["learning_rate"])
        assert b.keys() == a.keys()
    assert two[-1]["held_out_distillation"] == pytest.approx(one[-1]["held_out_distillation"], abs=tolerance(way))
    assert one[0]["loss"] - one[-1]["loss"] > 1e-3  # there was something to get wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beginner", ["one", "two"])
def test_a_run_goes_on_with_another_number_of_processes(folder: Path, way: str, beginner: str) -> None:
    whole, resumed = lines(folder / "one" / way)[HALF:], lines(folder / beginner / f"{way}-half")
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole], abs=tolerance(way))


def test_an_epochs_last_batch_may_leave_a_process_idle(folder: Path) -> None:
    """Or the runs above would not have shown that it does no harm."""
    run = trainer("plain", folder / "store", folder / "count", Processes())
    sizes = [len(run.epochs.next_rows(run.state)) for _ in range(STEPS)]
    assert 1 in sizes and 2 in sizes


def test_only_the_first_process_writes(folder: Path) -> None:
    assert not (folder / "elsewhere").exists()
    assert (folder / "two" / "plain" / "head" / "model.safetensors").exists()


def test_shares_are_disjoint_and_whole() -> None:
    for rows in (1, 2, 5, 6):
        members = [Processes(index=i, count=3) for i in range(3)]
        busy = [each for each in members if not each.idle(rows)]
        assert sorted(row for each in busy for row in range(rows)[each.share(rows)]) == list(range(rows))
        assert all(range(rows)[each.share(rows)] for each in members)


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with joined("cpu") as processes:
        assert processes == Processes()
    assert not torch.distributed.is_initialized()


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInputError, match=r"cuda:1 is one device for 2 processes"), joined("cuda:1"):
        pass


@pytest.mark.slow
def test_the_script_trains_both_heads(tmp_path: Path) -> None:
    """A handful of prompts, few steps, each head by two processes that accelerate launches."""
    model = tmp_path / "model"
    tiny_llama(vocab_size=VOCAB, hidden_size=64, num_layers=6).save_pretrained(model)
    save_table_tokenizer(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i}"]}) + "\n" for i in range(8)))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "DEVICE": "cpu",
        "PROCESSES": "2",
        "TARGET": str(model),
        "STEPS": "3",
        "ANSWER": "--max-tokens 12 --batch 4",
        "TRAIN": "--rows 2 --row-size 32",
    }
    script = Path(__file__).parents[1] / "scripts" / "train_default_heads.sh"
    command = ["sh", str(script), str(prompts), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_eagle(tmp_path / "out" / "eagle" / "head").config.hidden_size == 64
    assert load_eagle3(tmp_path / "out" / "eagle3" / "head").config.hidden_size == 64
    for kind in ("eagle", "eagle3"):
        assert [line["step"] for line in lines(tmp_path / "out" / kind)] == [1, 2, 3]
