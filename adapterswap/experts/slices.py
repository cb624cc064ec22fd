"""Which layers a slice keeps, as the record in its folder says: the others were cut away, and nothing may need them.

An adapter without a module in a layer does not change that layer; a slice without it does not know. Knows records only
as far as this, and no plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterswap.errors import ExpertError
from adapterswap.experts.layers import STACKS, NumLayers, Stack, format_layers, parse_layers
from adapterswap.files.smallfiles import read_json

__all__ = ["PROVENANCE", "KeptLayers", "every_layer", "recorded_layers"]

PROVENANCE = "adapterswap.json"


@dataclass(frozen=True)
class KeptLayers:
    """The layers that a slice keeps, by stack; under None, those of any stack."""

    by_stack: Mapping[Stack | None, frozenset[int]]

    @classmethod
    def of(cls, layers: str | Mapping[Stack, str], stack: str | None = None) -> KeptLayers:
        """Parse `0-4,30-31`, of any stack or of one, or such a text for each stack.

        Raises:
            ValueError: a text is not a list of layers, or a stack is unknown.
        """
        by_stack: dict[Stack | None, frozenset[int]] = {}
        for key, text in layers.items() if isinstance(layers, Mapping) else [(stack, layers)]:
            if key not in (None, *STACKS):
                raise ValueError(f"{key!r} is not one of {', '.join(STACKS)}")
            by_stack[next((name for name in STACKS if name == key), None)] = parse_layers(text)
        return cls(by_stack)

    def has(self, stack: Stack | None, layer: int) -> bool:
        """Whether the layer of this stack is kept."""
        return any(layer in layers for key, layers in self.by_stack.items() if key in (None, stack))

    def __str__(self) -> str:
        return " and ".join(
            f"{f'{stack} ' if stack else ''}layers {format_layers(layers)}" for stack, layers in self.by_stack.items()
        )


def every_layer(num_layers: NumLayers) -> list[tuple[Stack | None, int]]:
    """Every layer of a model of this depth, with its stack if the model has two."""
    if isinstance(num_layers, int):
        return [(None, layer) for layer in range(num_layers)]
    return [(stack, layer) for stack, depth in num_layers.items() for layer in range(depth)]


def recorded_layers(folder: Path) -> KeptLayers | None:
    """The layers of the slice in a folder, from its adapterswap.json; None if it is not a slice."""
    try:
        recorded = read_json(folder / PROVENANCE, "")["slice"]
        return KeptLayers.of(recorded["layers"], recorded.get("stack"))
    except (ExpertError, ValueError, KeyError, TypeError, AttributeError):
        return None
