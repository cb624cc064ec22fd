"""The weights that a quantized checkpoint computes with, as an ordinary checkpoint: transformers dequantizes them."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterswap.core.companions.companions import Companions
from adapterswap.core.model.base import read_config
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.opened_base import load_as_saved
from adapterswap.core.model.quantization import Quantization, quantization_in, settings_in
from adapterswap.kit.errors import AdapterswapError, BaseModelError, UnsupportedError
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.text import read_json


def dequantized(base: Checkpoint) -> Checkpoint:
    """The base with dequantized weights, in a temporary folder that is deleted once the checkpoint is no longer used.

    These are the weights that its layers multiply by: the original ones, rounded by the quantization, in the model's
    dtype and under the names that the base has for them. The whole model is in memory in the meantime.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("dequantized"))
        model = load_dense(base.source.folder, base.name)
        model._weight_conversions = _without_quantization(model)
        model.save_pretrained(folder)
        del model
        Companions(base.source.folder).copy(folder)
        checkpoint = Checkpoint.read(replace(base.source, folder=folder))
        if checkpoint.quantization is not None:
            raise _cannot(base.name, base.quantization, "the weights stay quantized")
        if lacking := checkpoint.lacking:
            raise _cannot(base.name, base.quantization, f"{lacking[0]} is lost, and {len(lacking) - 1} more")
        weakref.finalize(checkpoint, stack.pop_all().close)
    return checkpoint


def load_dense(folder: Path, name: str) -> Any:
    """The model in a folder, loaded by transformers on the CPU in the class and the dtype that it was saved in, with
    ordinary layers: a quantized one is dequantized. `name` is the model's name in messages."""
    content = read_json(folder / "config.json", kind=BaseModelError)
    quantization = quantization_in(content)
    config = read_config(folder, f"The base model {name}")
    if quantization is None:
        return load_as_saved(folder, name, config=config)
    if quantization.dequantized == "never":
        raise _cannot(name, quantization, "transformers has no way to dequantize it")

    if quantization.dequantized == "loading":
        for part in (config.get_text_config(), config):
            if hasattr(part, "quantization_config"):
                del part.quantization_config  # transformers removes only the model's own
        config.quantization_config = {**settings_in(content), "dequantize": True}

    try:
        model = load_as_saved(folder, name, config=config, device_map="cpu")
        if quantization.dequantized == "loaded":
            model = model.dequantize()
        return model
    except AdapterswapError as error:
        raise _cannot(name, quantization, error.problems[0].message) from None
    except Exception as error:  # each quantization library has its own errors
        raise _cannot(name, quantization, str(error) or type(error).__name__) from None


def _without_quantization(model: Any) -> list[Any]:
    """The conversions by which the model's weights were loaded, without their quantization: saving reverses them.

    Those of a quantized model would quantize the weights again, or write them under the names of quantized ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    used = set()
    for conversion in getattr(model, "_weight_conversions", None) or ():
        used.add(tuple(conversion.target_patterns))

    conversions = []
    for rule in get_model_conversion_mapping(model):
        if tuple(rule.target_patterns) in used and _can_be_reversed(rule):
            conversions.append(rule)
    return conversions


def _can_be_reversed(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _cannot(name: str, quantization: Quantization | None, reason: str) -> UnsupportedError:
    how = "not quantized"
    if quantization is not None:
        how = quantization.title
    return UnsupportedError(
        f"The base {name} ({how}) cannot be dequantized here: {reason}",
        "Install the library that quantized it, or use the base with floating point weights",
        parameter="base_model",
    )
