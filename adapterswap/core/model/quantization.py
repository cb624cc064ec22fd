"""Quantized checkpoints: by which method, and what is known of it.

A quantized layer is stored as integers or 8-bit floats with scales. What is stored as a plain floating-point weight,
the model computes with as it is, so LoRA can be merged into it while everything else is copied. That is known of the
methods in `_METHODS` that say so, and assumed of no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from adapterswap.core.model.layers import ModelConfig


class Quantization(NamedTuple):
    """A method of quantization.

    Attributes:
        title: what messages call it.
        keeps_floats: whether modules stored in floating point are computed in floating point.
        dequantized: when transformers can dequantize it: as it loads the weights, after that, or not at all.
    """

    title: str
    keeps_floats: bool = False
    dequantized: Literal["loading", "loaded", "never"] = "never"

    @property
    def remedy(self) -> str:
        """What to do about LoRA on quantized modules."""
        original = "Merge into the original base, in floating point"
        if self.dequantized == "never":
            return original
        return f"{original}, or pass `dequantize=True` to merge into the weights that the quantized base computes with"


_KEYS = ("quantization_config", "compression_config")

_METHODS = {
    "fp8": Quantization("FP8", True, "loading"),
    "mxfp8": Quantization("MXFP8", True, "loading"),
    "mxfp4": Quantization("MXFP4", True, "loading"),
    "compressed-tensors": Quantization("compressed-tensors", True, "loading"),
    "bitsandbytes": Quantization("bitsandbytes", False, "loaded"),
    "gptq": Quantization("GPTQ"),
    "awq": Quantization("AWQ"),
    "nvfp4": Quantization("NVFP4"),
    "modelopt": Quantization("ModelOpt"),
}
"""`quant_method` of config.json → the method. Any other has the defaults, and its own name."""


def settings_in(config: Mapping[str, Any]) -> Any:
    """The settings of the quantization in a config.json; of a multimodal model, they may be those of its language
    model. None if there are none."""
    for place in (config, ModelConfig(config).language):
        for key in _KEYS:
            if place.get(key):
                return place[key]
    return None


def quantization_in(config: Mapping[str, Any]) -> Quantization | None:
    """The method by which a config.json says that the weights are quantized; None if it says nothing."""
    settings = settings_in(config)
    if settings is None:
        return None
    name = "unknown"
    if isinstance(settings, Mapping):
        name = str(settings.get("quant_method") or "an unnamed method")
    return _METHODS.get(name, Quantization(name))
