"""One name for each module: experts may be saved from different classes and versions of their base's model.

Names are compared from headers alone. The base's model is built only if two names may mean one module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from adapterswap.core.changes.locations import locate_all
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import Part
from adapterswap.core.model.base import Base
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.layers import ModuleName, of_any_stack
from adapterswap.core.model.sources import Source
from adapterswap.core.planning.facts import BaseFacts
from adapterswap.kit.errors import AdapterswapError, ExpertError, Problems


class Aligned(NamedTuple):
    """Experts with one name for each module of their base, as far as it is known.

    Attributes:
        experts: by name; as they were if no two of their names can mean one module, or if the base cannot tell.
        differing: a sentence about two names that may mean one module; None if there are none.
        reference: the base that was compared with; None if neither the experts nor the caller name one.
        unreadable: why that base cannot be read.
        misnamed: why experts have no names of the base.
    """

    experts: dict[str, Adapter]
    differing: str | None = None
    reference: str | None = None
    unreadable: AdapterswapError | None = None
    misnamed: tuple[AdapterswapError, ...] = ()


def aligned(experts: Mapping[str, Adapter], base: Checkpoint | None = None) -> dict[str, Adapter]:
    """Adapters of one base, with one name for each of its modules.

    Args:
        experts: the adapters by name.
        base: their base, whose names for its stored weights they get; without it, names are compared with those of the
            first base that an adapter names.

    Raises:
        ExpertError: two names may mean one module, and the base cannot tell; a module that the base lacks.
    """
    declared = None
    if base is not None:
        declared = str(base.source.folder)
    result = align(experts, BaseFacts.of(experts, declared))
    problems = Problems(ExpertError)
    check_alignment(result, problems)
    problems.raise_if_any()
    if base is None or not experts:
        return result.experts

    located = locate_all(result.experts, base, problems).located
    problems.raise_if_any()

    # The name of a stored tensor without its end, such as `.weight`, is its module's.
    renamed = {}
    for name, adapter in result.experts.items():
        keys = {found.module: key.rpartition(".")[0] for key, found in located[name].items()}
        names = {part: keys.get(part, part) for part in adapter.parts}
        renamed[name] = adapter.with_names(names, name, base.container)
    return renamed


def align(experts: Mapping[str, Adapter], base: BaseFacts) -> Aligned:
    """The experts, with one name for each module of their base.

    If their modules have entirely different names, they are compared with the base's if the base is on this machine.
    """
    differing, reference = _differing_names(experts), base.reference
    unchanged = Aligned(dict(experts), differing, reference)
    if reference is None:
        return unchanged

    # The model takes a second or two to build, so only a doubt is worth it, and a mere suspicion no download.
    if not differing and not (_differ_in_kind(experts) and base.local.config is not None):
        return unchanged
    try:
        model = Base.at(Source.of_base(reference).folder, reference)
    except AdapterswapError as error:
        return unchanged._replace(unreadable=error)

    renamed, misnamed = dict(experts), list[AdapterswapError]()
    for name, adapter in experts.items():
        try:
            renamed[name] = adapter.under_names_of(model, name, reference)
        except AdapterswapError as error:
            misnamed.append(error)
    return Aligned(renamed, differing, reference, misnamed=tuple(misnamed))


def check_alignment(result: Aligned, problems: Problems) -> None:
    """Report names that may mean one module if no base tells, and modules that the base lacks."""
    if result.differing is not None and result.reference is None:
        problems.add(
            f"{result.differing}, but no base model is named to compare them with",
            "Pass `base_model`",
            parameter="base_model",
            kind=ExpertError,
        )
    elif result.differing is not None and result.unreadable is not None:
        problems.add(
            f"{result.differing}, and the base {result.reference} cannot be read to decide it: "
            f"{result.unreadable.problems[0].message}",
            "Pass the base's folder as `base_model`, or use experts that were saved from the same model class with "
            "the same version of transformers",
            parameter="base_model",
            kind=ExpertError,
        )

    for error in result.misnamed:
        with problems.collect():
            raise error


def _differing_names(experts: Mapping[str, Adapter]) -> str | None:
    """A sentence about two names in different experts that may mean one module; None if there are none."""
    # The lists of layers
    layered: dict[str, str] = {}
    for name, adapter in experts.items():
        if adapter.container is not None:
            layered[name] = adapter.container
    for name, container in layered.items():
        first_name, first = next(iter(layered.items()))
        if of_any_stack(container) != of_any_stack(first):
            return (
                f"The layers are named {first}.N in {first_name} but {container}.N in {name}; these may be the same "
                "modules"
            )

    # Single modules
    for name, adapter in experts.items():
        for other, theirs in experts.items():
            twin = _twin(adapter.parts, theirs.parts)
            if twin is not None:
                return f"{name} adapts {twin[0]} and {other} adapts {twin[1]}; these may be the same module"
    return None


def _twin(ours: Mapping[str, Part], theirs: Mapping[str, Part]) -> tuple[str, str] | None:
    """A name that is only in `ours` and one that is only in `theirs`, if the two may mean one module."""
    mine = sorted(ours.keys() - theirs.keys())
    if not mine:
        return None

    # By their ends: a class inside another has shorter names for the same modules.
    for long in mine:
        for short in _other_names(long, theirs):
            if short not in ours:
                return long, short

    # By what every name of a module shares
    by_place = {_place(theirs[name]): name for name in sorted(theirs.keys() - ours.keys())}
    for name in mine:
        place = _place(ours[name])
        if place in by_place:
            return name, by_place[place]
    return None


def _other_names(module: str, names: Collection[str]) -> Iterator[str]:
    """Those of `names` that may mean `module`: its end, or an embedding or head under another prefix."""
    _, *ends = ModuleName(module).ends()
    for end in ends:
        if end in names:
            yield end

    # A model has few embeddings and heads, so their last part alone may say which one is meant.
    if ModuleName(module).is_vocabulary(None):
        last = module.rpartition(".")[2]
        for name in sorted(names):
            if name != module and name.rpartition(".")[2] == last:
                yield name


def _place(module: Part) -> tuple[str, ...]:
    """The parts that all names of one module share: its kind and stack, the numbers in the name, its last part."""
    name = module.name
    if ModuleKeys(name).is_bias:
        name = name.removesuffix(".bias")

    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return module.kind, ModuleName(module.name).stack or "", parts[-1], *numbers


def _differ_in_kind(experts: Mapping[str, Adapter]) -> bool:
    """Whether two experts each have modules that the other has in no layer.

    They may adapt different modules, such as attention and MLP, or use different names for the same ones.
    """
    # Most experts adapt the same modules, and comparing these is quicker than replacing numbers in all their names.
    if len({frozenset(adapter.parts) for adapter in experts.values()}) <= 1:
        return False

    modules = []
    for adapter in experts.values():
        modules.append({re.sub(r"\d+", "0", module) for module in adapter.parts})
    return any(first - second and second - first for first, second in combinations(modules, 2))
