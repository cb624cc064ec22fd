"""Dequantise a base with transformers into a folder with the floating point weights that it computes with.

The folder is an ordinary checkpoint, from which merging can stream. Knows bases and transformers; nothing of plans.
"""

from __future__ import annotations

import shutil
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from adapterswap.bases import Base, load_weights
from adapterswap.errors import AdapterswapError, ArgumentError, UnsupportedError
from adapterswap.experts.checkpoints import COMPANIONS, Checkpoint, read_checkpoint
from adapterswap.experts.empty_models import read_config
from adapterswap.files.scratch import scratch_folder

__all__ = ["dequantized"]


def dequantized(base: Checkpoint) -> Checkpoint:
    """The base with dequantised weights, in a temporary folder that is deleted once the checkpoint is no longer used.

    These are the weights that its layers multiply by: the original ones, rounded by the quantisation, in the model's
    dtype. The whole model is in memory in the meantime.

    Raises:
        ArgumentError: the base is not quantised.
        UnsupportedError: transformers, or the library that quantised it, cannot dequantise it here.
    """
    settings = base.config.get("quantization_config")
    if not isinstance(settings, dict):
        raise ArgumentError(
            f"`dequantize` is set, but the base {base.name} is not quantised", "Leave it out", parameter="dequantize"
        )
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("dequantized"))
        _load(base, settings).save_pretrained(folder)
        for path in {path for pattern in COMPANIONS for path in base.source.folder.glob(pattern) if path.is_file()}:
            shutil.copyfile(path, folder / path.name)
        checkpoint = read_checkpoint(replace(base.source, folder=folder))
        if checkpoint.config.get("quantization_config"):
            raise _cannot(base, settings, "the weights stay quantised")
        weakref.finalize(checkpoint, stack.pop_all().close)
    return checkpoint


def _load(base: Checkpoint, settings: dict[str, Any]) -> Any:
    """The model, on the CPU, with ordinary layers."""
    config = read_config(base.source.folder, f"The base model {base.name}")
    later = settings.get("quant_method") == "bitsandbytes"  # it dequantises a model after loading
    if not later:
        config.quantization_config = {**settings, "dequantize": True}
    opened = Base(str(base.source.folder), base.source, config, None)
    try:
        model = load_weights(opened, config=config, device_map="cpu")
        model = model.dequantize() if later else model
        # Saving reverses these conversions to restore the original names; quantisation cannot be reversed this way.
        conversions = getattr(model, "_weight_conversions", None)
        if conversions:
            model._weight_conversions = [conversion for conversion in conversions if _can_be_reversed(conversion)]
        return model
    except AdapterswapError as error:
        raise _cannot(base, settings, error.problems[0].message) from None
    except Exception as error:  # each quantisation library has its own errors
        raise _cannot(base, settings, str(error) or type(error).__name__) from None


def _can_be_reversed(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _cannot(base: Checkpoint, settings: dict[str, Any], reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"The base {base.name} ({settings.get('quant_method')}) cannot be dequantised here: {reason}",
        "Install the library that quantised it, or use the base with floating point weights",
        parameter="base_model",
    )
