"""Merge DoRA, OFT, LoHa and similar adapters into one weight of the base, with PEFT's own code.

A module of the weight's size is built with PEFT's layer around it, which merges the tensors. So no model is needed, and
only one weight is in memory at a time. numpy arrays in, numpy arrays out; reads no file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.kinds import Opaque
from adapterswap.kit.errors import ExpertError, UnsupportedError, reason_of

Numbers = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating[Any]]

_MODULE = "adapted"


def merged(
    change: Opaque, parameter: str, own: Numbers, tensors: Mapping[str, Numbers], *, as_delta: bool = False
) -> Numbers:
    """W' = f(W), in float32, as `merge_and_unload` computes it, or ΔW = f(W) - W.

    ΔW is computed in float64 and rounded once. In float32 it would have rounding errors of the size of the weight's,
    which methods on singular values take for further directions.

    Args:
        change: the module's settings.
        parameter: the module's parameter to merge: `weight` or `bias`.
        own: the base's parameter, as the model stores it.
        tensors: the module's tensors by the names in `change.part.tensors`, including those that modules share.
        as_delta: return ΔW.
    """
    if not as_delta:
        return np.ascontiguousarray(_merged(change, parameter, own, tensors), np.float32)
    return np.ascontiguousarray(_merged(change, parameter, own.astype(np.float64), tensors) - own, np.float32)


def _merged(change: Opaque, parameter: str, own: Floats, tensors: Mapping[str, Numbers]) -> Floats:
    """f(W), in the precision of `own`."""
    import torch
    from peft import get_peft_model

    part = change.part
    if part.shares_tensors and not part.shared:
        raise UnsupportedError(
            f"{part.name}: the {part.method} adapter lacks the projections that its modules share, which PEFT draws at "
            "random",
            "Save it with save_projection=True",
        )

    remedy = "Compose it into an adapter with `compose`, or merge it with PEFT's merge_and_unload"
    module = _module(change, parameter, own, tensors)
    if module is None:
        raise UnsupportedError(f"{part.name} is neither a linear layer nor an embedding ({list(own.shape)})", remedy)

    holder = torch.nn.Module()
    holder.add_module(_MODULE, module)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # PEFT warns about its defaults
        try:
            model: Any = get_peft_model(holder, _config(change, tensors))
            model.to(module.weight.dtype)
            _load(model, part.name, tensors)
            layer = model.base_model.model.get_submodule(_MODULE)
            layer.merge()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            raise UnsupportedError(
                f"PEFT cannot merge the {part.method} at {part.name}: {reason_of(error)}", remedy
            ) from None
    merged: Floats = getattr(layer.get_base_layer(), parameter).detach().numpy()
    return merged


def _module(change: Opaque, parameter: str, base_values: Floats, tensors: Mapping[str, Numbers]) -> Any:
    """A module with the base's weight or bias, and zeros for the other; None if no module has this shape."""
    import torch
    from transformers.pytorch_utils import Conv1D

    lora = change.part.lora
    if parameter == "bias":
        if base_values.ndim != 1:
            return None
        out = base_values.shape[0]
        width = 1 if lora is None else lora.in_features
        shape = (width, out) if change.transposed else (out, width)
        weight, bias = np.zeros(shape, base_values.dtype), base_values
    elif base_values.ndim == 2:
        weight = base_values
        out, width = base_values.shape
        if change.transposed:
            width, out = base_values.shape
        bias = np.zeros(out, base_values.dtype)
    else:
        return None

    module: Any
    with torch.device("meta"):  # so that no random weights are drawn
        if lora is not None and lora.embedding:
            module = torch.nn.Embedding(width, out)
        elif change.transposed:
            module = Conv1D(out, width)
        else:
            module = torch.nn.Linear(width, out)

    module.weight = torch.nn.Parameter(torch.from_numpy(np.array(weight)))
    if not isinstance(module, torch.nn.Embedding):
        module.bias = torch.nn.Parameter(torch.from_numpy(np.array(bias)))
    return module


def _config(change: Opaque, tensors: Mapping[str, Numbers]) -> Any:
    """PEFT's config for this module only."""
    from peft import PeftConfig

    part = change.part
    content: dict[str, Any] = {**part.settings, **part.values, "peft_type": part.peft_type}
    if part.lora is not None:
        content |= {"r": part.lora.rank, "lora_alpha": part.lora.alpha, "use_rslora": part.lora.rslora}
        content["fan_in_fan_out"] = change.transposed and not part.lora.embedding
    if part.peft_type == "IA3":
        scales_inputs = tensors["ia3_l"].shape[0] == 1
        content["feedforward_modules"] = [_MODULE] if scales_inputs else []
        content["fan_in_fan_out"] = change.transposed
    return PeftConfig.from_peft_type(**content, target_modules=[_MODULE], inference_mode=True)


def _load(model: Any, name: str, tensors: Mapping[str, Numbers]) -> None:
    """Load the tensors into PEFT's layer. Shared projections are as wide as the widest module, so they are cut."""
    import torch
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = {}
    used: set[str] = set()
    for key, target in get_peft_model_state_dict(model).items():
        part = key.removeprefix(f"base_model.model.{_MODULE}.").removeprefix("base_model.")
        if part not in tensors:
            raise ExpertError(f"{name} has no {part}", "Save the adapter again")
        tensor = torch.from_numpy(np.array(tensors[part], np.float32))
        if not key.startswith("base_model.model."):
            tensor = tensor[tuple(slice(size) for size in target.shape)]
        state[key] = tensor
        used.add(part)

    unused = sorted(tensors.keys() - used)
    if unused:
        raise ExpertError(f"{name} has {unused[0]}, which PEFT does not use", "Save the adapter again")
    set_peft_model_state_dict(model, state)
