"""Score a model on word problems: exact match of greedy answers, with one forward pass.

The greedy answer is right exactly if each token of the right answer is the most likely one after the right tokens
before it. So all positions are compared at once, with the right answer as input. Knows nothing of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.lab.pretraining import padded
from adapterswap.lab.tokenizer import BOS, EOS, PAD, ids_of

if TYPE_CHECKING:
    from adapterswap.lab.world import WordProblem

__all__ = ["Questions", "exact_match"]

_BATCH = 250


class Questions:
    """Problems in one language, tokenised and batched once for many models.

    Attributes:
        number: how many problems.
        batches: per batch the indices of its problems, the ids (problems, tokens), and a mask (problems, tokens - 1) of
            the answers' tokens with the end of sequence, shifted by one like the model's predictions.
    """

    def __init__(self, problems: Sequence[WordProblem], language: str) -> None:
        prompts = [[BOS, *ids_of(problem.prompt(language))] for problem in problems]
        answers = [[*ids_of(problem.answer), EOS] for problem in problems]
        order = sorted(range(len(problems)), key=lambda i: len(prompts[i]) + len(answers[i]))
        self.number = len(problems)
        self.batches: list[tuple[list[int], Any, Any]] = []
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            ids = padded([prompts[i] + answers[i] for i in chosen], PAD)
            in_answer = padded([[0] * (len(prompts[i]) - 1) + [1] * len(answers[i]) for i in chosen], 0).bool()
            self.batches.append((chosen, ids, in_answer))


def exact_match(model: Any, questions: Questions) -> NDArray[np.bool_]:
    """Whether the model's greedy answer to each problem is right in every token (problems,)."""
    import torch

    right = np.zeros(questions.number, bool)
    with torch.inference_mode():
        for chosen, ids, in_answer in questions.batches:
            likeliest = model(input_ids=ids).logits[:, :-1].argmax(-1)
            right[chosen] = ((likeliest == ids[:, 1:]) | ~in_answer).all(-1).numpy()
    return right
