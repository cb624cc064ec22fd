"""Compute how any PEFT adapter changes its base's weights, as dense matrices: ΔW = W_merged - W_base.

PEFT merges one module at a time, in float32. The base's weight is restored afterwards, so memory holds the base and one
module. A kind is supported if a test shows that merging it gives the same outputs. Knows PEFT's layers; knows nothing
of low rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.bases import quiet_peft
from adapterswap.errors import BaseModelError, ExpertError, UnsupportedError, reason_of
from adapterswap.experts.adapter_keys import canonical_key, part_key
from adapterswap.experts.adapters import CONFIG, WEIGHTS
from adapterswap.experts.empty_models import read_config
from adapterswap.experts.shapes import and_more
from adapterswap.files.smallfiles import read_json

__all__ = ["CONVERTIBLE", "DenseChange", "LoadedAdapter", "load_with_base"]

CONVERTIBLE = (
    "LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "IA3", "VERA", "HRA", "FOURIERFT", "VBLORA", "RANDLORA", "MISS",
    "SHIRA", "C3A", "DELORA", "WAVEFT", "GRALORA",
)  # fmt: skip
"""The values of `peft_type` that are converted; LORA stands for DoRA and other variants of it."""

# The settings that say how PEFT starts a module; False means at random.
_INITS = ("init_weights", "init_lora_weights", "init_ia3_weights")
_MODULES = part_key("", "").removesuffix(".")  # before the names of modules
# A trained bias of the base, not one of PEFT's own tensors (`lora_B.bias`).
_BASE_BIAS = re.compile(r"(?<!\.lora_A)(?<!\.lora_B)\.bias$")

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
        saved: the parameters that were trained in full, of whole modules or biases alone, by their names in the base.
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
                    f"{name} is of the class {type(own).__name__}, but only linear layers can be converted to LoRA",
                    _KEEP,
                    parameter="adapter",
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
            raise UnsupportedError(
                f"PEFT cannot merge the adapter at {name}: {reason_of(error)}", _KEEP, parameter="adapter"
            ) from None
        if bias is not None and not torch.equal(own.bias, bias.float()):
            raise UnsupportedError(
                f"The adapter changes the bias of {name}, which LoRA cannot hold", _KEEP, parameter="adapter"
            )
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
            loaded = model.load_adapter(str(folder), "default")
    except KeyError as error:  # of a module trained in full, for which PEFT expects a tensor
        raise ExpertError(
            f"The adapter has no tensor {error.args[0]}, although its config says that it was trained",
            "Save the adapter again",
            parameter="adapter",
        ) from None
    except Exception as error:  # PEFT has no single class for these errors
        raise ExpertError(
            f"PEFT cannot load the adapter into {base_name}: {reason_of(error)}", _KEEP, parameter="adapter"
        ) from None
    unexpected = loaded.unexpected_keys
    if unexpected:
        raise ExpertError(
            f"PEFT has no place in {base_name} for {and_more(unexpected)} of the adapter",
            "Pass the base that the adapter was trained on with `base_model`",
            parameter="base_model",
        )
    stored = {canonical_key(key): tensor for key, tensor in stored.items()}
    _check_complete(model, stored, loaded.missing_keys, read_json(folder / CONFIG))
    return LoadedAdapter(model, _saved(model, stored))


def _check_complete(model: Any, stored: Mapping[str, Any], missing: Iterable[str], config: Mapping[str, Any]) -> None:
    """Check that PEFT filled no tensor with random numbers. A module without any tensors counts as unchanged.

    Raises:
        ExpertError: a module lacks some of its tensors, or all of them while PEFT starts such a module at random.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    random_start = any(config.get(key) is False for key in _INITS)
    modules = model.get_base_model().named_modules()
    layers = [part_key(name, "") for name, module in modules if isinstance(module, BaseTunerLayer)]
    shared = {name.rpartition(".")[2] for name in stored if not name.startswith(_MODULES)}  # by all modules
    for key in (key.replace(".default", "") for key in missing):
        layer = next((layer for layer in layers if key.startswith(layer)), None)
        if layer is None or key.removeprefix(layer) in shared:
            continue
        if random_start or any(name.startswith(layer) for name in stored):
            raise ExpertError(
                f"The adapter has no tensor {key}, so PEFT would fill it with random numbers",
                "Save the adapter again",
                parameter="adapter",
            )


def _saved(model: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters trained in full: those of whole modules, which may have modules of their own, and biases."""
    from peft.utils import ModulesToSaveWrapper

    saved: dict[str, Any] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            whole = part_key(name, "")
            saved |= {key.removeprefix(_MODULES): stored[key] for key in stored if key.startswith(whole)}
    biases = {key.removeprefix(_MODULES).replace(".base_layer", ""): key for key in stored if _BASE_BIAS.search(key)}
    return saved | {name: stored[key] for name, key in biases.items()}
