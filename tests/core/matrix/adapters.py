"""Pairs of experts created and saved by PEFT, of every kind in the matrix.

Some kinds then rename the saved tensors, as another tool or an older transformers would write them. The adapter that
PEFT saved is kept next to the renamed copy, and the reference is read from it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import (
    BOFTConfig,
    HiraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftConfig,
    RoadConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core.matrix.architectures import LAYERS, NOTHING, Architecture

__all__ = ["KINDS", "OPAQUE", "Expert", "Kind", "Pair", "save_expert"]

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Expert:
    """An adapter.

    Attributes:
        folder: what the library gets.
        made: what PEFT saved: the same folder, or the one whose tensors were renamed.
        extra: ΔW by parameter of the base, in float64, of what only the renamed copy holds (see `with_v4_experts`).
    """

    folder: Path
    made: Path
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    task: Expert
    language: Expert


@dataclass(frozen=True)
class Kind:
    """How a pair of experts is created, and for which architectures."""

    make: Callable[[Architecture, PreTrainedModel, Path], Pair]
    applies: Callable[[Architecture], bool] = lambda architecture: True


def _leaves(model: PreTrainedModel, wanted: Callable[[str], bool]) -> list[str]:
    """The last parts of the names of the wanted linear layers, as a user would list them for PEFT."""
    linear = ("Linear", "FalconLinear", "Conv1D")
    names = [name for name, module in model.named_modules() if type(module).__name__ in linear and wanted(name)]
    return sorted({name.rpartition(".")[2] for name in names})


def _in_layers(architecture: Architecture, model: PreTrainedModel) -> list[str]:
    """Linear layers of the language model that PEFT takes: not a state-space block's `out_proj` and `dt_proj`."""
    if architecture.linear != "all-linear":
        return list(architecture.linear)
    return _leaves(model, lambda name: architecture.layer_of(name) is not None)


def _has_fused_experts(architecture: Architecture) -> bool:
    """Their projections are parameters, not linear layers, and PEFT adapts all parameters of these names."""
    return architecture.v4_experts is not None


def _plain_linear(architecture: Architecture, model: PreTrainedModel) -> list[str]:
    """All linear layers of the language model's layers; for mixtures of experts only the attention."""
    return (_attention if _has_fused_experts(architecture) else _in_layers)(architecture, model)


def _attention(architecture: Architecture, model: PreTrainedModel) -> list[str]:
    names = _leaves(model, lambda name: architecture.layer_of(name) is not None and architecture.is_attention(name))
    return [name for name in names if architecture.linear == "all-linear" or name in architecture.linear]


def _name_of(model: PreTrainedModel, module: torch.nn.Module | None) -> str:
    return next(name for name, own in model.named_modules() if own is module)


def _embedding(model: PreTrainedModel) -> str:
    return _name_of(model, model.get_input_embeddings()).rpartition(".")[2]


def _head(model: PreTrainedModel) -> str:
    return _name_of(model, model.get_output_embeddings()).rpartition(".")[2]


def _final_norm(architecture: Architecture, model: PreTrainedModel) -> list[str]:
    """The norm after the last layer, where there is one."""
    names = [name for name, _ in model.named_modules()]
    layer = next(match[0] for name in names if (match := re.match(architecture.layers, name)))
    decoder = re.sub(r"\.\w+\.\d+\.$", "", layer)
    return [name for name in names if re.fullmatch(rf"{decoder}\.\w*(norm|ln_f)\w*", name)]


def save_expert(model: PreTrainedModel, folder: Path, *, seed: int, **options: Any) -> Expert:
    """An untrained expert with random factors, saved by PEFT."""
    options = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "use_rslora": True, **options}
    return _save_any(model, folder, LoraConfig(**options), seed=seed)


def _save_any(model: PreTrainedModel, folder: Path, config: PeftConfig, *, seed: int) -> Expert:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT explains its defaults; messages while loading are recorded later
        peft_model = get_peft_model(copy.deepcopy(model), config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)  # tied ones share it
            elif "original_module" not in name and parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        peft_model.save_pretrained(folder)
    return Expert(folder, folder)


