"""What a PeftModel holds: its LoRA layers and modules trained in full, found once, and its adapters as experts.

PEFT keeps a copy of a module trained in full for every expert and computes with one of them, so taking one expert's
module costs nothing. For an average, one more copy is made and filled again at every switch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.config import AdapterConfig
from adapterswap.core.experts.keys import LORA
from adapterswap.core.experts.parts import FullModule, LoraModule, OpaqueModule, Part
from adapterswap.core.model.layers import ModelConfig, ModuleName, NumLayers, layer_container
from adapterswap.core.model.sources import Source
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.peft_config import Shape
from adapterswap.engines.live.scales import SAME, Scales
from adapterswap.kit.errors import ArgumentError, ExpertError, Problems, UnsupportedError
from adapterswap.kit.files.tensorfile import Tensor, TensorFile

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

_AVERAGE = "__adapterswap_average__"  # the name of the additional copy in PEFT's wrapper
_ELEMENTS = 2**22  # to average at a time


def find_wrappers(model: Any) -> dict[str, Any]:
    """PEFT's wrappers of modules that an expert trained in full, by the module's full name in the base model.

    PEFT also wraps modules without weights, such as an `Identity` in place of a norm; these are left out.
    """
    from peft.utils import ModulesToSaveWrapper

    wrappers = {}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.state_dict():
            wrappers[name] = module
    return wrappers


def match_dtypes(model: Any, name: str) -> None:
    """Convert the modules that an expert trained in full to the dtypes of the base's own modules.

    PEFT does this itself unless it loads with `low_cpu_mem_usage`, which keeps the dtypes in the file.
    """
    for wrapper in find_wrappers(model).values():
        if name not in wrapper.modules_to_save:
            continue
        own = wrapper.original_module.state_dict()
        for key, tensor in wrapper.modules_to_save[name].state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and own[key].is_floating_point():
                tensor.data = tensor.data.to(own[key].dtype)


def use_in_full(name: str, wrapper: Any, coefficients: Mapping[str, float]) -> None:
    """Compute a module with W = Σ c_i·W_i + (1 - Σ c_i)·W_base from now on; without coefficients, with W_base.

    Args:
        name: the module's name, for messages.
        wrapper: PEFT's wrapper, which holds every W_i.
        coefficients: c_i by expert.
    """
    if not coefficients:
        active = []
    elif list(coefficients.values()) == [1]:
        active = list(coefficients)
    else:
        _fill(name, wrapper, coefficients)
        active = [_AVERAGE]
    if wrapper.active_adapters != active:
        wrapper.set_adapter(active, inference_mode=True)


def forget_average(wrapper: Any) -> None:
    """Free the copy that holds an average, if there is one. The wrapper then computes the base's module."""
    wrapper.delete_adapter(_AVERAGE, None)


def _fill(name: str, wrapper: Any, coefficients: Mapping[str, float]) -> None:
    """Compute the average in float32, round it once, and store it in the wrapper's additional copy."""
    import torch

    if _AVERAGE not in wrapper.modules_to_save:
        wrapper.update(_AVERAGE)
        wrapper.modules_to_save[_AVERAGE].requires_grad_(False)
    base = wrapper.original_module.state_dict()
    experts = {expert: wrapper.modules_to_save[expert].state_dict() for expert in coefficients}
    base_coefficient = 1 - sum(coefficients.values())
    with torch.no_grad():
        for key, target in wrapper.modules_to_save[_AVERAGE].state_dict().items():
            parts = [(coefficient, experts[expert][key]) for expert, coefficient in coefficients.items()]
            if abs(base_coefficient) > 1e-12:
                parts.append((base_coefficient, base[key]))
            if bad := [part for _, part in parts if part.is_meta or not part.is_floating_point()]:
                raise UnsupportedError(
                    f"{name} is trained in full and {'offloaded' if bad[0].is_meta else 'quantized'}, so it cannot be "
                    "averaged",
                    f"Give it to one expert in its own rule: {{modules: [{name}], expert: NAME}}",
                    parameter="composition",
                )
            for rows in _blocks(target):
                wide = torch.promote_types(target.dtype, torch.float32)
                total = torch.zeros_like(target[rows], dtype=wide)
                for coefficient, part in parts:
                    total.add_(part[rows].to(target.device, wide), alpha=coefficient)
                target[rows] = total


