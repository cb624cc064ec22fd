"""Short names of compositions, as used in requests and grids: `math+swahili@bottom=4,top=1`.

Knows which settings a short name can hold; `compositions` checks their values.
"""

from __future__ import annotations

import re
from typing import Any

from adapterswap.errors import ArgumentError, FieldError, check_type, did_you_mean
from adapterswap.files.yamlfiles import validate
from adapterswap.methods.registry import names_of, own_parameters
from adapterswap.planning.compositions import ZONES, Composition
from adapterswap.planning.names import SHORT_NAME
from adapterswap.planning.parameters import parameter_keys

__all__ = ["as_composition", "parse_composition"]

_SHORT_KEYS = (
    *ZONES, "task_weight", "language_weight", "weights", *parameter_keys(), "seed", "method", "partition", "outside",
    "stack",
)  # fmt: skip


def as_composition(composition: Composition | str) -> Composition:
    """Return a `Composition` unchanged, and parse a short name.

    Raises:
        ArgumentError: `composition` is neither.
        ArgumentError, FieldError: see `parse_composition`.
    """
    check_type(composition, (Composition, str), "composition", "Pass a Composition or a name such as 'math+swahili'")
    return composition if isinstance(composition, Composition) else parse_composition(composition)


def parse_composition(name: str) -> Composition:
    """The composition with the short name `name`: `math+swahili` or `math+swahili@bottom=4,top=1`.

    Raises:
        ArgumentError: the name does not have that form.
        FieldError: a setting is unknown, repeated or without a value, or its value is not allowed.
    """
    check_type(name, str, "name", "Pass a name such as 'math+swahili'")
    match = re.fullmatch(rf"({SHORT_NAME})\+({SHORT_NAME})(?:@([\w=.,+-]+))?", name)
    form = f"Write TASK+LANGUAGE, or TASK+LANGUAGE@key=value,… with the keys {', '.join(_SHORT_KEYS)}"
    if match is None:
        raise ArgumentError(f"{name!r} is not the short name of a composition", form, parameter="name")
    content: dict[str, Any] = {"task": match[1], "language": match[2]}
    items = [item for item in (match[3] or "").split(",") if item]
    method = next((item for item in items if item.startswith("method=")), "").removeprefix("method=")
    keys = {*_SHORT_KEYS}
    if method not in names_of() and method in names_of(packages=True):
        keys |= {parameter.name for parameter in own_parameters(method)}
    for item in items:
        key, _, value = item.partition("=")
        if key not in keys:
            remedy = did_you_mean(key, keys, form)
            raise FieldError(f"{name!r}: unknown setting {key!r}", remedy, parameter=key or None)
        if not value:
            raise FieldError(f"{name!r}: {key} has no value", f"Write {key}=VALUE", parameter=key)
        if key in content:
            raise FieldError(f"{name!r}: {key} is set twice", "Set it once", parameter=key)
        content[key] = value
    return validate(content, Composition, where=name)
