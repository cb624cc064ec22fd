"""The tables of `inspect`: what an expert holds, part by part, with the values that each kind of part has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.parts import FullModule, LoraModule, OpaqueModule
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import Kind, ModuleName
from adapterswap.engines.gguf.adapter import GgufAdapter, GgufModule


@dataclass(frozen=True)
class PartRow:
    """A part of an expert.

    Attributes:
        name: its name within its layer, with the stack in front in a model with two; outside the layers, its full name.
        kind: attention, mlp, …
        layer: its layer; None outside the layers.
        values: by the name of the column; `shape` and `out × in` are tuples.
        nbytes: its size; None where a table does not show it.
    """

    name: str
    kind: Kind
    layer: int | None
    values: dict[str, Any]
    nbytes: int | None = None


def tables(expert: Adapter | Checkpoint | GgufAdapter) -> dict[str, list[PartRow]]:
    """The parts of an expert by what they are: `module`, `tensor`, a kind of PEFT, `trained in full`…

    Nothing has an empty table.
    """
    if isinstance(expert, GgufAdapter):
        all_tables = {"module": [_gguf_row(module) for module in expert.modules.values()]}
    elif isinstance(expert, Checkpoint):
        all_tables = {"tensor": _tensor_rows(expert.parameters.values(), expert.has_both_stacks)}
    else:
        has_stacks = expert.has_both_stacks
        in_full = [part for part in expert.saved.values() if not part.rows]
        all_tables = {
            "module": [_lora_row(module, has_stacks) for module in expert.modules.values()],
            expert.config.title: _tensor_rows(expert.opaque.values(), has_stacks),
            "trained in full": _tensor_rows(in_full, has_stacks),
            "trained tokens": _tensor_rows(expert.tokens.values(), has_stacks),
        }
    return {title: rows for title, rows in all_tables.items() if rows}


def _lora_row(module: LoraModule, has_stacks: bool) -> PartRow:
    values = {
        "rank": module.rank,
        "α": module.alpha,
        "s": module.scale,
        "out × in": (module.out_features, module.in_features),
        "dtype": module.dtype,
    }
    return PartRow(_within(module.name, module.layer, has_stacks), module.kind, module.layer, values)


def _gguf_row(module: GgufModule) -> PartRow:
    name = module.name
    if module.layer is not None:
        name = name.removeprefix(f"blk.{module.layer}.")
    shape = (module.out_features, module.in_features)
    return PartRow(name, module.kind, module.layer, {"rank": module.rank, "out × in": shape, "dtype": module.dtype})


def _tensor_rows(parts: Iterable[FullModule | OpaqueModule | StoredTensor], has_stacks: bool) -> list[PartRow]:
    """A row for each tensor of each part."""
    rows = []
    for part in parts:
        tensors = {"": part.tensor} if isinstance(part, StoredTensor) else part.tensors
        for last, tensor in tensors.items():
            name = _within(f"{part.name}.{last}".removesuffix("."), part.layer, has_stacks)
            values = {"shape": tensor.shape, "dtype": tensor.dtype}
            rows.append(PartRow(name, part.kind, part.layer, values, tensor.nbytes))
    return rows


def _within(name: str, layer: int | None, has_stacks: bool) -> str:
    if layer is None:
        return name
    within = ModuleName(name).within(layer)
    if has_stacks:
        within = f"{ModuleName(name).stack} {within}"
    return within
