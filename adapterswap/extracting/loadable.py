"""Find the weights that PEFT can adapt, by trying it (`experts.peft_trial`).

PEFT refuses some modules (Mamba's `out_proj`), mistakes others (in a mixture of experts it takes every target that
ends in `gate_proj`, `up_proj` or `down_proj` for the fused experts' parameters, even in dense layers and shared
experts), and wraps some that then compute something else. Knows modules; reads no tensor.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adapterswap.arithmetic.peft_config import Shape, adapter_config
from adapterswap.errors import UnsupportedError
from adapterswap.experts.anatomy import AdaptableWeight, build_empty
from adapterswap.experts.peft_trial import try_in_peft
from adapterswap.extracting.cutting import name_tensors
from adapterswap.extracting.pairing import LeftOutWeight, WeightPair

__all__ = ["leave_out_unloadable", "loadable"]


def leave_out_unloadable(pair: WeightPair) -> WeightPair:
    """The pair without the matrices that PEFT cannot adapt; these move to `left_out`.

    Raises:
        UnsupportedError: none of the matrices is left.
    """
    names = loadable(lambda: build_empty(pair.base), [matrix.weight for matrix in pair.matrices])
    matrices = tuple(matrix for matrix in pair.matrices if matrix.weight.name in names)
    unloadable = [matrix for matrix in pair.matrices if matrix.weight.name not in names]
    if not matrices:
        raise UnsupportedError(
            f"PEFT cannot adapt any of the selected modules of {pair.base.name}, such as {unloadable[0].weight.name}",
            "Select other modules, or keep the full checkpoint",
            parameter="modules",
        )
    left_out = [
        LeftOutWeight(f"{matrix.weight.name}.weight", "modules that PEFT cannot adapt", matrix.full, matrix.base)
        for matrix in unloadable
    ]
    all_left_out = sorted([*pair.left_out, *left_out], key=lambda weight: weight.name)
    return replace(pair, matrices=matrices, left_out=tuple(all_left_out))


def loadable(build: Callable[[], Any], weights: Sequence[AdaptableWeight]) -> frozenset[str]:
    """The names of the modules for which PEFT loads LoRA factors as they are and then computes with W + ΔW.

    Args:
        build: builds the base's model on torch's meta device.
        weights: the weights to adapt.
    """
    model = build()
    linear_classes: dict[type, bool] = {}
    usable = [
        weight
        for weight in weights
        if _called(model, weight.name) and _is_linear_in_peft(model, weight.name, linear_classes)
    ]
    if not usable or _loads(build(), usable):
        return frozenset(weight.name for weight in usable)
    groups: dict[str, list[AdaptableWeight]] = {}
    for weight in usable:
        groups.setdefault(re.sub(r"\.\d+(?=\.)", "", weight.name), []).append(weight)
    usable = [weight for group in groups.values() if _loads(build(), group) for weight in group]
    if usable and not _loads(build(), usable):
        raise UnsupportedError(
            f"PEFT can load LoRA for each kind of module of {type(model).__name__} on its own, but not for all at once",
            "Select some modules with `modules`",
            parameter="modules",
        )
    return frozenset(weight.name for weight in usable)


def _loads(model: Any, weights: Sequence[AdaptableWeight]) -> bool:
    """Whether PEFT adapts these modules and no others, and puts every factor where it belongs."""
    import torch
    from peft import PeftConfig

    names = {name for weight in weights for name in (weight.name, *weight.tied)}
    config = adapter_config(
        dict.fromkeys(names, Shape(1, 1.0, 1.0)),
        1,
        1.0,
        rslora=True,
        base_model=None,
        revision=None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(weight.transposed and not weight.embedding for weight in weights),
        tied=any(weight.tied for weight in weights),
    )
    tensors: dict[str, Any] = {}
    for weight in weights:
        a = torch.empty(1, weight.in_features, device="meta")
        b = torch.empty(weight.out_features, 1, device="meta")
        tensors.update(name_tensors(weight, a, b))
    trial = try_in_peft(model, PeftConfig.from_peft_type(**config), tensors)
    return trial is not None and trial.adapted == names and not trial.missing and not trial.dropped


def _called(model: Any, name: str) -> bool:
    """Whether a module's own forward is called: if its parent reads the weight instead, PEFT's factors are ignored.

    transformers notes such children for accelerate, which also depends on that call (`force_accelerate_hooks`).
    """
    parent, _, child = name.rpartition(".")
    forward: Any = type(model.get_submodule(parent)).forward
    while forward is not None:
        if child in inspect.getclosurevars(forward).nonlocals.get("child_module_names", ()):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _is_linear_in_peft(model: Any, name: str, linear_classes: dict[type, bool]) -> bool:
    """Whether PEFT's layer around a module computes the same as the module with W + ΔW.

    True for Linear, Conv1D and Embedding. A class derived from them with a forward of its own (OPT's positions, a
    router) is tried on a narrow copy; `linear_classes` keeps the answers.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    module = model.get_submodule(name)
    kind = type(module)
    if kind.forward in (torch.nn.Linear.forward, torch.nn.Embedding.forward, Conv1D.forward):
        return True
    if kind not in linear_classes:
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                linear_classes[kind] = _try(module)
        except Exception:  # the forward of an unknown class
            linear_classes[kind] = False
    return linear_classes[kind]


def _try(module: Any) -> bool:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    rows, columns = 5, 3
    narrow = copy.deepcopy(module)
    narrow.weight = torch.nn.Parameter(torch.rand(rows, columns))
    if getattr(narrow, "bias", None) is not None:
        narrow.bias = torch.nn.Parameter(torch.rand(rows))
    for name, buffer in list(narrow.named_buffers(recurse=False)):  # such as an embedding's scale
        narrow.register_buffer(name, torch.full(buffer.shape, 2.0))
    if isinstance(narrow, torch.nn.Embedding):
        narrow.num_embeddings, narrow.embedding_dim, narrow.padding_idx = rows, columns, None
        inputs = torch.tensor([[0, 3, 1, 1]])
    else:
        narrow.out_features, narrow.in_features = rows, columns
        inputs = torch.rand(1, 4, columns)
    holder: Any = torch.nn.Module()
    holder.add_module("narrow", narrow)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["narrow"], init_lora_weights=False), holder)
    with torch.no_grad():
        unmerged = holder.narrow(inputs)
        holder.narrow.merge()
        merged = holder.narrow(inputs)
    return bool(torch.allclose(unmerged, merged, rtol=1e-4, atol=1e-4))