def _pair(
    make: Callable[[Architecture, PreTrainedModel], tuple[dict[str, Any], dict[str, Any]]],
) -> Callable[[Architecture, PreTrainedModel, Path], Pair]:
    """Both experts from PEFT's options for each."""

    def made(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
        task, language = make(architecture, model)
        return Pair(
            save_expert(model, folder / "task", seed=1, **task),
            save_expert(model, folder / "language", seed=2, **language),
        )

    return made


def _same(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(options), dict(options)


@_pair
def _linear(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    targets = architecture.linear if architecture.linear == "all-linear" else list(architecture.linear)
    return _same(target_modules=targets)


@_pair
def _attention_only(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    return _same(target_modules=_attention(architecture, model))


@_pair
def _embeddings(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    leaves = _plain_linear(architecture, model)
    return _same(target_modules=[_embedding(model), _head(model), leaves[0], leaves[-1]])


@_pair
def _modules_to_save(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = [_head(model), *_final_norm(architecture, model)]
    return _same(target_modules=_plain_linear(architecture, model), modules_to_save=saved)


@_pair
def _mixed(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranks, alphas and scalings differ between experts, modules and layers; the language expert has fewer modules."""
    leaves = _plain_linear(architecture, model)
    layer = r"(layers|h|blocks)\.[13]\..*"
    task = {"r": 4, "lora_alpha": 6, "rank_pattern": {leaves[0]: 3}, "alpha_pattern": {leaves[-1]: 5.5}}
    language = {
        "r": 3, "lora_alpha": 7, "use_rslora": False, "layers_to_transform": list(range(LAYERS - 1)),
        "rank_pattern": {layer + leaves[0]: 5}, "alpha_pattern": {layer + leaves[0]: 4},
    }  # fmt: skip
    return {"target_modules": leaves, **task}, {"target_modules": leaves[:-1] or leaves, **language}


@_pair
def _composite(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole block with its submodules, and LoRA on the head."""
    layered = (name for name, _ in model.named_modules() if architecture.layer_of(f"{name}.") is not None)
    blocks = [
        name
        for name in layered
        if re.fullmatch(rf"{architecture.layers}[^.]+", name) and architecture.is_attention(f"{name}.")
    ]
    return _same(target_modules=[_head(model)], modules_to_save=[re.sub(r".*\.", "", blocks[0])])


def _of_kind(
    make: Callable[[list[str], list[str]], PeftConfig],
) -> Callable[[Architecture, PreTrainedModel, Path], Pair]:
    """Experts of another kind than LoRA on linear layers; `make` gets all their names, and those of the last sort."""

    def made(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
        leaves = _plain_linear(architecture, model)
        return Pair(
            _save_any(model, folder / "task", make(leaves, leaves[-1:]), seed=1),
            _save_any(model, folder / "language", make(leaves, leaves[-1:]), seed=2),
        )

    return made


def _variant(**options: Any) -> Callable[[list[str], list[str]], PeftConfig]:
    return lambda all_, last: LoraConfig(task_type="CAUSAL_LM", target_modules=all_, r=3, lora_alpha=5, **options)


def _has_linear(architecture: Architecture) -> bool:
    """PEFT supports these kinds only on Linear layers."""
    return architecture.family != "conv1d"


@_pair
def _vision(architecture: Architecture, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task expert adapts everything, the language expert only the vision tower and the projector."""
    linear = ("Linear",)
    outside = [
        name for name, module in model.named_modules()
        if type(module).__name__ in linear and name.startswith("model.") and architecture.layer_of(name) is None
    ]  # fmt: skip
    return {"target_modules": "all-linear"}, {"target_modules": outside}


def _renamed(expert: Expert, folder: Path, rename: Callable[[str], str]) -> Expert:
    """The same tensors with keys that `rename` makes of `MODULE.lora_A.weight`, without PEFT's prefix."""
    folder.mkdir(parents=True)
    tensors = load_file(expert.folder / WEIGHTS)
    save_file({rename(key): tensor for key, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    shutil.copyfile(expert.folder / CONFIG, folder / CONFIG)
    return Expert(folder, expert.made)


def _modules(rename: Callable[[str], str]) -> Callable[[str], str]:
    """Rename the module within a key of PEFT's."""
    return lambda key: PREFIX + rename(key.removeprefix(PREFIX))


def _first_match(rules: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        rule = next(((old, new) for old, new in rules if re.search(old, name)), None)
        return name if rule is None else re.sub(rule[0], rule[1], name, count=1)

    return _modules(rename)


def _v4_expert(
    architecture: Architecture, model: PreTrainedModel, expert: Expert, folder: Path, *, seed: int, r: int, alpha: int
) -> Expert:
    """The expert under the names of transformers 4; with mixtures of experts also a LoRA on each projection of each.

    Transformers 5 fuses the experts of a layer: `gate_up_proj` is experts×(2·intermediate)×hidden, with gate above up,
    and `down_proj` is experts×hidden×intermediate.
    """
    renamed = _renamed(expert, folder, _first_match(architecture.v4))
    if architecture.v4_experts is None:
        return renamed
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / WEIGHTS)
    extra: Tensors = {}

    def lora(name: str, out: int, into: int) -> torch.Tensor:
        """Add random factors; return their ΔW. Plain LoRA: PEFT loads rank-stabilized experts with a wrong scale."""
        a, b = torch.randn(r, into, generator=generator) * 0.05, torch.randn(out, r, generator=generator) * 0.05
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
        return alpha / r * (b.double() @ a.double())

    targets: set[str] = set()
    for parameter, weight in model.named_parameters():
        match = re.fullmatch(r".*\.(\d+)\..*experts\.(gate_up_proj|down_proj)", parameter)
        if match is None:
            continue
        deltas = []
        for index in range(weight.shape[0]):
            gate, up, down = architecture.v4_experts(int(match[1]), index)
            if match[2] == "down_proj":
                deltas.append(lora(down, *weight.shape[1:]))
            else:
                half, into = weight.shape[1] // 2, weight.shape[2]
                deltas.append(torch.cat([lora(gate, half, into), lora(up, half, into)]))
            targets |= {name.rpartition(".")[2] for name in (gate, up, down)}
        extra[parameter] = torch.stack(deltas)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    config["target_modules"] = sorted({*config["target_modules"], *targets})
    (folder / CONFIG).write_text(json.dumps(config))
    return Expert(folder, expert.made, extra)


_TASK, _LANGUAGE = {"r": 4, "lora_alpha": 8, "use_rslora": False}, {"r": 3, "lora_alpha": 9, "use_rslora": False}


def _plain(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
    """Plain LoRA on the language model's layers, with other towers on everything that is linear."""
    targets = "all-linear" if architecture.family == "multimodal" else _plain_linear(architecture, model)
    return Pair(
        save_expert(model, folder / "made-task", seed=1, target_modules=targets, **_TASK),
        save_expert(model, folder / "made-language", seed=2, target_modules=targets, **_LANGUAGE),
    )


def _v4(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
    pair = _plain(architecture, model, folder)
    return Pair(
        _v4_expert(architecture, model, pair.task, folder / "task", seed=3, r=4, alpha=8),
        _v4_expert(architecture, model, pair.language, folder / "language", seed=4, r=3, alpha=9),
    )


def _v4_beside_v5(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
    pair = _plain(architecture, model, folder)
    return Pair(pair.task, _v4_expert(architecture, model, pair.language, folder / "language", seed=4, r=3, alpha=9))


def _text_beside_multimodal(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
    """The language expert was trained on the text-only model with the same decoder."""
    assert architecture.text_only is not None
    pair = Pair(
        save_expert(model, folder / "made-task", seed=1, target_modules="all-linear"),
        save_expert(
            model, folder / "made-language", seed=2,
            target_modules=[
                name for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and architecture.layer_of(name) is not None
            ],
        ),
    )  # fmt: skip
    language = _renamed(pair.language, folder / "language", _first_match((architecture.text_only,)))
    config = json.loads((language.folder / CONFIG).read_text())
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in config["target_modules"]})
    (language.folder / CONFIG).write_text(json.dumps(config))
    return Pair(pair.task, language)


def _wrapped(
    wrap: Callable[[str], str], *, both: bool = False
) -> Callable[[Architecture, PreTrainedModel, Path], Pair]:
    """The language expert, or both, saved from a model inside a wrapper."""

    def made(architecture: Architecture, model: PreTrainedModel, folder: Path) -> Pair:
        pair = _plain(architecture, model, folder)
        language = _renamed(pair.language, folder / "language", wrap)
        return Pair(_renamed(pair.task, folder / "task", wrap) if both else pair.task, language)

    return made


def _is_v4(architecture: Architecture) -> bool:
    return bool(architecture.v4) or architecture.v4_experts is not None


_ANY = {"task_type": "CAUSAL_LM"}

# Kinds whose modules are copied, and blended only if the base is available.
OPAQUE: dict[str, Kind] = {
    "dora": Kind(_of_kind(_variant(use_dora=True, use_rslora=True))),
    "lora_bias": Kind(_of_kind(_variant(lora_bias=True))),
    "ia3": Kind(_of_kind(lambda all_, last: IA3Config(**_ANY, target_modules=all_, feedforward_modules=last))),
    "vera": Kind(_of_kind(lambda all_, last: VeraConfig(**_ANY, target_modules=all_, r=4))),
    "hira": Kind(_of_kind(lambda all_, last: HiraConfig(**_ANY, target_modules=all_, r=4))),
    "oft": Kind(
        _of_kind(lambda all_, last: OFTConfig(**_ANY, target_modules=all_, r=0, oft_block_size=4)), _has_linear
    ),
    "boft": Kind(_of_kind(lambda all_, last: BOFTConfig(**_ANY, target_modules=all_, boft_block_size=4)), _has_linear),
    "loha": Kind(
        _of_kind(
            lambda all_, last: LoHaConfig(
                **_ANY, target_modules=all_, r=3, rank_pattern={last[0]: 2}, alpha_pattern={last[0]: 5}
            )
        ),
        _has_linear,
    ),
    "lokr": Kind(_of_kind(lambda all_, last: LoKrConfig(**_ANY, target_modules=all_, r=3)), _has_linear),
    "hra": Kind(_of_kind(lambda all_, last: HRAConfig(**_ANY, target_modules=all_, r=4)), _has_linear),
    "miss": Kind(_of_kind(lambda all_, last: MissConfig(**_ANY, target_modules=all_, r=4)), _has_linear),
    "road": Kind(_of_kind(lambda all_, last: RoadConfig(**_ANY, target_modules=all_, group_size=2)), _has_linear),
}

KINDS: dict[str, Kind] = {
    "linear": Kind(_linear),
    "attention": Kind(_attention_only, lambda a: a.attention != NOTHING),
    "embeddings": Kind(_embeddings),
    "modules_to_save": Kind(_modules_to_save),
    "mixed": Kind(_mixed),
    "biases": Kind(_of_kind(_variant(bias="all"))),
    "composite": Kind(_composite, lambda a: a.family in ("dense", "moe") and a.attention != NOTHING),
    **OPAQUE,
    "vision_only": Kind(_vision, lambda a: a.family == "multimodal"),
    "v4": Kind(_v4, _is_v4),
    "v4_beside_v5": Kind(_v4_beside_v5, _is_v4),
    "text_only_beside": Kind(_text_beside_multimodal, lambda a: a.text_only is not None),
    # torch.compile, data parallelism around the model, activation checkpointing around each layer, a state dict saved
    # with the adapter's name in its keys
    "orig_mod": Kind(_wrapped(_modules(lambda name: f"_orig_mod.{name}"))),
    "orig_mod_both": Kind(_wrapped(_modules(lambda name: f"_orig_mod.{name}"), both=True)),
    "module": Kind(_wrapped(_modules(lambda name: f"module.{name}"))),
    "checkpoint_wrapped": Kind(
        _wrapped(_modules(lambda name: re.sub(r"\.(\d+)\.", r".\1._checkpoint_wrapped_module.", name, count=1)))
    ),
    "default": Kind(_wrapped(lambda key: re.sub(r"\.(lora_[AB])\.", r".\1.default.", key))),
}
