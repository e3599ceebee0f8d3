"""Drafting with an EAGLE-3 head: sessions recomputed the slow way, and the whole loop lossless with files on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas import native
from eyas.checkpoints.eagle3 import load_eagle3, save_eagle3
from eyas.cli import main
from eyas.drafters.eagle3 import Eagle3Drafter
from eyas.errors import CheckpointError, InvalidInputError
from eyas.generate import Session
from eyas.heads.config import Eagle3Config
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.layers import head_arrays
from eyas.loading import feature_levels, load_drafter, load_target
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.policies.base import Candidates
from eyas.policies.trace import PolicyTrace
from eyas.sampling import SamplingParams
from support.answers import answer
from support.table_cli import VOCAB, save_table_tokenizer
from support.tiny import tiny_llama

H, V = 16, 40
IDS = [1, 2, 3, 5, 8, 11, 13, 17, 19, 21, 30, 34, 39]
CONFIG = Eagle3Config(
    hidden_size=H,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=V,
    draft_vocab_size=len(IDS),
)
STRETCHED: dict[str, Any] = {
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "max_position_embeddings": 64,
    "head_dim": 10,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True, "rope_theta": 1e6},
    {"draft_vocab_size": None},
    {"target_lm_head": True},
    {"target_lm_head": True, "draft_vocab_size": None},
    STRETCHED,
]
DYNAMIC = DynamicPolicy(num_steps=4, topk=4, num_draft_tokens=12)
POLICIES: list[TreePolicy] = [DYNAMIC, StaticPolicy.eagle1(), StaticPolicy.chain(5)]


def offsets(ids: list[int]) -> np.ndarray:
    return np.array(ids) - np.arange(len(ids))


def lively_head(config: Eagle3Config, seed: int = 0) -> Eagle3Head:
    head = Eagle3Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return head


def target_lm_head(config: Eagle3Config = CONFIG) -> Tensor:
    return torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(10))


def make_drafter(config: Eagle3Config = CONFIG) -> Eagle3Drafter:
    d2t = None if config.draft_vocab_size is None else torch.from_numpy(offsets(IDS))
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(9))
    return Eagle3Drafter(lively_head(config), embedding, target_lm_head(config), d2t)


def context(rows: int, seed: int = 1) -> tuple[list[int], Tensor]:
    """Tokens and the features before them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (rows,), generator=generator).tolist(), torch.randn(rows, 3 * H, generator=generator)


@torch.no_grad()
def scores(drafter: Eagle3Drafter, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
    """Log-probabilities of what follows ``path``, from scratch: after the true features one own output after the other
    goes back in, before the final norm; no cache."""
    tokens = [*tokens, *path]
    hidden = drafter.head.fc(features)
    for stop in range(len(features), len(tokens) + 1):
        embeds = drafter.embedding[torch.tensor(tokens[:stop])]
        out = drafter.head(embeds[None], hidden[None, :stop], torch.arange(stop)[None])[0]
        hidden = torch.cat((hidden, out[-1:]))
    own = drafter.head.lm_head
    ids = torch.arange(V) if drafter.token_ids is None else drafter.token_ids
    rows = target_lm_head()[ids] if own is None else own.weight
    return torch.log_softmax(drafter.head.norm(out[-1]) @ rows.T, -1)


def assert_recomputed(drafter: Eagle3Drafter, candidates: Candidates, tokens: list[int], features: Tensor) -> None:
    assert len(candidates) > 1
    ids = torch.arange(V) if drafter.token_ids is None else drafter.token_ids
    for parent in sorted(set(candidates.parents[1:].tolist())):
        path, node = [], parent
        while node > 0:
            path.append(int(candidates.tokens[node]))
            node = int(candidates.parents[node])
        children = np.flatnonzero(candidates.parents == parent)
        best, rows = scores(drafter, tokens, features, path[::-1]).topk(len(children))
        assert candidates.tokens[children].tolist() == ids[rows].tolist()
        np.testing.assert_allclose(candidates.log_probs[children], best.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", CHANGES)
def test_every_node_equals_its_own_path_from_scratch(policy: TreePolicy, changes: dict[str, Any]) -> None:
    drafter = make_drafter(replace(CONFIG, **changes))
    tokens, features = context(9)
    session = drafter.new_session()
    session.commit(tokens, features)
    record = PolicyTrace(policy)
    tree = session.propose(tokens[-1], record, max_depth=99)
    assert record.candidates.depth == policy.num_steps
    assert set(tree.tokens[1:].tolist()) <= set(IDS if drafter.token_ids is not None else range(V))
    assert_recomputed(drafter, record.candidates, tokens, features)


def test_after_each_cycle_only_true_features_are_left() -> None:
    drafter = make_drafter()
    tokens, features = context(5)
    session = drafter.new_session()
    session.commit(tokens, features)
    for cycle in range(6):
        record = PolicyTrace(DYNAMIC)
        tree = session.propose(tokens[-1], record, max_depth=99)
        assert_recomputed(drafter, record.candidates, tokens, features)
        deepest = tree.path_to(int(tree.depths.argmax()))
        accepted = deepest[1 : 1 + (99 if cycle % 3 == 0 else cycle % 3)]
        block = [*tree.tokens[accepted].tolist(), cycle]
        true = context(len(block), seed=100 + cycle)[1]
        session.commit(block, true)
        tokens, features = tokens + block, torch.cat((features, true))
        assert session.length == len(tokens)
    session.truncate(4)
    more, true = context(2, seed=7)
    session.commit(more, true)
    record = PolicyTrace(DYNAMIC)
    session.propose(more[-1], record, max_depth=99)
    assert_recomputed(drafter, record.candidates, tokens[:4] + more, torch.cat((features[:4], true)))


def test_misuse_is_refused() -> None:
    drafter = make_drafter()
    tokens, features = context(4)
    with pytest.raises(InvalidInputError, match=r"features of shape \(4, 48\), got \(4, 16\)"):
        drafter.new_session().commit(tokens, features[:, :H])
    with pytest.raises(InvalidInputError, match=r"embedding has shape \(40, 8\)"):
        Eagle3Drafter(drafter.head, torch.zeros(V, 8), target_lm_head())
    tied = make_drafter(replace(CONFIG, target_lm_head=True))
    with pytest.raises(InvalidInputError, match=r"lm_head has shape \(39, 16\)"):
        Eagle3Drafter(tied.head, tied.embedding, target_lm_head()[1:])


@pytest.mark.parametrize("tied", [False, True])
def test_from_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    config = replace(CONFIG, target_lm_head=tied)
    drafter = make_drafter(config)
    save_eagle3(tmp_path, config, head_arrays(drafter.head), dtype="float32", d2t=offsets(IDS))
    loaded = Eagle3Drafter.from_checkpoint(load_eagle3(tmp_path), drafter.embedding, target_lm_head(), name="mine")
    assert (loaded.name, loaded.feature_levels) == ("mine", 3)
    tokens, features = context(6)
    trees = []
    for one in (drafter, loaded):
        session = one.new_session()
        session.commit(tokens, features)
        trees.append(session.propose(tokens[-1], DYNAMIC, 99))
    assert np.array_equal(trees[0].tokens, trees[1].tokens)
    assert np.array_equal(trees[0].log_values, trees[1].log_values)


# From files to answers

ENGINES = [
    "transformers",
    pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason=native.reason())),
]


