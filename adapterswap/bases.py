"""A base model opened with transformers: its config, its tokenizer, and its weights when they are wanted.

From a local folder or the Hub, as safetensors, and without running any code of its repository. Shared by training,
which adds adapters to a base, and evaluation, which judges it; knows nothing of either.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.errors import AdapterswapError, reason_of
from adapterswap.experts.sources import Source, find_source
from adapterswap.files.dtypes import FLOAT_NAMES
from adapterswap.files.smallfiles import check_pointers

__all__ = [
    "Base",
    "choose_device",
    "empty_model",
    "empty_model_as_saved",
    "load_weights",
    "names_in_memory",
    "open_base",
    "quiet_peft",
    "read_config",
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


def read_config(folder: Path, name: str) -> Any:
    """The transformers config in a folder; `name` is what messages call the model.

    Raises:
        AdapterswapError: transformers cannot read it without remote code, or finds it contradictory.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # as in `load_weights`
        raise AdapterswapError(
            f"{name} cannot be opened: {reason_of(error)}",
            "Use a model whose config.json is sound, and which transformers knows without remote code",
        ) from None


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
    """The causal language model's modules without weights: nothing is downloaded.

    Raises:
        AdapterswapError: transformers has no causal language model for the base.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(base.config, trust_remote_code=False)
    except Exception as error:  # as in `load_weights`
        raise AdapterswapError(
            f"The base model {base.reference} cannot be loaded: {reason_of(error)}",
            "Use a causal language model that transformers knows, with a sound config.json",
        ) from None


def empty_model_as_saved(folder: Path, name: str) -> Any:
    """The modules without weights of the model that a folder's config.json describes, as its `architectures` name it.

    That may be more than a language model, such as one that sees, or less, without its head.

    Args:
        folder: where config.json lies.
        name: what to call the model in messages.

    Raises:
        AdapterswapError: transformers cannot build it without remote code.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        names = config.architectures or []
        kind = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
        if kind is None:
            raise ValueError(f"transformers has no {names[0]}")
        with torch.device("meta"):
            build = kind._from_config if names else kind.from_config
            return build(config)
    except Exception as error:  # configs of strangers make model classes raise whatever they meet
        raise AdapterswapError(
            f"the modules of {name} cannot be found: {reason_of(error)}",
            "Give a model that the installed transformers knows without remote code",
        ) from None


def names_in_memory(folder: Path, name: str, modules: Iterable[str]) -> dict[str, str]:
    """The names that modules of a base have in the installed transformers, by the names given, which may be older.

    Args:
        folder: where the base's config.json lies.
        name: what to call the base in messages.
        modules: full names of modules.

    Raises:
        AdapterswapError: transformers cannot build the base, or it has no such module under either name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model = empty_model_as_saved(folder, name)
    held = {module for module, _ in model.named_modules()}
    renamings = [entry for entry in get_model_conversion_mapping(model) or () if isinstance(entry, WeightRenaming)]
    found = {}
    for module in modules:
        renamed = module if module in held else rename_source_key(f"{module}.weight", renamings, [])[0]
        found[module] = renamed.removesuffix(".weight")
        if found[module] not in held:
            raise AdapterswapError(
                f"{name} has no module {module} in the installed transformers",
                "Save the expert again with this version of transformers, or pass the base model that it adapts",
            )
    return found


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
