"""`adapterswap inspect`: show what an adapter or a model holds, from its header and configs only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from adapterswap.cli.options import Expert, Json
from adapterswap.cli.printing import echo, human_bytes, print_json, print_table, rare_collections, table, working
from adapterswap.cli.signature import declare
from adapterswap.model.layers import (
    format_depth,
    format_layers,
    has_both_stacks,
    stack_of,
    stacked_layers_in_config,
    within_layer,
)

if TYPE_CHECKING:
    from rich.table import Table

    from adapterswap.experts.adapter import Adapter, FullModule, OpaqueModule
    from adapterswap.gguf.reading import GgufAdapter
    from adapterswap.model.checkpoints import Checkpoint, StoredTensor
    from adapterswap.tools.inspecting import Inspection


@declare("inspect")
@rare_collections()
def command(path: Expert, *, as_json: Json = False) -> None:
    """Show what an adapter or a full checkpoint holds: ranks, scales, layers, owners.

    PATH is a PEFT LoRA folder, a folder of full weights, a Hub id (org/name@revision), or LoRA in GGUF. If adapterswap
    composed, merged or exported it, the strip shows which expert each layer came from.
    """
    from adapterswap.tools.inspecting import inspect

    with working("reading"):
        inspection = inspect(path)
    if as_json:
        print_json(inspection.as_json())
    else:
        _print(inspection)


def _print(inspection: Inspection) -> None:
    from adapterswap.experts.adapter import Adapter
    from adapterswap.gguf.reading import GgufAdapter

    if isinstance(inspection.expert, Adapter):
        _print_adapter(inspection, inspection.expert)
    elif isinstance(inspection.expert, GgufAdapter):
        _print_gguf(inspection, inspection.expert)
    else:
        _print_model(inspection, inspection.expert)
    if inspection.trained_from is not None:
        echo(f"trained from {inspection.trained_from}")
    if inspection.record is not None:
        record = inspection.record
        experts = ", ".join(f"{name} from {source}" for name, source in record.experts.items())
        relation = "composed of" if record.slice is None else f"the {record.slice} of"
        for line in [f"{relation} {experts}", *record.origins, *inspection.strip]:
            echo(line)


def _print_adapter(inspection: Inspection, adapter: Adapter) -> None:
    config = adapter.config
    form = "rank-stabilized LoRA (s = α/√r)" if config.rslora else "plain LoRA (s = α/r)"
    form = form if adapter.modules and not adapter.opaque else config.title
    echo(f"{adapter.source}: {form} for {config.base_model or 'an unnamed base'}")
    full_parameters = inspection.num_saved_parameters
    whole = [part for part in adapter.saved.values() if not part.rows]
    trained = [f"{len(whole)} trained in full"] if whole else []
    trained += (
        [f"trained tokens in {len(adapter.tokens)} module{'s' * (len(adapter.tokens) > 1)}"] if adapter.tokens else []
    )
    in_full = f", {' and '.join(trained)} with {full_parameters:,} parameters" if trained else ""
    total, size = inspection.num_parameters, human_bytes(inspection.nbytes)
    echo(f"{len(adapter.modules) + len(adapter.opaque)} modules, {total:,} parameters{in_full}, {size}")
    has_stacks = has_both_stacks(adapter.container)
    rows: list[tuple[Any, ...]] = []
    for m in adapter.modules.values():
        numbers = (m.rank, f"{m.alpha:g}", f"{m.scale:.6g}", f"{m.out_features} × {m.in_features}", m.dtype)
        rows.append((_within(m.name, m.layer, has_stacks), m.kind, m.layer, *numbers))
    heads = ("module", "kind", "layers", "rank", "α", "s", "out × in", "dtype")
    tables = [_table(*heads, rows=rows)] if rows else []
    groups: list[tuple[str, list[Any]]] = [
        (config.title, [*adapter.opaque.values()]),
        ("trained in full", whole),
        ("trained tokens", [*adapter.tokens.values()]),
    ]
    tables += [_tensor_table(title, parts, has_stacks=has_stacks) for title, parts in groups if parts]
    print_table(*tables)
    if adapter.ignored:
        names = ", ".join(adapter.ignored)
        echo(f"in the file but not loaded by PEFT, because the config does not target them: {names}")


def _print_gguf(inspection: Inspection, adapter: GgufAdapter) -> None:
    count = len(adapter.files)
    pieces = f" in {count} pieces" if count > 1 else f", the piece {name}" if (name := adapter.files[0].piece) else ""
    echo(f"{adapter.source}: LoRA in GGUF for {adapter.architecture}{pieces} (s = {adapter.alpha:g} / rank)")
    echo(f"{len(adapter.modules)} modules, {inspection.num_parameters:,} parameters, {human_bytes(inspection.nbytes)}")
    rows: list[tuple[Any, ...]] = []
    for m in adapter.modules.values():
        name = m.name if m.layer is None else m.name.removeprefix(f"blk.{m.layer}.")
        rows.append((name, m.kind, m.layer, m.rank, f"{m.out_features} × {m.in_features}", m.dtype))
    print_table(_table("module", "kind", "layers", "rank", "out × in", "dtype", rows=rows))


def _print_model(inspection: Inspection, model: Checkpoint) -> None:
    parameters = model.parameters.values()
    layers = stacked_layers_in_config(model.config)
    depth = f", {format_depth(layers)} layers" if layers is not None else ""
    echo(f"{model.source}: full weights of {model.config.get('model_type') or 'a model without a type'}{depth}")
    size, shards = human_bytes(inspection.nbytes), len(model.shards)
    total = inspection.num_parameters
    echo(f"{len(parameters)} tensors, {total:,} parameters, {size} in {shards} file{'s' * (shards > 1)}")
    print_table(_tensor_table("tensor", parameters, has_stacks=has_both_stacks(model.container)))


def _table(*heads: str, rows: Iterable[tuple[Any, ...]]) -> Table:
    """A table of names, kinds, layers and the rest; those that differ only by their layer share a row."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for name, kind, layer, *rest in rows:
        groups.setdefault((name, kind, *rest), []).extend([] if layer is None else [layer])
    joined = [(name, kind, format_layers(layers), *rest) for (name, kind, *rest), layers in groups.items()]
    return table(*heads, rows=joined, left=len(heads))


def _tensor_table(title: str, parts: Iterable[FullModule | OpaqueModule | StoredTensor], *, has_stacks: bool) -> Table:
    """A table of whole tensors, with the size of each row's together."""
    from adapterswap.model.checkpoints import StoredTensor

    rows: list[tuple[tuple[str, ...], int | None]] = []
    sizes: Counter[tuple[str, ...]] = Counter()
    for part in parts:
        tensors = {"": part.tensor} if isinstance(part, StoredTensor) else part.tensors
        for last, tensor in tensors.items():
            name = f"{part.name}.{last}".removesuffix(".")
            shape = " × ".join(map(str, tensor.shape)) or "–"
            row = (_within(name, part.layer, has_stacks), part.kind, shape, tensor.dtype)
            sizes[row] += tensor.nbytes
            rows.append((row, part.layer))
    sized = [(*row[:2], layer, *row[2:], human_bytes(sizes[row])) for row, layer in rows]
    return _table(title, "kind", "layers", "shape", "dtype", "size", rows=sized)


def _within(name: str, layer: int | None, has_stacks: bool) -> str:
    """The part of a name after its layer; in a model with two stacks, with the stack in front."""
    if layer is None:
        return name
    return f"{stack_of(name)} {within_layer(name, layer)}" if has_stacks else within_layer(name, layer)
