"""Held-out acceptance on the native engine: the trees of PyTorch's drafter, and what `eyas train` uses on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

from eyas.cli import main
from eyas.drafters.native_eagle import NativeEagleDrafter
from eyas.heads.config import Eagle3Config, EagleConfig, HeadConfig
from eyas.heads.layers import DraftHead
from eyas.models import load_source
from eyas.policies.dynamic import DynamicPolicy
from eyas.train.evaluate import forecast, simulate
from eyas.train.native import native_drafter
from eyas.train.recipes import recipe_for
from eyas.train.recipes.eagle import EagleRecipe
from eyas.train.store import Document
from support.table_cli import VOCAB, save_table_tokenizer
from support.tiny import tiny_llama

H = 64
SHAPE: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
}
CONFIGS: dict[str, HeadConfig] = {
    "eagle": EagleConfig(**SHAPE, num_layers=2),
    "eagle3": Eagle3Config(**SHAPE, draft_vocab_size=40),
    "eagle3, target's lm_head": Eagle3Config(**SHAPE, draft_vocab_size=40, target_lm_head=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=VOCAB, hidden_size=H, num_layers=8, tied=False).save_pretrained(path)
    save_table_tokenizer(path)
    return path


def lively_head(config: HeadConfig) -> DraftHead:
    head: DraftHead = recipe_for(config).new_head(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return head.requires_grad_(False)


def documents(levels: int, count: int = 4, length: int = 30) -> list[Document]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ids = torch.randint(0, 40, (length + 1,), generator=generator)
        features = torch.randn(length, levels * H, generator=generator).bfloat16()
        answer = np.arange(length) >= 5
        made.append(Document(ids[:-1].numpy(), answer, features, features[:, -H:], int(ids[-1]), index, True))
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_both_engines_measure_the_same(model: Path, name: str) -> None:
    config, source = CONFIGS[name], load_source(str(model))
    recipe, head = recipe_for(config), lively_head(CONFIGS[name])
    d2t = None if config.draft_vocab_size is None else np.zeros(config.draft_vocab_size, np.int64)
    embedding, lm_head = (
        torch.from_numpy(source.tensors.float32(key).copy()) for key in ("model.embed_tokens.weight", "lm_head.weight")
    )
    make = native_drafter(source, config, threads=1, dtype="float32")
    assert make is not None
    items, policy = documents(recipe.feature_levels), DynamicPolicy(num_steps=3, topk=8, num_draft_tokens=30)
    ours = simulate(make(head, d2t), policy, items)
    offsets = None if d2t is None else torch.from_numpy(d2t)
    assert ours == simulate(recipe.drafter(head, embedding, lm_head, offsets), policy, items)
    assert ours.tokens == 4 * 25 and ours.length > 1.1
    worth = forecast(make(head, d2t), items)
    assert worth.acceptance == forecast(recipe.drafter(head, embedding, lm_head, offsets), items).acceptance


def test_what_the_engine_lacks_is_left_to_pytorch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, config = load_source(str(model)), CONFIGS["eagle"]
    assert native_drafter(source, replace(config, hidden_act="relu"), threads=1) is None
    other = replace(source, config={**source.config, "model_type": "gpt2"})
    assert native_drafter(other, config, threads=1) is None
    monkeypatch.setattr(native, "available", lambda: False)
    assert native_drafter(source, config, threads=1) is None


def test_the_command_measures_on_the_native_engine(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i}"]}) + "\n" for i in range(40)))

    def eyas(*command: Any) -> None:
        with pytest.raises(SystemExit) as left:
            main([*map(str, command), "--target", str(model)])
        assert not left.value.code, capsys.readouterr().err

    made: list[str] = []

    def spy(engine: str, whole: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(engine)
            return whole(*arguments, **options)

        return call

    monkeypatch.setattr(EagleRecipe, "drafter", spy("torch", EagleRecipe.drafter))
    monkeypatch.setattr(NativeEagleDrafter, "new_session", spy("native", NativeEagleDrafter.new_session))
    eyas("data", "answer", prompts, "--out", tmp_path / "store", "--max-tokens", 8, "--engine", "native")
    train = ("train", tmp_path / "store", "--steps", 1, "--rows", 2, "--row-size", 32, "--device", "cpu", "--out")
    eyas(*train, tmp_path / "one")
    assert set(made) == {"native"}
    line = json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["held_out_acceptance_length"] >= 1
    made.clear()
    monkeypatch.setattr(native, "available", lambda: False)
    eyas(*train, tmp_path / "two")
    assert set(made) == {"torch"}
