"""Answering prompts and the feature store: what is stored is what inference computes, and nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.errors import CheckpointError, InvalidInputError
from eyas.targets.hf import ATTENTION, HFTarget
from eyas.train.answer import AnswerProgress, AnswerSettings, answer_prompts
from eyas.train.prompts import Message, Prompt, read_prompts
from eyas.train.store import Document, FeatureStore, StoreWriter, finished_prompts
from eyas.tree import DraftTree

EOS, USER, REPLY = 1, 2, 3


def encode(messages: Sequence[Message]) -> list[int]:
    """A chat template on token level: every message is its role's mark, its numbers, and the end mark."""
    ids = []
    for message in messages:
        ids += [{"system": 0, "user": USER, "assistant": REPLY}[message["role"]]]
        ids += [int(word) for word in message["content"].split()] + [EOS]
    return [*ids, REPLY]


def decode(ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in ids if token != EOS)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=EOS, initializer_range=0.3,
        attn_implementation=ATTENTION,
    )  # fmt: skip
    return HFTarget(LlamaForCausalLM(config).eval(), "tiny")


PROMPTS = [Prompt(i, (" ".join(str(4 + (i * 7 + j) % 30) for j in range(1 + i % 5)),)) for i in range(12)]
SETTINGS = AnswerSettings(max_tokens=10, max_prompt_tokens=40, batch=4, sampled_share=0.5, seed=3)


def run(
    target: HFTarget, out: Path, prompts: Sequence[Prompt] = PROMPTS, settings: AnswerSettings = SETTINGS
) -> AnswerProgress:
    return answer_prompts(target, prompts, out, settings, encode=encode, decode=decode)


def by_prompt(path: Path) -> dict[int, Document]:
    return {document.prompt_index: document for document in FeatureStore(path)}


def greedy_alone(target: HFTarget, prompt: list[int], count: int) -> list[int]:
    cache = target.new_cache()
    tokens = [int(target.prefill(cache, prompt).argmax()[0])]
    while len(tokens) < count and tokens[-1] != EOS:
        (out,) = target.verify([(cache, DraftTree.root_only(tokens[-1]))])
        cache.commit([0])
        tokens.append(int(out.argmax()[0]))
    return tokens


def test_answers_and_features_are_those_of_inference(target: HFTarget, tmp_path: Path) -> None:
    done = run(target, tmp_path / "s")
    store = by_prompt(tmp_path / "s")
    assert done.documents + done.empty == len(PROMPTS)
    assert len(store) == done.documents
    assert any(d.greedy for d in store.values()) and not all(d.greedy for d in store.values())
    for index, document in store.items():
        prompt = encode([{"role": "user", "content": PROMPTS[index].turns[0]}])
        assert document.ids[: len(prompt)].tolist() == prompt
        assert document.answer.tolist() == [i >= len(prompt) for i in range(len(document))]
        if document.greedy:
            answer = [*document.ids[len(prompt) :].tolist(), document.last]
            assert answer == greedy_alone(target, prompt, SETTINGS.max_tokens)
        inference = target.prefill(target.new_cache(), document.ids.tolist()).features
        torch.testing.assert_close(document.features.float(), inference, atol=0.02, rtol=0.01)


def test_batch_and_order_change_no_answer(target: HFTarget, tmp_path: Path) -> None:
    run(target, tmp_path / "four")
    run(target, tmp_path / "one", settings=replace(SETTINGS, batch=1))
    four, one = by_prompt(tmp_path / "four"), by_prompt(tmp_path / "one")
    assert four.keys() == one.keys()
    for index, document in four.items():
        assert document.ids.tolist() == one[index].ids.tolist()
        assert document.last == one[index].last


def test_a_killed_run_goes_on_where_it_was(target: HFTarget, tmp_path: Path) -> None:
    class KilledError(Exception): ...

    def stop(count: AnswerProgress) -> None:
        if count.documents >= 5:
            raise KilledError

    out = tmp_path / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter.__init__, "__kwdefaults__", {"shard_documents": 2})
        with pytest.raises(KilledError):
            answer_prompts(target, PROMPTS, out, SETTINGS, encode=encode, decode=decode, progress=stop)
    kept = finished_prompts(out)
    assert 4 <= len(kept) < len(PROMPTS)
    (out / "shard-00009.safetensors.tmp").write_bytes(b"half a shard")
    again = run(target, out)
    assert again.skipped == len(kept)
    whole = tmp_path / "whole"
    run(target, whole)
    resumed, straight = by_prompt(out), by_prompt(whole)
    assert resumed.keys() == straight.keys()
    assert len(FeatureStore(out)) == len(resumed)  # nothing twice
    for index, document in straight.items():
        assert resumed[index].ids.tolist() == document.ids.tolist()
    assert run(target, out).documents == 0


