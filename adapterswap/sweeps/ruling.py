"""Families of compositions by rules: which experts the names in the rules stand for.

A name in a rule is that of an expert or of a role (`task`, `language`, or one of the recipe's `roles`). A role stands
for each of its experts in turn. Knows recipes; knows nothing of grids, tasks or experts on disk.
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
    """The experts that the names in a family's rules stand for in one composition.

    Attributes:
        sides: role → its experts in the composition; several are averaged first.
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
    """The name of the row of a role's experts alone."""
    return f"{role} expert"


def named_in(rules: Sequence[Rule]) -> tuple[str, ...]:
    """The names in rules, each once, without `base`."""
    return tuple(dict.fromkeys(name for rule in rules for name in rule.experts))


def check_roles(names: Sequence[str], roles: Mapping[str, Sequence[str]]) -> str | None:
    """An error message if a name in rules is both a role and an expert, otherwise None."""
    experts = {name: role for role, members in roles.items() for name in members}
    for name in names:
        if name in experts and name in roles and list(roles[name]) != [name]:
            return f"{name!r} in a rule is both a role and a {experts[name]} expert: rename the expert"
    return None


def casts(
    names: Sequence[str],
    roles: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...]]],
) -> Iterator[Cast]:
    """Every choice of experts for the names in a family's rules.

    Args:
        names: the names of experts or roles; see `named_in`.
        roles: role → the names of its experts.
        pairs: (task side, language side). If the rules name only one of the two roles, pairs that share that side count
            once; if they name neither, the pairs are ignored.
    """
    home = {name: role for role, members in roles.items() for name in members}
    free = [name for name in names if name not in home]
    sided = [role for role in (TASK, LANGUAGE) if role in free]
    chosen = [{TASK: task, LANGUAGE: language} for task, language in pairs]
    sides = dict.fromkeys(tuple(pair[role] for role in sided) for pair in chosen) if sided else {(): None}
    others = [role for role in free if role not in sided]
    for side, added in product(sides, product(*(roles[role] for role in others))):
        experts = dict(zip(sided, side, strict=True)) | {
            role: (member,) for role, member in zip(others, added, strict=True)
        }
        experts |= {name: (name,) for name in names if name in home}
        by_role: dict[str, tuple[str, ...]] = {}
        for name in names:
            role = home.get(name, name)
            by_role[role] = tuple(dict.fromkeys((*by_role.get(role, ()), *experts[name])))
        yield Cast(by_role, experts)


def bound(rules: Sequence[Rule], cast: Cast) -> list[Rule]:
    """The rules with roles replaced by experts; a side of several experts is replaced by their average.

    Raises:
        FieldError: a rule names an expert twice, for example by its name and by its role.
    """
    return [_bound(rule, cast) for rule in rules]


def _bound(rule: Rule, cast: Cast) -> Rule:
    averages: dict[str, list[str]] = {}

    def renamed(name: str) -> str:
        if name in rule.averages:
            members = [expert for member in rule.averages[name] for expert in cast.experts.get(member, (member,))]
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
                f"the rule {rule.text!r} blends {', '.join(weights)}, which are the same expert here",
                "Name each expert once: by its own name or by its role",
                parameter="compositions",
            )
        content["blend"] = {weights[name]: weight for name, weight in (rule.blend or {}).items()}
    content.pop("averages", None)
    return Rule.model_validate({**content, **({"averages": averages} if averages else {})})
