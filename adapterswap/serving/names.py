"""Names that a client may ask for: an expert's own, or a composition's short name.

A name is text from a stranger. It selects among the experts that the operator listed, and is never part of a path.
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
    """A name that means nothing here: a server answers it with 404, and every other `AdapterswapError` with 400."""


def check_expert_name(name: str) -> None:
    """Whether an expert may be called so.

    Raises:
        FieldError: the name is reserved, or holds a character that has a meaning in names of compositions.
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
        name: what the client wrote.
        experts: the names of the experts that there are.

    Raises:
        UnknownNameError: the name does not mean a composition, or names an expert that does not exist.
        FieldError, CompositionError: the name means a composition, and is malformed or too long.
    """
    if name in experts:
        return Composition(allocation=(Rule(expert=name),))
    listed = ", ".join(sorted(experts)[:_SHOWN]) + (", …" if len(experts) > _SHOWN else "")
    remedy = f"The experts here are: {listed or 'none'}. Ask for one of them, or for TASK+LANGUAGE"
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
