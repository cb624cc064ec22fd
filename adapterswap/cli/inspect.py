"""`adapterswap inspect`: what an adapter or a model holds, from its header and configs alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.paths import PATH
from adapterswap.cli.printing import human_bytes, print_json, print_table
from adapterswap.errors import printable
from adapterswap.experts.layers import format_layers, num_layers_in_config

if TYPE_CHECKING:
    from adapterswap.experts.adapters import Adapter, FullModule, LoraModule
    from adapterswap.experts.checkpoints import Checkpoint, Parameter
    from adapterswap.files.tensorfile import Tensor
    from adapterswap.records.record import CompositionRecord

    Part = LoraModule | FullModule | Parameter


@click.command("inspect")
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(path: str, as_json: bool) -> None:
    """Show what an adapter or a full checkpoint holds: ranks, scales, layers, owners.

    PATH is a PEFT LoRA folder, a folder of full weights, or a Hub id (org/name@revision). For what adapterswap composed
    or merged, the strip of layers shows which expert each came from.
    """
    from adapterswap.experts.adapters import Adapter
    from adapterswap.experts.opening import open_expert

    opened = open_expert(path)
    made_of = _origin(opened.source.folder)
    if as_json:
        print_json(_as_json(opened, made_of) if isinstance(opened, Adapter) else _model_as_json(opened, made_of))
    elif isinstance(opened, Adapter):
        _print(opened, made_of)
    else:
        _print_model(opened, made_of)


def _origin(folder: Path) -> CompositionRecord | None:
    from adapterswap.experts.adapters import PROVENANCE
    from adapterswap.files.smallfiles import exists

    if not exists(folder / PROVENANCE):  # the next line costs the import of pydantic
        return None
    from adapterswap.records.record import CompositionRecord, read_record

    record = read_record(folder)
    return record if isinstance(record, CompositionRecord) else None


def _parameters(module: LoraModule) -> int:
    return module.rank * (module.in_features + module.out_features)


def _saved_parameters(module: FullModule) -> int:
    return sum(prod(tensor.shape) for tensor in module.tensors.values())


def _as_json(adapter: Adapter, made_of: CompositionRecord | None) -> dict[str, Any]:
    config = adapter.config
    return {
        "kind": "adapter",
        "source": str(adapter.source),
        "base_model": config.base_model,
        "use_rslora": config.rslora,
        "parameters": sum(map(_parameters, adapter.modules.values())),
        "saved_parameters": sum(map(_saved_parameters, adapter.saved.values())),
        "bytes": adapter.file.size,
        "modules": [
            {
                "name": module.name,
                "layer": module.layer,
                "kind": module.kind,
                "rank": module.rank,
                "alpha": module.alpha,
                "scale": module.scale,
                "out_features": module.out_features,
                "in_features": module.in_features,
                "embedding": module.embedding,
                "dtype": module.dtype,
                "bytes": {"A": [module.a.start, module.a.stop], "B": [module.b.start, module.b.stop]},
                **_owner(module.name, made_of),
            }
            for module in adapter.modules.values()
        ],
        "saved": [
            {
                "name": module.name,
                "layer": module.layer,
                "kind": module.kind,
                "parameters": _saved_parameters(module),
                "tensors": {name: _tensor_as_json(tensor) for name, tensor in module.tensors.items()},
                **_owner(module.name, made_of),
            }
            for module in adapter.saved.values()
        ],
        "ignored": list(adapter.ignored),
        **_composition(made_of, [*adapter.modules.values(), *adapter.saved.values()]),
    }


def _model_as_json(model: Checkpoint, made_of: CompositionRecord | None) -> dict[str, Any]:
    parameters = model.parameters.values()
    return {
        "kind": "model",
        "source": str(model.source),
        "model_type": model.config.get("model_type"),
        "num_layers": num_layers_in_config(model.config),
        "parameters": sum(prod(parameter.tensor.shape) for parameter in parameters),
        "bytes": sum(shard.size for shard in model.shards),
        "shards": [{"name": shard.path.name, "bytes": shard.size} for shard in model.shards],
        "tensors": [
            {
                "name": parameter.name,
                "layer": parameter.layer,
                "kind": parameter.kind,
                **_tensor_as_json(parameter.tensor),
                "shard": parameter.path.name,
                **_owner(parameter.name, made_of),
            }
            for parameter in parameters
        ],
        **_composition(made_of, parameters),
    }


def _tensor_as_json(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": [tensor.start, tensor.stop]}


def _owner(name: str, made_of: CompositionRecord | None) -> dict[str, Any]:
    return {"owner": made_of.modules.get(name)} if made_of else {}


def _composition(made_of: CompositionRecord | None, parts: Iterable[Part]) -> dict[str, Any]:
    if made_of is None:
        return {}
    experts = {name: str(source) for name, source in made_of.experts.items()}
    return {
        "composed_of": {
            "experts": experts,
            "num_layers": made_of.num_layers,
            "strip": _strip(made_of, parts),
        }
    }


def _print(adapter: Adapter, made_of: CompositionRecord | None) -> None:
    from rich.table import Table

    config, modules = adapter.config, adapter.modules.values()
    form = "rank-stabilized LoRA (s = α/√r)" if config.rslora else "plain LoRA (s = α/r)"
    click.echo(f"{adapter.source}: {form} for {config.base_model or 'a base that it does not name'}")
    total = sum(map(_parameters, modules))
    whole = sum(map(_saved_parameters, adapter.saved.values()))
    in_full = f", {len(adapter.saved)} trained in full with {whole:,} parameters" if adapter.saved else ""
    click.echo(f"{len(adapter.modules)} modules, {total:,} parameters{in_full}, {human_bytes(adapter.file.size)}")
    table = Table("module", "kind", "layers", "rank", "α", "s", "out × in", "dtype", box=None, header_style="bold")
    for cells in _rows(adapter):
        table.add_row(*cells)
    tables = [table] if adapter.modules else []
    if adapter.saved:
        tables.append(_tensor_table("trained in full", adapter.saved.values()))
    print_table(*tables)
    if adapter.ignored:
        names = ", ".join(adapter.ignored)
        click.echo(f"in the file, and not loaded by PEFT since the config does not target them: {names}")
    if made_of:
        _print_origin(made_of, [*modules, *adapter.saved.values()])


def _print_model(model: Checkpoint, made_of: CompositionRecord | None) -> None:
    parameters = model.parameters.values()
    layers = num_layers_in_config(model.config)
    depth = f", {layers} layers" if layers is not None else ""
    click.echo(f"{model.source}: full weights of {model.config.get('model_type') or 'a model without a type'}{depth}")
    total = sum(prod(parameter.tensor.shape) for parameter in parameters)
    size, shards = human_bytes(sum(shard.size for shard in model.shards)), len(model.shards)
    click.echo(f"{len(parameters)} tensors, {total:,} parameters, {size} in {shards} file{'s' * (shards > 1)}")
    print_table(_tensor_table("tensor", parameters))
    if made_of:
        _print_origin(made_of, parameters)


def _rows(adapter: Adapter) -> list[tuple[str, ...]]:
    """Modules that differ only by their layer share a row."""

    grouped: dict[tuple[str, ...], list[int]] = {}
    for m in adapter.modules.values():
        shape = f"{m.out_features} × {m.in_features}"
        key = (_within(m.name, m.layer), m.kind, str(m.rank), f"{m.alpha:g}", f"{m.scale:.6g}", shape, m.dtype)
        grouped.setdefault(key, []).extend([] if m.layer is None else [m.layer])
    return [(name, kind, format_layers(layers), *rest) for (name, kind, *rest), layers in grouped.items()]


def _tensor_table(title: str, parts: Iterable[FullModule | Parameter]) -> Any:
    """A table of whole tensors; those that differ only by their layer share a row."""
    from rich.table import Table

    from adapterswap.experts.adapters import FullModule

    grouped: dict[tuple[str, ...], list[int]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for part in parts:
        tensors = (
            {f"{part.name}.{name}": tensor for name, tensor in part.tensors.items()}
            if isinstance(part, FullModule)
            else {part.name: part.tensor}
        )
        for name, tensor in tensors.items():
            shape = " × ".join(map(str, tensor.shape)) or "–"
            key: tuple[str, ...] = (_within(name, part.layer), part.kind, shape, tensor.dtype)
            grouped.setdefault(key, []).extend([] if part.layer is None else [part.layer])
            sizes[key] = sizes.get(key, 0) + tensor.nbytes
    table = Table(title, "kind", "layers", "shape", "dtype", "size", box=None, header_style="bold")
    for key, layers in grouped.items():
        name, kind, *rest = key
        table.add_row(name, kind, format_layers(layers), *rest, human_bytes(sizes[key]))
    return table


def _within(name: str, layer: int | None) -> str:
    return name if layer is None else name.partition(f".{layer}.")[2]


def _print_origin(made_of: CompositionRecord, parts: Iterable[Part]) -> None:
    experts = ", ".join(f"{name} from {source}" for name, source in made_of.experts.items())
    for line in [f"composed of {experts}", *_strip(made_of, parts)]:
        click.echo(printable(line))


def _strip(made_of: CompositionRecord, parts: Iterable[Part]) -> list[str]:
    """The strip of layers, a line each; what no expert changed is left out beside others of its kind and layer."""
    from adapterswap.planning.allocation import BASE
    from adapterswap.planning.describe import Mark, blend_text, draw_strip

    marks = []
    for part in parts:
        owner = made_of.owner_of(part.name)
        if part.layer is not None and part.layer < made_of.num_layers and owner is not None:
            where = part.layer, part.kind
            marks.append(Mark(*where, owner) if isinstance(owner, str) else Mark(*where, None, blend_text(owner)))
    changed = {(mark.layer, mark.kind) for mark in marks if mark.owner != BASE}
    marks = [mark for mark in marks if mark.owner != BASE or (mark.layer, mark.kind) not in changed]
    return draw_strip(marks, made_of.num_layers, made_of.experts).split("\n")
