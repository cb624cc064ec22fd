"""PEFT's own calls that would disturb a composition, guarded while one is active.

PEFT resets every layer when an adapter is added, and makes adapters trainable when `disable_adapter` ends; deleting or
setting an adapter changes layers whose setting a composition relies on. The model's methods are replaced on this one
object and put back with the composition's end. Knows PEFT's methods; knows nothing of compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from adapterswap.errors import AdapterswapError

__all__ = ["Guard"]

_GUARDED = ("add_adapter", "delete_adapter", "disable_adapter", "set_adapter")


class Guard:
    """Guards a PeftModel until `remove`.

    * `add_adapter`, and with it `load_adapter`: afterwards, whether it succeeded or not, `changed` is called.
    * `disable_adapter`: at the end of its block `enabled` is called.
    * `set_adapter`, `delete_adapter`: refused.

    Args:
        model: the PeftModel.
        changed: puts the composition back after the model's adapters changed.
        enabled: freezes the adapters again.
    """

    def __init__(self, model: Any, changed: Callable[[], None], enabled: Callable[[], None]) -> None:
        self._model = model
        self._before = {name: vars(model)[name] for name in _GUARDED if name in vars(model)}
        add, disable = model.add_adapter, model.disable_adapter

        def add_adapter(*args: Any, **kwargs: Any) -> Any:
            try:
                return add(*args, **kwargs)
            finally:
                changed()

        @contextmanager
        def disable_adapter() -> Iterator[None]:
            try:
                with disable():
                    yield
            finally:
                enabled()

        model.add_adapter = add_adapter
        model.disable_adapter = disable_adapter
        model.set_adapter = _refuse("set_adapter")
        model.delete_adapter = _refuse("delete_adapter")

    def remove(self) -> None:
        for name in _GUARDED:
            delattr(self._model, name)  # the class's own methods show again
        for name, method in self._before.items():
            setattr(self._model, name, method)


def _refuse(name: str) -> Callable[..., None]:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AdapterswapError(
            f"{name} was called while a composition is active",
            "Leave the composition first: composer.reset(), or the end of the `with` block",
        )

    return refused
