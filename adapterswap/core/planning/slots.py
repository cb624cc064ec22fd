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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

from adapterswap.core.changes.kinds import Change, Storage, Term, Terms, Whole
from adapterswap.core.methods.method import SCALE
from adapterswap.core.methods.registry import find_method
from adapterswap.core.model.layers import Kind, ModuleName
from adapterswap.core.planning.rules import BASE, Rule

_NOTHING = 1e-12  # a smaller coefficient of the base is a rounding error of the experts' coefficients

_Kind = TypeVar("_Kind", bound=Change)


class BaseShare(NamedTuple):
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


class Place(NamedTuple):
    """A module of adapters, or a stored tensor of a model, before a rule is applied. The attributes are a slot's."""

    name: str
    module: str
    matched_name: str
    layer: int | None
    kind: Kind
    empty: Storage = Storage.LORA
    dtype: str = ""
    shape: tuple[int, ...] = ()
    base: Whole | None = None

    def slot(
        self,
        terms: Sequence[Term[Change]] = (),
        weights: Mapping[str, float] | None = None,
        rule: Rule | None = None,
        requested: tuple[str, ...] = (),
        method: str = "linear",
    ) -> Slot:
        """The slot with these terms, of this rule."""
        name, module, _, layer, kind, empty, dtype, shape, base = self
        return Slot(
            name, module, layer, kind, tuple(terms), weights or {}, rule, method, empty, dtype, shape, base,
            requested=requested,
        )  # fmt: skip


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
        empty: its storage while it has no terms.
        dtype, shape: how the model stores the tensor; empty for a module of an adapter.
        base: the base's own tensor; None if the plan has no base.
        spans: all rows in order, for an embedding or head with rows that the base or an expert lacks. If experts
            trained single tokens: their rows and, of a stored tensor, the base's rows between them. Else empty.
        requested: the experts that the rule names with a coefficient other than 0, including those that lack the
            module.

        These follow from the others:

        storage: what stores its change: LoRA's factors, whole weights (`modules_to_save`), single rows of them, …
        is_stored: whether it is a stored tensor of a model, not a module of an adapter.
        has_span: whether the coefficients are computed from inner products of low-rank changes.
        is_linear: whether the result is a weighted sum of changes. SLERP and similar methods are linear if all changes
            are low-rank: `resolve` computes their coefficients. For stored tensors they are computed on whole weights.
        owner: the expert whose change the slot gets unaltered, `base` for no change, None for a blend.
        owner_label: the owner's name in the strip: an expert, `base`, or the rule's average or chain; None for a blend.
        coefficients: the owner's name, `base`, or each expert's coefficient summed over its sides, as plain data.
        absent: the requested experts that do not change the slot (their ΔW is zero).
        total_rank: the rank of a module's exact form: the sum of its terms' ranks.
    """

    name: str
    module: str
    layer: int | None
    kind: Kind
    terms: tuple[Term[Change], ...]
    weights: Mapping[str, float]
    rule: Rule | None
    method: str = "linear"
    empty: Storage = Storage.LORA
    dtype: str = ""
    shape: tuple[int, ...] = ()
    base: Whole | None = None
    spans: tuple[Span, ...] = ()
    requested: tuple[str, ...] = ()

    storage: Storage = field(init=False, repr=False, compare=False)
    is_stored: bool = field(init=False, repr=False, compare=False)
    has_span: bool = field(init=False, repr=False, compare=False)
    is_linear: bool = field(init=False, repr=False, compare=False)
    owner: str | None = field(init=False, repr=False, compare=False)
    owner_label: str | None = field(init=False, repr=False, compare=False)
    coefficients: str | dict[str, float] = field(init=False, repr=False, compare=False)
    absent: tuple[str, ...] = field(init=False, repr=False, compare=False)
    total_rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rule, terms = self.rule, self.terms
        is_stored = self.empty is Storage.TENSOR

        # A slot without terms is the base's weight, whatever method the rule has for others.
        has_span = self.method != "linear" and not is_stored and rule is not None and rule.spans
        is_linear = self.method == "linear" or has_span or not terms

        # A slot has an owner if nothing is computed: its change is copied, or the base's weight stays.
        owner: str | None = None
        if not terms:
            owner = BASE
        elif is_linear and len(terms) == 1 and terms[0].coefficient == 1:
            owner = terms[0].expert
        owner_label = owner
        if owner is None and rule is not None:
            owner_label = rule.joint_owner

        total_rank = 0
        summed: dict[str, float] = {}
        for term in terms:
            lora = term.change.lora
            if lora is not None:
                total_rank += lora.rank
            summed[term.expert] = summed.get(term.expert, 0.0) + term.coefficient

        coefficients: str | dict[str, float] = summed
        if owner is not None:
            coefficients = owner

        # The dataclass is frozen, but these are set once, here.
        self.__dict__.update(
            storage=Storage.of(terms, self.empty),
            is_stored=is_stored,
            has_span=has_span,
            is_linear=is_linear,
            owner=owner,
            owner_label=owner_label,
            coefficients=coefficients,
            absent=tuple(name for name in self.requested if name not in summed),
            total_rank=total_rank,
        )

    @property
    def matched_name(self) -> str:
        """The name that rules match: the module's, as adapters write it, with the parameter of a stored tensor."""
        if not self.is_stored:
            return self.name
        return f"{self.module}.{self.name.rpartition('.')[2]}"

    @cached_property
    def has_tokens(self) -> bool:
        """Whether it is a stored tensor with a row for each token; see `StoredTensor.has_tokens`."""
        return bool(self.shape) and ModuleName(self.module).is_vocabulary(self.layer)

    @property
    def has_low_rank(self) -> bool:
        """Whether the result of low-rank changes has a low rank itself."""
        return self.is_linear or (self.rule is not None and self.rule.on_cores)

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
        share: tuple[BaseShare, ...] = ()
        if abs(rest) > _NOTHING:
            share = (BaseShare(rest),)
        elif self.is_held_whole or (self.rule is not None and self.rule.weights and self.terms):
            # Other terms, or coefficients, are computed from it.
            share = (BaseShare(None),)
        return Span(0, self._rows, self.terms, share)

    def _base_by_side(self, sides: Mapping[str, Mapping[str, float]]) -> tuple[BaseShare, ...]:
        """The base's share of each side, for a method on whole weights."""
        replaced = dict.fromkeys(sides, 0.0)
        for term in self.terms:
            if term.change.replaces:
                replaced[term.side] += sides[term.side][term.expert]

        shares = []
        for side, share in replaced.items():
            if share < 1 and not math.isclose(share, 1):
                shares.append(BaseShare(1 - share, side=side))

        # PEFT computes an opaque change from the base's weight, even where nothing of the base is added.
        if self.opaque and not shares:
            return (BaseShare(None, side=self.opaque[0].side),)
        return tuple(shares)

    @cached_property
    def ranges(self) -> tuple[Span, ...]:
        """All rows of a stored tensor in order: `spans` or, if all are alike, one span for each of its matrices."""
        if self.spans:
            return self.spans

        height = self._rows // self.matrices
        spans = []
        for matrix in range(self.matrices):
            start = matrix * height
            spans.append(replace(self.ordinary, start=start, stop=start + height, matrix=matrix))
        return tuple(spans)

    @property
    def _rows(self) -> int:
        """The rows of a stored tensor, as which all axes but the last count; 0 for a module of an adapter."""
        if not self.is_stored:
            return 0
        if len(self.shape) > 1:
            return math.prod(self.shape[:-1])
        return math.prod(self.shape)

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
        terms = []
        for (side, expert), coefficient in self.rule.split(weights, apart=apart).items():
            if expert in term_of:
                terms.append(term_of[expert]._replace(side=side, coefficient=coefficient))

        parts = self.rule.split(weights, apart=self.rule.combines_sides)
        requested = tuple(dict.fromkeys(expert for _, expert in parts))
        return replace(self, terms=tuple(terms), weights=weights, requested=requested)

    @property
    def needs_base(self) -> bool:
        """Whether the base's own numbers enter."""
        shares = list(self.ordinary.base)
        for span in self.spans:
            shares += span.base
        return any(share.copy is None for share in shares)

    @property
    def matrices(self) -> int:
        """How many matrices a stored tensor holds, if low-rank changes apply to each of them separately; else 1."""
        if not self.is_stored:
            return 1
        return max((term.change.matrices for term in self.low_rank), default=1)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The trained tokens whose rows it holds, in the order of its tensor."""
        if self.owner is not None:
            return self.whole[0].change.rows

        rows: list[int] = []
        for span in self.spans:
            rows += range(span.start, span.stop)
        return tuple(rows)

    @property
    def all_whole(self) -> tuple[tuple[str, Whole], ...]:
        """Every expert with whole weights, also in spans: it may own only rows, or lend them."""
        held: list[tuple[str, Whole]] = []
        for part in (self, *self.spans):
            for term in part.whole:
                held.append((term.expert, term.change))
        for span in self.spans:
            for share in span.base:
                if share.copy is not None:
                    held.append((share.expert, share.copy))
        return tuple(held)

    @property
    def factors_by_rows(self) -> str | None:
        """The first expert whose LoRA has different coefficients in different rows; None if there is none."""
        for span in reversed(self.spans):
            if span.low_rank:
                return span.low_rank[0].expert
        return None

    @property
    def copied(self) -> Whole | None:
        """The tensor that is copied as the result; None if the result is computed."""
        if self.spans:
            return None
        if not self.terms:
            return self.base

        # A low-rank owner has no tensor to copy: the base's weight plus its ΔW has to be computed.
        if self.owner is not None and self.whole:
            return self.whole[0].change
        return None

    @property
    def blend(self) -> str:
        """Its blend of sides as text; see `mixture`."""
        if self.rule is None:
            return blend_text(self.weights)
        return mixture(self.rule, self.weights, self.method)

    @property
    def label(self) -> str:
        """Its owner, as the strip calls it, or its blend as text."""
        return self.owner_label or self.blend


def shared_out(terms: Sequence[Term[_Kind]]) -> tuple[Term[_Kind], ...]:
    """The terms with coefficients that add up to 1: their shares of the sum, or equal ones if one is not above 0."""
    if any(term.coefficient <= 0 for term in terms):
        return tuple(term._replace(coefficient=1 / len(terms)) for term in terms)

    total = math.fsum(term.coefficient for term in terms)
    return tuple(term._replace(coefficient=term.coefficient / total) for term in terms)


def blend_text(coefficients: Mapping[str, float]) -> str:
    """A blend as text: `0.5·math + 0.5·swahili`."""
    return " + ".join(f"{factor:.4g}·{name}" for name, factor in coefficients.items()) or BASE


def mixture(rule: Rule, weights: Mapping[str, float], method: str) -> str:
    """What a rule blends, as text, with the method and whether the weights depend on magnitudes."""
    text = blend_text(weights)
    if method != "linear":
        text = f"{method}({text}){_parameters_text(rule)}"
    if rule.weights:
        text += ", weighted by magnitude"
    return text


def _parameters_text(rule: Rule) -> str:
    """The parameters that are required or differ from their defaults, except λ: ` at density 0.5`."""
    listed = []
    for parameter in find_method(rule.method).own_parameters:
        if parameter.name == SCALE.name:
            continue
        value = rule.parameters[parameter.name]
        if not parameter.required and value == parameter.default:
            continue

        text = str(value)
        if parameter.kind is float:
            text = f"{value:g}"
        listed.append(f"{parameter.name} {text}")

    if not listed:
        return ""
    return f" at {', '.join(listed)}"
