"""Switch modules that experts trained in full (PEFT's `modules_to_save`) in a running model.

PEFT keeps a copy of such a module for every expert and computes with one of them, so taking one expert's module costs
nothing. For an average, one more copy is made and filled again at every switch. Knows PEFT's wrapper, but not plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from adapterswap.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["find_wrappers", "forget_average", "match_dtypes", "use_in_full"]

_AVERAGE = "__adapterswap_average__"  # the name of the additional copy in PEFT's wrapper
_ELEMENTS = 2**22  # to average at a time


def find_wrappers(model: Any) -> dict[str, Any]:
    """PEFT's wrappers of modules that an expert trained in full, by the module's full name in the base model.

    PEFT also wraps modules without weights, such as an `Identity` in place of a norm; these are left out.
    """
    from peft.utils import ModulesToSaveWrapper

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.state_dict()
    }


def match_dtypes(model: Any, name: str) -> None:
    """Convert the modules that an expert trained in full to the dtypes of the base's own modules.

    PEFT does this itself unless it loads with `low_cpu_mem_usage`, which keeps the dtypes in the file.
    """
    for wrapper in find_wrappers(model).values():
        if name not in wrapper.modules_to_save:
            continue
        own = wrapper.original_module.state_dict()
        for key, tensor in wrapper.modules_to_save[name].state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and own[key].is_floating_point():
                tensor.data = tensor.data.to(own[key].dtype)


def use_in_full(name: str, wrapper: Any, coefficients: Mapping[str, float]) -> None:
    """Compute a module with W = Σ c_i·W_i + (1 - Σ c_i)·W_base from now on; without coefficients, with W_base.

    Args:
        name: the module's name, for messages.
        wrapper: PEFT's wrapper, which holds every W_i.
        coefficients: c_i by expert.

    Raises:
        UnsupportedError: the weights to average are quantised or offloaded.
    """
    if not coefficients:
        active = []
    elif list(coefficients.values()) == [1]:
        active = list(coefficients)
    else:
        _fill(name, wrapper, coefficients)
        active = [_AVERAGE]
    if wrapper.active_adapters != active:
        wrapper.set_adapter(active, inference_mode=True)


def forget_average(wrapper: Any) -> None:
    """Free the copy that holds an average, if there is one. The wrapper then computes the base's module."""
    wrapper.delete_adapter(_AVERAGE, None)


def _fill(name: str, wrapper: Any, coefficients: Mapping[str, float]) -> None:
    """Compute the average in float32, round it once, and store it in the wrapper's additional copy."""
    import torch

    if _AVERAGE not in wrapper.modules_to_save:
        wrapper.update(_AVERAGE)
        wrapper.modules_to_save[_AVERAGE].requires_grad_(False)
    base = wrapper.original_module.state_dict()
    experts = {expert: wrapper.modules_to_save[expert].state_dict() for expert in coefficients}
    base_coefficient = 1 - sum(coefficients.values())
    with torch.no_grad():
        for key, target in wrapper.modules_to_save[_AVERAGE].state_dict().items():
            parts = [(coefficient, experts[expert][key]) for expert, coefficient in coefficients.items()]
            if abs(base_coefficient) > 1e-12:
                parts.append((base_coefficient, base[key]))
            if odd := [part for _, part in parts if part.is_meta or not part.is_floating_point()]:
                raise UnsupportedError(
                    f"{name} is trained in full and {'offloaded' if odd[0].is_meta else 'quantised'}, so it cannot be "
                    "averaged",
                    f"Give it to one expert in its own rule: {{modules: [{name}], expert: NAME}}",
                    parameter="composition",
                )
            for rows in _blocks(target):
                wide = torch.promote_types(target.dtype, torch.float32)
                total = torch.zeros_like(target[rows], dtype=wide)
                for coefficient, part in parts:
                    total.add_(part[rows].to(target.device, wide), alpha=coefficient)
                target[rows] = total


def _blocks(tensor: torch.Tensor) -> Iterator[Any]:
    """Slices along the first axis, each with about `_ELEMENTS` elements."""
    if tensor.dim() == 0:
        yield ...
        return
    step = max(1, _ELEMENTS * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)
