"""A slot: one module of an adapter, or one stored tensor of a model, and the changes that enter it.

The linear form is

    W' = Σ_whole c_i·W_i + (1 - Σ_whole c_i)·W_base + Σ_lora c_i·s_i·B_i·A_i

because ΔW_i is W_i - W_base for weights trained in full and s_i·B_i·A_i for LoRA. For an opaque change (DoRA, OFT, …),
W_i is the weight that PEFT computes from the base's. Pure data: knows changes and rules, but not whole plans, nor how a
slot is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adapterswap.changes.kinds import Change, LowRank, Opaque, Whole
from adapterswap.experts.adapter import LoraModule
from adapterswap.model.layers import Kind, is_vocabulary
from adapterswap.planning.rules import BASE, BlendMethod, Rule

_NOTHING = 1e-12  # a smaller coefficient of the base is a rounding error of the experts' coefficients


@dataclass(frozen=True)
class Term:
    """One expert's part in a slot: its coefficient c, and its change.

    `side` is the average through which the expert enters, if the rule treats averages as wholes; else the expert.
    """

    expert: str
    side: str
    coefficient: float
    change: Change

    @property
    def low_rank(self) -> LowRank:
        """The change, which must be low-rank."""
        assert isinstance(self.change, LowRank)
        return self.change

    @property
    def lora(self) -> LoraModule:
        """The factors of a low-rank change, or of a variant of LoRA."""
        if isinstance(self.change, Opaque):
            assert self.change.part.lora is not None
            return self.change.part.lora
        return self.low_rank.lora

    @property
    def opaque(self) -> Opaque | None:
        """The change, if it is opaque."""
        return self.change if isinstance(self.change, Opaque) else None

    @property
    def method(self) -> str:
        """The name of an opaque change's method, such as DoRA; else empty."""
        return "" if self.opaque is None else self.opaque.part.method

    @property
    def whole(self) -> Whole:
        """The change, which must be a whole weight."""
        assert isinstance(self.change, Whole)
        return self.change


@dataclass(frozen=True)
class Rows:
    """A range of rows with the same terms, in an embedding or head whose vocabulary was resized.

    Attributes:
        start, stop: the first row, and the row after the last.
        terms: like a slot's terms; none leaves the base's rows.
        rest: the base's coefficient.
        is_new: whether the base lacks the tokens of these rows.
        lent: experts' copies of their resized base's weight, with their coefficients. They replace the base, whose
            weight does not have these rows, and LoRA is added to them.
    """

    start: int
    stop: int
    terms: tuple[Term, ...]
    rest: float
    is_new: bool = False
    lent: tuple[Term, ...] = ()

    @property
    def made_of(self) -> str | dict[str, float]:
        """The owner's name, or each expert's coefficient, as plain data."""
        if len(self.terms) == 1 and self.terms[0].coefficient == 1:
            return self.terms[0].expert
        return {term.expert: term.coefficient for term in self.terms}


