"""Load experts from disk into a running model, whole or only some layers, and compare their copies of base weights.

PEFT would overwrite the base's weights for every expert, in the copies' dtype, and untie weights that are tied to them;
it would also hold the expert's factors in that dtype.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.core.experts.adapter import Adapter, open_adapter
from adapterswap.core.experts.keys import copies_in
from adapterswap.core.experts.parts import compare_shapes
from adapterswap.core.model.base import Base, shape_of
from adapterswap.core.model.layers import Depth, KeptLayers, ModuleName, NumLayers, format_layers
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.model.sources import CONFIG, WEIGHTS, Source
from adapterswap.core.planning.base import check_base_weights
from adapterswap.core.planning.composition import Composition, parse_composition
from adapterswap.core.planning.functions import slice_layers
from adapterswap.core.planning.names import ExpertName
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.planning.targets import Target, clash
from adapterswap.core.writing.copies import Comparable
from adapterswap.engines.live.inventory import (
    check_in_memory,
    factors,
    find_layers,
    find_wrappers,
    layers_of_base,
    match_dtypes,
)
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    ExpertError,
    Problems,
    UnsupportedError,
    and_more,
    reason_of,
)
from adapterswap.kit.files.folders import OutputKind, scratch_folder
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import TensorFile, open_files
from adapterswap.kit.files.text import expand

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def check_copies_in_model(
    file: TensorFile, owner: str, modules: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> None:
    """Compare every copy with the model's own weight, up to the rounding of the narrower of their dtypes.

    Args:
        file: the header of the safetensors file of the expert, or of any kind of adapter that PEFT loads.
        owner: what to call the expert in messages, such as `the expert 'math'`.
        modules: the base's modules by full name, possibly inside LoRA layers of other experts.
        names: the model's name of each module that has another name in the file, by the name in the file.
    """
    copies = {(names or {}).get(module, module): copy for module, copy in copies_in(file).items()}
    carried = {module: copy for module, copy in copies.items() if module in modules}
    if not carried:
        return
    if any(getattr(modules[module], "merged", False) for module in carried):
        raise UnsupportedError("Adapters are merged into the model's weights", "Call unmerge_adapter() first")

    problems = Problems(ExpertError)
    with open_files([file]) as files:
        for module, copy in carried.items():
            model_weight = _own_weight(modules[module])
            conflict = (
                f"{owner} carries a copy of {module}.weight ({copy.name}), with which PEFT would overwrite the model's "
                "own"
            )
            if copy.dtype not in Dtype.FLOATS:
                problems.add(
                    f"{conflict}, and its dtype is {copy.dtype}",
                    f"Save it as one of {', '.join(Dtype.FLOATS)}",
                    parameter="expert",
                )
            elif model_weight is None:
                problems.add(
                    f"{conflict}. The two cannot be compared, because the model's is quantized, sharded or offloaded",
                    "Load the model with that weight whole, in float32, bfloat16 or float16",
                    parameter="model",
                    kind=UnsupportedError,
                )
            elif not Comparable.of(copy, files[file.path]).is_one_with(model_weight):
                problems.add(
                    f"{conflict}. The two differ, so the expert was trained on another base",
                    "Load it into the base that it was trained on, in the dtype in which that base is stored",
                    parameter="expert",
                )
    problems.raise_if_any()


def _own_weight(module: Any) -> Comparable | None:
    """The weight of a module, or of the one inside a LoRA layer; None unless it is a plain floating-point tensor."""
    import torch

    if hasattr(module, "get_base_layer"):
        module = module.get_base_layer()
    weight: Any = getattr(module, "weight", None)
    names = {getattr(torch, name): stored for name, stored in Dtype.NAMES.items()} | {torch.float64: "F32"}
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta or weight.dtype not in names:
        return None

    flat = weight.detach().reshape(-1)

    def read(start: int, stop: int) -> Any:
        return flat[start:stop].float().cpu().numpy()

    return Comparable(names[weight.dtype], tuple(weight.shape), read)


def without_copies(adapter: Adapter) -> Adapter:
    """The adapter without the copies of the base's weights that it carries."""
    bare = {name: replace(module, base=None) for name, module in adapter.modules.items()}
    return replace(adapter, parts={**adapter.parts, **bare})


