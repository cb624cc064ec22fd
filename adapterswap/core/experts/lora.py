"""Read LoRA modules from the tensors of an adapter: plain ones, those of parameters, and variants with more tensors.

Errors name the module; the caller puts the adapter's folder before them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import prod

from adapterswap.core.experts.config import AdapterConfig, scale
from adapterswap.core.experts.keys import DORA, LORA_BIAS, LORA_PARTS, MISMATCH, FactorTensors, ModuleKeys
from adapterswap.core.experts.parts import LoraModule, OpaqueModule
from adapterswap.core.model.sources import CONFIG
from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.tensorfile import Tensor

# A fused layer's two parameters in every model of transformers, in their order.
_FIRST_FUSED, _LAST_FUSED = "gate_up_proj", "down_proj"


def bare_name(name: str) -> str:
    """The module that PEFT wrapped, for the name of a layer that it nested in another."""
    return re.sub(r"(\.base_layer)+$", "", name)


def check_not_empty(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise an `ExpertError` for a tensor of the module `name` that holds no numbers."""
    for part, tensor in tensors.items():
        if 0 in tensor.shape:
            raise ExpertError(
                f"{name}: {part} is empty ({list(tensor.shape)}), as DeepSpeed ZeRO-3 leaves it",
                "Gather the weights before saving (stage3_gather_16bit_weights_on_model_save), and save again",
            )


def read_lora(
    name: str,
    layer: int | None,
    factors: FactorTensors,
    config: AdapterConfig,
    rank: int,
    alpha: float,
    *,
    parameter: bool,
) -> LoraModule | OpaqueModule:
    """A module of LoRA, or of a variant.

    Args:
        name, layer: the module's, or the parameter's.
        factors: its tensors.
        config: the adapter's.
        rank, alpha: the values that the config gives it.
        parameter: whether it is a parameter, which may be fused from one matrix per expert of a mixture.

    Raises:
        ExpertError: the tensors do not fit each other or the config.
        UnsupportedError: it is a convolution, or a fused parameter in an older layout.
    """
    a, b = factors.a, factors.b
    if 0 in a.shape or 0 in b.shape:
        check_not_empty(name, {"lora_A": a, "lora_B": b})

    for factor, tensor in (("A", a), ("B", b)):
        if len(tensor.shape) != 2:
            raise UnsupportedError(
                f"{name}: lora_{factor} has the shape {list(tensor.shape)}, but must be a matrix",
                "Only linear and embedding modules can be composed, not convolutions",
            )
    if a.shape[0] != b.shape[1]:
        raise ExpertError(f"{name}: lora_A has rank {a.shape[0]}, but lora_B has {b.shape[1]}", MISMATCH)

    # PEFT stacks the factors of all experts of a fused parameter: A is (experts·rank×in).
    experts = 1
    if parameter and a.shape[0] % rank == 0:
        experts = a.shape[0] // rank
    if experts > 1 and not config.is_at_least((0, 19)):
        raise UnsupportedError(
            f"{name} is a fused parameter with LoRA in the layout of PEFT before 0.19, which exchanges "
            "inputs and outputs for most models. Later versions of PEFT misread it or refuse it",
            "Convert it with `adapterswap convert`, which compares it with its base",
        )
    if a.shape[0] != rank * experts:
        raise ExpertError(f"{name} has rank {a.shape[0]}, but {CONFIG} says {rank}", MISMATCH)

    module = LoraModule(
        name,
        layer,
        rank,
        alpha,
        config.rslora,
        scale(rank, alpha, config.rslora),
        a,
        b,
        factors.embedding,
        factors.base,
        parameter,
        experts,
    )
    if config.dora or config.lora_bias or factors.extras:
        return _variant(module, factors.extras, config)
    return module


def _variant(module: LoraModule, extras: Mapping[str, Tensor], config: AdapterConfig) -> OpaqueModule:
    """A module of DoRA, or of LoRA with biases."""
    is_used = {DORA: config.dora, LORA_BIAS: config.lora_bias}
    expected = {part for part, variant in LORA_PARTS.items() if is_used[variant]}
    for part in sorted(expected ^ extras.keys()):
        if part in extras:
            raise ExpertError(f"{module.name} has {part}, but {CONFIG} says that it should not", MISMATCH)
        raise ExpertError(f"{module.name} has no {part}, but {CONFIG} says that it should", MISMATCH)

    # Both a magnitude vector and a bias have a number per output.
    for part, tensor in extras.items():
        if prod(tensor.shape) != module.out_features:
            raise ExpertError(
                f"{module.name}: {part} has the shape {list(tensor.shape)}, but B has {module.out_features} rows",
                MISMATCH,
            )

    prefix = ModuleKeys(module.name).part("")
    a_key, b_key = module.keys
    tensors = {a_key.removeprefix(prefix): module.a, b_key.removeprefix(prefix): module.b, **extras}
    settings = {"use_dora": config.dora, "lora_bias": config.lora_bias}
    return OpaqueModule(module.name, module.layer, config.title, config.peft_type, tensors, settings, lora=module)


def parameter_names(names: Collection[str], config: AdapterConfig) -> dict[str, str]:
    """The names of modules with LoRA on a parameter → the parameter's own name.

    PEFT wraps the module once for each of its parameters, in the order of the parameters; the keys of inner layers
    contain `base_layer`.

    Raises:
        UnsupportedError: the config does not say which parameters they are.
        ValueError: a regex of the config is invalid or too slow.
    """
    # If the default for null were not empty, PEFT would have written its names.
    adapted: set[str] = set()
    if config.targets.modules is not None:
        adapted = config.targets.loaded(names)

    # The layers around each module, the innermost first
    chains: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        module = bare_name(name)
        if module != name or name not in adapted:
            chains.setdefault(module, []).append(name)

    own_names: dict[str, str] = {}
    for module, chain in chains.items():
        inside, anywhere = [], []
        for target in config.target_parameters:
            holder, _, parameter = target.rpartition(".")
            if not holder:
                anywhere.append(parameter)
            elif f".{module}".endswith(f".{holder}"):
                inside.append(parameter)

        named = set(inside)
        if len(inside) != len(chain):
            named.update(anywhere)
        if len(named) != len(chain) or (len(named) > 1 and named != {_FIRST_FUSED, _LAST_FUSED}):
            raise UnsupportedError(
                f"{module} has LoRA on {len(chain)} of its parameters, but target_parameters does not say "
                f"which ({', '.join(config.target_parameters)})",
                "Name the parameters with their module in the config, such as mlp.experts.down_proj",
            )

        parameters = sorted(named, key=lambda parameter: parameter != _FIRST_FUSED)
        for name, parameter in zip(chain, parameters, strict=True):
            own_names[name] = f"{module}.{parameter}"
    return own_names