@dataclass(frozen=True)
class Slot:
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
        rows: all rows in order, for an embedding or head with rows that the base or an expert lacks. If experts trained
            single tokens: their rows and, of a stored tensor, the base's rows between them. Else empty.
    """

    name: str
    module: str
    layer: int | None
    kind: Kind
    terms: tuple[Term, ...]
    weights: Mapping[str, float]
    rule: Rule | None
    method: BlendMethod = "linear"
    in_full: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    base: Whole | None = None
    rows: tuple[Rows, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the slot is a stored tensor of a model, not a module of an adapter."""
        return bool(self.dtype)

    @property
    def has_tokens(self) -> bool:
        """Whether it is a stored tensor with a row for each token; see `StoredTensor.has_tokens`."""
        return bool(self.shape) and is_vocabulary(self.module, self.layer)

    @property
    def matched_name(self) -> str:
        """The name that rules look at: the module's, as adapters write it, with the parameter of a stored tensor."""
        return f"{self.module}.{self.name.rpartition('.')[2]}" if self.is_stored else self.name

    @property
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
    def matrices(self) -> int:
        """How many matrices the tensor holds, if low-rank changes apply to each of them separately; else 1."""
        return max((term.low_rank.matrices for term in self.low_rank), default=1) if self.is_stored else 1

    @property
    def is_held_whole(self) -> bool:
        """Whether computing it needs whole tensors in memory, as a nonlinear method or an opaque change does."""
        return not self.is_linear or bool(self.opaque)

    @property
    def of_tokens(self) -> bool:
        """Whether the changes are single rows of an embedding or head (`trainable_token_indices`)."""
        return any(term.whole.rows for term in self.whole)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The trained tokens whose rows it holds, in the order of its tensor."""
        if self.owner is not None:
            return self.terms[0].whole.rows
        return tuple(row for part in self.rows for row in range(part.start, part.stop))

    @property
    def all_terms(self) -> tuple[Term, ...]:
        """The terms, and those of the rows: an expert may own only rows."""
        return (*self.terms, *(term for part in self.rows for term in (*part.terms, *part.lent)))

    @property
    def factors_by_rows(self) -> str | None:
        """The first expert whose LoRA has different coefficients in different rows; None if there is none."""
        experts = (t.expert for part in reversed(self.rows) for t in part.terms if isinstance(t.change, LowRank))
        return next(experts, None)

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

    @property
    def owner(self) -> str | None:
        """The expert whose change the slot gets unaltered, `base` for no change, None for a blend."""
        if not self.terms:
            return BASE
        alone = self.is_linear and len(self.terms) == 1 and self.terms[0].coefficient == 1
        return self.terms[0].expert if alone else None

    @property
    def coefficients(self) -> str | dict[str, float]:
        """The owner's name, `base`, or each expert's coefficient, as plain data."""
        if self.owner is not None:
            return self.owner
        summed: dict[str, float] = {}
        for term in self.terms:
            summed[term.expert] = summed.get(term.expert, 0.0) + term.coefficient
        return summed

    @property
    def whole(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if isinstance(term.change, Whole))

    @property
    def low_rank(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if isinstance(term.change, LowRank))

    @property
    def opaque(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if isinstance(term.change, Opaque))

    @property
    def rest(self) -> float:
        """The base's coefficient in the linear form, 1 - Σ c_i over all changes that are not low-rank."""
        rest = 1 - math.fsum(term.coefficient for term in self.terms if not isinstance(term.change, LowRank))
        return rest if abs(rest) > _NOTHING else 0.0

    @property
    def needs_base(self) -> bool:
        """Whether the base's own numbers enter."""
        waits = self.rule is not None and self.rule.weights is not None and bool(self.terms)
        if self.rule is not None and self.rule.acts_on_weights and self.terms:
            return bool(self.low_rank or self.opaque) or any(share < 1 for share in self.whole_shares.values())
        return not self.is_linear or waits or self.rest != 0 or bool(self.opaque) or any(r.rest for r in self.rows)

    @property
    def whole_shares(self) -> dict[str, float]:
        """The share of each side that is experts' whole weights; the rest, up to 1, is the base's."""
        sides = self.rule.sides if self.rule is not None else {}
        shares = dict.fromkeys(sides, 0.0)
        for term in (*self.whole, *self.opaque):
            shares[term.side] += sides[term.side][term.expert]
        return {side: 1.0 if math.isclose(share, 1) else share for side, share in shares.items()}

    @property
    def copied(self) -> Whole | None:
        """The tensor that is copied as the result; None if the result is computed."""
        if self.rows:
            return None
        if not self.terms:
            return self.base
        return self.terms[0].whole if self.owner is not None and self.whole else None


def shared_out(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms with coefficients that add up to 1: their shares of the sum, or equal ones if one is not above 0."""
    total = math.fsum(term.coefficient for term in terms)
    even = any(term.coefficient <= 0 for term in terms)
    return tuple(replace(term, coefficient=1 / len(terms) if even else term.coefficient / total) for term in terms)


def reweighted(terms: Sequence[Term], rule: Rule, weights: Mapping[str, float], *, apart: bool) -> tuple[Term, ...]:
    """The terms with the coefficients that follow from these weights; experts without a term are left out."""
    term_of = {term.expert: term for term in terms}
    return tuple(
        replace(term_of[expert], side=side, coefficient=coefficient)
        for (side, expert), coefficient in rule.split(weights, apart=apart).items()
        if expert in term_of
    )
