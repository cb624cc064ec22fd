"""A slot: one module of an adapter, or one stored tensor of a model, and the changes that enter it.

The linear form is, in every range of rows,

    W' = b·W + Σ c_i·X_i,    b = 1 - Σ c_i over the changes that replace W

where X_i is W_i for a change that replaces the base's weight W (a weight trained in full, or the one that PEFT computes
from W for DoRA, OFT, …), and s_i·B_i·A_i for LoRA. So the base is a term like any other. Pure data: the
executors compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

from adapterswap.core.changes.kinds import Change, Term, Terms, Whole
from adapterswap.core.methods.method import SCALE
from adapterswap.core.methods.registry import find_method
from adapterswap.core.model.layers import Kind, ModuleName
from adapterswap.core.planning.rules import BASE, Rule

_NOTHING = 1e-12  # a smaller coefficient of the base is a rounding error of the experts' coefficients

_Kind = TypeVar("_Kind", bound=Change)


@dataclass(frozen=True)
class BaseShare:
    """A part of b·W: the base's weight, or what stands for it in rows that the base lacks.

    Attributes:
        coefficient: what is added of it; None if other terms are only computed from it.
        expert, copy: the expert that lends it, and its copy of its resized base's weight; `base` and None for the
            base's own weight, which the slot has once the base is opened.
        side: the side of which it is a part, for a method on whole weights.
    """

    coefficient: float | None
    expert: str = BASE
    copy: Whole | None = None
    side: str = BASE


@dataclass(frozen=True)
class Span(Terms):
    """A range of rows that are computed alike.

    Attributes:
        start, stop: the first row, and the row after the last.
        terms: like a slot's terms; none leaves the base's rows.
        base: the parts of the base's weight; empty if it does not enter.
        is_new: whether the base lacks the tokens of these rows.
        matrix: which of the tensor's matrices these rows are of, if low-rank changes apply to each of them separately.
    """

    start: int
    stop: int
    terms: tuple[Term[Change], ...]
    base: tuple[BaseShare, ...] = ()
    is_new: bool = False
    matrix: int = 0

    @property
    def rest(self) -> float:
        """The base's coefficient b."""
        return math.fsum(share.coefficient or 0.0 for share in self.base)

    @property
    def made_of(self) -> str | dict[str, float]:
        """The owner's name, or each expert's coefficient, as plain data."""
        if len(self.terms) == 1 and self.terms[0].coefficient == 1:
            return self.terms[0].expert
        return self.summed

    def is_like(self, other: Span) -> bool:
        """Whether the rows of both are computed alike."""
        return (self.terms, self.base) == (other.terms, other.base)


