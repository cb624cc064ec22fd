"""The configurations of each method in the comparison of all methods: at most eight.

They were fixed before the comparison was run, for two experts that both change every layer. The first of each list is
the method's default, if the list has it, and wins ties. Knows compositions' fields; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from adapterswap.errors import ArgumentError
from adapterswap.methods.method import Method
from adapterswap.methods.registry import all_methods, find_method

__all__ = ["BUDGET", "SCALES", "SUGGESTED", "ZONES", "Fields", "choices", "chosen_methods"]

Fields = Mapping[str, Any]
"""Fields of a composition, apart from its experts and its method."""

BUDGET = 8


def _grid(**values: Sequence[Any]) -> tuple[Fields, ...]:
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


def _shares(*language: float) -> tuple[Fields, ...]:
    return tuple({"task_weight": round(1 - share, 2), "language_weight": share} for share in language)


ZONES = _grid(bottom=(3, 1, 2, 4), top=(0, 1))
SCALES = _grid(scale=(1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2))
_SHARES = _shares(0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8)
_DENSITIES = (0.3, 0.8)
_SUMS = _grid(density=_DENSITIES, scale=(1.0, 0.6, 0.8, 1.2))
_ELECTED = _grid(density=_DENSITIES, scale=(1.0, 0.8, 1.3, 1.6))  # entries of one expert alone keep their size

_CHOICES: dict[str, tuple[Fields, ...]] = {
    "layer_swap": ZONES,
    "soup": _SHARES,
    "task_arithmetic": SCALES,
    "ties": _ELECTED,
    "dare_linear": _SUMS,
    "dare_ties": _ELECTED,
    "slerp": _SHARES,
    "magnitude_prune": _SUMS,
    "adamergex": _grid(scale=(1.0, 0.2, 0.4, 0.6, 0.8, 1.2, 1.4, 1.6)),
    "della": _ELECTED,
    "della_linear": _SUMS,
    "breadcrumbs": _SUMS,
    "breadcrumbs_ties": _ELECTED,
    "sce": _grid(select_topk=(1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)),
    "nuslerp": tuple(
        {**share, "nuslerp_flatten": flatten} for share in _shares(0.5, 0.2, 0.35, 0.65) for flatten in (True, False)
    ),
    "multislerp": _SHARES,
    "model_stock": _grid(filter_wise=(False, True)),
    "nearswap": _grid(t=(1e-3, 1e-4, 3e-4, 3e-3, 1e-2, 2e-2, 5e-2, 1e-1)),
    "karcher": ({},),
    "arcee_fusion": ({},),
    "tsv": SCALES,
    "iso_c": _grid(scale=(1.0, 0.6, 0.8, 1.2, 1.4, 1.6, 2.0, 2.5)),
    "iso_cts": _grid(common_space_fraction=(0.8, 0.5), scale=(1.0, 0.7, 1.4, 2.0)),
    "knots_ties": _ELECTED,
    "knots_dare_ties": _ELECTED,
    "core_ties": _ELECTED,
    "core_dare_ties": _ELECTED,
}

SUGGESTED: Mapping[str, tuple[Fields, ...]] = {
    "dominance": (
        *_grid(margin=(0.15, 0.5), per=("layer", "module")),  # AraSwap's margin first
        *_grid(tie=(0.001, 0.05), per=("layer", "module")),  # arXiv:2601.22620's τ first
    ),
}
"""Rules that `suggest_owners` derives from the experts, compared like methods; the fields are its arguments."""


def choices(method: Method) -> tuple[Fields, ...]:
    """The configurations of a method. Without a list here, as for a package's, they are its defaults with shares."""
    if method.name in _CHOICES:
        return _CHOICES[method.name]
    required = {parameter.name: parameter.default for parameter in method.parameters if parameter.required}
    return tuple({**share, **required} for share in (_SHARES if method.weighted else ({},)))


def chosen_methods(names: str | Iterable[str]) -> tuple[str, ...]:
    """`all`, or names separated by commas: methods that two or three experts can be composed with, and `SUGGESTED`.

    Raises:
        ArgumentError: there is no such method, or it is one of rules only.
        DependencyError: a package adds a method that is not valid.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if listed == ["all"]:
        return (*(name for name, method in all_methods().items() if method.as_composition), *SUGGESTED)
    chosen = []
    for name in listed:
        if name in SUGGESTED:
            chosen.append(name)
            continue
        method = find_method(name)
        if not method.as_composition:
            raise ArgumentError(
                f"{name!r} can only be used in rules",
                "Leave it out, since `soup` gives the same result",
                parameter="methods",
            )
        chosen.append(method.name)
    return tuple(dict.fromkeys(chosen))
