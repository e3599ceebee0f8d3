"""Faults of data, disks and settings: each a clear message before or during training, nothing half written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from eyas.errors import CheckpointError, InvalidInputError
from eyas.train import store as store_module
from eyas.train.checks import check_store, vocabulary_advice
from eyas.train.settings import TrainSettings
from eyas.train.store import Document, FeatureStore, StoreWriter, finished_prompts
from eyas.train.tensorboard import TensorBoardLog
from eyas.train.trainer import Trainer
from test_train import CONFIG, HIDDEN, VOCAB, document, weights

TARGET = {"name": "t", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 1, "feature_levels": 1}


def stored(path: Path, documents: list[Document]) -> FeatureStore:
    writer = StoreWriter(path, target=TARGET, feature_size=HIDDEN, settings={})
    for each in documents:
        writer.add(each)
    writer.flush()
    return FeatureStore(path)


def test_a_good_store_passes(tmp_path: Path) -> None:
    store = stored(tmp_path, [document(12, seed=i, index=i) for i in range(20)])
    assert check_store(store, weights().lm_head) == pytest.approx(1.0)
    sampled = [replace(document(12, seed=i, index=i), greedy=False) for i in range(2)]
    assert check_store(stored(tmp_path / "sampled", sampled), weights().lm_head) is None
    assert check_store(stored(tmp_path / "none", []), weights().lm_head) is None
    with pytest.raises(CheckpointError, match=f"hidden size {HIDDEN}, the target's is {HIDDEN + 2}"):
        check_store(store, torch.zeros(VOCAB, HIDDEN + 2))


def test_another_targets_lm_head_is_noticed(tmp_path: Path) -> None:
    store = stored(tmp_path, [document(30, seed=i, index=i) for i in range(4)])
    with pytest.raises(CheckpointError, match="another model's, or the two are out of step"):
        check_store(store, weights(seed=1).lm_head)


def test_features_one_place_off_are_noticed(tmp_path: Path) -> None:
    def shifted(seed: int) -> Document:
        good = document(30, seed=seed, index=seed)
        features = good.features.roll(1, 0)
        return replace(good, features=features, final=features)

    with pytest.raises(CheckpointError, match="out of step"):
        check_store(stored(tmp_path, [shifted(i) for i in range(4)]), weights().lm_head)


def test_answers_without_a_mask_are_noticed(tmp_path: Path) -> None:
    blank = [replace(document(9, seed=i, index=i), answer=np.zeros(9, bool)) for i in range(3)]
    with pytest.raises(CheckpointError, match="chat template"):
        check_store(stored(tmp_path, blank), weights().lm_head)


def test_tokens_beyond_the_vocabulary_are_noticed(tmp_path: Path) -> None:
    good = document(9)
    ids = good.ids.copy()
    ids[4] = VOCAB + 3
    with pytest.raises(CheckpointError, match=rf"document 0: token {VOCAB + 3} is beyond the target's vocabulary"):
        check_store(stored(tmp_path, [replace(good, ids=ids)]), weights().lm_head)


def test_a_small_vocabulary_is_remarked_on() -> None:
    assert vocabulary_advice(0.98, 8000) is None
    assert "61.0%" in str(vocabulary_advice(0.61, 100))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_leaves_a_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    writer = StoreWriter(tmp_path, target=TARGET, feature_size=HIDDEN, settings={}, shard_documents=2)
    for index in range(2):
        writer.add(document(9, seed=index, index=index))

    def full(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half a shard")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "save_file", full)
        writer.add(document(9, seed=2, index=2))
        with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors: .*No space left.*make room"):
            writer.add(document(9, seed=3, index=3))
    assert not list(tmp_path.glob("*.tmp"))
    assert finished_prompts(tmp_path) == {0, 1}
    assert len(FeatureStore(tmp_path)) == 2
    writer.flush()  # there is room again: nothing was lost
    assert finished_prompts(tmp_path) == {0, 1, 2, 3}


def trainer(tmp_path: Path, steps: int = 2) -> Trainer:
    if not (tmp_path / "s").exists():
        stored(tmp_path / "s", [document(12, seed=i, index=i) for i in range(4)])
    settings = TrainSettings(steps=steps, rows=1, row_size=16)
    return Trainer([tmp_path / "s"], weights(), CONFIG, settings, tmp_path / "run")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, 2).run()
    before = (tmp_path / "run" / "state.pt").read_bytes()

    def full(state: Any, file: Path) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match=r"state\.pt: .*No space left"):
            trainer(tmp_path, 4).run()
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    assert trainer(tmp_path, 4).run().step == 4


def test_metrics_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path)
    log.write({"step": 3, "loss": 0.5, "agreement": (0.25, 0.125), "kind": "eagle", "none": None})
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["agreement/1", "agreement/2", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("agreement/2")] == [(3, 0.125)]


def test_missing_tensorboard_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(InvalidInputError, match=r"eyas\[tensorboard\]"):
        TensorBoardLog(tmp_path)
