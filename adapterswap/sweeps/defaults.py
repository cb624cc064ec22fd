"""Which configuration of a family is the papers' default, and whether a configuration's zones fit the base.

Knows compositions; knows nothing of recipes, experts or results.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapterswap.methods.registry import find_method, own_parameters
from adapterswap.planning.compositions import Composition, scaled_default

__all__ = ["default_of", "overlaps"]


def default_of(configurations: Sequence[Composition], num_layers: int) -> int | None:
    """The index of the papers' default among the configurations that one pair has in one row of a table.

    For a layer swap by zones: b = 5 and u = 2 of 32 layers, scaled, without transitions. For methods: the values that
    their paper published, otherwise their parameters' defaults (`Method.published`). Weights are equal in both. A
    single configuration without zones is always the default. None if no configuration is the default, or more than one
    (partitions A and B, TIES at two ranks).
    """
    is_only = len(configurations) == 1
    defaults = [
        index
        for index, composition in enumerate(configurations)
        if _is_default(composition, num_layers, is_only=is_only)
    ]
    return defaults[0] if len(defaults) == 1 else None


def _is_default(composition: Composition, num_layers: int, *, is_only: bool) -> bool:
    free = {"task_weight", "language_weight", "weights", "norms", "row_threshold", "seed"}
    changed = composition.model_dump(exclude_defaults=True).keys() & free
    if _has_zones(composition):
        return _zones(composition, num_layers) == (*_paper_zones(num_layers), 0, 0) and not changed
    if is_only:
        return True
    defaults = {p.name: None if p.required else p.default for p in own_parameters(composition.method)}
    return not changed and composition.parameters == {**defaults, **find_method(composition.method).published}


def overlaps(composition: Composition, num_layers: int) -> bool:
    """Whether a layer swap's zones need more layers than the base has."""
    return _has_zones(composition) and sum(_zones(composition, num_layers)) > num_layers


def _has_zones(composition: Composition) -> bool:
    return composition.method == "layer_swap" and composition.partition is None and composition.allocation is None


def _paper_zones(num_layers: int) -> tuple[int, int]:
    return scaled_default(5, num_layers), scaled_default(2, num_layers)


def _zones(composition: Composition, num_layers: int) -> tuple[int, int, int, int]:
    """(b, u, t_b, t_u) as in `Composition.zones`, but without its errors: here zones may overlap."""
    bottom, top = _paper_zones(num_layers)
    bottom = bottom if composition.bottom is None else composition.bottom
    top = top if composition.top is None else composition.top
    return bottom, top, composition.bottom_transition, composition.top_transition
