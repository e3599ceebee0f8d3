"""Whether stored answers can teach a head of this target: seen before training, not after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.errors import CheckpointError
from eyas.train.store import FeatureStore

SAMPLE = 8
"""Documents looked at, spread over the store."""

AGREEMENT = 0.8
"""Of greedy answers' tokens, the share that lm_head must find in the features: rounding costs a few percent at most."""


def check_store(store: FeatureStore, lm_head: torch.Tensor, sample: int = SAMPLE) -> float | None:
    """Look at some documents of a store.

    The input of lm_head at each place of a greedy answer must give the token that follows. Where it does not, features
    are out of step with their tokens, or the target, its lm_head or its final norm is another one.

    Args:
        lm_head: [V, H] of the target that the head is for.

    Returns:
        The share of greedy answers' tokens that lm_head finds; None where no greedy answer was looked at.

    Raises:
        CheckpointError: no answers in the documents, tokens beyond the vocabulary, or features that do not belong.
    """
    vocab_size = len(lm_head)
    answers = found = judged = 0
    chosen = sorted({int(index) for index in np.linspace(0, len(store) - 1, sample)}) if len(store) else []
    for index in chosen:
        document = store[index]
        if document.final.shape[1] != lm_head.shape[1]:
            raise CheckpointError(
                f"{store.path} holds features of a model of hidden size {document.final.shape[1]}, the target's is "
                f"{lm_head.shape[1]}; the answers were made by another model"
            )
        highest = max(int(document.ids.max()), document.last)
        if highest >= vocab_size:
            raise CheckpointError(
                f"{store.path}, document {index}: token {highest} is beyond the target's vocabulary of {vocab_size}; "
                "the answers were made by another model"
            )
        following = np.append(document.ids[1:], document.last)
        said = np.append(document.answer[1:], True)  # the token that follows was generated
        answers += int(document.answer.sum())
        if document.greedy:
            rows = torch.from_numpy(np.flatnonzero(said))
            choices = (document.final[rows].float() @ lm_head.float().T).argmax(-1).numpy()
            found += int((choices == following[said]).sum())
            judged += len(choices)
    if len(chosen) and not answers:
        raise CheckpointError(
            f"{store.path}: no token of {len(chosen)} documents is marked as an answer, so there is nothing to learn; "
            "were they made with the model's own chat template?"
        )
    if not judged:
        return None
    if found / judged < AGREEMENT:
        raise CheckpointError(
            f"{store.path}: the target's lm_head finds only {found / judged:.0%} of the greedy answers' tokens in "
            f"their features (at least {AGREEMENT:.0%} are needed); the answers or features are another model's, or "
            "the two are out of step. Make the store anew with this target: eyas data answer"
        )
    return found / judged


def vocabulary_advice(coverage: float, size: int) -> str | None:
    """What to say about a draft vocabulary that holds a share of the held-out answers' tokens; None if it is fine."""
    if coverage >= 0.9:
        return None
    return (
        f"the draft vocabulary of {size} tokens holds only {coverage:.1%} of the held-out answers' tokens; what it "
        "lacks can never be drafted. A larger --draft-vocab-size, or more answers to choose from, would help"
    )


def check_stores(stores: Sequence[FeatureStore], lm_head: torch.Tensor) -> None:
    """``check_store`` of each."""
    for store in stores:
        check_store(store, lm_head)
