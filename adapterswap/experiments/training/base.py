"""The base model for training: check for libraries, prepare its tokenizer, load its weights, choose the device."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adapterswap.core import OpenedBase
from adapterswap.experiments.training.recipe import TrainingOptions, TrainRecipe
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import BaseModelError, DependencyError, Problems, RunError, UnsupportedError
from adapterswap.kit.files.text import read_json
from adapterswap.kit.processes import Processes

# Up to here torch's kernel for attention in bfloat16 on a CPU takes 3 to 5 times as long as plain products.
_SHORT = 256  # tokens
_FLASH = "flash_attention_2"
_ATTENTION = {_FLASH: "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_libraries(recipe: TrainRecipe) -> None:
    """Check that all libraries that the recipe needs are installed, and that the launcher's choices fit it."""
    require("train")
    problems, options = Problems(DependencyError), recipe.training
    if _is_on("ACCELERATE_USE_DEEPSPEED") and _zero_stage() == 3:
        problems.add(
            "DeepSpeed ZeRO-3 leaves each process a part of every weight, so the expert would be written empty",
            "Start it with ZeRO-2, with FSDP, or without them",
            kind=UnsupportedError,
        )
    if _is_on("ACCELERATE_USE_FSDP") and recipe.quantization:
        problems.add(
            "FSDP spreads the base over the devices, but with `quantization` each process loads all of it",
            "Start it without FSDP: each device then holds the quantized base",
            parameter="quantization",
            kind=UnsupportedError,
        )
    if recipe.judged_by and find_spec("lm_eval") is None:
        problems.add(
            "`selection` needs lm-evaluation-harness, which is not installed",
            "Run `pip install 'adapterswap[eval]'`",
            parameter="selection",
        )
    if find_spec("bitsandbytes") is None:
        if recipe.quantization:
            problems.add(
                "`quantization` needs bitsandbytes, which is not installed",
                "Run `pip install bitsandbytes`",
                parameter="quantization",
            )
        if "8bit" in options.optimizer or "paged" in options.optimizer:
            problems.add(
                f"training.optimizer {options.optimizer} needs bitsandbytes, which is not installed",
                "Run `pip install bitsandbytes`, or choose adamw_torch_fused",
                parameter="training.optimizer",
            )
    if options.kernels:
        from transformers.utils import is_kernels_available

        if not is_kernels_available():  # also of a version that it does not know
            problems.add(
                "training.kernels needs kernels, in a version that transformers supports",
                "Run `pip install 'transformers[kernels]'`, or remove training.kernels",
                parameter="training.kernels",
            )
    package = _ATTENTION.get(options.attn_implementation)
    if package and find_spec(package) is None:
        problems.add(
            f"training.attn_implementation {options.attn_implementation} needs {package}, which is not installed",
            "Install FlashAttention for your CUDA version, or choose sdpa",
            parameter="training.attn_implementation",
        )
    if options.report_to:
        from transformers.integrations import get_available_reporting_integrations

        for name in sorted(set(options.report_to) - set(get_available_reporting_integrations())):
            problems.add(
                f"training.report_to: {name!r} is not installed, or is not a tracker that transformers supports",
                "Install it or correct the name",
                parameter="training.report_to",
            )
    problems.raise_if_any()


def with_padding(base: OpenedBase) -> OpenedBase:
    """The base, whose tokenizer gets a token for padding if it has none. It must have one for the end."""
    reference = base.reference
    if base.tokenizer.eos_token_id is None:
        raise BaseModelError(
            f"The tokenizer of {reference} has no end-of-sequence token, so the expert could not learn to stop",
            "Set eos_token in its tokenizer_config.json",
            parameter="base_model",
        )
    if base.tokenizer.pad_token_id is None:
        base.tokenizer.pad_token = base.tokenizer.eos_token  # padding is masked, so any token works
    return base


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() == "true"


def is_spread() -> bool:
    """Whether the launcher chose FSDP or DeepSpeed, which may spread weights over processes."""
    return _is_on("ACCELERATE_USE_FSDP") or _is_on("ACCELERATE_USE_DEEPSPEED")