@dataclass(frozen=True)
class Slot(Terms):
    """One module or one stored tensor, and how its result is computed.

    Attributes:
        name: the module's full name, or the tensor's key in the output.
        module: the module that the slot is or belongs to, under the adapters' name if one adapts it.
        layer, kind: the module's.
        terms: none leaves the base unchanged; a single one with coefficient 1 is a copy; anything else is a blend.
        weights: the weight of each side that the rule combines, including experts that do not change the slot.
        rule: the rule that matched. It says how a blend is computed, and whether coefficients still depend on tensors.
            None if no expert changes a stored tensor.
        method: how the terms are combined; linear if SLERP's coefficients are already known.
        in_full: whether experts hold the module's whole weights (`modules_to_save`).
        dtype, shape: how the model stores the tensor; empty for a module of an adapter.
        base: the base's own tensor; None if the plan has no base.
        spans: all rows in order, for an embedding or head with rows that the base or an expert lacks. If experts
            trained single tokens: their rows and, of a stored tensor, the base's rows between them. Else empty.
    """

    name: str
    module: str
    layer: int | None
    kind: Kind
    terms: tuple[Term[Change], ...]
    weights: Mapping[str, float]
    rule: Rule | None
    method: str = "linear"
    in_full: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    base: Whole | None = None
    spans: tuple[Span, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the slot is a stored tensor of a model, not a module of an adapter."""
        return bool(self.dtype)

    @cached_property
    def has_tokens(self) -> bool:
        """Whether it is a stored tensor with a row for each token; see `StoredTensor.has_tokens`."""
        return bool(self.shape) and ModuleName(self.module).is_vocabulary(self.layer)

    @property
    def matched_name(self) -> str:
        """The name that rules match: the module's, as adapters write it, with the parameter of a stored tensor."""
        return f"{self.module}.{self.name.rpartition('.')[2]}" if self.is_stored else self.name

    @cached_property
    def is_linear(self) -> bool:
        """Whether the result is a weighted sum of changes.

        SLERP and similar methods are linear if all changes are low-rank: `resolve` computes their coefficients. For
        stored tensors they are computed on whole weights.
        """
        return self.method == "linear" or self.has_span

    @property
    def has_low_rank(self) -> bool:
        """Whether the result of low-rank changes has a low rank itself."""
        return self.is_linear or (self.rule is not None and self.rule.on_cores)

    @property
    def has_span(self) -> bool:
        """Whether the coefficients are computed from inner products of low-rank changes."""
        return self.method != "linear" and not self.is_stored and self.rule is not None and self.rule.spans

    @property
    def is_held_whole(self) -> bool:
        """Whether computing it needs whole tensors in memory, as a nonlinear method or an opaque change does."""
        return not self.is_linear or bool(self.opaque)

    @cached_property
    def ordinary(self) -> Span:
        """All rows, as the rule computes them."""
        if self.terms and self.rule is not None and self.rule.acts_on_weights:
            return Span(0, self._rows, self.terms, self._base_by_side(self.rule.sides))
        rest = 1 - math.fsum(term.coefficient for term in self.terms if term.change.replaces)
        added = rest if abs(rest) > _NOTHING else None
        return Span(0, self._rows, self.terms, (BaseShare(added),) if added or self._computes_with_base else ())

    def _base_by_side(self, sides: Mapping[str, Mapping[str, float]]) -> tuple[BaseShare, ...]:
        """The base's share of each side, for a method on whole weights."""
        replaced = dict.fromkeys(sides, 0.0)
        for term in (term for term in self.terms if term.change.replaces):
            replaced[term.side] += sides[term.side][term.expert]
        shares = {side: 1 - share for side, share in replaced.items() if share < 1 and not math.isclose(share, 1)}
        if self.opaque and not shares:
            return (BaseShare(None, side=self.opaque[0].side),)
        return tuple(BaseShare(share, side=side) for side, share in shares.items())

    @cached_property
    def ranges(self) -> tuple[Span, ...]:
        """All rows of a stored tensor in order: `spans` or, if all are alike, one span for each of its matrices."""
        if self.spans:
            return self.spans
        count = self.matrices
        height = self._rows // count
        return tuple(
            replace(self.ordinary, start=matrix * height, stop=(matrix + 1) * height, matrix=matrix)
            for matrix in range(count)
        )

    @property
    def _rows(self) -> int:
        """The rows of a stored tensor, as which all axes but the last count; 0 for a module of an adapter."""
        return math.prod(self.shape[:-1] if len(self.shape) > 1 else self.shape) if self.is_stored else 0

    def with_spans(self, spans: Sequence[Span]) -> Slot:
        """The stored tensor with these spans, and as many rows."""
        return replace(self, spans=tuple(spans), shape=(spans[-1].stop, *self.shape[1:]))

    def base_of(self, span: Span) -> tuple[Whole, ...]:
        """The tensors of a span's `base`, in a plan that has opened the base."""
        weights = tuple(share.copy or self.base for share in span.base)
        assert None not in weights
        return cast("tuple[Whole, ...]", weights)

    def reweighted(self, weights: Mapping[str, float], *, apart: bool) -> Slot:
        """The slot with other weights of the rule's sides, and the coefficients that follow from them.

        For `apart` see `Rule.split`.
        """
        assert self.rule is not None
        term_of = {term.expert: term for term in self.terms}
        terms = tuple(
            replace(term_of[expert], side=side, coefficient=coefficient)
            for (side, expert), coefficient in self.rule.split(weights, apart=apart).items()
            if expert in term_of
        )
        return replace(self, terms=terms, weights=weights)

    @property
    def needs_base(self) -> bool:
        """Whether the base's own numbers enter."""
        return any(share.copy is None for span in (self.ordinary, *self.spans) for share in span.base)

    @property
    def _computes_with_base(self) -> bool:
        """Whether other terms, or coefficients, are computed from the base's weight."""
        waits = self.rule is not None and self.rule.weights is not None and bool(self.terms)
        return not self.is_linear or waits or bool(self.opaque)

    @property
    def matrices(self) -> int:
        """How many matrices a stored tensor holds, if low-rank changes apply to each of them separately; else 1."""
        return max((term.change.matrices for term in self.low_rank), default=1) if self.is_stored else 1

    @property
    def of_tokens(self) -> bool:
        """Whether the changes are single rows of an embedding or head (`trainable_token_indices`)."""
        return any(term.change.rows for term in self.whole)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The trained tokens whose rows it holds, in the order of its tensor."""
        if self.owner is not None:
            return self.whole[0].change.rows
        return tuple(row for span in self.spans for row in range(span.start, span.stop))

    @property
    def all_whole(self) -> tuple[tuple[str, Whole], ...]:
        """Every expert with whole weights, also in spans: it may own only rows, or lend them."""
        lent = ((share.expert, share.copy) for span in self.spans for share in span.base if share.copy is not None)
        return (*((term.expert, term.change) for part in (self, *self.spans) for term in part.whole), *lent)

    @property
    def factors_by_rows(self) -> str | None:
        """The first expert whose LoRA has different coefficients in different rows; None if there is none."""
        return next((term.expert for span in reversed(self.spans) for term in span.low_rank), None)

    @property
    def requested(self) -> Mapping[str, float]:
        """Each expert's coefficient in the rule, summed over its sides, including experts that lack the module."""
        coefficients: dict[str, float] = {}
        if self.rule is not None:
            for (_, expert), coefficient in self.rule.split(self.weights, apart=self.rule.combines_sides).items():
                coefficients[expert] = coefficients.get(expert, 0.0) + coefficient
        return coefficients

    @property
    def absent(self) -> tuple[str, ...]:
        """The experts that the rule requests but that do not change the slot (their ΔW is zero)."""
        present = {term.expert for term in self.terms}
        if self.rule is not None and not self.rule.averages and present == {self.rule.expert}:
            return ()  # as in most modules of most plans
        return tuple(name for name in self.requested if name not in present)

    @cached_property
    def owner(self) -> str | None:
        """The expert whose change the slot gets unaltered, `base` for no change, None for a blend."""
        if not self.terms:
            return BASE
        alone = self.is_linear and len(self.terms) == 1 and self.terms[0].coefficient == 1
        return self.terms[0].expert if alone else None

    @property
    def coefficients(self) -> str | dict[str, float]:
        """The owner's name, `base`, or each expert's coefficient, as plain data."""
        return self.summed if self.owner is None else self.owner

    @property
    def copied(self) -> Whole | None:
        """The tensor that is copied as the result; None if the result is computed."""
        if self.spans:
            return None
        if not self.terms:
            return self.base
        return self.whole[0].change if self.owner is not None and self.whole else None

    @property
    def total_rank(self) -> int:
        """The rank of a module's exact form: the sum of its terms' ranks."""
        return sum(lora.rank for lora in self.loras)

    @property
    def owner_label(self) -> str | None:
        """The owner's name in the strip: an expert, `base`, or the rule's average or chain; None for a blend."""
        return self.owner or (self.rule.joint_owner if self.rule else None)

    @property
    def blend(self) -> str:
        """Its blend of sides as text; see `mixture`."""
        return blend_text(self.weights) if self.rule is None else mixture(self.rule, self.weights, self.method)

    @property
    def label(self) -> str:
        """Its owner, as the strip calls it, or its blend as text."""
        return self.owner_label or self.blend


def shared_out(terms: Sequence[Term[_Kind]]) -> tuple[Term[_Kind], ...]:
    """The terms with coefficients that add up to 1: their shares of the sum, or equal ones if one is not above 0."""
    total = math.fsum(term.coefficient for term in terms)
    even = any(term.coefficient <= 0 for term in terms)
    return tuple(replace(term, coefficient=1 / len(terms) if even else term.coefficient / total) for term in terms)


def blend_text(coefficients: Mapping[str, float]) -> str:
    """A blend as text: `0.5·math + 0.5·swahili`."""
    return " + ".join(f"{factor:.4g}·{name}" for name, factor in coefficients.items()) or BASE


def mixture(rule: Rule, weights: Mapping[str, float], method: str) -> str:
    """What a rule blends, as text, with the method and whether the weights depend on magnitudes."""
    text = blend_text(weights)
    if method != "linear":
        text = f"{method}({text}){_parameters_text(rule)}"
    return f"{text}, weighted by magnitude" if rule.weights else text


def _parameters_text(rule: Rule) -> str:
    """The parameters that are required or differ from their defaults, except λ: ` at density 0.5`."""
    parameters = [parameter for parameter in find_method(rule.method).own_parameters if parameter.name != SCALE.name]
    values = [(p, rule.parameters[p.name]) for p in parameters if p.required or rule.parameters[p.name] != p.default]
    listed = [f"{p.name} {value:g}" if p.kind is float else f"{p.name} {value}" for p, value in values]
    return f" at {', '.join(listed)}" if listed else ""
