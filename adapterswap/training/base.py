"""The base model for training: prepare its tokenizer, load its weights as the recipe says, choose the device.

Knows nothing of rows or of what is trained.
"""

from __future__ import annotations

from typing import Any

from adapterswap.bases import Base, load_weights, open_base
from adapterswap.errors import BaseModelError, RunError
from adapterswap.processes import count_processes
from adapterswap.training.recipe import Quantization, TrainingOptions, TrainRecipe

__all__ = ["device_and_dtype", "load_trainable", "open_trainable"]


def open_trainable(reference: str) -> Base:
    """Open the base's config and tokenizer, and add a pad token if there is none.

    Raises:
        NotFoundError: see `open_base`.
        BaseModelError: see `open_base`; or the tokenizer has no end-of-sequence token.
    """
    base = open_base(reference)
    if base.tokenizer.eos_token_id is None:
        raise BaseModelError(
            f"the tokenizer of {reference} has no end-of-sequence token, so the expert could not learn to stop",
            "Set eos_token in its tokenizer_config.json",
            parameter="base_model",
        )
    if base.tokenizer.pad_token_id is None:
        base.tokenizer.pad_token = base.tokenizer.eos_token  # padding is masked, so any token works
    return base


def load_trainable(base: Base, recipe: TrainRecipe, *, device: str, dtype: str) -> Any:
    """Load the model with the recipe's dtype, attention and quantization.

    With an adapter, the base has the dtype of the computation. Without one, the trained weights have
    training.weight_dtype and are rounded to that dtype during the computation.

    Raises:
        BaseModelError: see `load_weights`.
    """
    options, choices = recipe.training, {}
    if attention := _attention(options, device, dtype):
        choices["attn_implementation"] = attention
    if recipe.adapter.method == "none":
        return load_weights(base, dtype=options.weight_dtype, **choices)
    if recipe.quantization is None:
        return load_weights(base, dtype=dtype, **choices)
    from accelerate import PartialState
    from peft import prepare_model_for_kbit_training

    model = load_weights(
        base, dtype=dtype, quantization_config=_bits(recipe.quantization, dtype),
        device_map={"": PartialState().device}, **choices,
    )  # fmt: skip
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=options.gradient_checkpointing)


def _attention(options: TrainingOptions, device: str, dtype: str) -> str | None:
    """The attention implementation to request from transformers; None leaves the choice to it."""
    from importlib.util import find_spec

    if options.attn_implementation != "auto":
        return options.attn_implementation
    flash = device == "cuda" and dtype == "bfloat16" and find_spec("flash_attn") is not None
    return "flash_attention_2" if flash else None


def _bits(options: Quantization, dtype: str) -> Any:
    """The quantization config for transformers; 4-bit weights are computed with in `dtype`."""
    from transformers import BitsAndBytesConfig

    if options.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.quant_type,
        bnb_4bit_use_double_quant=options.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def device_and_dtype(options: TrainingOptions) -> tuple[str, str]:
    """Resolve a recipe's training.device and training.dtype to `cpu` or `cuda`, and to torch's name of the dtype.

    accelerate assigns a device to each process, so the names have no numbers, unlike those of `bases.choose_device`.

    Raises:
        RunError: CUDA is requested but not available, or one process would see several devices.
    """
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RunError(
                "training.device is cuda, but torch finds no CUDA device",
                "Use device: auto or device: cpu",
                parameter="training.device",
            )
        if torch.cuda.device_count() > 1 and count_processes() == 1:
            raise RunError(
                f"torch finds {torch.cuda.device_count()} CUDA devices, but one process trains on one device only",
                "Start one process per device with accelerate launch -m adapterswap train …, or set "
                "CUDA_VISIBLE_DEVICES=0",
                parameter="training.device",
            )
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, dtype