@contextmanager
def folder_without_copies(file: TensorFile) -> Iterator[Path]:
    """A folder with an adapter's config and its tensors without the copies: its own folder if it carries none."""
    source = file.path.parent
    copies = {copy.name for copy in copies_in(file).values()}
    if not copies:
        yield source
        return
    from safetensors import safe_open
    from safetensors.torch import save

    with scratch_folder("live") as place:
        bare = place / "bare"
        with OutputKind(None).folder(bare) as folder, safe_open(file.path, "pt") as tensors:
            others = {key: tensors.get_tensor(key) for key in file.tensors if key not in copies}
            (folder / WEIGHTS).write_bytes(save(others))
            shutil.copyfile(source / CONFIG, folder / CONFIG)
        yield bare


def load_expert(
    model: PreTrainedModel | PeftModel,
    expert: Adapter | str | Path,
    name: str,
    *,
    layers: str | None = None,
    autocast_adapter_dtype: bool = True,
) -> PeftModel:
    """Load an expert under `name`, frozen, and return the model as a PeftModel.

    The base's own weights do not change: copies of them that the expert carries are only compared. After an error the
    model is as it was.

    Args:
        model: the base, or a PeftModel that holds other experts.
        expert: an opened adapter, a folder or a Hub id.
        name: what compositions call it.
        layers: load only these layers, such as `0-4,30-31`, and whatever is outside the layers. The other layers take
            no memory, and a composition that needs them is refused.
        autocast_adapter_dtype: PEFT's option of this name: hold float16 and bfloat16 experts in float32.

    Raises:
        ExpertError: the expert is damaged, does not fit the model or carries a copy of another base's weight.
        NotFoundError: the expert does not exist.
        ArgumentError: the name is taken or cannot be used, or the expert has no such layers.
        UnsupportedError: the expert is of a kind that cannot be composed, or the model is offloaded.
    """
    # What is loaded, and into what
    if isinstance(expert, Adapter):
        adapter = expert
    else:
        try:
            adapter = open_adapter(expert)
        except AdapterswapError as error:
            raise error.recast(parameter="expert") from None
    Target.LIVE.check_expert(adapter, f"the expert {name!r}")
    _check_base(adapter, name, model)
    base = _base_of(model)
    check_in_memory(base)
    adapter = as_in_model(adapter, name, base)
    _check_name(name, getattr(model, "peft_config", {}))
    part = adapter
    if layers is not None:
        part = slice_of(adapter, layers, layers_of_base(base))
    _check_fit(part, name, base)

    with _folder_of(adapter, layers, layers_of_base(base)) as folder:
        peft_model = _load(model, base, folder, name, autocast_adapter_dtype)

    # What PEFT made of it
    loaded = {}
    for module, layer in find_layers(peft_model).items():
        pair = factors(layer, name)
        if pair:
            loaded[module] = pair
    wrappers = find_wrappers(peft_model.get_base_model())
    saved = {module for module, wrapper in wrappers.items() if name in wrapper.modules_to_save}

    lost = sorted(module for module, pair in loaded.items() if module in part.factors and pair.a.is_meta)
    if lost:
        _remove(peft_model, name)
        raise UnsupportedError(
            f"PEFT loses LoRA on {and_more(lost)} of the expert {name!r}: for this type of model it renames these keys",
            "Write full weights with `merge`, which does not depend on PEFT",
            parameter="expert",
        )
    differing = sorted((loaded.keys() ^ part.factors.keys()) | (saved ^ part.saved.keys()))
    if differing:
        _remove(peft_model, name)
        raise ExpertError(
            f"The expert {name!r} does not fit the model: its config and its file disagree on {differing[0]}",
            "Save the adapter again with PEFT, or write it with `adapterswap slice`",
            parameter="expert",
        )
    return peft_model


def _base_of(model: Any) -> Any:
    """The base of a PeftModel; the model itself if it is none."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def _check_base(adapter: Adapter, name: str, model: Any) -> None:
    """Raise if the model was loaded from another local base than the one that the expert's record names."""
    place = expand(getattr(model.config, "_name_or_path", None) or "")
    if place.name and os.path.isdir(place):
        try:
            own = {name: adapter.config.base_reference}
            check_base_weights({name: adapter.base_fingerprints}, Source(place, place.name), own)
        except BaseModelError as error:
            raise error.recast(ExpertError, parameter="expert") from None


def as_in_model(adapter: Adapter, name: str, model: Any) -> Adapter:
    """The adapter under the names that a running model has for its modules.

    If the model lacks a module under any name, the adapter is returned unchanged, and `_check_fit` reports the module.
    """
    base = _base_of(model)
    names = {module for module, _ in base.named_modules()} | _parameters(base).keys()
    if names.issuperset(adapter.parts):
        return adapter
    try:
        return adapter.under_names_of(Base(base), name, "the model")
    except AdapterswapError:
        return adapter


