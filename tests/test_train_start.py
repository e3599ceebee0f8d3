"""Runs that begin with the weights of a head, and heads of several layers, from the commands to both engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import test_train as eagle
import test_train_eagle3 as eagle3
from eyas import native
from eyas.checkpoints.eagle import load_eagle
from eyas.checkpoints.eagle3 import load_eagle3
from eyas.checkpoints.heads import load_head
from eyas.cli import main
from eyas.errors import CheckpointError
from eyas.heads.config import HeadConfig
from eyas.train.settings import TrainSettings
from eyas.train.trainer import Trainer
from support.table_cli import VOCAB, save_table_tokenizer
from support.tiny import tiny_llama

FEW = TrainSettings(steps=2, rows=2, row_size=24, warmup=1, noise=0.0, evaluate_every=100)
CONFIGS: dict[str, HeadConfig] = {
    "eagle": replace(eagle.CONFIG, draft_vocab_size=16, num_layers=2),
    "eagle3": replace(eagle3.CONFIG, draft_vocab_size=16, target_lm_head=True),
    "own lm_head": replace(eagle3.CONFIG, draft_vocab_size=16),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [eagle3.document(9 + i, seed=i, index=i) for i in range(6)]
    return eagle3.write_store(tmp_path_factory.mktemp("start") / "store", documents)


def trainer(store: Path, config: HeadConfig, out: Path, start: Path | None = None) -> Trainer:
    read = None if start is None else load_head(start)
    return Trainer([store], eagle3.weights(), config, FEW, out, start=read)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_run_begins_with_a_heads_weights(store: Path, tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    trainer(store, config, tmp_path / "one").run()
    read = load_head(tmp_path / "one" / "head")
    begun = trainer(store, config, tmp_path / "two", tmp_path / "one" / "head")
    assert begun.state.step == 0
    for weights in (begun.head.state_dict(), begun.average):
        assert weights.keys() == read.tensors.keys()
        for key, array in read.tensors.items():
            np.testing.assert_array_equal(weights[key], array)
    np.testing.assert_array_equal(begun.d2t, read.d2t)
    begun.run()
    resumed = trainer(store, config, tmp_path / "two", tmp_path / "one" / "head")
    assert resumed.state.step == 2
    assert not torch.equal(resumed.head.fc.weight, torch.tensor(read.tensors["fc.weight"]))


@pytest.mark.parametrize("name", CONFIGS)
def test_another_draft_vocabulary_needs_the_targets_lm_head(store: Path, tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    trainer(store, config, tmp_path / "one").run()
    larger = replace(config, draft_vocab_size=20)
    if name == "own lm_head":
        with pytest.raises(CheckpointError, match="draft_vocab_size is 16 there, asked for is 20"):
            trainer(store, larger, tmp_path / "two", tmp_path / "one" / "head")
        return
    begun = trainer(store, larger, tmp_path / "two", tmp_path / "one" / "head")
    assert begun.d2t is not None and len(begun.d2t) == 20
    assert load_head(tmp_path / "one" / "head").tensors.keys() == begun.head.state_dict().keys()
    begun.run()


@pytest.mark.parametrize("name", ["eagle3", "own lm_head"])
def test_a_draft_vocabulary_of_the_same_size_is_kept(store: Path, tmp_path: Path, name: str) -> None:
    """Where these answers would ask for others."""
    trainer(store, CONFIGS[name], tmp_path / "one").run()
    head = tmp_path / "one" / "head"
    read = load_eagle3(head)
    odd = np.arange(1, 17) - np.arange(16)
    begun = Trainer(
        [store], eagle3.weights(), read.config, FEW, tmp_path / "two", start=replace(read, d2t=odd.astype(np.int64))
    )
    np.testing.assert_array_equal(begun.d2t, odd)


def test_heads_of_another_shape_are_refused(store: Path, tmp_path: Path) -> None:
    trainer(store, CONFIGS["eagle3"], tmp_path / "one").run()
    head = tmp_path / "one" / "head"
    others: list[tuple[HeadConfig, str]] = [
        (CONFIGS["eagle"], "its kind"),
        (replace(CONFIGS["eagle3"], intermediate_size=24), "intermediate_size is 32 there, asked for is 24"),
        (CONFIGS["own lm_head"], "target_lm_head is True there, asked for is False"),
    ]
    for config, words in others:
        with pytest.raises(CheckpointError, match=f"a head of another shape: {words}"):
            trainer(store, config, tmp_path / "two", head)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_larger_head_begins_with_the_same_output(store: Path, tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    trainer(store, config, tmp_path / "one").run()
    before = trainer(store, config, tmp_path / "two", tmp_path / "one" / "head")
    larger = replace(config, num_layers=config.num_layers + 1, intermediate_size=40)
    grown = trainer(store, larger, tmp_path / "three", tmp_path / "one" / "head")
    embeds, hidden = torch.randn(2, 2, 7, config.hidden_size).unbind()
    positions = torch.arange(7)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            grown.head(embeds, hidden, positions), before.head(embeds, hidden, positions), rtol=1e-5, atol=1e-5
        )
    start = {key: tensor.clone() for key, tensor in grown.head.state_dict().items()}
    grown.run()
    assert all((tensor != start[key]).any() for key, tensor in grown.head.state_dict().items() if "proj" in key)
    with pytest.raises(CheckpointError, match="intermediate_size is 40 there, asked for is 32; num_layers"):
        trainer(store, config, tmp_path / "four", tmp_path / "three" / "head")


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A head of two layers is trained, trained on from its weights, and drafts on both engines."""
    model = tmp_path / "model"
    tiny_llama(vocab_size=VOCAB, hidden_size=64).save_pretrained(model)
    save_table_tokenizer(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i}"]}) + "\n" for i in range(8)))

    def eyas(*command: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([*map(str, command), "--target", str(model)])
        said = capsys.readouterr()
        return said.err if left.value.code else said.out

    data, one, two = tmp_path / "store", tmp_path / "one", tmp_path / "two"
    eyas("data", "answer", prompts, "--out", data, "--max-tokens", 16, "--engine", "transformers")
    assert "is a file; --out is a directory" in eyas("data", "answer", prompts, "--out", prompts)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "no prompts in" in eyas("data", "answer", tmp_path / "empty.jsonl", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    few = ("--steps", 2, "--rows", 2, "--row-size", 32, "--layers", 2)
    eyas("train", data, "--out", one, *few)
    eyas("train", data, "--out", two, *few, "--init-from", one / "head", "--draft-vocab-size", 20)
    read = load_eagle(two / "head")
    assert (read.config.num_layers, read.config.draft_vocab_size) == (2, 20)
    assert read.metadata["init_from"] == "head"  # on another machine its place says nothing
    # A run that goes on keeps its beginning, whatever is asked for.
    further = (*few, "--steps", 3, "--draft-vocab-size", 20)
    eyas("train", data, "--out", two, *further, "--init-from", tmp_path / "nowhere")
    assert load_eagle(two / "head").metadata["init_from"] == "head"
    engines = ["transformers", *(["native"] if native.available() else [])]
    for engine in engines:
        said = eyas("generate", "w9", "--draft", two / "head", "--engine", engine, "--json", "--compare")
        assert json.loads(said)["identical"] is True
    assert "device 'nope' cannot be used" in eyas("train", data, "--out", tmp_path / "x", "--device", "nope")
    (tmp_path / "other").mkdir()
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other" / "state.pt")
    assert "no checkpoint of a run, it lacks average" in eyas("train", data, "--out", tmp_path / "other")
    assert "num_layers is 2 there" in eyas("train", data, "--out", tmp_path / "x", "--init-from", two / "head")
    assert "is not a directory" in eyas("train", data, "--out", tmp_path / "x", "--init-from", tmp_path / "nowhere")
    assert "is a file; --out is a directory" in eyas("train", data, "--out", prompts)
    assert "threads must be" in eyas("train", data, "--out", tmp_path / "x", "--threads", 0)
    assert "intermediate_size" in eyas("train", data, "--out", tmp_path / "x", "--intermediate-size", 0)
    assert "add --optimizer muon" in eyas("train", data, "--out", tmp_path / "x", "--matrix-learning-rate", 0.1)
    assert "for EAGLE-3 heads" in eyas("train", data, "--out", tmp_path / "x", "--own-lm-head")
    assert "optimiser" in eyas("train", data, "--out", two, *few, "--draft-vocab-size", 20, "--optimizer", "muon")
    assert not (tmp_path / "x").exists()
