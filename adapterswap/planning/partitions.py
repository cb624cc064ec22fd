"""Which side of a partition, the task's or the language's, a module belongs to.

The second paper's partitions have two uses: composing takes each module from its side's expert, and partial training
changes only one side's modules. Both use the same rules, so they cannot disagree. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from adapterswap.experts.layers import Kind
from adapterswap.planning.compositions import Composition, Partition

__all__ = ["SIDES", "Side", "partition_sides"]

Side = Literal["task", "language"]
SIDES: tuple[Side, Side] = ("task", "language")


def partition_sides(partition: Partition, num_layers: int) -> Callable[[str, int | None, Kind], Side | None]:
    """A function from a module's name, layer and kind to its side; None for modules outside the layers.

    Norms follow their layer, like everything in it except attention.
    """
    rules = Composition(partition=partition).rules(num_layers)

    def side(name: str, layer: int | None, kind: Kind) -> Side | None:
        rule = next(rule for rule in rules if rule.matches(name, layer, kind))
        return next((side for side in SIDES if side == rule.expert), None)

    return side
