"""An adapter under other names: the base's own, or those under which a checkpoint stores its weights.

`Base.find` says what the base calls a module. Here an opened adapter gets these names; its file keeps the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from adapterswap.errors import ExpertError
from adapterswap.experts.adapter import Adapter, LoraModule, OpaqueModule, Part, by_layer
from adapterswap.model.base import Base
from adapterswap.model.layers import kind_of, layer_of

_Module = TypeVar("_Module", bound=Part)


def under_canonical_names(adapter: Adapter, base: Base, expert: str, base_name: str) -> Adapter:
    """The adapter with every module under its canonical name.

    Args:
        adapter: the opened adapter.
        base: the base, whose names these are.
        expert, base_name: the names of both in messages.
    """
    mapping: dict[str, str] = {}
    for module in adapter.parts.values():
        lora = module.lora if isinstance(module, OpaqueModule) else module
        shape = (lora.out_features, lora.in_features) if isinstance(lora, LoraModule) else None
        canonical = base.find(module.name, adapter.container, shape)
        if canonical is None:
            raise ExpertError(
                f"{expert} adapts {module.name}, but {base_name} has no module of this shape under this or an older "
                "name",
                "Pass the base that the experts adapt as `base_model`, or save the expert again with this version of "
                "transformers",
                parameter="base_model",
            )
        mapping[module.name] = canonical
    return renamed_adapter(adapter, mapping, expert, base.container)


def renamed_adapter(adapter: Adapter, mapping: Mapping[str, str], expert: str, container: str | None) -> Adapter:
    """The adapter with its modules renamed. Its file keeps the old names and is read by them.

    Args:
        adapter: the adapter.
        mapping: old name → new name, for every module.
        expert: the adapter's name, for messages.
        container: the list of layers under the new names.
    """
    if all(new == old for old, new in mapping.items()):
        return adapter
    for parts in ({**adapter.modules, **adapter.opaque}, adapter.saved):
        check_distinct({old: mapping[old] for old in parts}, expert)
    original = {mapping[name]: adapter.original.get(name, name) for name in adapter.parts}

    def moved(module: _Module) -> _Module:
        name = mapping[module.name]
        place: dict[str, Any] = {"name": name, "layer": layer_of(name, container), "kind": kind_of(name)}
        if isinstance(module, OpaqueModule) and module.lora is not None:
            return replace(module, lora=replace(module.lora, **place), **place)
        return replace(module, **place)

    modules = {module.name: module for module in map(moved, adapter.modules.values())}
    saved = {module.name: module for module in map(moved, adapter.saved.values())}
    opaque = {module.name: module for module in map(moved, adapter.opaque.values())}
    parts_moved: list[Part] = [*modules.values(), *opaque.values(), *saved.values()]
    layered = any(part.layer is not None for part in parts_moved)
    return replace(
        adapter,
        modules=by_layer(modules),
        saved=by_layer(saved),
        opaque=by_layer(opaque),
        container=container if layered else None,
        renamed=True,
        original=original,
    )


def check_distinct(mapping: Mapping[str, str], whose: str) -> None:
    """Raise `ExpertError` if two names of `whose` would become the same."""
    old_names: dict[str, str] = {}
    for old, new in mapping.items():
        if new in old_names:
            raise ExpertError(
                f"{whose}: {old_names[new]} and {old} are two names of one module, {new}", "Save the expert again"
            )
        old_names[new] = old
