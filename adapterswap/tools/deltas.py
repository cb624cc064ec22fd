"""How any PEFT adapter changes its base's weights, as dense matrices, truncated to LoRA of a rank.

PEFT merges one module at a time, in float32. The base's weight is restored afterwards, so memory holds the base and one
module. A kind is supported if a test shows that merging it gives the same outputs. Weights of linear layers and
embeddings can become LoRA, which engines that serve only LoRA can load; vectors, such as norms, cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapterswap.core.changes.factors import Factors
from adapterswap.core.changes.kinds import Whole, of_kind
from adapterswap.core.changes.locations import locate_all
from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import ModuleKeys, canonical_key
from adapterswap.core.model.base import Base, Weight
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.model.dequantization import load_dense
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.model.sources import CONFIG, WEIGHTS
from adapterswap.core.writing.peft_config import Shape, adapter_config
from adapterswap.core.writing.reduction import approximate
from adapterswap.kit.errors import ExpertError, Problems, UnsupportedError, and_more, reason_of
from adapterswap.kit.files.tensorfile import open_files
from adapterswap.kit.files.text import read_json, write_json
from adapterswap.tools.comparison import norm_together
from adapterswap.tools.cut import as_written


@dataclass(frozen=True)
class ConvertedModule:
    """A module of a converted adapter.

    Attributes:
        name: its full name in the written adapter.
        rank: the rank of its factors.
        norm: ‖ΔW‖ before the conversion (Frobenius).
        error: ‖ΔW - ΔW'‖ / ‖ΔW‖ with the factors as written; 0 if it is below 5e-8.
    """

    name: str
    rank: int
    norm: float
    error: float


@dataclass(frozen=True)
class Conversion:
    """What `convert` wrote, or would write.

    Attributes:
        out_path: the folder.
        peft_type: the adapter's kind before, such as LORA, DORA or LOHA.
        pickled: whether its weights were a pickle.
        modules: its LoRA modules.
    """

    out_path: Path
    peft_type: str
    pickled: bool
    modules: tuple[ConvertedModule, ...]

    @property
    def relative_error(self) -> float:
        """‖ΔW - ΔW'‖ / ‖ΔW‖ over all modules together."""
        norm = norm_together(module.norm for module in self.modules)
        distance = norm_together(module.norm * module.error for module in self.modules)
        if not norm:
            return 0.0
        return distance / norm

    @property
    def worst(self) -> ConvertedModule:
        """The module with the largest error."""
        return max(self.modules, key=lambda module: module.error)


CONVERTIBLE = (
    "LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "IA3", "VERA", "HRA", "FOURIERFT", "VBLORA", "RANDLORA", "MISS",
    "SHIRA", "C3A", "DELORA", "WAVEFT", "GRALORA",
)  # fmt: skip
"""The values of `peft_type` that are converted; LORA stands for DoRA and other variants of it."""

# The settings that say how PEFT starts a module; False means at random.
_INITS = ("init_weights", "init_lora_weights", "init_ia3_weights")
_MODULES = ModuleKeys("").part("").removesuffix(".")  # before the names of modules
# A trained bias of the base, not one of PEFT's own tensors (`lora_B.bias`).
_BASE_BIAS = re.compile(r"(?<!\.lora_A)(?<!\.lora_B)\.bias$")

_KEEP = "Use the adapter as it is, or merge it into its base with PEFT"


@dataclass(frozen=True)
class DenseChange:
    """ΔW of a module, out×in."""

    name: str
    delta: npt.NDArray[np.float32]


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in its base.

    Attributes:
        model: the PeftModel.
        saved: the parameters that were trained in full, of whole modules or biases alone, by their names in the base.
    """

    model: Any
    saved: Mapping[str, Any]

    def changes(self, progress: Callable[[int, int], None]) -> Iterator[DenseChange]:
        """ΔW of every module that the adapter changes."""
        from transformers.pytorch_utils import Conv1D

        layers = _layers(self.model)
        for count, (name, layer) in enumerate(layers.items(), start=1):
            own = layer.get_base_layer()
            shape = getattr(getattr(own, "weight", None), "shape", ())
            if type(own).__name__ not in ("Linear", "Conv1D") or len(shape) != 2:
                raise UnsupportedError(
                    f"{name} is of the class {type(own).__name__}, but only linear layers can be converted to LoRA",
                    _KEEP,
                    parameter="adapter",
                )

            delta = _merged_difference(name, layer, own)
            if isinstance(own, Conv1D):
                delta = np.ascontiguousarray(delta.T)
            yield DenseChange(name, delta)
            progress(count, len(layers))


def _layers(model: Any) -> dict[str, Any]:
    """PEFT's layers around the modules that it adapts, by the names of these modules in the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            layers[name] = module
    return layers