def _blocks(tensor: torch.Tensor) -> Iterator[Any]:
    """Slices along the first axis, each with about `_ELEMENTS` elements."""
    if tensor.dim() == 0:
        yield ...
        return
    step = max(1, _ELEMENTS * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)


_INNER = re.compile(r"(\.base_layer)+$")
_INNER_NAMES = re.compile(r"(\.base_layer|\.original_module)+\.")


@dataclass(frozen=True)
class LoadedFrom:
    """The opened adapter that a loaded expert came from, and the config object that PEFT made when it loaded it."""

    adapter: Adapter
    config: object


@dataclass(frozen=True)
class LoadedFactors:
    """The tensors A (rank×in) and B (out×rank) of an adapter at a layer; of an embedding, see `LoraModule`."""

    a: torch.Tensor
    b: torch.Tensor
    embedding: bool
    experts: int = 1

    @property
    def rank(self) -> int:
        """The rank, which is that of each expert's factors in a fused parameter."""
        return self.a.shape[0] // self.experts


def factors(layer: Any, name: str) -> LoadedFactors | None:
    """An adapter's tensors at a LoRA layer; None if it has none there."""
    if name in layer.lora_embedding_A:
        return LoadedFactors(layer.lora_embedding_A[name], layer.lora_embedding_B[name], True)
    if name in layer.lora_A:
        experts = getattr(layer, "num_experts", 1)
        return LoadedFactors(layer.lora_A[name].weight, layer.lora_B[name].weight, False, experts)
    return None


def own_factors(layer: Any, name: str) -> LoadedFactors | None:
    """The factors without zeros that `prepare_model_for_compiled_hotswap` added to reach its target rank."""
    loaded = factors(layer, name)
    if loaded is None or loaded.embedding or loaded.a.dim() != 2 or parameter_of(layer) is not None:
        return loaded
    if loaded.rank <= layer.r[name]:
        return loaded

    is_used = (loaded.a.detach() != 0).any(dim=1) | (loaded.b.detach() != 0).any(dim=0)
    rank = int(layer.r[name])
    if is_used.any():
        rank = max(rank, int(is_used.nonzero().max()) + 1)
    return replace(loaded, a=loaded.a[:rank], b=loaded.b[:, :rank])


