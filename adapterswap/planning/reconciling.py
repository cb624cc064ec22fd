"""Experts that use different names for one module: rename them to the base's own names, or refuse them.

Names are compared from headers alone. The base's model is built only if two names may mean one module. Knows nothing of
rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

from adapterswap.errors import AdapterswapError, ExpertError, Problems
from adapterswap.experts.adapter_keys import is_bias
from adapterswap.experts.adapters import Adapter, Part
from adapterswap.experts.checkpoints import MODEL_CONFIG
from adapterswap.experts.layers import EMBEDDINGS, HEADS, ends_of, of_any_stack, stack_of
from adapterswap.experts.naming import names_of_base, under_canonical_names
from adapterswap.experts.sources import at_revision, cached_base_config, find_source

__all__ = ["reference_of", "under_one_name"]

_Modules = Mapping[str, Part]


def under_one_name(experts: Mapping[str, Adapter], base_model: str | None, problems: Problems) -> dict[str, Adapter]:
    """The experts, with one name for each module of their base.

    They are returned unchanged if no two of their names can mean the same module. If their modules have entirely
    different names, they are compared with the base's if the base is on this machine.

    Args:
        experts: the experts of one base, by name.
        base_model: the declared base; by default the first that an expert names.
        problems: collects names that could not be reconciled.
    """
    odd, reference = _differing_names(experts), reference_of(experts, base_model)
    if odd is None and not (_differ_in_kind(experts) and reference and cached_base_config(reference) is not None):
        return dict(experts)
    if reference is None:
        problems.add(
            f"{odd}, but no base model is named to compare them with",
            "Pass `base_model`",
            parameter="base_model",
            kind=ExpertError,
        )
        return dict(experts)
    try:
        names = names_of_base(find_source(reference, [MODEL_CONFIG], what="base model").folder, reference)
    except AdapterswapError as error:
        if odd is not None:
            problems.add(
                f"{odd}, and the base {reference} cannot be read to decide it: {error.problems[0].message}",
                "Pass the base's folder as `base_model`, or use experts that were saved from the same model class with "
                "the same version of transformers",
                parameter="base_model",
                kind=ExpertError,
            )
        return dict(experts)
    renamed = {}
    for name, adapter in experts.items():
        renamed[name] = adapter
        with problems.collect():
            renamed[name] = under_canonical_names(adapter, names, name)
    return renamed


def reference_of(experts: Mapping[str, Adapter], base_model: str | None) -> str | None:
    """Where to find the base: the declared one, or the first that an expert names, at its revision."""
    named = (
        at_revision(adapter.config.base_model, adapter.config.revision)
        for adapter in experts.values()
        if adapter.config.base_model
    )
    return base_model or next(named, None)


def _differing_names(experts: Mapping[str, Adapter]) -> str | None:
    """A sentence about two names in different experts that may mean one module; None if there are none."""
    layered = {name: adapter.container for name, adapter in experts.items() if adapter.container is not None}
    for name, container in layered.items():
        first_name, first = next(iter(layered.items()))
        if of_any_stack(container) != of_any_stack(first):
            return (
                f"The layers are named {first}.N in {first_name} but {container}.N in {name}; these may be the same "
                "modules"
            )
    parts: dict[str, _Modules] = {name: adapter.parts for name, adapter in experts.items()}
    for name, modules in parts.items():
        for other, others in parts.items():
            if (twin := _twin(modules, others)) is not None:
                return f"{name} adapts {twin[0]} and {other} adapts {twin[1]}; these may be the same module"
    return None


def _twin(ours: _Modules, theirs: _Modules) -> tuple[str, str] | None:
    """A name that is only in `ours` and one that is only in `theirs`, if the two may mean one module."""
    mine, others = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if not mine:
        return None
    for long in sorted(mine):
        if (short := next((short for short in _other_names(long, theirs) if short not in ours), None)) is not None:
            return long, short
    by_place = {_place(theirs[name]): name for name in sorted(others)}
    return next(((name, by_place[at]) for name in sorted(mine) if (at := _place(ours[name])) in by_place), None)


def _other_names(module: str, names: Collection[str]) -> Iterator[str]:
    """Those of `names` that may mean `module`: its end, or an embedding or head under another prefix."""
    _, *ends = ends_of(module)
    yield from (end for end in ends if end in names)
    last = module.rpartition(".")[2]
    if last in EMBEDDINGS | HEADS:
        yield from (name for name in sorted(names) if name.rpartition(".")[2] == last and name != module)


def _place(module: Part) -> tuple[str, ...]:
    """The parts that all names of one module share: its kind and stack, the numbers in the name, its last part."""
    parts = (module.name.removesuffix(".bias") if is_bias(module.name) else module.name).split(".")
    return module.kind, stack_of(module.name) or "", parts[-1], *(part for part in parts if part.isdigit())


def _differ_in_kind(experts: Mapping[str, Adapter]) -> bool:
    """Whether two experts each have modules that the other has in no layer.

    They may adapt different modules, such as attention and MLP, or use different names for the same ones.
    """
    if len({frozenset(adapter.parts) for adapter in experts.values()}) <= 1:
        return False
    modules = [{re.sub(r"\d+", "0", module) for module in adapter.parts} for adapter in experts.values()]
    return any(first - second and second - first for first, second in combinations(modules, 2))
