"""How a sweep evaluates, parts documents and searches: the recipe's `settings`, `selection` and `search`.

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
    """What recipes say of evaluations, and what only a sweep lets them say."""

    gen_kwargs: dict[str, Any] = Field(default={}, description="Generation settings over the tasks' own.")
    seed: int = Field(default=SEED, ge=0, description="For shots and sampling.")


class DocumentSplit(StrictModel):
    """MGSM has no development set, so configurations are chosen on one part of the documents and reported on the other.

    Tasks with equally many documents are parted alike: MGSM asks the same questions in every language.
    """

    fraction: float = Field(default=0.5, gt=0, lt=1, description="The share of documents to choose on.")
    seed: int = Field(default=0, ge=0, description="Which documents these are.")

    def split(self, num_docs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(documents to choose on, documents to report on), both in order; of a single document, none to choose on."""
        chosen = min(max(1, round(self.fraction * num_docs)), num_docs - 1)
        select = sorted(Random(self.seed).sample(range(num_docs), chosen))
        kept = set(select)
        return tuple(select), tuple(doc_id for doc_id in range(num_docs) if doc_id not in kept)


class Halving(StrictModel):
    """Successive halving, asynchronous (Li et al. 2020): trials begin on few documents, and the better ones go on."""

    min_documents: int = Field(default=16, ge=1, description="Documents of each target task on the first rung.")
    reduction_factor: int = Field(
        default=3, ge=2, description="Each rung has so many times more, and one in so many goes on to the next."
    )

    def rungs(self, available: int) -> tuple[int, ...]:
        """How many documents each rung has, as long as there are more than that to choose on."""
        found = []
        documents = self.min_documents
        while documents < available:
            found.append(documents)
            documents *= self.reduction_factor
        return tuple(found)


class Search(StrictModel):
    """Some configurations of a family instead of all: a trial is a configuration, judged with every pair."""

    sampler: Literal["tpe", "random"] = Field(
        default="tpe", description="tpe: Bayesian, by the trials so far (Bergstra et al. 2011); random: at random."
    )
    trials: int = Field(default=40, ge=1, description="Configurations of each family that is searched.")
    halving: Halving | None = Field(default=None, description="Give most of them up after some documents.")
    seed: int = Field(default=0, ge=0, description="Of the sampler, and of the documents that a rung has.")
    family: str | None = Field(default=None, description="The only family to search; default: all that have a choice.")
