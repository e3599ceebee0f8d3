"""Trees that the engine grows by itself against the policies that it takes the place of."""

from __future__ import annotations

import numpy as np
import pytest

from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

from eyas.calibration import Calibration, LevelMap
from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.checkpoints.eagle3 import Eagle3Checkpoint
from eyas.costs import CostTable
from eyas.drafters.base import DraftSession
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.native_eagle import NativeEagleDrafter
from eyas.heads.config import Eagle3Config, EagleConfig
from eyas.native.rules import make_rule
from eyas.policies import DynamicPolicy, TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.trace import PolicyTrace
from eyas.targets.native import NativeTarget
from support.decoder import tiny_config, tiny_weights

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
}
MODEL = tiny_config(num_hidden_layers=6, tie_word_embeddings=False)


class OwnDynamic(DynamicPolicy):
    """A policy the engine does not know, for all it can tell: asked level by level."""


class OwnBudgeted(BudgetedPolicy):
    """The same of the other policy."""


def make_drafter(rng: np.random.Generator) -> NativeEagleDrafter:
    """A random head; from time to time one of few tokens, whose children are filled up with confidence zero."""
    levels = int(rng.choice([1, 3]))
    target = NativeTarget.from_weights(
        MODEL, tiny_weights(MODEL), dtype="float32", threads=int(rng.integers(1, 3)), feature_levels=levels
    )
    vocab = int(rng.choice([3, 37]))
    d2t = np.sort(rng.choice(SIZES["vocab_size"], vocab, replace=False)) - np.arange(vocab)
    config = (EagleConfig if levels == 1 else Eagle3Config)(**SIZES, draft_vocab_size=vocab)  # type: ignore[arg-type]
    tensors = {
        name: (rng.standard_normal(shape) * rng.choice([0.1, 0.3]) + ("norm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    if isinstance(config, EagleConfig):
        return NativeEagleDrafter(EagleCheckpoint("tiny", config, tensors, d2t=d2t), target)
    return NativeEagleDrafter(Eagle3Checkpoint("tiny", config, tensors, d2t=d2t), target)


def make_calibration(rng: np.random.Generator) -> Calibration:
    """Maps with flat stretches, on which different values are worth the same, and steep ones."""
    maps = []
    for _ in range(int(rng.integers(0, 4))):
        knots = int(rng.integers(1, 6))
        promised = np.cumsum(rng.uniform(0.05, 2.0, knots)) - 6.0
        observed = np.cumsum(rng.choice([0.0, 0.3, 1.5], knots)) - 8.0
        maps.append(LevelMap(tuple(promised.tolist()), tuple(np.minimum(observed, 0.0).tolist())))
    return Calibration(tuple(maps))


def make_policies(rng: np.random.Generator) -> tuple[TreePolicy, TreePolicy]:
    """The same policy twice: one that the engine knows, one that it must ask."""
    budget = (int(rng.integers(1, 7)), int(rng.integers(1, 9)), int(rng.integers(1, 40)))
    calibration = make_calibration(rng)
    if rng.random() < 0.5:
        switches = bool(rng.random() < 0.7), bool(rng.random() < 0.7)
        return (
            DynamicPolicy(*budget, *switches, calibration),
            OwnDynamic(*budget, *switches, calibration),
        )
    rows = (1, 8, 40)
    costs = CostTable(
        rows,
        tuple(np.cumsum(rng.uniform(0.5, 4.0, len(rows))).tolist()),
        (1, 8),
        tuple(np.cumsum(rng.uniform(0.0, 0.3, 2)).tolist()),
        first_ms=float(rng.choice([0.0, 0.2])),
        overhead_ms=0.1,
    )
    acceptance = rng.dirichlet(np.ones(int(rng.integers(1, 9))) / 2, int(rng.integers(1, 5)))
    rate = None if rng.random() < 0.4 else float(rng.uniform(0.1, 0.6))
    prospects = tuple(map(tuple, acceptance.tolist()))
    return (
        BudgetedPolicy(costs, prospects, *budget, calibration, rate),
        OwnBudgeted(costs, prospects, *budget, calibration, rate),
    )


def assert_same_cycle(ours: DraftSession, theirs: DraftSession, root: int, policies: tuple[TreePolicy, ...]) -> int:
    """Propose the same tree, from the same candidates, for the same reasons. Its number of candidates."""
    known, asked = (PolicyTrace(policy) for policy in policies)
    tree, wanted = ours.propose(root, known, 5), theirs.propose(root, asked, 5)
    for name in ("tokens", "parents", "log_values"):
        assert getattr(tree, name).tolist() == getattr(wanted, name).tolist()
        assert getattr(tree, name).dtype == getattr(wanted, name).dtype
    assert ours.length == theirs.length
    assert known.widths == asked.widths
    assert known.expanded == asked.expanded
    assert known.kept.tolist() == asked.kept.tolist()
    assert known.candidates is not None and asked.candidates is not None
    for name in ("tokens", "parents", "ranks", "log_probs", "log_values"):
        assert getattr(known.candidates, name).tolist() == getattr(asked.candidates, name).tolist()
        assert getattr(known.candidates, name).dtype == getattr(asked.candidates, name).dtype
    assert known.candidates.levels == asked.candidates.levels
    grown, calibration = known.candidates, policies[0].calibration  # type: ignore[attr-defined]
    afresh = calibration.acceptance(grown.log_values, grown.parents, grown.levels)
    np.testing.assert_allclose(grown.acceptance_by(calibration), afresh, rtol=1e-14)
    return len(known.candidates)


@pytest.mark.parametrize("graft", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_engine_grows_what_the_policy_would(seed: int, graft: bool) -> None:
    rng = np.random.default_rng(seed)
    head = make_drafter(rng)
    drafter = GraftedDrafter(head) if graft else head
    sizes = set()
    for _ in range(8):
        policies = make_policies(rng)
        assert make_rule(policies[0]) is not None
        assert make_rule(policies[1]) is None
        ours, theirs = drafter.new_session(), drafter.new_session()
        for count in (20, 1, 3):
            tokens = rng.integers(0, 6, count).tolist()  # few enough to repeat themselves
            features = (rng.standard_normal((count, head.feature_size)) * 2).astype(np.float32)
            for session in (ours, theirs):
                session.commit(tokens, features)
            sizes.add(assert_same_cycle(ours, theirs, tokens[-1], policies))
            sizes.add(assert_same_cycle(ours, theirs, tokens[-1], policies))  # no pair waits: the tip once more
    assert max(sizes) > 1
