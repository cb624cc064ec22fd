"""What has been decided about a plan at each stage of making it: what the path hands on, and gates look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor
from adapterswap.core.model.layers import NumLayers
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.rules import Rule
from adapterswap.core.planning.slots import Slot

Expert = Adapter | Checkpoint


class Request(NamedTuple):
    """A composition, the experts that it names, and those that the caller passed."""

    composition: Composition
    names: Sequence[str]
    experts: Mapping[str, object]


class Opened(NamedTuple):
    """The opened experts of a composition; `recorded` if a record says that they belong together."""

    composition: Composition
    experts: Mapping[str, Expert]
    recorded: bool = False

    @property
    def adapters(self) -> dict[str, Adapter]:
        """Those that are adapters."""
        return {name: expert for name, expert in self.experts.items() if isinstance(expert, Adapter)}


class Layered(NamedTuple):
    """Adapters whose layers have been counted, with the base's number of layers."""

    adapters: Mapping[str, Adapter]
    num_layers: NumLayers
    composition: Composition


class Ruled(NamedTuple):
    """The rules of a composition for a number of layers."""

    rules: Sequence[Rule]
    num_layers: NumLayers


class Skeleton(NamedTuple):
    """The checkpoint like which full weights are written, what messages call it, the full experts, the depth, and the
    requested owner of the config."""

    name: str
    checkpoint: Checkpoint
    experts: Mapping[str, Checkpoint]
    num_layers: NumLayers
    config_from: str | None = None


class Filled(NamedTuple):
    """Slots with their terms, and the slots that no rule matches."""

    slots: list[Slot]
    uncovered: list[Slot]


class Rowed(NamedTuple):
    """Slots of full weights whose embeddings and heads have the rows of all tokens."""

    slots: Sequence[Slot]
    skeleton: Skeleton
    rules: Sequence[Rule]


class Ends(NamedTuple):
    """The slots of full weights with all rows, the base's tensors, and its config."""

    slots: Mapping[str, Slot]
    stored: Mapping[str, StoredTensor]
    config: Mapping[str, Any]


class Merging(NamedTuple):
    """A plan of adapters, and the base into which they are merged."""

    plan: Plan
    base: Checkpoint


class Planned(NamedTuple):
    """A finished plan.

    Attributes:
        plan: the plan.
        names: the experts that the composition names.
        uncovered: slots that no rule matches.
        recorded: see `Opened`.
        base_at_hand: whether the base's own weights can be read.
    """

    plan: Plan
    names: Sequence[str]
    uncovered: Sequence[Slot] = ()
    recorded: bool = False
    base_at_hand: bool = False
