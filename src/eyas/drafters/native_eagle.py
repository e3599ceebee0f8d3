"""Drafting with EAGLE heads of any kind on the native CPU engine: a level of the tree costs what the head's bytes cost.

Where the engine knows the policy (``eyas.native.rules``) the whole growth of a tree is one native call. Any other
policy decides in Python, and each level is one native call: embedding, ``fc``, the layer with tree attention, scores
over the draft vocabulary, the best k with their log-softmax. ``eyas.drafters.eagle`` and ``eagle3`` are the same in
PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas import native
from eyas.drafters.base import check_root
from eyas.drafters.waiting import WaitingPairs
from eyas.draws import CONFIDENCE, Draws, children
from eyas.errors import InvalidInputError, UnsupportedModelError
from eyas.heads.config import Eagle3Config
from eyas.heads.rope import rotary_frequencies
from eyas.native.config import ACTIVATIONS, weight_type
from eyas.native.rules import Rule, make_rule
from eyas.policies.base import Candidates, Children, TreePolicy, grow_tree, prune, watched
from eyas.targets.base import Features
from eyas.targets.native import NativeTarget
from eyas.tree import DraftTree, Floats, Ints, Proposal

if TYPE_CHECKING:
    from eyas.checkpoints.eagle import EagleCheckpoint
    from eyas.checkpoints.eagle3 import Eagle3Checkpoint


class NativeEagleDrafter:
    """A head packed for the engine that runs its target. Weights only: all state is in the sessions.

    Args:
        checkpoint: the head as read; without an lm_head it is scored by the target's own or its rows.
        target: whose embedding, lm_head and threads it uses.
        dtype: weight type of the head; "auto" is float32 beside a float32 target and int8 beside any other: half the
            bytes of bfloat16, with the same acceptance length. (The fc of an EAGLE-3 head stays bfloat16.)

    Raises:
        InvalidInputError: shapes that do not fit the target; an unknown dtype.
        UnsupportedModelError: an activation that the engine lacks.
    """

    def __init__(
        self, checkpoint: EagleCheckpoint | Eagle3Checkpoint, target: NativeTarget, *, dtype: str = "auto"
    ) -> None:
        config, info = checkpoint.config, target.info
        if config.hidden_act not in ACTIVATIONS:
            raise UnsupportedModelError(f"the native engine has no activation {config.hidden_act!r}, only silu")
        self.feature_levels = config.FEATURE_LEVELS if isinstance(config, Eagle3Config) else 1
        if info.feature_levels != self.feature_levels:
            raise InvalidInputError(
                f"draft head {checkpoint.name} reads {self.feature_levels} feature level(s), the target was loaded to "
                f"give {info.feature_levels}"
            )
        frequencies, scale = rotary_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        numbers = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            # A head drafts as far as its target decodes; beyond what it was trained for it merely guesses worse.
            "max_position_embeddings": info.max_positions,
            "rms_norm_eps": config.rms_norm_eps,
            "inv_freq": frequencies.tolist(),
            "rope_scale": scale,
        }
        tensors = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in checkpoint.tensors.items()}
        kind = weight_type(dtype) if dtype != "auto" else "float32" if info.dtype == "float32" else "int8"
        try:
            self.core = native.core.Head.load(target.core, numbers, tensors, kind, checkpoint.token_ids)
        except ValueError as error:
            raise InvalidInputError(f"draft head {checkpoint.name}: {error}") from None
        self.name = checkpoint.name
        self.token_ids = checkpoint.token_ids  # [draft vocab] int64: target ids; None: all, in order
        self.feature_size = self.feature_levels * config.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own packed weights, the rows of a draft vocabulary included."""
        return self.core.weight_bytes

    def new_session(self) -> NativeEagleSession:
        return NativeEagleSession(self)