def load_experts(model: PreTrainedModel, plan: Plan) -> PeftModel:
    """`model` as a PeftModel with the plan's experts loaded under their names, frozen.

    Raises:
        ExpertError: an expert does not fit the model.
        UnsupportedError: an expert is a full checkpoint.
    """
    loaded: Any = model
    plan.check_adapter()
    for name, adapter in plan.adapters.items():
        loaded = load_expert(loaded, adapter, name)
    return loaded


def slice_of(adapter: Adapter, layers: str, num_layers: NumLayers | None) -> Adapter:
    """The adapter with only `layers` of it."""
    plan = slice_layers(adapter, layers, num_layers=num_layers)
    parts = {name: part for name, part in adapter.parts.items() if plan.slots[name].terms}
    return replace(adapter, parts=parts, kept_layers=KeptLayers.of(layers))


def layers_taken(
    adapter: Adapter, name: str, compositions: Iterable[str | Composition], num_layers: NumLayers | None
) -> str:
    """The layers that compositions take from an expert, in the form `0-4,30-31`."""
    num_layers = Depth.known(num_layers, "the model", "Pass `layers` instead", parameter="model")
    taken: set[int] = set()
    for composition in compositions:
        if isinstance(composition, str):
            composition = parse_composition(composition)
        rules = composition.rules(num_layers)
        for module in adapter.parts.values():
            if module.layer is None:
                continue
            matching = [rule for rule in rules if rule.matches(module.name, module.layer, module.kind)]
            if matching and name in matching[0].coefficients():
                taken.add(module.layer)

    if not taken:
        raise CompositionError(
            f"The compositions take no layer from the expert {name!r}",
            "Check the names of the experts in them",
            parameter="compositions",
        )
    return format_layers(taken)


def _check_name(name: str, loaded: Any) -> None:
    """Refuse the name of a loaded adapter, and names that PEFT cannot hold."""
    problems = Problems(ArgumentError)
    if name in loaded:
        problems.add(
            f"An adapter named {name!r} is already loaded",
            "Choose another name, or delete that adapter first (delete_adapter)",
            parameter="name",
        )
    if not ExpertName(name).fits_peft:
        problems.add(
            f"PEFT cannot hold an adapter under the name {name!r}",
            f"Choose a name without dots that is neither {BASE!r} nor a part of 'lora_'",
            parameter="name",
        )
    problems.raise_if_any()


def _check_fit(adapter: Adapter, name: str, base: Any) -> None:
    """Raise if the base lacks a module of the adapter, has it in another shape, or differs from a copy it carries."""
    problems = Problems(ExpertError)
    modules, parameters = dict(base.named_modules()), _parameters(base)
    _check_other_parts(adapter, name, modules, problems)
    problems.raise_if_any()

    # Its modules
    remedy = "Load it into the base that it was trained on"
    fused = {module.name: module for module in adapter.modules.values() if module.parameter}
    missing: list[str] = []
    for part_name in adapter.parts:
        there = parameters if part_name in fused else modules
        if part_name not in there:
            missing.append(part_name)
    if missing:
        depth = layers_of_base(base)
        otherwise = remedy
        if all(ModuleName(module).is_ahead(adapter.parts[module].layer, depth) for module in missing):
            otherwise = (
                "transformers does not load layers that predict further tokens: write full weights with `merge` instead"
            )
        problems.add(
            f"The expert {name!r} adapts {and_more(missing)}, which the model does not have",
            otherwise,
            parameter="expert",
        )

    # The shapes of their factors
    for module in (module for name, module in fused.items() if name in parameters):
        shape = (module.experts, module.out_features, module.in_features)
        if _axes(parameters[module.name]) != _axes(shape):
            problems.add(
                f"{module.name} is {module.shape} in the expert {name!r}, and "
                f"{'×'.join(map(str, parameters[module.name]))} in the model",
                remedy,
                parameter="expert",
            )
    shapes = {module: shape_of(modules[module]) for module in adapter.factors if module in modules}
    compare_shapes(
        {module.name: f"{module.out_features}×{module.in_features}" for module in adapter.factors.values()},
        {module: f"{shape[0]}×{shape[1]}" for module, shape in shapes.items() if shape is not None},
        one=f"the expert {name!r}",
        other="the model",
        remedy=remedy,
        problems=problems,
        parameter="expert",
    )

    # The shapes of those that were trained in full
    ours: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for part in adapter.saved.values():
        target: Any = modules.get(part.name)
        state: dict[str, Any] = {}
        if target is not None:
            state = getattr(target, "original_module", target).state_dict()
        ours |= {f"{part.name}.{key}": "×".join(map(str, tensor.shape)) for key, tensor in part.tensors.items()}
        theirs |= {f"{part.name}.{key}": "×".join(map(str, tensor.shape)) for key, tensor in state.items()}
    compare_shapes(
        ours,
        theirs,
        one=f"the expert {name!r}",
        other="the model",
        remedy=remedy,
        problems=problems,
        parameter="expert",
    )
    problems.raise_if_any()
    check_copies_in_model(
        adapter.file, f"the expert {name!r}", modules, {old: new for new, old in adapter.original.items()}
    )


