"""Adapters as mlx-lm trains and loads them: read into PEFT's form, and written from it.

mlx-lm computes y = x·Wᵀ + scale·(x·a)·b, with `lora_a` (in×rank) and `lora_b` (rank×out); so A = aᵀ, B = bᵀ, and one
scale counts for all modules. Its adapter_config.json has `fine_tune_type`, `num_layers` (the last n layers; all of
them below 1) and `lora_parameters` with `rank`, `scale` and `keys`: names of modules within a layer, or in the model.
Without `keys` the modules follow from mlx-lm's version. Tensors for other modules are not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.model.layers import NumLayers
from adapterswap.core.model.sources import CONFIG, PROVENANCE, WEIGHTS, Source
from adapterswap.core.writing.peft_config import Shape, adapter_config
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ExpertError, Problems, UnsupportedError, and_more
from adapterswap.kit.files.text import read_json, shown, write_json

_IN_LAYER = re.compile(r"(?P<start>.*\blayers|.*\bh|.*\bblocks)\.(?P<layer>\d+)\.(?P<rest>.+)")
_SAME_NAMES = ("model.layers.", "language_model.model.layers.")  # as transformers has them
_FUSE = "Fuse it with `mlx_lm.fuse` and compose the full weights, or train it as LoRA"
_ALL_LAYERS = -1


def write_as_peft(folder: Path, out: Path, base_model: str | None) -> None:
    """Write mlx-lm's adapter in `folder` as a PEFT adapter into the empty folder `out`.

    Raises:
        ExpertError: the files are damaged, or mlx-lm itself would not load some of the tensors.
        UnsupportedError: it is not plain LoRA on linear modules of known names.
    """
    require("models")
    from safetensors.torch import load_file, save_file

    config = read_json(folder / CONFIG)
    scale, keys, num_layers = _settings(config, folder)
    tensors = load_file(folder / Source.MLX_WEIGHTS)
    problems = Problems(UnsupportedError)
    written: dict[str, Any] = {}
    shapes: dict[str, Shape] = {}
    layers: set[int] = set()
    for key in sorted(tensors):
        module, _, part = key.rpartition(".")
        if part == "lora_b" and f"{module}.lora_a" in tensors:
            continue
        a, b = tensors[key], tensors.get(f"{module}.lora_b")
        if part == "m":
            problems.add(f"{folder}: {module} has a magnitude (m), so it is DoRA", _FUSE)
            continue
        if part != "lora_a" or b is None:
            problems.add(f"{folder / Source.MLX_WEIGHTS}: {key} is not a factor of a LoRA with both factors", _FUSE)
            continue
        if a.dim() != 2 or b.dim() != 2:
            problems.add(f"{folder}: {module} has factors for each expert of a mixture ({shown([*a.shape])})", _FUSE)
            continue
        if a.shape[1] != b.shape[0]:
            problems.add(
                f"{folder}: {module} has factors of rank {a.shape[1]} and {b.shape[0]}",
                "Save the adapter again",
                kind=ExpertError,
            )
            continue

        found = _IN_LAYER.fullmatch(module)
        if found is None and module.rpartition(".")[2] != "lm_head":
            problems.add(f"{folder}: {module} is outside the layers, where mlx-lm ties embeddings to the head", _FUSE)
            continue
        if found is not None and not module.startswith(_SAME_NAMES) and base_model is None:
            problems.add(
                f"{folder}: {module} is not a name that transformers is known to have for a module of mlx-lm",
                "Pass the base in the form of transformers (`base_model`), with which the names are compared",
                parameter="base_model",
            )
            continue
        if keys is not None and module not in keys and (found is None or found["rest"] not in keys):
            problems.add(
                f"{folder}: mlx-lm would not load {module}, which `keys` in its {CONFIG} does not name",
                "Add it to `keys`, or remove its tensors",
                kind=ExpertError,
            )
            continue

        if found is not None:
            layers.add(int(found["layer"]))
        rank = a.shape[1]
        a_key, b_key = ModuleKeys(module).factors()
        written |= {a_key: a.T.contiguous(), b_key: b.T.contiguous()}
        shapes[module] = Shape.of_scale(rank, rslora=False, wanted=scale)
    if 0 < num_layers < len(layers):
        problems.add(
            f"{folder}: {Source.MLX_WEIGHTS} has {len(layers)} layers, but num_layers in {CONFIG} is {num_layers}, and "
            "mlx-lm loads only the last ones",
            "Correct `num_layers`, or train the adapter again",
            kind=ExpertError,
        )
    problems.raise_if_any()

    model = config.get("model")
    if not isinstance(model, str) or not model.isprintable():
        model = None
    content = adapter_config(
        shapes,
        rslora=False,
        base_model=base_model or model,
        revision=None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=False,
        tied=False,
    )
    write_json(out / CONFIG, content)
    save_file(written, out / WEIGHTS, {"format": "pt"})


def check_depth(folder: Path, adapter: Adapter, num_layers: NumLayers) -> None:
    """Raise `ExpertError` if mlx-lm, which loads the last n layers, would leave out some of the adapter's.

    Args:
        folder: the folder of the mlx-lm adapter.
        adapter: the same as a PEFT adapter.
        num_layers: the base's number of layers, or the least that is possible.
    """
    count = _settings(read_json(folder / CONFIG), folder)[2]
    layers = [part.layer for part in adapter.parts.values() if part.layer is not None]
    if count > 0 and isinstance(num_layers, int) and layers and min(layers) < num_layers - count:
        raise ExpertError(
            f"{folder}: num_layers in {CONFIG} is {count}, so mlx-lm loads layers {num_layers - count} to "
            f"{num_layers - 1} of this base, but {Source.MLX_WEIGHTS} has layer {min(layers)}",
            "Pass the base that it was trained on, or correct `num_layers`",
            parameter="adapter",
        )


def _settings(config: Mapping[str, Any], folder: Path) -> tuple[float, set[str] | None, int]:
    """The scale, the keys and the number of layers in mlx-lm's config."""
    problems = Problems(ExpertError)
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        problems.add(f"{folder}: fine_tune_type is {shown(kind)}, not lora", _FUSE, kind=UnsupportedError)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        parameters = {}
    scale, keys = parameters.get("scale"), parameters.get("keys")
    num_layers = config.get("num_layers", config.get("lora_layers", _ALL_LAYERS))  # `lora_layers` until 2024
    remedy = "Restore the file that mlx-lm wrote"
    if kind == "lora":
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            problems.add(f"{folder / CONFIG}: lora_parameters.scale is {shown(scale)}, not a number", remedy)
        if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
            problems.add(f"{folder / CONFIG}: lora_parameters.keys is {shown(keys)}, not a list of names", remedy)
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            problems.add(f"{folder / CONFIG}: num_layers is {shown(num_layers)}, not a whole number", remedy)
    problems.raise_if_any()
    assert isinstance(scale, int | float)
    assert isinstance(num_layers, int)
    if keys is not None:
        keys = set(keys)
    return float(scale), keys, num_layers