@pytest.fixture(scope="module", params=[False, True], ids=["own lm_head", "target's lm_head"])
def files(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A model of six layers, and a random head for it."""
    path = tmp_path_factory.mktemp("files")
    tiny_llama(vocab_size=VOCAB, hidden_size=64, num_layers=6).save_pretrained(path / "model")
    save_table_tokenizer(path / "model")
    config = Eagle3Config(64, 96, 4, 2, 16, VOCAB, draft_vocab_size=30, target_lm_head=request.param)
    ids = list(range(0, 2 * 15, 2)) + list(range(30, 45))
    save_eagle3(path / "head", config, head_arrays(lively_head(config)), d2t=offsets(ids))
    return path / "model", path / "head"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_random_head_changes_nothing(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], engine: str
) -> None:
    model, head = files
    for policy in ("dynamic", "static", "chain"):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(
                [
                    *("generate", "w9 w10", "--target", str(model), "--draft", str(head), "--engine", engine),
                    *("--dtype", "float32", "--threads", "1", "--json", "--compare", "--policy", policy),
                    *("--max-tokens", "24", "--ignore-eos"),
                ]
            )
        assert not left.value.code
        result = json.loads(capsys.readouterr().out)
        assert result["identical"] is True
        assert len(result["token_ids"]) == 24
        assert result["stats"]["draft_tokens"] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_with_a_random_head_is_repeatable(files: tuple[Path, Path], engine: str) -> None:
    loaded = load_target(str(files[0]), engine=engine, dtype="float32", threads=1, feature_levels=3)
    drafter = load_drafter(str(files[1]), loaded)
    one, two = (
        answer(loaded.target, [3, 5, 7], drafter, params=SamplingParams(temperature=1.0, seed=4), max_tokens=20)
        for _ in range(2)
    )
    assert one.tokens == two.tokens


def test_the_target_must_give_the_levels_that_the_head_reads(files: tuple[Path, Path]) -> None:
    model, head = files
    assert feature_levels(str(head)) == 3
    assert feature_levels("default") == feature_levels("eagle3") == 3
    assert feature_levels("eagle2") == feature_levels("none") == feature_levels(None) == 1
    with pytest.raises(CheckpointError, match="is not a directory"):
        feature_levels(str(head / "nowhere"))
    loaded = load_target(str(model), engine="transformers", dtype="float32")
    drafter = load_drafter(str(head), loaded)
    with pytest.raises(InvalidInputError, match=r"reads 3 feature level\(s\), but target .* was loaded to give 1"):
        Session(loaded.target, drafter)
    if native.available():
        with pytest.raises(InvalidInputError, match=r"reads 3 feature level\(s\), the target was loaded to give 1"):
            load_drafter(str(head), load_target(str(model), engine="native", dtype="float32"))


def test_the_commands_make_a_head_that_drafts(
    capsys: pytest.CaptureFixture[str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i}"]}) + "\n" for i in range(16)))
    model = ("--target", str(files[0]))
    store, run = str(tmp_path / "store"), tmp_path / "run"
    f32 = ("--engine", "transformers", "--dtype", "float32")
    for command in (
        ("data", "answer", str(prompts), "--out", store, "--max-tokens", "16", "--features", "eagle3", *model, *f32),
        (
            "train",
            store,
            "--out",
            str(run),
            "--kind",
            "eagle3",
            "--steps",
            "3",
            "--rows",
            "2",
            "--row-size",
            "64",
            *model,
        ),
        ("generate", "w9", "--draft", str(run / "head"), "--json", "--compare", "--max-tokens", "12", *model, *f32),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(command))
        assert not left.value.code
    assert json.loads(capsys.readouterr().out)["identical"] is True
    settings = json.loads(load_eagle3(run / "head").metadata["settings"])
    assert (settings["unroll"], settings["noise"]) == (4, 0.0)
