"""`adapterswap inspect`: what an adapter folder holds, from its header and configs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.printing import human_bytes, print_json, print_table
from adapterswap.errors import printable
from adapterswap.experts.layers import format_layers

if TYPE_CHECKING:
    from adapterswap.checking.record import Record
    from adapterswap.experts.adapters import Adapter, LoraModule


@click.command("inspect")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(path: str, as_json: bool) -> None:
    """Show what an adapter holds: ranks, scales, layers, owners.

    PATH is a PEFT LoRA folder or a Hub id (org/name@revision). For an adapter that adapterswap composed, the strip of
    layers shows which expert each came from.
    """
    from adapterswap.experts.adapters import open_adapter

    adapter = open_adapter(path)
    made_of = _origin(adapter)
    if as_json:
        print_json(_as_json(adapter, made_of))
    else:
        _print(adapter, made_of)


def _origin(adapter: Adapter) -> Record | None:
    from adapterswap.experts.adapters import PROVENANCE
    from adapterswap.files.smallfiles import exists

    path = adapter.source.folder / PROVENANCE
    if not exists(path):
        return None
    from adapterswap.checking.record import read_record  # here, since it costs the import of pydantic

    return read_record(path)


def _parameters(module: LoraModule) -> int:
    return module.rank * (module.in_features + module.out_features)


def _as_json(adapter: Adapter, made_of: Record | None) -> dict[str, Any]:
    config = adapter.config
    return {
        "source": str(adapter.source),
        "base_model": config.base_model,
        "use_rslora": config.rslora,
        "parameters": sum(map(_parameters, adapter.modules.values())),
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
                "dtype": module.dtype,
                "bytes": {"A": [module.a.start, module.a.stop], "B": [module.b.start, module.b.stop]},
                **({"owner": made_of.modules.get(module.name)} if made_of else {}),
            }
            for module in adapter.modules.values()
        ],
    }


def _print(adapter: Adapter, made_of: Record | None) -> None:
    from rich.table import Table

    config, modules = adapter.config, adapter.modules.values()
    form = "rank-stabilized LoRA (s = α/√r)" if config.rslora else "plain LoRA (s = α/r)"
    click.echo(f"{adapter.source}: {form} for {config.base_model or 'a base that it does not name'}")
    total = sum(map(_parameters, modules))
    click.echo(f"{len(adapter.modules)} modules, {total:,} parameters, {human_bytes(adapter.file.size)}")
    table = Table("module", "kind", "layers", "rank", "α", "s", "out × in", "dtype", box=None, header_style="bold")
    for cells in _rows(adapter):
        table.add_row(*cells)
    print_table(table)
    if made_of:
        click.echo(_owners(adapter, made_of))


def _rows(adapter: Adapter) -> list[tuple[str, ...]]:
    """Modules that differ only by their layer share a row."""

    grouped: dict[tuple[str, ...], list[int]] = {}
    for m in adapter.modules.values():
        within = m.name if m.layer is None else m.name.partition(f".{m.layer}.")[2]
        shape = f"{m.out_features} × {m.in_features}"
        key = (within, m.kind, str(m.rank), f"{m.alpha:g}", f"{m.scale:.6g}", shape, m.dtype)
        grouped.setdefault(key, []).extend([] if m.layer is None else [m.layer])
    return [(name, kind, format_layers(layers), *rest) for (name, kind, *rest), layers in grouped.items()]


def _owners(adapter: Adapter, made_of: Record) -> str:
    from adapterswap.planning.describe import Mark, blend_text, draw_strip

    marks = []
    for module in adapter.modules.values():
        owner = made_of.owner_of(module.name)
        if module.layer is not None and module.layer < made_of.num_layers and owner is not None:
            where = module.layer, module.kind
            marks.append(Mark(*where, owner) if isinstance(owner, str) else Mark(*where, None, blend_text(owner)))
    experts = ", ".join(f"{name} from {source}" for name, source in made_of.experts.items())
    lines = [f"composed of {experts}", *draw_strip(marks, made_of.num_layers, made_of.experts).split("\n")]
    return "\n".join(map(printable, lines))