def _zero_stage() -> int:
    """The stage of ZeRO that `accelerate launch` sets, from its command line or from DeepSpeed's own file."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return int(read_json(Path(file), kind=RunError).get("zero_optimization", {}).get("stage", 0))


def attention_of(model: Any, options: TrainingOptions, *, device: str, dtype: str) -> str | None:
    """The attention to request from transformers for a model, which may be without weights; None if it is to choose.

    Raises:
        UnsupportedError: the recipe names one that the model's class does not have, or that does not compute so.
    """
    named = options.attn_implementation
    if named != "auto":
        reason = None
        if not _has_attention(model, named):
            reason = f"{type(model).__name__} does not have it in transformers"
        elif named in _ATTENTION and (device, dtype) != ("cuda", "bfloat16"):
            reason = f"it computes in bfloat16 on CUDA, and this run in {dtype} on {device}"
        if reason is not None:
            raise UnsupportedError(
                f"training.attn_implementation is {named}: {reason}",
                "Choose auto, or eager",
                parameter="training.attn_implementation",
            )
        return named

    if dtype != "bfloat16":
        return None
    if device == "cuda" and find_spec(_ATTENTION[_FLASH]) is not None and _has_attention(model, _FLASH):
        return _FLASH
    if device == "cpu" and options.max_length <= _SHORT:
        return "eager"
    return None


def _has_attention(model: Any, name: str) -> bool:
    """Whether the model's class has this attention in transformers, and not another kernel in its place."""
    if name == "eager":
        return True
    if name == "sdpa":
        return bool(model._supports_sdpa)
    kernels = getattr(model, "_compatible_flash_implementations", None)
    return bool(model._supports_flash_attn) and (kernels is None or name in kernels)


def load_trainable(base: OpenedBase, recipe: TrainRecipe, *, attention: str | None, dtype: str) -> Any:
    """Load the model with the recipe's dtype and quantization, and this attention; see `attention_of`.

    With an adapter, the base has the dtype of the computation. Without one, the trained weights have
    training.weight_dtype and are rounded to that dtype during the computation.
    """
    options = recipe.training
    choices: dict[str, Any] = {}
    if attention is not None:
        choices["attn_implementation"] = attention
    if options.kernels:
        choices["use_kernels"] = True
    if recipe.adapter.method == "none":
        return base.load_weights(dtype=options.weight_dtype, **choices)
    if recipe.quantization is None:
        return base.load_weights(dtype=dtype, **choices)

    # Keep the base in 8 bits, or in 4, whose weights are computed with in `dtype`.
    from accelerate import PartialState
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_8bit=True)
    if recipe.quantization.bits == 4:
        bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=recipe.quantization.quant_type,
            bnb_4bit_use_double_quant=recipe.quantization.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    choices |= {"quantization_config": bits, "device_map": {"": PartialState().device}}
    model = base.load_weights(dtype=dtype, **choices)
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=options.gradient_checkpointing)


def bfloat16_speedup() -> float:
    """How many times as fast as float32 a core of this CPU multiplies matrices in bfloat16, measured in some 0.02 s.

    One thread and its processor time are taken, so that whatever else the machine does changes little.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        one, other = (torch.ones(shape, dtype=dtype) for shape in ((256, 512), (512, 512)))
        one @ other  # the first product chooses its kernel
        times = []
        for _ in range(5):
            began = time.thread_time()
            one @ other
            times.append(time.thread_time() - began)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(torch.float32) / seconds(torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


def device_and_dtype(options: TrainingOptions) -> tuple[str, str]:
    """Resolve a recipe's training.device and training.dtype to `cpu` or `cuda`, and to torch's name of the dtype.

    accelerate assigns a device to each process, so the names have no numbers, unlike those of `choose_device`.
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
        if torch.cuda.device_count() > 1 and Processes.started() == 1:
            raise RunError(
                f"PyTorch finds {torch.cuda.device_count()} CUDA devices, but one process trains on one device only",
                "Start one process per device with accelerate launch -m adapterswap train …, or set "
                "CUDA_VISIBLE_DEVICES=0",
                parameter="training.device",
            )
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, dtype
