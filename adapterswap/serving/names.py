"""Names that a client may request: an expert's own, or a composition's short name.

A name is untrusted text. It selects among the experts that the operator listed, and is never part of a path.
"""

from __future__ import annotations

from collections.abc import Collection

from adapterswap.errors import CompositionError, FieldError
from adapterswap.files.smallfiles import shown
from adapterswap.planning.allocation import BASE, Rule
from adapterswap.planning.compositions import Composition
from adapterswap.planning.names import fits_short_names
from adapterswap.planning.short_names import parse_composition

__all__ = ["UnknownNameError", "check_expert_name", "composition_of"]

_LONGEST = 300  # characters; a composition with every setting written out has fewer
_SHOWN = 30  # experts named in a message


class UnknownNameError(CompositionError):
    """A name that this server does not know. It is answered with 404, and every other `AdapterswapError` with 400."""


def check_expert_name(name: str) -> None:
    """Raise if an expert cannot have this name.

    Raises:
        FieldError: the name is reserved, too long, or contains a character with a meaning in names of compositions.
    """
    if name == BASE:
        raise FieldError(
            f"the expert name {BASE!r} is reserved for the unchanged base", "Rename the expert", parameter="experts"
        )
    if not fits_short_names(name) or len(name) > _LONGEST:
        raise FieldError(
            f"{shown(name)} cannot be the name of an expert",
            "Use letters, digits, `_`, `-` and `.`, as in swahili-v2",
            parameter="experts",
        )


def composition_of(name: str, experts: Collection[str]) -> Composition:
    """The composition that `name` means: an expert as it is, TASK+LANGUAGE, or TASK+LANGUAGE@key=value,…

    Args:
        name: the name in the client's request.
        experts: the names of all experts.

    Raises:
        UnknownNameError: the name is neither an expert's nor a composition's, or names an expert that does not exist.
        FieldError, CompositionError: the name of a composition is malformed or too long.
    """
    if name in experts:
        return Composition(allocation=(Rule(expert=name),))
    listed = ", ".join(sorted(experts)[:_SHOWN]) + (", …" if len(experts) > _SHOWN else "")
    remedy = f"The experts here are: {listed or 'none'}. Request one of them, or TASK+LANGUAGE"
    if "+" not in name and "@" not in name:
        raise UnknownNameError(f"there is no expert {shown(name)}", remedy, parameter="name")
    if len(name) > _LONGEST:
        raise CompositionError(
            f"the name {shown(name)} is longer than {_LONGEST} characters", "Use a shorter one", parameter="name"
        )
    composition = parse_composition(name)
    unknown = [expert for expert in composition.expert_names if expert not in experts]
    if unknown:
        raise UnknownNameError(
            f"{shown(name)}: there is no expert {' or '.join(map(shown, unknown))}", remedy, parameter="name"
        )
    return composition
