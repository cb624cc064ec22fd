"""Compute how any PEFT adapter changes its base's weights, as dense matrices: ΔW = W_merged - W_base.

PEFT merges one module at a time, in float32. The base's weight is restored afterwards, so memory holds the base and one
module. A kind is supported if a test shows that merging it gives the same outputs. Knows PEFT's layers; knows nothing
of low rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.bases import quiet_peft
from adapterswap.errors import BaseModelError, ExpertError, UnsupportedError, reason_of
from adapterswap.experts.adapters import WEIGHTS
from adapterswap.experts.empty_models import read_config

__all__ = ["CONVERTIBLE", "DenseChange", "LoadedAdapter", "load_with_base"]

CONVERTIBLE = (
    "LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "IA3", "VERA", "HRA", "FOURIERFT", "VBLORA", "RANDLORA", "MISS",
    "SHIRA", "C3A", "DELORA", "WAVEFT", "GRALORA",
)  # fmt: skip
"""The values of `peft_type` that are converted; LORA stands for DoRA and other variants of it."""

_KEEP = "Use the adapter as it is, or merge it into its base with PEFT"


@dataclass(frozen=True)
class DenseChange:
    """ΔW of a module, out×in."""

    name: str
    delta: npt.NDArray[np.float32]


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in its base.

    Attributes:
        model: the PeftModel.
        saved: the tensors of modules that were trained in full, by the keys of PEFT's files.
    """

    model: Any
    saved: Mapping[str, Any]

    def changes(self, progress: Callable[[int, int], None]) -> Iterator[DenseChange]:
        """ΔW of every module that the adapter changes.

        Raises:
            UnsupportedError: a module is neither a linear layer nor Conv1D, PEFT cannot merge it, or it changes more
                than the weight.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer
        from transformers.pytorch_utils import Conv1D

        modules = self.model.get_base_model().named_modules()
        layers = {name: module for name, module in modules if isinstance(module, BaseTunerLayer)}
        for count, (name, layer) in enumerate(layers.items(), start=1):
            own = layer.get_base_layer()
            shape = getattr(getattr(own, "weight", None), "shape", ())
            if type(own).__name__ not in ("Linear", "Conv1D") or len(shape) != 2:
                raise UnsupportedError(
                    f"{name} is a {type(own).__name__}, but only linear layers can be converted to LoRA", _KEEP
                )
            delta = _merged_difference(name, layer, own)
            yield DenseChange(name, np.ascontiguousarray(delta.T) if isinstance(own, Conv1D) else delta)
            progress(count, len(layers))


def _merged_difference(name: str, layer: Any, own: Any) -> npt.NDArray[np.float32]:
    """W_merged - W_base, as the base stores it."""
    import torch

    weight, bias = own.weight, own.bias
    with torch.no_grad():
        before = weight.detach().float().clone()
        own.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
        own.bias = None if bias is None else torch.nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        try:
            layer.merge(safe_merge=True)
        except Exception as error:  # each kind raises its own errors
            raise UnsupportedError(f"PEFT cannot merge the adapter at {name}: {reason_of(error)}", _KEEP) from None
        if bias is not None and not torch.equal(own.bias, bias.float()):
            raise UnsupportedError(f"The adapter changes the bias of {name}, which LoRA cannot hold", _KEEP)
        delta: npt.NDArray[np.float32] = (own.weight - before).numpy()
        own.weight, own.bias = weight, bias
    return delta


def load_with_base(folder: Path, base_folder: Path, base_name: str) -> LoadedAdapter:
    """The adapter in a folder, loaded by PEFT into its base, in the dtype that the base is stored in.

    Raises:
        BaseModelError: transformers cannot load the base without remote code.
        ExpertError: PEFT cannot load the adapter, or ignores some of its tensors.
    """
    import transformers
    from peft import PeftModel
    from safetensors.torch import load_file

    config = read_config(base_folder, f"The base model {base_name}")
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    try:
        if kind is None:
            raise ValueError(f"transformers has no {names[0]}")
        base = kind.from_pretrained(base_folder, dtype="auto", use_safetensors=True, trust_remote_code=False).eval()
    except Exception as error:  # as in `bases.load_weights`
        raise BaseModelError(
            f"The base model {base_name} cannot be loaded: {reason_of(error)}",
            "Pass the base that the adapter was trained on, in safetensors, with `base_model`",
            parameter="base_model",
        ) from None
    stored = load_file(folder / WEIGHTS)
    try:
        with quiet_peft():
            model = PeftModel.from_pretrained(base, str(folder))
            unexpected = model.load_adapter(str(folder), "default").unexpected_keys
    except Exception as error:  # PEFT has no single class for these errors
        raise ExpertError(f"PEFT cannot load the adapter into {base_name}: {reason_of(error)}", _KEEP) from None
    if unexpected:
        raise ExpertError(
            f"PEFT has no place for {unexpected[0]} in {base_name}, nor for {len(unexpected) - 1} more tensors of the "
            "adapter",
            "Pass the base that the adapter was trained on with `base_model`",
            parameter="base_model",
        )
    ends = tuple(json.loads((folder / "adapter_config.json").read_text()).get("modules_to_save") or ())
    saved = {key: tensor for key, tensor in stored.items() if key.rpartition(".")[0].endswith(ends) and ends}
    return LoadedAdapter(model, saved)
