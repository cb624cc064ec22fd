"""Divide an export into files that requests can scale: by layer, by layer and kind of module, or by zone.

A zone is a run of consecutive layers of one expert or one blend, so that a request can change the strength of each part
of the composition. Knows plans and names; writes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adapterswap.experts.layers import Kind
from adapterswap.planning.slots import Slot
from adapterswap.writing.gguf_layout import GgufTensor, PreparedGguf

__all__ = ["DIVISIONS", "Division", "Part", "divide"]

Division = Literal["layer", "kind", "zone"]

DIVISIONS: tuple[Division, ...] = ("layer", "kind", "zone")
"""What each file holds: a layer; the attention, the MLP or the other modules of a layer; a zone."""


@dataclass(frozen=True)
class Part:
    """The content of one file.

    Attributes:
        name: the file's name, without its suffix.
        layers: the layers that it changes; empty for modules outside the layers.
        kind: the kind of modules that it changes, if files are divided by kind.
        tensors: its tensors.
    """

    name: str
    layers: tuple[int, ...]
    kind: Kind | None
    tensors: tuple[GgufTensor, ...]


def divide(prepared: PreparedGguf, by: Division) -> list[Part]:
    """The parts of an export, in the order of their first layer; modules outside the layers come last."""
    width = max(2, len(str(prepared.plan.one_depth("`export`") - 1)))
    if by == "zone":
        return _zones(prepared, width)
    groups: dict[tuple[int | None, Kind | None], list[GgufTensor]] = {}
    for tensor in sorted(prepared.tensors, key=lambda t: (t.layer is None, t.layer or 0, t.kind)):
        kind = tensor.kind if by == "kind" and tensor.layer is not None else None
        groups.setdefault((tensor.layer, kind), []).append(tensor)
    return [
        Part(
            "outside" if layer is None else f"layer-{layer:0{width}}" + (f"-{kind}" if kind else ""),
            () if layer is None else (layer,),
            kind,
            tuple(tensors),
        )
        for (layer, kind), tensors in groups.items()
    ]


def _zones(prepared: PreparedGguf, width: int) -> list[Part]:
    """Runs of layers that share an owner or a blend; if modules of a layer differ, each share is a zone."""
    slots = prepared.plan.slots
    shares = {tensor.module: _share(slots[tensor.module]) for tensor in prepared.tensors}
    layers: dict[int | None, dict[str, list[GgufTensor]]] = {}
    for tensor in sorted(prepared.tensors, key=lambda t: (t.layer is None, t.layer or 0)):
        layers.setdefault(tensor.layer, {}).setdefault(shares[tensor.module], []).append(tensor)
    zones: list[tuple[list[int], str, list[GgufTensor]]] = []
    running: dict[str, tuple[list[int], str, list[GgufTensor]]] = {}
    for layer, by_share in layers.items():
        # A zone continues if the layer before was divided in the same way among the same owners.
        continues = layer is not None and running.keys() == by_share.keys()
        continues = continues and all(zone[0] and zone[0][-1] == (layer or 0) - 1 for zone in running.values())
        if not continues:
            running = {share: ([], share, []) for share in by_share}
            zones += running.values()
        for share, tensors in by_share.items():
            running[share][0].extend([] if layer is None else [layer])
            running[share][2].extend(tensors)
    parts: list[Part] = []
    for numbers, share, tensors in zones:
        ends = dict.fromkeys((numbers[0], numbers[-1])) if numbers else ()
        span = "-".join(f"{end:0{width}}" for end in ends) or "outside"
        owner = "+".join(re.sub(r"[^\w.-]", "_", name) for name in prepared.plan.experts if name in _experts_of(share))
        parts.append(Part(f"zone-{span}-{owner}", tuple(numbers), None, tuple(tensors)))
    return _distinct(parts)


def _share(slot: Slot) -> str:
    """A key for a module's result: equal for modules that share an owner, or a method and its coefficients."""
    return json.dumps([slot.coefficients, slot.method], sort_keys=True)


def _experts_of(share: str) -> Sequence[str]:
    """The experts of a `_share`."""
    owner = json.loads(share)[0]
    return [owner] if isinstance(owner, str) else list(owner)


def _distinct(parts: Sequence[Part]) -> list[Part]:
    """The parts, with numbers after names that occur twice: blends of the same experts with other weights."""
    counts: dict[str, int] = {}
    renamed = []
    for part in parts:
        count = counts[part.name] = counts.get(part.name, 0) + 1
        name = part.name if count == 1 else f"{part.name}-{count}"
        renamed.append(Part(name, part.layers, part.kind, part.tensors))
    return renamed
