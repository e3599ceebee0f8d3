"""Draft tokens drawn from the drafter's own distribution, for sampled answers.

A sampled answer often takes a token that is nobody's first choice. Proposed for certain, token x is accepted as often
as the target gives it, p(x); drawn from the drafter's distribution q, with probability min(1, p(x) / q(x)), which in
the mean is what p and q have in common: usually far more than the mass of q's likeliest tokens under p. Children of one
node are drawn one after the other, none twice (as in SpecInfer, arXiv 2305.09781, and Sequoia, 2402.12374).

What makes this lossless (``eyas.verify.verify_sampling``): a token, once drawn, must not be dropped or moved because
of what it is. So the confidence of the i-th child here depends on q and i alone, and policies, which know tokens
only by their confidences, cannot see it. The tree may depend on anything that was drawn further up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eyas.policies.base import Children
from eyas.sampling import SamplingParams, log_softmax, warp
from eyas.tree import Floats, Ints, Proposal
from eyas.verify import Mass

SHARPENING = 0.9
"""Of the answer's temperature, that of the draws. A small drafter is less sure than its target: a little sharper, it
has more in common with it (docs/policies.md)."""


CONFIDENCE = (0.25, 0.7, 1 / 3)
"""That of the first draw: so much, and so much times the likeliest token's probability; and of what is left, that of
any later draw as a share of it. See ``confidences``."""


@dataclass(frozen=True)
class Draws:
    """How to draw.

    Attributes:
        params: those of the answer: q is warped like the target's distribution, which it is to come near to, but for
            the temperature.
        rng: the only source of randomness.
    """

    params: SamplingParams
    rng: np.random.Generator

    @property
    def temperature(self) -> float:
        """What the drafter's logits are divided by."""
        return SHARPENING * self.params.temperature

    def children(self, logits: Floats, token_ids: Ints | None, topk: int) -> Children:
        """``topk`` children of each of n nodes.

        Args:
            logits: [n, D] float32, the drafter's raw word on the tokens it scores.
            token_ids: [D] their target ids; None: all ids, in order.
            topk: children per node; where q has fewer tokens, the rest is padding of confidence zero.
        """
        params = self._sharpened
        weights = [warp(scores, params) for scores in logits]
        likeliest = np.exp(log_softmax(logits).max(axis=-1))
        return children([draw(row, topk, self.rng) for row in weights], weights, likeliest, token_ids, topk)

    @property
    def by_temperature(self) -> bool:
        """See ``SamplingParams``, at the temperature of the draws: from such q the native engine draws by itself."""
        return self._sharpened.by_temperature

    @property
    def _sharpened(self) -> SamplingParams:
        """What q is warped by."""
        return replace(self.params, temperature=self.temperature)


def children(
    places: Sequence[Sequence[int]],
    weights: Sequence[Floats] | Floats,
    likeliest: Floats,
    token_ids: Ints | None,
    topk: int,
) -> Children:
    """What was drawn for n nodes, as a policy sees it.

    Args:
        places: of each node, the distinct places drawn, in order, at most ``topk``.
        weights: of each node, [D] what they were drawn by, any scale.
        likeliest: [n] the largest probability at temperature 1, see ``confidences``.
        token_ids: [D] target ids; None: all ids, in order.
    """
    tokens = np.zeros((len(places), topk), np.int64)
    log_probs = np.full((len(places), topk), -np.inf, np.float32)
    proposals = []
    for row, (drawn, scale, most) in enumerate(zip(places, weights, likeliest.tolist(), strict=True)):
        found = len(drawn)
        tokens[row, :found] = drawn if token_ids is None else token_ids[drawn]
        log_probs[row, :found] = np.log(confidences(most, found))
        proposals.append(Proposal(scale, token_ids, tokens[row, :found].tolist(), drawn))
    return Children(tokens, log_probs, tuple(proposals))


def draw(weights: Floats, count: int, rng: np.random.Generator) -> list[int]:
    """``count`` indices drawn one after the other in proportion to ``weights`` [D], none twice; fewer where fewer have
    any weight."""
    left = Mass(weights.astype(np.float64))
    drawn: list[int] = []
    while len(drawn) < count and left.total > 0:
        drawn.append(left.sample(rng))
        left.take_out(drawn[-1])
    return drawn


def confidences(likeliest: float, count: int) -> Sequence[float]:
    """How probably the first, second, ... draw from a distribution is the one accepted, judged by the largest
    probability that the drafter gives at temperature 1, whatever the temperature of the draws: a lower one sharpens p
    and q alike, but they agree no more often.

    Fitted to the shipped EAGLE-3 head. EAGLE-2's tree needs their order alone; whoever needs the values calibrates
    them.
    """
    first = CONFIDENCE[0] + CONFIDENCE[1] * likeliest
    values, left = [], 1.0
    for number in range(count):
        values.append(left * (first if number == 0 else first * CONFIDENCE[2]))
        left -= values[-1]
    return values
