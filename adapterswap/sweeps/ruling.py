"""Families of compositions by rules: which experts their names stand for, and what each gives.

A name in a rule is an expert's, or a role's (`task`, `language`, or one of the recipe's `roles`), which stands for each
of the role's experts in turn. Knows recipes; knows nothing of grids, tasks or experts on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from adapterswap.errors import FieldError
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.rule_text import mean_label

__all__ = ["LANGUAGE", "TASK", "Cast", "bound", "casts", "check_roles", "expert_row", "named_in"]

TASK, LANGUAGE = "task", "language"

Sides = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Cast:
    """What the names in a family's rules stand for in one composition.

    Attributes:
        sides: role → its experts there; several where a side is averaged first.
        experts: name in the rules → the experts that it stands for.
    """

    sides: Sides
    experts: Mapping[str, tuple[str, ...]]

    def of(self, role: str) -> tuple[str, ...]:
        return self.sides.get(role, ())

    @property
    def others(self) -> tuple[str, ...]:
        """The experts of all roles but task and language."""
        return tuple(name for role, names in self.sides.items() if role not in (TASK, LANGUAGE) for name in names)


def expert_row(role: str) -> str:
    """What the row of a role's experts, each alone, is called."""
    return f"{role} expert"


def named_in(rules: Sequence[Rule]) -> tuple[str, ...]:
    """The names in rules, each once, without `base`."""
    return tuple(dict.fromkeys(name for rule in rules for name in rule.experts))


def check_roles(names: Sequence[str], roles: Mapping[str, Sequence[str]]) -> str | None:
    """What is wrong with names of rules that mean a role and an expert; None if nothing is."""
    experts = {name: role for role, members in roles.items() for name in members}
    for name in names:
        if name in experts and name in roles and list(roles[name]) != [name]:
            return f"{name!r} in a rule is a role, and an expert among the {experts[name]} experts: rename the expert"
    return None


def casts(
    names: Sequence[str],
    roles: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...]]],
) -> Iterator[Cast]:
    """Every choice of experts for the names of a family's rules.

    Args:
        names: see `named_in`; each an expert's or a role's.
        roles: role → the names of its experts.
        pairs: (task side, language side), of which those are taken that differ where the rules name both roles, or one.
    """
    home = {name: role for role, members in roles.items() for name in members}
    free = [name for name in names if name not in home]
    sided = [role for role in (TASK, LANGUAGE) if role in free]
    chosen = [{TASK: task, LANGUAGE: language} for task, language in pairs]
    sides = dict.fromkeys(tuple(pair[role] for role in sided) for pair in chosen) if sided else {(): None}
    others = [role for role in free if role not in sided]
    for side, rest in product(sides, product(*(roles[role] for role in others))):
        experts = dict(zip(sided, side, strict=True)) | {role: (one,) for role, one in zip(others, rest, strict=True)}
        experts |= {name: (name,) for name in names if name in home}
        by_role: dict[str, tuple[str, ...]] = {}
        for name in names:
            role = home.get(name, name)
            by_role[role] = tuple(dict.fromkeys((*by_role.get(role, ()), *experts[name])))
        yield Cast(by_role, experts)


def bound(rules: Sequence[Rule], cast: Cast) -> list[Rule]:
    """The rules with experts in the places of roles; a side of several is their average.

    Raises:
        FieldError: a rule names an expert twice, once by its role.
    """
    return [_bound(rule, cast) for rule in rules]


def _bound(rule: Rule, cast: Cast) -> Rule:
    averages: dict[str, list[str]] = {}

    def renamed(name: str) -> str:
        if name in rule.averages:
            members = [one for member in rule.averages[name] for one in cast.experts.get(member, (member,))]
            label = name if members == list(rule.averages[name]) else mean_label(members)
        elif name == BASE or len(members := list(cast.experts[name])) == 1:
            return name if name == BASE else cast.experts[name][0]
        else:
            label = mean_label(members)
        averages[label] = members
        return label

    content = rule.as_data()
    if rule.expert is not None:
        content["expert"] = renamed(rule.expert)
    else:
        weights = {name: renamed(name) for name in rule.blend or {}}
        if len(set(weights.values())) < len(weights):
            raise FieldError(
                f"the rule {rule.text!r} blends {', '.join(weights)}, which are one expert here",
                "Name each expert once: by its own name or by its role",
                parameter="compositions",
            )
        content["blend"] = {weights[name]: weight for name, weight in (rule.blend or {}).items()}
    content.pop("averages", None)
    return Rule.model_validate({**content, **({"averages": averages} if averages else {})})