def test_two_turns_become_one_document(target: HFTarget, tmp_path: Path) -> None:
    prompts = [Prompt(0, ("5 6", "7 8 9"), system="4 4")]
    run(target, tmp_path / "s", prompts, replace(SETTINGS, sampled_share=0.0))
    (document,) = FeatureStore(tmp_path / "s")
    first_prompt = encode([{"role": "system", "content": "4 4"}, {"role": "user", "content": "5 6"}])
    first = greedy_alone(target, first_prompt, SETTINGS.max_tokens)
    messages = [
        {"role": "system", "content": "4 4"},
        {"role": "user", "content": "5 6"},
        {"role": "assistant", "content": decode(first)},
        {"role": "user", "content": "7 8 9"},
    ]
    prompt = encode(messages)
    assert document.ids[: len(prompt)].tolist() == prompt
    second = greedy_alone(target, prompt, SETTINGS.max_tokens)
    assert [*document.ids[len(prompt) :].tolist(), document.last] == second
    answered = document.ids[document.answer].tolist()
    assert answered == [*first[: len(answered) - len(second) + 1], *second[:-1]]
    assert not document.answer[: len(first_prompt)].any()


def test_what_is_dropped_is_counted(target: HFTarget, tmp_path: Path) -> None:
    long = Prompt(0, (" ".join(["9"] * 50),))
    silent = Prompt(1, ("5",))

    class Silent:
        """Says end of text at once."""

        info = target.info

        def new_cache(self, capacity: int | None = None) -> object:
            return target.new_cache(capacity)

        def prefill(self, cache: object, tokens: Sequence[int]) -> object:
            out = target.prefill(cache, tokens)  # type: ignore[arg-type]
            return replace(out, logits=torch.eye(40)[EOS : EOS + 1])

        def verify(self, batch: object, *, logits: bool = True) -> object:
            raise AssertionError("nothing to decode")

    done = answer_prompts(
        Silent(),  # type: ignore[arg-type]
        [long, silent],
        tmp_path / "s",
        replace(SETTINGS, sampled_share=0.0),
        encode=encode,
        decode=decode,
    )
    assert (done.too_long, done.empty, done.documents) == (1, 1, 0)
    assert len(FeatureStore(tmp_path / "s")) == 0


def test_the_store_is_laid_out_as_documented(target: HFTarget, tmp_path: Path) -> None:
    run(target, tmp_path / "s")
    shard = load_file(tmp_path / "s" / "shard-00000.safetensors")
    tokens, documents = len(shard["ids"]), len(shard["last"])
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shard.items()}
    assert kinds == {
        "ids": (torch.int32, (tokens,)),
        "answer": (torch.uint8, (tokens,)),
        "features": (torch.bfloat16, (tokens, 16)),
        "offsets": (torch.int64, (documents + 1,)),
        "last": (torch.int32, (documents,)),
        "prompt_index": (torch.int32, (documents,)),
        "greedy": (torch.uint8, (documents,)),
    }
    assert shard["offsets"][-1] == tokens
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert manifest["target"]["name"] == "tiny"
    assert manifest["feature_size"] == 16
    assert manifest["settings"]["seed"] == 3
    assert FeatureStore(tmp_path / "s").lengths().sum() == tokens


def test_stores_that_cannot_be_used_say_why(target: HFTarget, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no feature store"):
        FeatureStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no feature store"):
        FeatureStore(tmp_path / "file")
    run(target, tmp_path / "s", PROMPTS[:2])
    with pytest.raises(CheckpointError, match="another target"):
        StoreWriter(tmp_path / "s", target={"name": "other"}, feature_size=16, settings={})
    (tmp_path / "s" / "shard-00005.safetensors").write_bytes(b"\x09\x00")
    with pytest.raises(CheckpointError, match=r"shard-00005\.safetensors is not a whole shard"):
        FeatureStore(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        FeatureStore(tmp_path / "s")


def test_every_usual_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    reply = {"role": "assistant", "content": "no"}
    spoken = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no"}, {"from": "human", "value": "b"}]
    records = [
        {"id": "x", "turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, reply]},
        {"conversations": spoken},
        {"instruction": "a", "input": "b", "output": "no"},
        {"prompt": "a"},
    ]
    file.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    assert read_prompts([file, file])[:6] == [
        Prompt(0, ("a", "b")),
        Prompt(1, ("a",), "s"),
        Prompt(2, ("a", "b")),
        Prompt(3, ("a\n\nb",)),
        Prompt(4, ("a",)),
        Prompt(5, ("a", "b")),
    ]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"turns": []}', '{"turns": [3]}', '{"prompt": " "}', '{"messages": [7]}', "[" * 100_000],
    ids=lambda line: line[:20],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(InvalidInputError, match=r"p\.jsonl, line 2"):
        read_prompts([file])


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        AnswerSettings(batch=0)
    with pytest.raises(InvalidInputError, match="sampled_share"):
        AnswerSettings(sampled_share=1.5)
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_prompts([Path("/nowhere.jsonl")])