class NativeEagleSession:
    """One request's drafting state: the head's K/V of all committed pairs, and the pairs it has not yet run over."""

    def __init__(self, drafter: NativeEagleDrafter) -> None:
        self.token_ids = drafter.token_ids
        self._core = drafter.core.new_session()
        self._waiting = WaitingPairs(drafter.feature_size, _copied, np.concatenate)
        self._policy: TreePolicy | None = None  # the last to decide, and its rule
        self._rule: Rule | None = None

    @property
    def length(self) -> int:
        return self._core.length + len(self._waiting)

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        """Queue n pairs; the head runs over them with the next tree. ``features`` [n, feature_levels * H], anything
        numpy can read."""
        self._waiting.add(tokens, features)

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        """Grow a tree below ``root``, the token of the last pair (see ``eyas.drafters.waiting``)."""
        return self._propose(root, policy, max_depth, None)

    def propose_drawn(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws) -> DraftTree:
        """As ``propose``, with children drawn from the head's distribution."""
        return self._propose(root, policy, max_depth, draws)

    def _propose(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws | None) -> DraftTree:
        check_root(root, self._waiting.tokens)
        if max_depth < 1 or not (self._waiting or self._core.has_tip):
            return DraftTree.root_only(root)
        rule = self._rule_of(watched(policy)) if draws is None or draws.by_temperature else None
        if rule is None:
            return grow_tree(root, policy, max_depth, _Growth(self, policy.topk, draws))
        candidates = self._grow(root, rule, policy.topk, min(policy.num_steps, max_depth), draws)
        return prune(candidates, policy.select(candidates))

    def truncate(self, length: int) -> None:
        self._waiting.keep(length - self._core.length)
        if length < self._core.length:
            self._core.truncate(length)

    def _rule_of(self, policy: TreePolicy) -> Rule | None:
        """See ``make_rule``; made once, as a request keeps its policy."""
        if policy is not self._policy:
            self._policy, self._rule = policy, make_rule(policy)
        return self._rule

    def _grow(self, root: int, rule: Rule, topk: int, max_depth: int, draws: Draws | None) -> Candidates:
        """The tree that ``grow_tree`` would grow, before any selection."""
        drawing: tuple[Any, ...] = ()
        if draws is not None:  # numbers for all that could be expanded: [level, node, child]
            drawing = (draws.rng.random((max_depth, topk, topk)), draws.temperature, CONFIDENCE)
        grown, values, drawn = self._core.grow(root, *self._pairs(), rule.core, max_depth, *drawing)
        tokens, parents, log_probs, log_values, ranks, levels = grown
        proposals = {} if drawn is None else dict(self._proposals(topk, *drawn))
        candidates = Candidates(tokens, parents, log_probs, log_values, ranks, levels, proposals)
        if candidates.depth > 0:
            self._waiting.clear()
        return candidates.with_acceptance(rule.calibration, values) if rule.calibration.levels else candidates

    def _proposals(self, topk: int, nodes: Ints, places: Ints, weights: Floats) -> Iterator[tuple[int, Proposal]]:
        """What the children of each of n nodes were drawn from: places [n * topk], weights [n, draft vocab]."""
        ids = places if self.token_ids is None else self.token_ids[places]
        rows = (each.reshape(-1, topk).tolist() for each in (ids, places))
        for node, tokens, row, scale in zip(nodes.tolist(), *rows, weights, strict=True):
            found = sum(place >= 0 for place in row)
            yield node, Proposal(scale, self.token_ids, tokens[:found], row[:found])

    def score_root(self, k: int, *draws: Any) -> Any:
        """Run the head over the waiting pairs: only true features enter the committed part of its K/V."""
        if not self._waiting:
            return self._core.score_tip(k, *draws)
        tokens, features = self._pairs()
        assert features is not None  # there are tokens, and they came together
        self._waiting.clear()
        return self._core.commit(tokens, features, k, *draws)

    def _pairs(self) -> tuple[Ints, Floats | None]:
        """Tokens [n] and features [n, feature_levels * H] of the waiting pairs; no features where there are none."""
        return np.array(self._waiting.tokens, np.int64), self._waiting.features


def _copied(features: Features) -> Floats:
    return np.array(features, np.float32, order="C")


class _Growth:
    """One tree in the making: which row of the engine's draft tree belongs to which candidate.

    A candidate gets a row when it is expanded. The engine finds its feature (the head's output on its parent's row)
    and its ancestors by the parent's number: 0 for the root, r + 1 for row r.
    """

    def __init__(self, session: NativeEagleSession, topk: int, draws: Draws | None) -> None:
        self._session = session
        self._topk = topk
        self._draws = draws
        self._number = {0: 0}

    def __call__(self, candidates: Candidates, expanded: Ints) -> Children:
        draws, topk, token_ids = self._draws, self._topk, self._session.token_ids
        if draws is None:
            return Children(*self._scores(candidates, expanded, topk))
        if not draws.by_temperature:
            return draws.children(self._scores(candidates, expanded, 0), token_ids, topk)
        # As many a level as ``_grow`` takes.
        uniforms = draws.rng.random((max(topk, len(expanded)), topk))[: len(expanded)]
        drawn, weights, likeliest = self._scores(candidates, expanded, topk, uniforms, draws.temperature)
        places = [[place for place in row if place >= 0] for row in drawn.tolist()]
        return children(places, weights, likeliest[:, 0], token_ids, topk)

    def _scores(self, candidates: Candidates, expanded: Ints, k: int, *draws: Any) -> Any:
        """The engine's word on the children of n nodes: the k best ids and log-probabilities [n, k]; with (uniforms
        [n, k], temperature), k drawn places, their weights [n, draft vocab] and the likeliest's probability [n, 1];
        raw scores where k is 0."""
        if candidates.depth == 0:
            return self._session.score_root(k, *draws)
        number = self._number
        parents = [number[parent] for parent in candidates.parents[expanded].tolist()]
        for node in expanded.tolist():
            number[node] = len(number)
        tokens = candidates.tokens[expanded]
        return self._session._core.expand(tokens, np.array(parents, np.int64), candidates.depth, k, *draws)
