"""Activate one composition after another in a model, and restore the previous state when each is left.

Knows switches, rows and pins, and PEFT's calls that disturb them, but not the names of compositions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adapterswap.errors import UnsupportedError
from adapterswap.live.batching import Rows
from adapterswap.live.catalogue import Catalogue
from adapterswap.live.compiled import Pin
from adapterswap.live.guard import Guard
from adapterswap.live.inventory import is_unloaded
from adapterswap.live.switching import InitialState, Switch, apply_switch, unmerge

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["Session"]


class Session:
    """Tracks the active composition of a model.

    Attributes:
        active: what the model computes now; None if no composition is active.
        pin: the experts that stay active for a compiled graph, if any.
    """

    def __init__(self, model: PeftModel, catalogue: Catalogue) -> None:
        self.active: Switch | Rows | None = None
        self.pin: Pin | None = None
        self._model = model
        self._catalogue = catalogue
        self._baseline: InitialState | None = None
        self._guard: Guard | None = None

    def set(self, wanted: Switch | Rows) -> None:
        """Compute `wanted` from now on. If that fails, restore what was computed before.

        Raises:
            CompositionError: an expert was deleted, or is not pinned.
            UnsupportedError: adapters are merged, or a layer cannot be computed row by row.
        """
        self._catalogue.refresh()
        if any(layer.merged for layer in self._catalogue.inventory.layers.values()):
            raise UnsupportedError("adapters are merged into the model's weights", "Call unmerge_adapter() first")
        if self.pin is not None and isinstance(wanted, Switch):
            self.pin.check(wanted)
        before = self.active
        if self._baseline is None:
            self._baseline = InitialState(self._catalogue.inventory)
            self._guard = Guard(self._model, self._reapply, self._baseline.freeze)
        try:
            self._apply(wanted)
        except BaseException:
            if before is None:
                self.reset()
            else:
                self._apply(before)
            raise

    def reset(self) -> None:
        """Restore the state before any composition. A model without its LoRA layers is not changed."""
        baseline, guard, self._baseline, self._guard = self._baseline, self._guard, None, None
        if isinstance(self.active, Rows):
            self.active.withdraw()
        self.active = None
        if guard is not None:
            guard.remove()
        if baseline is not None and not is_unloaded(self._model):
            baseline.restore()

    @contextmanager
    def using(self, wanted: Switch | Rows) -> Iterator[None]:
        """Compute `wanted` inside the block, and restore what was computed before; raises the errors of `set`."""
        before = self.active
        self.set(wanted)
        try:
            yield
        finally:
            self._return_to(before)

    @contextmanager
    def pinned(self, experts: Sequence[str]) -> Iterator[None]:
        """Keep the experts active inside the block, where compositions only change numbers in tensors; see `Pin`.

        Raises:
            UnsupportedError: a composition is active, or adapters are merged.
        """
        if self.active is not None:
            raise UnsupportedError("a composition is active", "Leave it first: call pinned() before use() or set()")
        self.pin = Pin(experts)
        try:
            self.set(Switch())
            yield
        finally:
            self.pin = None
            self.reset()

    def _return_to(self, before: Switch | Rows | None) -> None:
        if before is None or is_unloaded(self._model):
            self.reset()
            return
        try:
            unmerge(self._catalogue.inventory.layers.values())
            self.set(before)
        except BaseException:
            self.reset()
            raise

    def _apply(self, wanted: Switch | Rows) -> None:
        inventory = self._catalogue.inventory
        if isinstance(self.active, Rows):
            self.active.withdraw()
        if isinstance(wanted, Rows):
            wanted.apply(inventory)
        elif self.pin is not None:
            self.pin.apply(wanted, inventory)
        else:
            apply_switch(wanted, inventory)
        self.active = wanted

    def _reapply(self) -> None:
        """Restore the composition after PEFT reset all layers to add an adapter."""
        if self._baseline is not None and self.active is not None:
            self._catalogue.refresh()
            self._baseline.extend(self._catalogue.inventory)
            self._apply(self.active)
