"""A quantised base as the floating point weights that it computes with: transformers dequantises it, into a folder.

The folder is a checkpoint like any other, so that merging streams from it. Knows bases and transformers; knows nothing
of plans.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterswap.bases import Base, load_weights
from adapterswap.errors import AdapterswapError, ArgumentError, UnsupportedError
from adapterswap.experts.checkpoints import COMPANIONS, Checkpoint, read_checkpoint
from adapterswap.experts.empty_models import read_config

__all__ = ["dequantized"]


def dequantized(base: Checkpoint) -> Checkpoint:
    """The base with its weights dequantised, in a temporary folder that goes when the checkpoint is no longer used.

    They are what its layers multiply by: the original weights, rounded by the quantisation, in the model's dtype. The
    whole model is in memory while it is read.

    Raises:
        ArgumentError: the base is not quantised.
        UnsupportedError: transformers, or the library that quantised it, cannot dequantise it here.
    """
    settings = base.config.get("quantization_config")
    if not isinstance(settings, dict):
        raise ArgumentError(
            f"`dequantize` is set, and the base {base.name} is not quantised", "Leave it out", parameter="dequantize"
        )
    folder = Path(tempfile.mkdtemp(prefix="adapterswap-dequantized-"))
    try:
        _load(base, settings).save_pretrained(folder)
        for path in {path for pattern in COMPANIONS for path in base.source.folder.glob(pattern) if path.is_file()}:
            shutil.copyfile(path, folder / path.name)
        found = read_checkpoint(replace(base.source, folder=folder))
        if found.config.get("quantization_config"):
            raise _cannot(base, settings, "the weights stay quantised")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    return found


def _load(base: Checkpoint, settings: dict[str, Any]) -> Any:
    """The model, on the CPU, with ordinary layers."""
    config = read_config(base.source.folder, f"The base model {base.name}")
    later = settings.get("quant_method") == "bitsandbytes"  # which dequantises a model that was loaded
    if not later:
        config.quantization_config = {**settings, "dequantize": True}
    opened = Base(str(base.source.folder), base.source, config, None)
    try:
        model = load_weights(opened, config=config, device_map="cpu")
        model = model.dequantize() if later else model
        # What it would do to store the weights under their first names again; quantising them cannot be repeated.
        conversions = getattr(model, "_weight_conversions", None)
        if conversions:
            model._weight_conversions = [each for each in conversions if _can_be_reversed(each)]
        return model
    except AdapterswapError as error:
        raise _cannot(base, settings, error.problems[0].message) from None
    except Exception as error:  # each library of quantised layers has errors of its own
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
        "Install the library that quantised it, or give the base in floating point numbers",
        parameter="base_model",
    )