def _merged_difference(name: str, layer: Any, own: Any) -> npt.NDArray[np.float32]:
    """W_merged - W_base, as the base stores it."""
    import torch

    weight, bias = own.weight, own.bias
    with torch.no_grad():
        before = weight.detach().float().clone()
        own.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
        if bias is not None:
            own.bias = torch.nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        try:
            layer.merge(safe_merge=True)
        except Exception as error:  # each kind raises its own errors
            raise UnsupportedError(
                f"PEFT cannot merge the adapter at {name}: {reason_of(error)}", _KEEP, parameter="adapter"
            ) from None

        if bias is not None and not torch.equal(own.bias, bias.float()):
            raise UnsupportedError(
                f"The adapter changes the bias of {name}, which LoRA cannot hold", _KEEP, parameter="adapter"
            )
        delta: npt.NDArray[np.float32] = (own.weight - before).numpy()
        own.weight, own.bias = weight, bias
    return delta


def load_with_base(folder: Path, base_folder: Path, base_name: str) -> LoadedAdapter:
    """The adapter in a folder, loaded by PEFT into its base, in the dtype that the base is stored in."""
    from peft import PeftModel
    from safetensors.torch import load_file

    base = load_dense(base_folder, base_name).eval()
    stored = load_file(folder / WEIGHTS)
    try:
        with quiet_peft():
            model = PeftModel.from_pretrained(base, str(folder))
            loaded = model.load_adapter(str(folder), "default")
    except KeyError as error:  # of a module trained in full, for which PEFT expects a tensor
        raise ExpertError(
            f"The adapter has no tensor {error.args[0]}, although its config says that it was trained",
            "Save the adapter again",
            parameter="adapter",
        ) from None
    except Exception as error:  # PEFT has no single class for these errors
        raise ExpertError(
            f"PEFT cannot load the adapter into {base_name}: {reason_of(error)}", _KEEP, parameter="adapter"
        ) from None

    unexpected = loaded.unexpected_keys
    if unexpected:
        raise ExpertError(
            f"PEFT has no place in {base_name} for {and_more(unexpected)} of the adapter",
            "Pass the base that the adapter was trained on with `base_model`",
            parameter="base_model",
        )
    stored = {canonical_key(key): tensor for key, tensor in stored.items()}
    _check_complete(model, stored, loaded.missing_keys, read_json(folder / CONFIG))
    return LoadedAdapter(model, _saved(model, stored))


def _check_complete(model: Any, stored: Mapping[str, Any], missing: Iterable[str], config: Mapping[str, Any]) -> None:
    """Check that PEFT filled no tensor with random numbers. A module without any tensors counts as unchanged."""
    layers = [ModuleKeys(name).part("") for name in _layers(model)]
    shared = set()  # names of tensors that all modules share
    for name in stored:
        if not name.startswith(_MODULES):
            shared.add(name.rpartition(".")[2])
    random_start = any(config.get(setting) is False for setting in _INITS)

    for missing_key in missing:
        key = missing_key.replace(".default", "")
        layer = next((layer for layer in layers if key.startswith(layer)), None)
        if layer is None or key.removeprefix(layer) in shared:
            continue
        if random_start or any(name.startswith(layer) for name in stored):
            raise ExpertError(
                f"The adapter has no tensor {key}, so PEFT would fill it with random numbers",
                "Save the adapter again",
                parameter="adapter",
            )


