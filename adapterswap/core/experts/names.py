"""An adapter under other names: the base's own, or those under which a checkpoint stores its weights.

`Base.find` says what the base calls a module. Here an opened adapter gets these names; its file keeps the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adapterswap.core.experts.adapter import Adapter, by_layer
from adapterswap.core.model.base import Base
from adapterswap.core.model.layers import ModuleName
from adapterswap.kit.errors import ExpertError


def under_canonical_names(adapter: Adapter, base: Base, expert: str, base_name: str) -> Adapter:
    """The adapter with every module under its canonical name.

    Args:
        adapter: the opened adapter.
        base: the base, whose names these are.
        expert, base_name: the names of both in messages.
    """
    mapping: dict[str, str] = {}
    for module in adapter.parts.values():
        shape = (module.lora.out_features, module.lora.in_features) if module.lora else None
        canonical = base.find(module.name, adapter.container, shape)
        if canonical is None:
            raise ExpertError(
                f"{expert} adapts {module.name}, but {base_name} has no module of this shape under this or an older "
                "name",
                module.misnamed
                or "Pass the base that the experts adapt as `base_model`, or save the expert again with this version "
                "of transformers",
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
    check_distinct(mapping, expert)
    parts = by_layer(
        part.at(mapping[old], ModuleName(mapping[old]).layer(container)) for old, part in adapter.parts.items()
    )
    layered = any(part.layer is not None for part in parts.values())
    original = {mapping[name]: adapter.original.get(name, name) for name in adapter.parts}
    return replace(adapter, parts=parts, container=container if layered else None, renamed=True, original=original)


def check_distinct(mapping: Mapping[str, str], whose: str) -> None:
    """Raise `ExpertError` if two names of `whose` would become the same."""
    old_names: dict[str, str] = {}
    for old, new in mapping.items():
        if new in old_names:
            raise ExpertError(
                f"{whose}: {old_names[new]} and {old} are two names of one module, {new}", "Save the expert again"
            )
        old_names[new] = old
