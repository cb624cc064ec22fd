"""The kinds of changes: low-rank factors, weights that replace the base's, or a function of the base's weight.

Pure data, which say where the numbers are stored. Adapters and full checkpoints are both sets of changes to named
weights of one base, and are treated alike. What a change contributes to a sum is W' itself if it `replaces` the base's
weight, else ΔW. It is `by_rows` if each of its rows can be taken alone, without the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from adapterswap.core.experts.parts import LoraModule, OpaqueModule, Part
from adapterswap.core.model.base import ExpertRows
from adapterswap.kit.files.numbers import too_large
from adapterswap.kit.files.tensorfile import Tensor


class Storage(Enum):
    """Where the change of a slot is stored, which decides how it is laid out, written, shown and checked.

    The value says what an adapter's module is, in messages.
    """

    LORA = "has LoRA"
    VARIANT = "has a variant of LoRA"  # DoRA, or biases of B
    OTHER = "has a change of another kind"  # (IA)³, OFT, …
    FULL = "is trained in full (modules_to_save)"
    TOKENS = "has trained tokens (trainable_token_indices)"
    ROWS = "has trained tokens beside other changes"  # or among the rows of a stored tensor
    TENSOR = "is a stored tensor of a model"

    in_full: bool
    """Whether experts hold the weights of an adapter's module, or rows of them, not a change of them."""
    of_tokens: bool
    """Whether there are trained rows of an embedding or head."""

    def __init__(self, words: str) -> None:
        self.in_full = self.name in ("FULL", "TOKENS")
        self.of_tokens = self.name in ("TOKENS", "ROWS")

    @classmethod
    def of(cls, terms: Iterable[Term[Change]], empty: Storage) -> Storage:
        """The storage of an adapter's module with these terms, or of a stored tensor; `empty` if there are none."""
        found = {term.change.storage for term in terms}
        if not found:
            return empty
        if cls.TOKENS in found and (empty is cls.TENSOR or not found <= {cls.TOKENS, cls.FULL}):
            return cls.ROWS
        if empty is cls.TENSOR:
            return cls.TENSOR
        if len(found) == 1:
            return found.pop()
        # Of several, the one that needs the most; a module that one expert adapts and another holds is adapted.
        return next(storage for storage in (cls.OTHER, cls.VARIANT, cls.LORA, cls.TOKENS) if storage in found)


@dataclass(frozen=True)
class LowRank:
    """ΔW = s·B·A, with B out×rank and A rank×in.

    Attributes:
        lora: the factors and their scale s.
        path: the file that holds them.
        transposed: the model stores the weight in×out: an embedding, or GPT-2's Conv1D.
        within: the part of one expert that the stored tensor holds, for factors of a mixture; None if it holds all.
    """

    lora: LoraModule
    path: Path
    transposed: bool = False
    within: ExpertRows | None = None

    storage = Storage.LORA
    replaces = by_rows = False
    rows = ()

    @property
    def height(self) -> int:
        """The rows of the weight that it is for."""
        return self.lora.height

    @property
    def matrices(self) -> int:
        """The number of matrices in the weight, one per expert of a mixture."""
        return self.lora.experts if self.within is None else 1

    @property
    def copy(self) -> Tensor | None:
        """The copy of the base's weight that the adapter stores next to the factors; None if there is none."""
        return self.lora.base

    @property
    def method(self) -> str:
        """What messages call it."""
        return "LoRA"

    def at(self, name: str) -> LowRank:
        """The same of a module under another name."""
        return replace(self, lora=self.lora.at(name, self.lora.layer))