def other_tensors(layer: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors besides A and B that an adapter has at a layer, by the end of their key after the module's name."""
    tensors = {}
    if name in layer.lora_magnitude_vector:
        tensors["lora_magnitude_vector"] = layer.lora_magnitude_vector[name].weight
    if name in layer.lora_B and layer.lora_B[name].bias is not None:
        tensors["lora_B.bias"] = layer.lora_B[name].bias
    return tensors


def find_layers(model: PeftModel) -> dict[str, Any]:
    """The LoRA layers by the full name, in the base model, of the module or parameter that they adapt.

    For `target_parameters`, PEFT nests layers around a module, one for each adapted parameter.
    """
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            parameter = parameter_of(module)
            if parameter:
                name = f"{_INNER.sub('', name)}.{parameter}"
            layers[name] = module
    return layers


def factors_by_module(model: PeftModel, name: str) -> dict[str, LoadedFactors]:
    """An adapter's tensors at all LoRA layers, by the names of `find_layers`."""
    by_module = {}
    for module, layer in find_layers(model).items():
        tensors = factors(layer, name)
        if tensors is not None:
            by_module[module] = tensors
    return by_module


def parameter_of(layer: Any) -> str | None:
    """The name, within its module, of the parameter that a LoRA layer adapts; None if it adapts a module."""
    return getattr(layer, "parameter_name", None)


def is_unloaded(model: PeftModel) -> bool:
    """Whether `unload` or `merge_and_unload` removed the LoRA layers from the model."""
    return not hasattr(model.get_base_model(), "peft_config")


def check_in_memory(model: Any, adapters: Iterable[tuple[Any, str]] = ()) -> None:
    """Raise `UnsupportedError` if a weight of the model is not in memory.

    accelerate keeps offloaded weights elsewhere and puts meta tensors in their place. PEFT fails on these, or loads
    adapters into them that compute something else.

    Args:
        model: the model.
        adapters: modules and names of parameters to leave out: PEFT fills those of an adapter while it loads it.
    """
    left_out = {id(getattr(module, name)) for module, name in adapters}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and id(parameter) not in left_out:
            raise UnsupportedError(
                f"The model's weights are not all in memory: {_INNER_NAMES.sub('.', name)} is on the device meta, as "
                "accelerate's offloading to the CPU or to disk leaves it",
                "Load the model without offloading, in fewer bits if memory is short. Or write full weights with "
                "`adapterswap merge`, which needs little memory, and offload those",
                parameter="model",
            )


def layers_of_base(model: Any) -> NumLayers | None:
    """The number of layers of a transformers model, from its config; None if the config does not give it."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return ModelConfig(config.to_dict()).stacked_layers
    if not hasattr(config, "get_text_config"):
        return None
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int):
        return None
    return depth


_LOAD = "Load the experts first (LiveComposer.from_experts, or PeftModel.from_pretrained)"


def check_model(model: object) -> None:
    """Raise an `ArgumentError` unless this is a PeftModel with its adapters in it."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ArgumentError(f"`model` is of type {type(model).__name__}, not a PeftModel", _LOAD, parameter="model")
    if is_unloaded(model):
        raise ArgumentError("The model's adapters were unloaded or merged into it", _LOAD, parameter="model")


class Inventory:
    """The LoRA layers and adapters of a PeftModel at one moment.

    Attributes:
        model: the model.
        scales: the adapters' own scales in it.
        layers: the LoRA layers by their module's full name.
        in_full: PEFT's wrappers of modules that any adapter trained in full (`modules_to_save`), likewise.
        wrappers: these wrappers, and PEFT's wrappers of trainable tokens.
        parameters: where the adapters' parameters are: a module and the parameter's name in it. The parameters
            themselves are not kept, because loading may replace them.
    """

    def __init__(self, model: PeftModel, origins: Mapping[str, LoadedFrom], scales: Scales) -> None:
        from peft.utils import AuxiliaryTrainingWrapper

        check_model(model)
        self.model = model
        self.scales = scales
        self.layers = find_layers(model)
        if not self.layers:
            raise ArgumentError("The model has no LoRA layers", _LOAD, parameter="model")
        self.in_full = find_wrappers(model.get_base_model())
        self.wrappers = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]

        # Every parameter of an adapter, as the module that holds it and its name there
        self.parameters: list[tuple[Any, str]] = []
        for module in (*self.layers.values(), *self.wrappers):
            for attribute in module.adapter_layer_names:
                for holder in attrgetter(attribute)(module).modules():
                    self.parameters += [(holder, name) for name, _ in holder.named_parameters(recurse=False)]
        check_in_memory(model.get_base_model(), self.parameters)
        self._configs = dict(model.peft_config)
        self._origins = {name: o for name, o in origins.items() if self._configs.get(name) is o.config}
        self._experts: dict[str, Adapter] = {}

    def forget(self) -> None:
        """Describe the experts anew when they are needed: their scales or ranks were changed."""
        self._experts.clear()

    @property
    def is_stale(self) -> bool:
        """Whether adapters were added or deleted since."""
        configs = self.model.peft_config
        if configs.keys() != self._configs.keys():
            return True
        return any(configs[name] is not self._configs[name] for name in configs)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._configs)

    def content(self, names: Collection[str]) -> bytes:
        """A digest of all tensors of these adapters, by their bits.

        Writes into `parameter.data`, such as those of a hot swap, change neither a tensor's version nor its place.
        """
        import torch

        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = []
        for tensor in self._tensors(names):
            count = len(tensor) if tensor.dim() else 1
            rows = tensor.detach().reshape(count, -1)
            bits = rows.contiguous().view(integers[tensor.element_size()])
            sums += [bits.sum(dim=0).cpu(), bits.sum(dim=1).cpu()]
        if not sums:
            return b""
        return sha256(torch.cat(sums).numpy().tobytes()).digest()

    def _tensors(self, names: Collection[str]) -> Iterator[torch.Tensor]:
        """All tensors of some experts."""
        for name in names:
            for layer in self.layers.values():
                pair = factors(layer, name)
                if pair is not None:
                    yield from (pair.a, pair.b, *other_tensors(layer, name).values())
            for wrapper in self.in_full.values():
                if name in wrapper.modules_to_save:
                    yield from wrapper.modules_to_save[name].state_dict().values()

    @cached_property
    def num_layers(self) -> NumLayers | None:
        """The base's number of layers; see `layers_of_base`."""
        return layers_of_base(self.model.get_base_model())

    @cached_property
    def other_parts(self) -> frozenset[str]:
        """The LoRA layers that see images or audio; see `is_other_part`."""
        container = layer_container(self.layers)
        return frozenset(name for name in self.layers if ModuleName(name).is_other_part(container))

    def origin(self, name: str) -> Adapter | None:
        """The opened adapter that `name` was loaded from; None if the composer did not load it."""
        return self._origins[name].adapter if name in self._origins else None

    def experts(self, names: Iterable[str]) -> dict[str, Adapter]:
        """The loaded adapters among `names`, as experts of one base: the model that they are loaded in.

        Their modules, ranks and scales are those of the layers. If the composer did not load an adapter, its tensors
        have no place in a file.
        """
        problems = Problems(ExpertError)
        loaded: dict[str, Adapter] = {}
        for name in names:
            if name in self._configs:
                with problems.collect():
                    if name not in self._experts:
                        self._experts[name] = self._as_expert(name)
                    loaded[name] = self._experts[name]
        problems.raise_if_any()
        return _of_one_base(loaded)

    def _as_expert(self, name: str) -> Adapter:
        """The adapter that was loaded, or what the model has if its ranks or scales were changed since."""
        origin = self.origin(name)
        if origin is None:
            return self._describe(name)

        for module, part in origin.factors.items():
            layer = self.layers.get(module)
            loaded = None if layer is None else own_factors(layer, name)
            is_same = loaded is not None and loaded.rank == part.rank
            if not is_same or not math.isclose(self.scales.of(layer, name), part.scale, rel_tol=SAME):
                return replace(self._describe(name), kept_layers=origin.kept_layers)
        return origin

    def shape(self, module: str, name: str) -> Shape | None:
        """The rank, alpha and scale with which an adapter is computed at a layer; None if it has no factors there.

        Alpha is the one that PEFT keeps, unless another scale or rank was set since.
        """
        layer = self.layers[module]
        loaded = own_factors(layer, name)
        if loaded is None:
            return None

        kept = Shape.of_alpha(layer.r[name], layer.lora_alpha[name], layer.use_rslora[name])
        scale = self.scales.of(layer, name)
        if loaded.rank == kept.rank and math.isclose(scale, kept.scale, rel_tol=SAME):
            return kept
        return Shape.of_scale(loaded.rank, layer.use_rslora[name], scale)

    def _describe(self, name: str) -> Adapter:
        """A loaded adapter as if it were on disk: its config, and modules whose tensors have shapes but no place."""
        # Its config is checked by the rules for adapter_config.json; sets, of module names, become lists.
        content = json.dumps(self._configs[name].to_dict(), default=sorted)
        config = AdapterConfig.parse(content.encode(), f"The adapter {name!r}")

        problems = Problems(UnsupportedError)
        retrain = "Train it as a plain or rank-stabilized LoRA"
        if name == BASE:
            problems.add(
                f"An adapter is named {BASE!r}, which is reserved for the unchanged base",
                "Load it under another name",
                kind=ExpertError,
            )

        # An expert without parts, and then with those of the loaded layers
        file = TensorFile(Path(name), {}, 0, 0, b"", ())
        bare = Adapter(Source(Path(name), name), config, file, {}, None)
        with problems.collect():
            Target.LIVE.check_expert(bare, f"The adapter {name!r}")
        layers = {module: layer for module, layer in self.layers.items() if name in layer.r}
        saved_modules: dict[str, Any] = {}
        for module, wrapper in self.in_full.items():
            if name in wrapper.modules_to_save:
                saved_modules[module] = wrapper.modules_to_save[name]
        container = layer_container([*layers, *saved_modules])

        parts: list[Part] = []
        for module, layer in layers.items():
            tensors, shape = own_factors(layer, name), self.shape(module, name)
            if tensors is None or shape is None or tensors.a.dim() != 2:
                problems.add(f"The adapter {name!r} at {module} is not a pair of matrices", retrain)
            elif name in layer.lora_variant and not config.dora:
                problems.add(f"The adapter {name!r} at {module} is an unknown variant of LoRA", retrain)
            else:
                lora = LoraModule(
                    name=module,
                    layer=ModuleName(module).layer(container),
                    rank=shape.rank,
                    alpha=shape.alpha,
                    rslora=layer.use_rslora[name],
                    scale=shape.scale,
                    a=_placeless(f"{module}.A", tensors.a),
                    b=_placeless(f"{module}.B", tensors.b),
                    embedding=tensors.embedding,
                    parameter=parameter_of(layer) is not None,
                    experts=tensors.experts,
                )
                extra = {}
                for part, tensor in other_tensors(layer, name).items():
                    extra[part] = _placeless(f"{module}.{part}", tensor)
                settings = {"use_dora": config.dora, "lora_bias": config.lora_bias}
                variant = OpaqueModule(module, lora.layer, config.title, LORA, extra, settings, lora=lora)
                if extra:
                    parts.append(variant)
                else:
                    parts.append(lora)

        for module, whole in saved_modules.items():
            tensors_in_full = {}
            for key, tensor in whole.state_dict().items():
                tensors_in_full[key] = _placeless(f"{module}.{key}", tensor)
            parts.append(FullModule(module, ModuleName(module).layer(container), tensors_in_full))
        problems.raise_if_any()
        return bare.with_parts(parts, container)


def _of_one_base(experts: dict[str, Adapter]) -> dict[str, Adapter]:
    """The experts with one base, revision and task type in their configs: they are loaded in the same model."""
    configs = [adapter.config for adapter in experts.values()]
    if len({(c.base_model, c.revision, c.task_type) for c in configs}) <= 1:
        return experts

    base = next((c.base_model for c in configs if c.base_model), None)
    revision = None
    if len({(c.base_model, c.revision) for c in configs}) == 1:
        revision = configs[0].revision
    task = configs[0].task_type

    alike = {}
    for name, adapter in experts.items():
        config = replace(adapter.config, base_model=base, revision=revision, task_type=task)
        alike[name] = replace(adapter, config=config)
    return alike


def _placeless(name: str, tensor: torch.Tensor) -> Tensor:
    """A tensor's shape, for planning. Its offsets are not those of a file."""
    return Tensor(name, "F32", tuple(tensor.shape), 0, 0)
