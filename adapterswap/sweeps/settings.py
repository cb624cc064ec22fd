"""How a sweep evaluates, splits documents and searches: the recipe's `settings`, `selection` and `search`.

Knows nothing of experts and compositions.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from pydantic import Field

from adapterswap.evaluation.settings import SEED, EvaluationOptions
from adapterswap.files.yamlfiles import StrictModel

__all__ = ["DocumentSplit", "Halving", "Search", "SweepSettings"]


class SweepSettings(EvaluationOptions):
    """How tasks are evaluated: the options of `evaluate`, and some that only sweeps have."""

    gen_kwargs: dict[str, Any] = Field(default={}, description="Generation settings that override the tasks' own.")
    seed: int = Field(default=SEED, ge=0, description="The seed of shots and sampling.")


class DocumentSplit(StrictModel):
    """MGSM has no development set, so configurations are chosen on one part of the documents and reported on the other.

    Tasks with the same number of documents are split alike: MGSM has the same questions in every language.
    """

    fraction: float = Field(default=0.5, gt=0, lt=1, description="The share of documents to choose on.")
    seed: int = Field(default=0, ge=0, description="The seed by which documents are chosen.")

    def split(self, num_docs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(documents to choose on, documents to report on), both sorted. A single document is only reported on."""
        chosen = min(max(1, round(self.fraction * num_docs)), num_docs - 1)
        select = sorted(Random(self.seed).sample(range(num_docs), chosen))
        selected = set(select)
        return tuple(select), tuple(doc_id for doc_id in range(num_docs) if doc_id not in selected)


class Halving(StrictModel):
    """Asynchronous successive halving (Li et al. 2020): trials start on few documents, and the best ones continue."""

    min_documents: int = Field(default=16, ge=1, description="Documents of each target task on the first rung.")
    reduction_factor: int = Field(
        default=3, ge=2, description="Each rung has so many times more documents, and one in so many trials continues."
    )

    def rungs(self, available: int) -> tuple[int, ...]:
        """The number of documents of each rung; every one is below `available`."""
        numbers = []
        documents = self.min_documents
        while documents < available:
            numbers.append(documents)
            documents *= self.reduction_factor
        return tuple(numbers)


class Search(StrictModel):
    """Evaluate some configurations of a family instead of all. A trial is one configuration with every pair."""

    sampler: Literal["tpe", "random"] = Field(
        default="tpe", description="tpe: Bayesian, from the trials so far (Bergstra et al. 2011); random: uniform."
    )
    trials: int = Field(default=40, ge=1, description="How many configurations of each searched family to try.")
    halving: Halving | None = Field(default=None, description="Give up most trials after some documents.")
    seed: int = Field(default=0, ge=0, description="The seed of the sampler, and of each rung's documents.")
    family: str | None = Field(default=None, description="The only family to search. Default: all that have a choice.")
