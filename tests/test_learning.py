"""From a model's own answer to a head that drafts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from eyas import native
from eyas.checkpoints.eagle import load_eagle
from eyas.drafters.base import Drafter
from eyas.drafters.eagle import EagleDrafter
from eyas.heads.config import EagleConfig
from eyas.policies import StaticPolicy
from eyas.targets.base import Target
from eyas.targets.hf import ATTENTION, HFTarget
from eyas.train.answer import AnswerSettings, answer_prompts
from eyas.train.prompts import Message, Prompt
from eyas.train.settings import TrainSettings
from eyas.train.trainer import TargetWeights, Trainer
from support.answers import answer
from support.tiny import tiny_llama, tiny_native

CONFIG = EagleConfig(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
)
SETTINGS = TrainSettings(
    steps=400,
    rows=1,
    row_size=72,
    learning_rate=1e-2,
    warmup=10,
    noise=0.0,
    weight_decay=0.0,
    distillation_weight=1.0,
    unroll=3,
    evaluate_every=1000,
)
PROMPT = [3, 1, 4, 1, 5, 9, 2]


def encode(messages: Sequence[Message]) -> list[int]:
    """Token ids written down as numbers, and no template."""
    return [int(word) for message in messages for word in message["content"].split()]


@pytest.mark.slow
def test_one_conversation_is_answered_learned_and_drafted_to_the_end(tmp_path: Path) -> None:
    model = tiny_llama(attn_implementation=ATTENTION)
    target = HFTarget(model, "tiny llama")
    prompt = Prompt(0, (" ".join(map(str, PROMPT)),))
    answer_prompts(
        target,
        [prompt],
        tmp_path / "store",
        AnswerSettings(max_tokens=60, sampled_share=0.0),
        encode=encode,
        decode=lambda ids: " ".join(map(str, ids)),
    )
    weights = TargetWeights(target.embedding_weight, target.lm_head_weight, model.model.norm.weight.detach())
    Trainer([tmp_path / "store"], weights, CONFIG, SETTINGS, tmp_path / "run").run()
    checkpoint = load_eagle(tmp_path / "run" / "head")

    pairs: list[tuple[Target, Drafter]] = [
        (target, EagleDrafter.from_checkpoint(checkpoint, target.embedding_weight, target.lm_head_weight))
    ]
    if native.available():
        from eyas.drafters.native_eagle import NativeEagleDrafter

        twin = tiny_native(model)
        pairs.append((twin, NativeEagleDrafter(checkpoint, twin)))
    # A random model is never sure, nor is a head that learned from it: a dynamic tree would be wide, not deep.
    for engine, drafter in pairs:
        ours = answer(engine, PROMPT, drafter, policy=StaticPolicy.chain(3), max_tokens=60)
        assert ours.tokens == answer(engine, PROMPT, max_tokens=60).tokens
        assert ours.steps[-1].stats.acceptance_length > 0.9 * 4
        assert len(set(ours.tokens)) > 8  # more than a loop was learned
