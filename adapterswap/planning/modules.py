"""What becomes of one module in a plan: the experts that enter, with which coefficients, by which rule.

Pure data. Knows experts' modules and rules; knows nothing of whole plans, nor of how a module is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from adapterswap.experts.adapters import FullModule, LoraModule
from adapterswap.experts.layers import Kind
from adapterswap.planning.allocation import BASE, Rule

__all__ = ["ModulePlan", "Part", "Term", "asked_of", "coefficients", "needs_base", "owner_of", "reweighted"]

_Module = TypeVar("_Module", LoraModule, FullModule)


@dataclass(frozen=True)
class Term(Generic[_Module]):
    """One expert's part in a module: its coefficient c, and where its numbers lie.

    `side` is the average that the expert enters through, where the rule treats averages as wholes; else the expert.
    """

    expert: str
    side: str
    coefficient: float
    module: _Module


@dataclass(frozen=True)
class ModulePlan(Generic[_Module]):
    """What becomes of one module: for a linear rule ΔW' = Σ c_i ΔW_i over `terms`.

    Attributes:
        name, layer, kind: the module.
        terms: none leaves the base unchanged; a single one with coefficient 1 is a copy; all others are a blend.
        weights: of the sides that the rule combines, before experts that lack the module were left out.
        rule: the rule that matched. It says how a blend is computed, and whether coefficients still wait for tensors.
    """

    name: str
    layer: int | None
    kind: Kind
    terms: tuple[Term[_Module], ...]
    weights: Mapping[str, float]
    rule: Rule

    @property
    def asked(self) -> Mapping[str, float]:
        """Each expert's coefficient by the rule, before experts that lack the module were left out."""
        return asked_of(self.rule, self.weights)

    @property
    def owner(self) -> str | None:
        """The expert that is copied, `base` for no change, None for a blend."""
        return owner_of(self.terms, linear=self.is_linear)

    @property
    def is_linear(self) -> bool:
        """Whether ΔW' is a weighted sum of the experts' ΔW (slerp is one, with weights that depend on them)."""
        return self.rule.method in ("linear", "slerp")

    @property
    def absent(self) -> tuple[str, ...]:
        """The experts that the rule asked for and that do not adapt this module (their ΔW is zero)."""
        present = {term.expert for term in self.terms}
        return tuple(name for name in self.asked if name not in present)


def asked_of(rule: Rule, weights: Mapping[str, float]) -> dict[str, float]:
    """The coefficient that a rule gives each expert, summed over the sides that it is on."""
    coefficients: dict[str, float] = {}
    for (_, expert), coefficient in rule.split(weights, apart=rule.combines_sides).items():
        coefficients[expert] = coefficients.get(expert, 0.0) + coefficient
    return coefficients


_Term = TypeVar("_Term", bound="Part")


def reweighted(terms: Sequence[_Term], rule: Rule, weights: Mapping[str, float], *, apart: bool) -> tuple[_Term, ...]:
    """The terms with the coefficients that these weights of the sides give; experts without a term are left out."""
    known: dict[str, Any] = {term.expert: term for term in terms}
    return tuple(
        replace(known[expert], side=side, coefficient=coefficient)
        for (side, expert), coefficient in rule.split(weights, apart=apart).items()
        if expert in known
    )


class Part(Protocol):
    """One expert's part in whatever is made of experts."""

    @property
    def expert(self) -> str: ...

    @property
    def side(self) -> str: ...

    @property
    def coefficient(self) -> float: ...


class Composed(Protocol):
    """What is made of experts' parts: a module of an adapter, or a stored tensor of a model."""

    @property
    def owner(self) -> str | None: ...

    @property
    def terms(self) -> Sequence[Part]: ...


def owner_of(terms: Sequence[Part], *, linear: bool) -> str | None:
    """`base` for no terms; the expert of a single linear term with coefficient 1; None for a blend."""
    if not terms:
        return BASE
    return terms[0].expert if linear and len(terms) == 1 and terms[0].coefficient == 1 else None


def coefficients(composed: Composed) -> str | dict[str, float]:
    """What becomes of a module or tensor as plain data: the owner's name, `base`, or each expert's coefficient."""
    if composed.owner is not None:
        return composed.owner
    found: dict[str, float] = {}
    for term in composed.terms:
        found[term.expert] = found.get(term.expert, 0.0) + term.coefficient
    return found


def needs_base(plan: ModulePlan[FullModule]) -> bool:
    """Whether Σ c_i W_i + (1 - Σ c_i) W_base has a part of the base's own weights."""
    return bool(plan.terms) and abs(1 - sum(term.coefficient for term in plan.terms)) > 1e-12