def check_writable(adapter: Adapter) -> None:
    """Raise `UnsupportedError` if mlx-lm cannot load a LoRA: modules other than linear ones, or names of its own."""
    problems = Problems(UnsupportedError)
    remedy = "Merge it into its base with `merge`, and convert the full weights with `mlx_lm.convert`"
    if adapter.saved or adapter.opaque:
        name = next(iter({**adapter.saved, **adapter.opaque}))
        problems.add(f"{name} is not plain LoRA, which is all that mlx-lm loads", remedy, parameter="format")

    odd = []
    for name, module in adapter.modules.items():
        is_named_alike = name.startswith(_SAME_NAMES) or name == "lm_head"
        if module.embedding or module.parameter or ".experts." in name or not is_named_alike:
            odd.append(name)
    if odd:
        problems.add(
            f"{and_more(odd, 3)}: mlx-lm has other names for such modules, or LoRA of another form on them",
            remedy,
            parameter="format",
        )
    problems.raise_if_any()


def write_from_peft(source: Path, adapter: Adapter, out: Path) -> None:
    """Write a PEFT adapter with one rank and scale 1, in the folder `source`, as mlx-lm's into the folder `out`."""
    require("models")
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / WEIGHTS)
    written: dict[str, Any] = {}
    keys: set[str] = set()
    for name, module in adapter.modules.items():
        written[f"{name}.lora_a"] = tensors[module.a.name].T.contiguous()
        written[f"{name}.lora_b"] = tensors[module.b.name].T.contiguous()
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            keys.add(name)
        else:
            keys.add(found["rest"])
    rank = max(module.rank for module in adapter.modules.values())
    parameters = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": sorted(keys)}

    # In layers without tensors mlx-lm starts with lora_b = 0, which changes nothing, so all layers are right.
    config = {
        "fine_tune_type": "lora",
        "model": adapter.config.base_model,
        "num_layers": _ALL_LAYERS,
        "lora_parameters": parameters,
    }
    write_json(out / CONFIG, config)
    save_file(written, out / Source.MLX_WEIGHTS, {"format": "mlx"})
    record = read_json(source / PROVENANCE)
    write_json(out / PROVENANCE, {key: value for key, value in record.items() if key not in ("files", "fingerprints")})
