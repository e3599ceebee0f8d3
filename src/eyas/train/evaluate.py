"""Acceptance length without a target: known greedy answers with the real drafter, policy and verifier.

A greedy answer says what the target would accept, so a cycle of decoding can be replayed from the stored ids and
features alone: draft a tree, follow it along the known continuation, commit. Nothing differs from decoding but the
arithmetic of the stored features (bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyas.drafters.base import Drafter
from eyas.drafters.ngram import measured_hit_rates
from eyas.errors import InvalidInputError
from eyas.forecast import Forecast
from eyas.heads.layers import DraftHead
from eyas.policies.base import Candidates, TreePolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.trace import PolicyTrace
from eyas.replay import Moment, Recording, Unverified
from eyas.train.store import Document
from eyas.tree import Ints
from eyas.tuner import Effort
from eyas.verify import verify_known

MakeDrafter = Callable[[DraftHead, Ints | None], Drafter]
"""Makes a drafter of a head and the offsets of its draft vocabulary, None for the whole one."""


@dataclass(frozen=True)
class Simulated:
    """What a drafter would have done.

    Attributes:
        cycles: drafted trees.
        tokens: what they would have committed.
    """

    cycles: int
    tokens: int

    @property
    def length(self) -> float:
        """tau: committed tokens per cycle."""
        return self.tokens / max(self.cycles, 1)


def simulate(drafter: Drafter, policy: TreePolicy, documents: Sequence[Document]) -> Simulated:
    """Replay the greedy decoding of each document's last answer.

    The count follows real decoding: the answer's first token comes from the prefill and is not counted.
    """
    cycles = tokens = 0
    for document in documents:
        if not document.greedy:
            raise InvalidInputError("simulated acceptance needs greedy answers, a sampled one was given")
        ids, root = [*document.ids.tolist(), document.last], _first_token(document)
        features = document.features.float().numpy()
        session = drafter.new_session()
        session.commit(ids[1 : root + 1], features[:root])
        while root < len(ids) - 1:
            tree = session.propose(ids[root], policy, len(ids) - 2 - root)
            new = len(verify_known(tree, ids[root + 1 :]).path)  # the root counts for the token of the target's own
            session.commit(ids[root + 1 : root + new + 1], features[root : root + new])
            root += new
            cycles += 1
            tokens += new
    return Simulated(cycles, tokens)


def forecast(drafter: Drafter, documents: Sequence[Document]) -> Forecast:
    """What the drafter's guesses are worth for greedy answers, up to the bounds of a tuning: it drafts after every
    token of the last answer of each (greedy) document."""
    answers, prompts = [], []
    for document in documents:
        ids, first = [*document.ids.tolist(), document.last], _first_token(document)
        features = document.features.float().numpy()
        session = drafter.new_session()
        if first > 1:
            session.commit(ids[1:first], features[: first - 1])
        moments = []
        for root in range(max(first, 1), len(ids) - 1):
            session.commit(ids[root : root + 1], features[root - 1 : root])
            trace = PolicyTrace(Unverified(DynamicPolicy(Effort.num_steps, Effort.topk, 1)))
            session.propose(ids[root], trace, Effort.num_steps)
            moments.append(Moment(trace.candidates or Candidates.root(ids[root]), tuple(ids[root + 1 :])))
        answers.append(tuple(moments))
        prompts.append(ids[:first])
    recording = Recording(tuple(answers), Effort.num_steps, Effort.topk)
    hit_rates = measured_hit_rates(prompts, recording.texts)
    return Forecast(recording.acceptance(), recording.calibration(), max(Effort.rows) - 1, hit_rates)


def _first_token(document: Document) -> int:
    """Where the last answer begins."""
    first = len(document.answer) - 1
    while first > 0 and document.answer[first - 1]:
        first -= 1
    return first
