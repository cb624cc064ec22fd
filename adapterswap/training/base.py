"""The base model for training: its tokenizer, its weights, and which of its modules get an adapter.

The base comes from a local folder or the Hub, as safetensors, and without running any code of its repository. Knows
nothing of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapterswap.errors import AdapterswapError, Problems
from adapterswap.layers import kind_of, layer_container, layer_of, num_layers_in_config, parse_layers
from adapterswap.sources import Source, find_source
from adapterswap.training.recipe import AdapterOptions, TrainingOptions

__all__ = ["Base", "Targets", "choose_device", "find_targets", "load_model", "open_base"]

_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.model", "*.jinja",
                "vocab*", "merges.txt", "added_tokens.json"]  # fmt: skip
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]


@dataclass(frozen=True)
class Base:
    """A base without its weights.

    Attributes:
        reference: what the recipe names.
        source: where it lies; its name and revision are what outputs say of it.
        config: the transformers config.
        tokenizer: its tokenizer, with a pad token.
    """

    reference: str
    source: Source
    config: Any
    tokenizer: Any

    @property
    def chat(self) -> Any:
        """`apply_chat_template`, or None where the tokenizer has no template."""
        return self.tokenizer.apply_chat_template if self.tokenizer.chat_template else None


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


def open_base(reference: str) -> Base:
    """The base's config and tokenizer.

    Raises:
        AdapterswapError: there is no such base, it is no text model that transformers knows, or its tokenizer lacks an
            end-of-sequence token.
    """
    from transformers import AutoConfig, AutoTokenizer

    source = find_source(reference, _SMALL_FILES, what="base model")
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise AdapterswapError(
            f"the base model {reference} cannot be opened: {_short(error)}",
            "Give a folder or Hub id with config.json and tokenizer files that transformers reads without remote code",
        ) from None
    if tokenizer.eos_token_id is None:
        raise AdapterswapError(
            f"the tokenizer of {reference} has no end-of-sequence token, so the expert could not learn to stop",
            "Set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any token does
    return Base(reference, source, config, tokenizer)


def load_model(base: Base, *, dtype: str, meta: bool = False) -> Any:
    """The causal language model; with `meta`, its modules without weights (nothing is downloaded).

    Raises:
        AdapterswapError: transformers has no causal language model for it, or weights are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        if meta:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(base.config, trust_remote_code=False)
        folder = find_source(base.reference, [*_SMALL_FILES, *_WEIGHTS], what="base model").folder
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise AdapterswapError(
            f"the base model {base.reference} cannot be loaded: {_short(error)}",
            "Give a causal language model that transformers knows, with its weights as safetensors",
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise AdapterswapError(
            f"the base model {base.reference} lacks weights: {', '.join(missing[:4])}{' …' * (len(missing) > 4)}",
            "Save or download it again; random weights are no base",
        )
    return model


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


def _short(error: BaseException) -> str:
    return " ".join(str(error).split()).removesuffix(".")[:200]
