"""Guard PEFT's own calls that would disturb a composition while one is active.

PEFT resets every layer when an adapter is added, and makes adapters trainable when `disable_adapter` ends. Setting or
deleting an adapter changes layers whose settings a composition relies on. These methods are replaced on this one model
and restored when the composition ends. Knows PEFT's methods, but not compositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapterswap.errors import UnsupportedError

__all__ = ["Guard"]


class Guard:
    """Guards a PeftModel until `remove`.

    * After `add_adapter`, which `load_adapter` calls, `changed` is called, whether it succeeded or not.
    * After `enable_adapter_layers`, which `disable_adapter` calls at its end, `enabled` is called.
    * `set_adapter` and `delete_adapter` are refused.

    Args:
        model: the PeftModel.
        changed: restores the composition after the model's adapters changed.
        enabled: freezes the adapters again.
    """

    def __init__(self, model: Any, changed: Callable[[], None], enabled: Callable[[], None]) -> None:
        guarded = [
            (model, "add_adapter", _followed(model.add_adapter, changed)),
            (model.base_model, "enable_adapter_layers", _followed(model.base_model.enable_adapter_layers, enabled)),
            (model, "set_adapter", _refused("set_adapter")),
            (model, "delete_adapter", _refused("delete_adapter")),
        ]
        self._before = [(owner, name, vars(owner).get(name)) for owner, name, _ in guarded]
        for owner, name, method in guarded:
            setattr(owner, name, method)

    def remove(self) -> None:
        for owner, name, method in self._before:
            delattr(owner, name)  # the class's own method is visible again
            if method is not None:
                setattr(owner, name, method)


def _followed(method: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            after()

    return call


def _refused(name: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"{name} was called while a composition is active",
            "Leave the composition first: call composer.reset() or leave the `with` block",
        )

    return refuse
