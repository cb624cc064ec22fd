"""Map a mixture's fused parameters in memory to the tensors that a checkpoint stores.

transformers 5 keeps a layer's experts in two parameters, `experts.gate_up_proj` and `experts.down_proj`, with a matrix
for each expert. Checkpoints store them in this form or matrix by matrix (`experts.3.up_proj.weight`), and transformers'
conversion rules relate the two forms. Knows models and names; reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterswap.experts.anatomy import conversions

__all__ = ["FusedParameter", "StoredPart", "fused_parameters"]

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that holds the rows `start` to `stop` of one expert's matrix."""

    key: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class FusedParameter:
    """A parameter with a matrix for each expert: (experts, rows, columns).

    Attributes:
        name: its name in the model.
        shape: its shape.
        transposed: whether each matrix is in×out, as PEFT sees it.
        key: the stored tensor that equals the parameter; None if there is none.
        parts: otherwise the stored tensors whose rows form its matrices; empty if they do not have this form.
    """

    name: str
    shape: tuple[int, int, int]
    transposed: bool
    key: str | None
    parts: tuple[StoredPart, ...]


def fused_parameters(model: Any, stored: Mapping[str, tuple[int, ...]]) -> dict[str, FusedParameter]:
    """A model's parameters with three axes, by name.

    Args:
        model: a transformers model, with or without weights.
        stored: the checkpoint's keys and shapes.
    """
    convert = conversions(model)
    alone: dict[str, str] = {}
    sources: dict[str, list[tuple[str, Any, str | None]]] = {}
    for key in stored:
        name, rule, pattern = convert(key)
        if rule is None:
            alone[name] = key
        else:
            sources.setdefault(name, []).append((key, rule, pattern))
    modules = dict(model.named_modules())
    fused = {}
    for name, parameter in model.state_dict().items():
        if parameter.dim() != 3:
            continue
        holder = modules.get(name.rpartition(".")[0])
        shape = tuple(parameter.shape)
        parts = _parts(shape, sources.get(name, ()), stored)
        transposed = bool(getattr(holder, "is_transposed", False))
        fused[name] = FusedParameter(name, shape, transposed, alone.get(name), parts)
    return fused


def _parts(
    shape: tuple[int, int, int],
    sources: Iterable[tuple[str, Any, str | None]],
    stored: Mapping[str, tuple[int, ...]],
) -> tuple[StoredPart, ...]:
    """The place of each stored matrix, if transformers only stacks matrices and concatenates their rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    parts: list[StoredPart] = []
    matrices: dict[int, dict[int, str]] = {}
    for key, rule, pattern in sources:
        kinds = [type(operation) for operation in rule.operations]
        dims = [getattr(operation, "dim", None) for operation in rule.operations]
        stacked = (kinds, dims) == ([MergeModulelist], [0])
        below = (kinds, dims) == ([MergeModulelist, Concatenate], [0, 1])
        number = _EXPERT.search(key)
        if number is None or not (below or (stacked and len(rule.source_patterns) == 1)):
            return ()
        matrices.setdefault(int(number[1]), {})[rule.source_patterns.index(pattern)] = key
    if set(matrices) != set(range(shape[0])):
        return ()
    for expert, keys in matrices.items():
        start = 0
        for _, key in sorted(keys.items()):
            sizes = stored[key]
            if len(sizes) != 2 or sizes[1] != shape[2]:
                return ()
            parts.append(StoredPart(key, expert, start, start + sizes[0]))
            start += sizes[0]
        if start != shape[1]:
            return ()
    return tuple(parts)
