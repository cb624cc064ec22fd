"""A base model opened with transformers: its config, its tokenizer, and its weights when they are wanted.

From a local folder or the Hub, as safetensors, and without running any code of its repository. Shared by training,
which adds adapters to a base, and evaluation, which judges it; knows nothing of either.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import AdapterswapError, reason_of
from adapterswap.experts.empty_models import empty_language_model, read_config
from adapterswap.experts.sources import Source, find_source
from adapterswap.files.dtypes import FLOAT_NAMES
from adapterswap.files.smallfiles import check_pointers

__all__ = [
    "Base",
    "choose_device",
    "empty_model",
    "load_weights",
    "open_base",
    "quiet_peft",
]

_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.model", "*.jinja",
                "vocab*", "merges.txt", "added_tokens.json"]  # fmt: skip
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
_DTYPES = ("auto", *FLOAT_NAMES)


@dataclass(frozen=True)
class Base:
    """A base without its weights.

    Attributes:
        reference: what the user named: a folder or a Hub id.
        source: where it lies; its name and revision are what outputs say of it.
        config: the transformers config.
        tokenizer: its tokenizer.
    """

    reference: str
    source: Source
    config: Any
    tokenizer: Any


def open_base(reference: str) -> Base:
    """The config and tokenizer of the base in a folder, or with a Hub id `org/name[@revision]`.

    Raises:
        AdapterswapError: there is no such base, or transformers cannot read it without remote code.
    """
    from transformers import AutoTokenizer

    source = find_source(reference, _SMALL_FILES, what="base model")
    check_pointers(source.folder)
    config = read_config(source.folder, f"The base model {reference}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # as in `load_weights`
        raise AdapterswapError(
            f"The base model {reference} cannot be opened: {reason_of(error)}",
            "Give a folder or Hub id with config.json and tokenizer files that transformers reads without remote code",
        ) from None
    return Base(reference, source, config, tokenizer)


def load_weights(base: Base, *, dtype: str = "auto", **options: Any) -> Any:
    """The causal language model, on the CPU unless `options` say otherwise.

    Args:
        base: what `open_base` returned.
        dtype: float32, bfloat16, float16, or auto for the one that the weights are stored in.
        options: more of `from_pretrained`'s, such as `quantization_config` or `attn_implementation`.

    Raises:
        AdapterswapError: transformers has no causal language model for it; weights are missing, or of other shapes than
            its config asks for.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in _DTYPES:
        raise AdapterswapError(f"the dtype {dtype!r} is not known", f"Give {', '.join(_DTYPES)}")
    folder = find_source(base.reference, [*_SMALL_FILES, *_WEIGHTS], what="base model").folder
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except Exception as error:  # configs of strangers make model classes raise whatever they meet
        raise AdapterswapError(
            f"The base model {base.reference} cannot be loaded: {reason_of(error)}",
            "Use a causal language model that transformers knows, with a sound config.json and safetensors weights",
        ) from None
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, asked = mismatched[0]
        raise AdapterswapError(
            f"the weights of the base model {base.reference} do not fit its config: {name} is {_shape(found)}, and "
            f"{_shape(asked)} is asked for",
            "Put the config.json that was saved with these weights beside them",
        )
    if missing := sorted(info["missing_keys"]):
        raise AdapterswapError(
            f"the base model {base.reference} lacks weights: {', '.join(missing[:4])}{' …' * (len(missing) > 4)}",
            "Save or download it again; random weights are no base",
        )
    return model


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def empty_model(base: Base) -> Any:
    """The causal language model's modules without weights; see `empty_language_model`."""
    return empty_language_model(base.config, f"The base model {base.reference}")


def choose_device(name: str) -> Any:
    """The torch device of that name; `auto` takes the first there is of CUDA, MPS and the CPU.

    Raises:
        AdapterswapError: torch knows no such device, sees none here, or it holds no numbers (`meta`).
    """
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        raise AdapterswapError(
            f"the device {name!r} cannot be used: {reason_of(error)}", "Give auto, cpu, cuda, cuda:N or mps"
        ) from None
    return device


@contextmanager
def quiet_peft() -> Iterator[None]:
    """PEFT 0.21 uses names that transformers 5.23 has renamed; a user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        yield