@dataclass(frozen=True)
class Whole:
    """Tensors that replace the base's: ΔW = W - W_base.

    A full checkpoint's weight, or all tensors of a module that an adapter trained in full (`modules_to_save`).

    Attributes:
        path: the file that holds them.
        tensors: the tensors by their name within the module, such as `weight`.
        rows: the rows of the weight that the only tensor replaces, in its order; empty if it replaces them all.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    rows: tuple[int, ...] = ()
    replaces = by_rows = True
    transposed = False
    lora = None
    copy = None
    method = "whole weights"

    @property
    def storage(self) -> Storage:
        """Where an adapter stores it."""
        return Storage.TOKENS if self.rows else Storage.FULL

    @classmethod
    def of(cls, path: Path, tensor: Tensor) -> Whole:
        """A change of a single tensor."""
        return cls(path, {tensor.name.rpartition(".")[2]: tensor})

    @property
    def height(self) -> int:
        """The rows of its first tensor."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def tensor(self) -> Tensor:
        """The only tensor."""
        (tensor,) = self.tensors.values()
        return tensor

    def place_of(self, row: int) -> int:
        """The position of a row of the weight among the tensor's rows."""
        if not self.rows:
            return row
        return self._places[row]

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {row: place for place, row in enumerate(self.rows)}

    def read_rows(
        self, owner: str, files: Mapping[Path, int], start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Read rows `start` to `stop` of the tensor. All axes but the last count as rows.

        Args:
            owner: its expert, or the base, for messages.
            files: the open files.
            start: the first row.
            stop: the row after the last; by default the end.
        """
        *counts, columns = self.tensor.shape
        if stop is None:
            stop = math.prod(counts)
        numbers = self.tensor.read_elements(owner, files[self.path], start * columns, stop * columns)
        return numbers.reshape(stop - start, columns)

    def difference(
        self,
        owner: str,
        own_rows: npt.NDArray[np.float32],
        files: Mapping[Path, int],
        start: int = 0,
        stop: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """ΔW = W - W_base in rows `start` to `stop`; `own_rows` are the base's, the other arguments `read_rows`'s."""
        delta = self.read_rows(owner, files, start, stop)
        with np.errstate(all="ignore"):
            delta -= own_rows
        if not np.isfinite(delta).all():
            raise too_large(self.tensor.name)
        return delta

    def at(self, name: str) -> Whole:
        """As for `LowRank`."""
        return self


@dataclass(frozen=True)
class Opaque:
    """A change that PEFT computes from the base's weight with other tensors (DoRA, OFT, …): W' = f(W).

    It is copied exactly, and can be averaged only if the base is given.

    Attributes:
        part: the module's tensors and settings.
        path: the file that holds them.
        transposed: as for `LowRank`.
    """

    part: OpaqueModule
    path: Path
    transposed: bool = False
    replaces = True
    by_rows = False
    rows = ()

    @property
    def storage(self) -> Storage:
        """Where an adapter stores it."""
        return Storage.OTHER if self.lora is None else Storage.VARIANT

    @property
    def height(self) -> int | None:
        """The rows of the weight that its factors are for; None without factors: those of the base's weight."""
        return None if self.lora is None else self.lora.height

    @property
    def lora(self) -> LoraModule | None:
        """The factors of a variant of LoRA, such as DoRA; None for other methods."""
        return self.part.lora

    @property
    def copy(self) -> Tensor | None:
        """As for `LowRank`."""
        return None if self.lora is None else self.lora.base

    @property
    def method(self) -> str:
        """What messages call it, such as DoRA."""
        return self.part.method

    def at(self, name: str) -> Opaque:
        """As for `LowRank`."""
        return replace(self, part=self.part.at(name, self.part.layer))


Change = LowRank | Whole | Opaque

_Kind = TypeVar("_Kind", bound=Change, covariant=True)


class Term(NamedTuple, Generic[_Kind]):
    """One expert's part in a slot: its coefficient c, and its change.

    `side` is the average through which the expert enters, if the rule treats averages as wholes; else the expert.
    """

    expert: str
    side: str
    coefficient: float
    change: _Kind

    @property
    def lora(self) -> LoraModule:
        """The factors, of LoRA or a variant of it."""
        assert self.change.lora is not None
        return self.change.lora


class Terms:
    """The terms of a slot or of a span, by the kind of their change."""

    terms: tuple[Term[Change], ...]

    @cached_property
    def whole(self) -> tuple[Term[Whole], ...]:
        """The terms with weights that replace the base's."""
        return tuple(cast(Term[Whole], term) for term in self.terms if isinstance(term.change, Whole))

    @cached_property
    def low_rank(self) -> tuple[Term[LowRank], ...]:
        """The terms with low-rank changes."""
        return tuple(cast(Term[LowRank], term) for term in self.terms if isinstance(term.change, LowRank))

    @property
    def is_low_rank(self) -> bool:
        """Whether all changes are low-rank, and there is one."""
        return bool(self.terms) and len(self.low_rank) == len(self.terms)

    @cached_property
    def opaque(self) -> tuple[Term[Opaque], ...]:
        """The terms whose weight PEFT computes from the base's."""
        return tuple(cast(Term[Opaque], term) for term in self.terms if isinstance(term.change, Opaque))

    @cached_property
    def loras(self) -> tuple[LoraModule, ...]:
        """The factors of all terms, each of LoRA or a variant of it."""
        factors = tuple(term.change.lora for term in self.terms)
        assert None not in factors
        return cast("tuple[LoraModule, ...]", factors)

    @property
    def summed(self) -> dict[str, float]:
        """Each expert's coefficient, summed over its sides."""
        coefficients: dict[str, float] = {}
        for term in self.terms:
            coefficients[term.expert] = coefficients.get(term.expert, 0.0) + term.coefficient
        return coefficients


def of_kind(kind: type[_Kind], changes: Mapping[str, Change]) -> dict[str, _Kind]:
    """The changes of one kind, by name."""
    return {name: change for name, change in changes.items() if isinstance(change, kind)}


def change_of(part: Part, path: Path, *, transposed: bool = False) -> Change:
    """What a part of an adapter's file does to its module; `transposed` as for `LowRank`."""
    if isinstance(part, LoraModule):
        return LowRank(part, path, transposed)
    if isinstance(part, OpaqueModule):
        return Opaque(part, path, transposed)
    return Whole(path, part.tensors, part.rows)
