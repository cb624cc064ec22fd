"""Start training from an adapter in a loaded model: a new LoRA takes over its factors, or lies on top of it."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.engines.live.inventory import factors_by_module
from adapterswap.engines.live.loader import check_copies_in_model, load_expert
from adapterswap.kit.errors import UnsupportedError


def take_over(model: Any, adapter: Adapter, trained: Container[str]) -> None:
    """Give the model's own LoRA an adapter's factors, and freeze those of modules that are not trained."""
    import torch
    from safetensors import safe_open

    tensors = factors_by_module(model, "default")
    old_names = {old: new for new, old in adapter.original.items()}
    check_copies_in_model(adapter.file, "the start", dict(model.get_base_model().named_modules()), old_names)
    with torch.no_grad(), safe_open(adapter.file.path, "pt") as file:
        for name, module in adapter.modules.items():
            for parameter, stored in ((tensors[name].a, module.a), (tensors[name].b, module.b)):
                parameter.copy_(file.get_tensor(stored.name))
                parameter.requires_grad_(name in trained)


def put_below(model: Any, adapter: Adapter, *, quantized: bool) -> Any:
    """The base's model with an adapter in it: merged into its weights or, if those are quantized, added to outputs."""
    loaded = load_expert(model, adapter, "below")
    if not quantized:
        return loaded.merge_and_unload()

    terms = factors_by_module(loaded, "below")
    model = loaded.unload()
    for name, term in terms.items():
        if term.embedding:
            raise UnsupportedError(
                f"The start adapts the embedding {name}, and the base is quantized",
                "Train without `quantization`, or start from the adapter itself",
                parameter="start",
            )
        scale = adapter.modules[name].scale
        model.get_submodule(name).register_forward_hook(partial(_add, term.a.detach(), term.b.detach(), scale))
    return model


def _add(a: Any, b: Any, scale: float, module: Any, inputs: Any, output: Any) -> Any:
    """A linear module's output and s·B·A·x, computed in the factors' dtype."""
    return output + (scale * (inputs[0].to(a.dtype) @ a.T @ b.T)).to(output.dtype)