def _saved(model: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters trained in full: those of whole modules, which may have modules of their own, and biases."""
    from peft.utils import ModulesToSaveWrapper

    saved: dict[str, Any] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            start = ModuleKeys(name).part("")
            for key, tensor in stored.items():
                if key.startswith(start):
                    saved[key.removeprefix(_MODULES)] = tensor
    for key, tensor in stored.items():
        if _BASE_BIAS.search(key):
            saved[key.removeprefix(_MODULES).replace(".base_layer", "")] = tensor
    return saved


_KEEP_IN_FULL = "Leave out `saved_rank` to keep it in full, or write full weights with `adapterswap merge`"


def write_lowered(
    adapter: Adapter, base: Checkpoint, out: Path, *, rank: int, error: float | None, dtype: str | None
) -> dict[str, ConvertedModule]:
    """Write the adapter into `out` with every module trained in full as LoRA; return those modules.

    Args:
        adapter: a LoRA.
        base: the checkpoint that it adapts.
        out: a folder.
        rank: the highest rank of such a module.
        error: the relative error of ΔW at which a smaller rank is enough; None for the full `rank`.
        dtype: of the new factors; by default the dtype of the adapter's own factors.
    """
    import torch
    from safetensors.torch import save_file

    dtype = dtype or next((module.dtype for module in adapter.modules.values()), "F32")
    torch_dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    tensors: dict[str, Any] = _own_tensors(adapter)
    shapes = {module.name: Shape(module.rank, module.alpha, module.scale) for module in adapter.modules.values()}
    config = adapter.config

    lowered: dict[str, ConvertedModule] = {}
    for weight, delta in _changes(adapter, base):
        module, shape, factors = lower(weight.name, delta, config.rslora, dtype, rank=rank, error=error)
        lowered[weight.name], shapes[weight.name] = module, shape
        for key, factor in zip(ModuleKeys(weight.name).factors(embedding=weight.embedding), factors, strict=True):
            tensors[key] = torch.from_numpy(factor).to(torch_dtype)

    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / WEIGHTS)
    content = adapter_config(
        shapes, (config.rank, config.alpha), rslora=config.rslora, base_model=config.base_model,
        revision=config.revision, task_type=config.task_type, fan_in_fan_out=config.fan_in_fan_out, tied=config.tied,
        auto_mapping=config.auto_mapping,
    )  # fmt: skip
    write_json(out / CONFIG, content)
    return lowered


def lower(
    name: str, delta: npt.NDArray[np.float32], rslora: bool, dtype: str, *, rank: int | None, error: float | None
) -> tuple[ConvertedModule, Shape, tuple[Any, Any]]:
    """ΔW as LoRA: what it loses, its rank and scale, and A and B with numbers that `dtype` holds."""
    norm = float(np.linalg.norm(delta.astype(np.float64)))
    factors = approximate(delta, rank=rank, error=error).factors

    a = as_written(np.ascontiguousarray(factors.a), dtype, name)
    b = as_written(np.ascontiguousarray(factors.b), dtype, name)
    shape = Shape.of_scale(a.shape[0], rslora, 1.0)
    kept = Factors.scaled(a, b, shape.scale, name).rows()
    lost = float(np.linalg.norm((delta - kept).astype(np.float64)))
    return ConvertedModule(name, shape.rank, norm, lost / norm), shape, (a, b)


def _changes(adapter: Adapter, base: Checkpoint) -> Iterator[tuple[Weight, npt.NDArray[np.float32]]]:
    """ΔW (out×in) of every module trained in full that differs from the base."""
    names = ("the adapter", base.name)
    problems = Problems(UnsupportedError)
    if adapter.opaque or any(module.parameter for module in adapter.modules.values()):
        problems.add("The adapter is more than plain LoRA on modules", _KEEP_IN_FULL, parameter="saved_rank")
        problems.raise_if_any()
    if base.quantization is not None:  # the adapter replaces the weights that the base computes with
        base = base.dequantized()
    stored, located, _ = locate_all({names[0]: adapter}, base, problems)
    problems.raise_if_any()

    weights = Base.at(base.source.folder, base.name, to_adapt=True)
    places = located[names[0]]
    full = of_kind(Whole, {key: place.change for key, place in places.items()})
    with open_files([adapter.file, *base.shards]) as files:

        def read(key: str, change: Whole) -> npt.NDArray[np.float32]:
            own = Whole.of(stored[key].path, stored[key].tensor)
            return change.difference(names[0], own.read_rows(names[1], files), files)

        # All mistakes are reported before the first matrix is read whole.
        matrices = {}
        for key, change in full.items():
            module = places[key].module
            weight = weights.get(module) or weights.get((weights.rename(key) or "").removesuffix(".weight"))
            if weight is None or len(change.tensor.shape) != 2:
                if read(key, change).any():
                    problems.add(
                        f"{key} was trained in full, but is not a matrix of a linear layer or an embedding, so LoRA "
                        "cannot hold its change",
                        _KEEP_IN_FULL,
                        parameter="saved_rank",
                    )
            elif adapter.config.tied and weight.tied:
                problems.add(
                    f"{module} was trained together with the module that is tied to it (ensure_weight_tying)",
                    _KEEP_IN_FULL,
                    parameter="saved_rank",
                )
            else:
                matrices[key] = weight, change
        problems.raise_if_any()

        for key, (weight, change) in matrices.items():
            delta = read(key, change)
            if weight.transposed:
                delta = delta.T
            if delta.any():
                yield weight, np.ascontiguousarray(delta)


def _own_tensors(adapter: Adapter) -> dict[str, Any]:
    """All tensors except those of modules trained in full, by PEFT's keys."""
    from safetensors import safe_open

    in_full: set[str] = set()
    for module in adapter.saved.values():
        in_full.update(tensor.name for tensor in module.tensors.values())

    tensors = {}
    with safe_open(adapter.file.path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            if key not in in_full:
                tensors[key] = file.get_tensor(key)
    return tensors