def _check_other_parts(adapter: Adapter, name: str, modules: Mapping[str, Any], problems: Problems) -> None:
    """Report a module that the adapter holds in full and a loaded one adapts, or the reverse: PEFT cannot hold both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    saved = {module for module, instance in modules.items() if isinstance(instance, ModulesToSaveWrapper)}
    adapted = {module for module, instance in modules.items() if isinstance(instance, BaseTunerLayer)}
    held = {f"the expert {name!r}": (adapter.saved, adapter.parts), "a loaded expert": (saved, saved | adapted)}
    reason = clash(held)
    if reason is not None:
        problems.add(reason, Target.LIVE.otherwise, parameter="expert", kind=UnsupportedError)


def _axes(shape: tuple[int, ...]) -> list[int]:
    """The sizes of a shape's axes without 1s, sorted: their order differs between models. A router has two axes."""
    return sorted(size for size in shape if size != 1)


def _parameters(base: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's matrices and stacks of matrices, by name, without the names of PEFT's layers."""
    shapes = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if parameter.dim() in (2, 3):
            shapes[re.sub(r"(\.base_layer)+\.", ".", name)] = tuple(parameter.shape)
    return shapes


@contextmanager
def _folder_of(adapter: Adapter, layers: str | None, num_layers: NumLayers | None) -> Iterator[Path]:
    """The folder for PEFT to load: the expert's own, or a temporary one with only what is loaded."""
    if layers is None and not adapter.renamed and not adapter.ties_factors:
        with folder_without_copies(adapter.file) as folder:
            yield folder
        return
    from adapterswap.core.writing.adapter import write_adapter

    # The names are the model's own: see `as_in_model`. PEFT ties the first adapter's factors of a head, and loses those
    # of further ones, so each module is loaded by itself: the file has the factors of both.
    adapter = replace(adapter, original={}, config=replace(adapter.config, tied=False))
    if layers is None:
        composition = Composition.of_one("expert", adapter)
        plan = make_plan(composition, {"expert": without_copies(adapter)}, num_layers=num_layers)
    else:
        plan = slice_layers(without_copies(adapter), layers, num_layers=num_layers)
    with scratch_folder("live") as place:
        yield write_adapter(plan, place / "adapter")


def _load(model: Any, base: Any, folder: Path, name: str, autocast: bool) -> Any:
    """Load an adapter's folder with PEFT, and return the model as a PeftModel."""
    from peft import PeftModel

    loaded = model
    # `low_cpu_mem_usage` reads the tensors into place, without initialising random ones first.
    device = str(next(base.parameters()).device)
    options = {"low_cpu_mem_usage": True, "torch_device": device, "autocast_adapter_dtype": autocast}
    with quiet_peft():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # `load_expert` checks this itself
        # PEFT applies patterns of parameters (`target_parameters`) despite this warning.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        try:
            if model is base:
                loaded = PeftModel.from_pretrained(model, str(folder), adapter_name=name, **options)
            else:
                model.load_adapter(str(folder), adapter_name=name, **options)
        except AdapterswapError:  # from putting the active composition back
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            if "same set of parameters" in str(error):
                raise UnsupportedError(
                    f"The expert {name!r} does not adapt the same parameters (target_parameters) as a loaded expert, "
                    "and PEFT cannot hold both",
                    Target.LIVE.otherwise,
                    parameter="expert",
                ) from None
            raise ExpertError(
                f"The expert {name!r} does not fit the model: {reason_of(error)}",
                "Load it into the base that it was trained on",
                parameter="expert",
            ) from None
    match_dtypes(loaded.get_base_model(), name)
    return loaded


def _remove(model: Any, name: str) -> None:
    """Remove an adapter again, bypassing `Guard`, and keep the active adapter, which PEFT would change."""
    if len(model.peft_config) == 1:
        model.unload()
        return
    active, tuner_active = model.active_adapter, model.base_model.active_adapter
    type(model).delete_adapter(model, name)
    model.active_adapter, model.base_model.active_adapter = active, tuner_active
