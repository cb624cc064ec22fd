"""The base model for training: its tokenizer made ready, and which of its modules get an adapter.

Knows nothing of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapterswap.bases import Base, open_base, reason_of
from adapterswap.errors import AdapterswapError, Problems
from adapterswap.experts.layers import kind_of, layer_container, layer_of, num_layers_in_config, parse_layers
from adapterswap.training.recipe import AdapterOptions, TrainingOptions

__all__ = ["Targets", "choose_device", "empty_model", "find_targets", "open_trainable"]


@dataclass(frozen=True)
class Targets:
    """What gets an adapter.

    Attributes:
        names: ends of module names, as PEFT's target_modules takes them, sorted.
        count: how many modules they name, in these layers.
        parameters: what is trained: r·(in + out) for each of them, and the modules saved in full.
        layers: layers that are adapted; None for all.
        conv1d: the modules store their weights transposed (GPT-2).
    """

    names: list[str]
    count: int
    parameters: int
    layers: list[int] | None
    conv1d: bool


def open_trainable(reference: str) -> Base:
    """The base's config and tokenizer, which gets a pad token if it has none.

    Raises:
        AdapterswapError: see `open_base`; or its tokenizer lacks an end-of-sequence token.
    """
    base = open_base(reference)
    if base.tokenizer.eos_token_id is None:
        raise AdapterswapError(
            f"the tokenizer of {reference} has no end-of-sequence token, so the expert could not learn to stop",
            "Set eos_token in its tokenizer_config.json",
        )
    if base.tokenizer.pad_token_id is None:
        base.tokenizer.pad_token = base.tokenizer.eos_token  # padding is masked, so any token does
    return base


def empty_model(base: Base) -> Any:
    """The model's modules without weights: nothing is downloaded.

    Raises:
        AdapterswapError: transformers has no causal language model for the base.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(base.config, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        raise AdapterswapError(
            f"the base model {base.reference} cannot be loaded: {reason_of(error)}",
            "Give a causal language model that transformers knows",
        ) from None


def find_targets(model: Any, options: AdapterOptions, config: Any) -> Targets:
    """Resolve `target_modules`, `layers` and `modules_to_save` on the modules that `model` has.

    Raises:
        AdapterswapError: a name that no module has, a layer out of range, the output head, tied embeddings, or a model
            whose projections are not recognised.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    adaptable = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D | torch.nn.Embedding)
    }
    matrices = [name for name, module in adaptable.items() if not isinstance(module, torch.nn.Embedding)]
    container = layer_container(matrices)
    if options.target_modules is None:
        wanted = {n for n in matrices if layer_of(n, container) is not None and kind_of(n) in ("attention", "mlp")}
        if not wanted:
            raise AdapterswapError(
                f"no attention or MLP projections were recognised in {type(model).__name__}",
                f"Name them in adapter.target_modules; its modules end in {_ends(matrices)}",
            )
        names = sorted({_shortest_end(name, wanted, adaptable, container) for name in wanted})
    else:
        names = sorted(set(options.target_modules))
    layers = sorted(parse_layers(options.layers)) if options.layers is not None else None
    _check_targets(names, layers, model, adaptable, options, config, container)
    chosen = {name: module for name, module in adaptable.items() if _named(name, names)}
    if layers is not None:
        chosen = {name: module for name, module in chosen.items() if layer_of(name, container) in layers}
    saved = [module for name, module in model.named_modules() if _named(name, options.modules_to_save)]
    return Targets(
        names=names,
        count=len(chosen),
        parameters=sum(options.r * sum(module.weight.shape) for module in chosen.values())
        + sum(parameter.numel() for module in saved for parameter in module.parameters()),
        layers=layers,
        conv1d=all(isinstance(module, Conv1D) for module in chosen.values()),
    )


def _check_targets(
    names: Sequence[str], layers: Sequence[int] | None, model: Any, adaptable: dict[str, Any],
    options: AdapterOptions, config: Any, container: str | None,
) -> None:  # fmt: skip
    problems = Problems()
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and bool(config.get_text_config().tie_word_embeddings)
    for name in names:
        found = {full: module for full, module in adaptable.items() if _named(full, [name])}
        where = f"adapter.target_modules: {name!r}"
        if not found:
            problems.add(f"{where} is the name of no module", f"Names there are: {_ends(adaptable)}")
        elif any(module is head for module in found.values()):
            problems.add(
                f"{where} is the output head, which TRL does not train as LoRA",
                "Remove it, or put it into adapter.modules_to_save",
            )
        elif tied and any(module is embeddings for module in found.values()):
            problems.add(f"{where} is tied to the output head, which would not change with it", "Remove it")
        elif layers is not None and any(layer_of(full, container) is None for full in found):
            problems.add(f"{where} lies in no layer, and adapter.layers chooses layers", "Remove one of the two")
    everything = dict(model.named_modules())
    for name in options.modules_to_save:
        saved = [module for full, module in everything.items() if _named(full, [name])]
        where = f"adapter.modules_to_save: {name!r}"
        if not saved:
            problems.add(f"{where} is the name of no module", f"Names there are: {_ends(adaptable)}")
        elif tied and any(module is embeddings or module is head for module in saved):
            problems.add(f"{where} is one weight for input and output here, which would come apart", "Remove it")
    depth = num_layers_in_config(config.to_dict())
    if layers and depth is not None and layers[-1] >= depth:
        problems.add(
            f"adapter.layers: {options.layers} reaches beyond layer {depth - 1}", f"Layers are 0 to {depth - 1}"
        )
    problems.raise_if_any()


def _named(name: str, ends: Sequence[str]) -> bool:
    """PEFT's rule for target_modules: the whole name, or its end after a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _shortest_end(name: str, wanted: set[str], adaptable: dict[str, Any], container: str | None) -> str:
    """`q_proj` for `model.layers.0.self_attn.q_proj`; `self_attn.q_proj` if something unwanted ends in q_proj too."""
    last = name.rpartition(".")[2]
    if all(other in wanted for other in adaptable if _named(other, [last])):
        return last
    return name[len(container or "") + 1 :].partition(".")[2]


def _ends(names: Any) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def choose_device(options: TrainingOptions) -> tuple[str, str]:
    """Device and dtype, `auto` resolved.

    Raises:
        AdapterswapError: CUDA is asked for and not there, or several devices are visible.
    """
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise AdapterswapError("training.device is cuda, and torch sees no CUDA device", "Use device: auto or cpu")
        if torch.cuda.device_count() > 1:
            raise AdapterswapError(
                f"torch sees {torch.cuda.device_count()} CUDA devices, and an expert is trained on one",
                "Choose it with the environment variable CUDA_VISIBLE_DEVICES=0",
            )
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, dtype
