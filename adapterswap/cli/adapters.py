"""`adapterswap inspect`, `slice`, `convert` and `extract`: what is in an expert, and another adapter made of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.options import Count, Device, Dtype, Expert, Json, Rank, Result, Share
from adapterswap.cli.output import (
    count_bar,
    echo,
    human_bytes,
    note,
    print_json,
    print_rows,
    print_table,
    rare_collections,
    table,
    working,
)
from adapterswap.cli.signature import declare
from adapterswap.core import format_layers

if TYPE_CHECKING:
    from adapterswap.core import Adapter, Checkpoint
    from adapterswap.engines.gguf.adapter import GgufAdapter
    from adapterswap.kit.files.tensorfile import Tensor
    from adapterswap.tools.deltas import Conversion
    from adapterswap.tools.extraction import Extracted, Extraction
    from adapterswap.tools.inspection import Inspection


@declare("inspect")
@rare_collections()
def inspect_command(path: Expert, *, as_json: Json = False) -> None:
    """Show what an adapter or a full checkpoint holds: ranks, scales, layers, owners.

    PATH is a PEFT LoRA folder, a folder of full weights, a Hub id (org/name@revision), or LoRA in GGUF. If adapterswap
    composed, merged or exported it, the strip shows which expert each layer came from.

    Examples:
        adapterswap inspect math-swahili
        adapterswap inspect org/base --json
    """
    from adapterswap.core import Adapter
    from adapterswap.engines.gguf.adapter import GgufAdapter
    from adapterswap.tools.inspection import inspect

    with working("reading"):
        inspection = inspect(path)
    if as_json:
        print_json(inspection.as_json())
        return

    # What it holds
    if isinstance(inspection.expert, Adapter):
        _print_adapter(inspection, inspection.expert)
    elif isinstance(inspection.expert, GgufAdapter):
        _print_gguf(inspection, inspection.expert)
    else:
        _print_model(inspection, inspection.expert)
    for kind, names in inspection.companions.items():
        echo(f"{_BESIDE.get(kind, kind)}: {', '.join(names)}")

    # Where it is from
    if inspection.trained_from is not None:
        echo(f"trained from {inspection.trained_from}")
    if inspection.record is not None:
        record = inspection.record
        experts = ", ".join(f"{name} from {source}" for name, source in record.experts.items())
        relation = "composed"
        if record.slice is not None:
            relation = f"the {record.slice}"
        echo(f"{relation} of {experts}", *record.origins, *inspection.strip)


_BESIDE = {
    "chat_template": "chat templates",
    "generation": "generation settings",
    "code": "code, which is never run",
}


def _print_adapter(inspection: Inspection, adapter: Adapter) -> None:
    """Print what an adapter holds."""
    config = adapter.config
    if not adapter.modules or adapter.opaque:
        form = config.title
    elif config.rslora:
        form = "rank-stabilized LoRA (s = α/√r)"
    else:
        form = "plain LoRA (s = α/r)"
    echo(f"{adapter.source}: {form} for {config.base_model or 'an unnamed base'}")

    # What is trained in full beside the low-rank modules
    whole = [part for part in adapter.saved.values() if not part.rows]
    trained: list[str] = []
    if whole:
        trained.append(f"{len(whole)} trained in full")
    if adapter.tokens:
        trained.append(f"trained tokens in {_counted(len(adapter.tokens), 'module')}")
    in_full = ""
    if trained:
        in_full = f", {' and '.join(trained)} with {inspection.num_saved_parameters:,} parameters"

    total, size = inspection.num_parameters, human_bytes(inspection.nbytes)
    echo(f"{len(adapter.adapted)} modules, {total:,} parameters{in_full}, {size}")
    _print_tables(inspection)
    if adapter.ignored:
        names = ", ".join(adapter.ignored)
        echo(f"in the file but not loaded by PEFT, because the config does not target them: {names}")


def _counted(number: int, noun: str) -> str:
    """`1 module`, `2 modules`."""
    if number > 1:
        return f"{number} {noun}s"
    return f"{number} {noun}"


def _print_gguf(inspection: Inspection, adapter: GgufAdapter) -> None:
    """Print what LoRA in GGUF holds."""
    count, piece = len(adapter.files), adapter.files[0].piece
    pieces = ""
    if count > 1:
        pieces = f" in {count} pieces"
    elif piece:
        pieces = f", the piece {piece}"
    echo(f"{adapter.source}: LoRA in GGUF for {adapter.architecture}{pieces} (s = {adapter.alpha:g} / rank)")

    echo(f"{len(adapter.modules)} modules, {inspection.num_parameters:,} parameters, {human_bytes(inspection.nbytes)}")
    _print_tables(inspection)


def _print_model(inspection: Inspection, model: Checkpoint) -> None:
    """Print what full weights hold."""
    depth = ""
    if inspection.depth is not None:
        depth = f", {inspection.depth} layers"
    echo(f"{model.source}: full weights of {model.config.get('model_type') or 'a model without a type'}{depth}")

    total, size, files = inspection.num_parameters, human_bytes(inspection.nbytes), _counted(len(model.shards), "file")
    echo(f"{len(model.parameters)} tensors, {total:,} parameters, {size} in {files}")
    _print_tables(inspection)


def _print_tables(inspection: Inspection) -> None:
    """A table of each kind of part; parts that differ only by their layer share a row, with their size together."""
    tables = []
    for title, parts in inspection.tables.items():
        layers: dict[tuple[str, ...], list[int]] = {}
        sizes: Counter[tuple[str, ...]] = Counter()
        for part in parts:
            row = (part.name, part.kind, *(_cell(head, value) for head, value in part.values.items()))
            layers.setdefault(row, [])
            if part.layer is not None:
                layers[row].append(part.layer)
            sizes[row] += part.nbytes or 0

        has_sizes = parts[0].nbytes is not None
        heads = [title, "kind", "layers", *parts[0].values]
        if has_sizes:
            heads.append("size")
        rows: list[list[str]] = []
        for row, layers_of_row in layers.items():
            name, kind, *values = row
            cells = [name, kind, format_layers(layers_of_row), *values]
            if has_sizes:
                cells.append(human_bytes(sizes[row]))
            rows.append(cells)
        tables.append(table(*heads, rows=rows, left=len(heads)))
    print_table(*tables)


def _cell(head: str, value: Any) -> str:
    """A value as its column shows it."""
    if head == "α":
        return f"{value:g}"
    if head == "s":
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return " × ".join(map(str, value)) or "–"
    return str(value)


@declare("slice")
@rare_collections()
def slice_command(
    expert: Expert,
    *,
    layers: Annotated[str, "LAYERS"],
    stack: Literal["encoder", "decoder"] | None = None,
    num_layers: Annotated[Count, "L"] | None = None,
    base_model: Expert | None = None,
    result: Result,
) -> None:
    """Cut an expert to some layers: a shell or a core.

    A shell holds only the outer layers of a language expert, a core only the middle of a task expert. Composing the two
    gives the same tensors and config as composing the whole experts. A composition that needs a layer that was cut away
    fails. Modules outside the layers are kept.

    Args:
        layers: Layers to keep, such as 0-4,30-31.
        stack: In a model with both stacks, keep the layers of this one only.  [default: both]
        base_model: The expert's base model, if it names none or another path.

    Examples:
        adapterswap slice experts/swahili --layers 0-4,30-31 -o swahili-shell
        adapterswap slice experts/math --layers 5-29 -o math-core
    """
    from adapterswap.core import COMPOSED, Form, open_adapter, prepare, slice_layers

    adapter = open_adapter(expert)
    plan = slice_layers(adapter, layers, stack=stack, num_layers=num_layers, base_model=base_model)
    with working("reading the expert"):
        prepared = prepare(plan, Form())
    if result.dry_run:
        COMPOSED.check(result.out_path, overwrite=result.overwrite, inputs=plan.inputs)
    else:
        with working("writing"):
            prepared.write(result.out_path, overwrite=result.overwrite)

    adapted, kept = sum(bool(slot.terms) for slot in plan.modules.values()), plan.rules[0].layers
    nbytes, share = prepared.layout.nbytes, prepared.layout.nbytes / _loaded_bytes(adapter)
    content: dict[str, Any] = {"layers": kept, "modules": adapted}
    layers_kept = f"layers {kept} of {plan.depth}"
    if stack:
        content["stack"] = stack
        layers_kept = f"{stack} {layers_kept}"
    content |= {"of_modules": len(plan.modules), "bytes": nbytes, "share": share}

    def show() -> None:
        echo(
            f"{layers_kept}: {adapted} of {len(plan.modules)} modules, {human_bytes(nbytes)}, "
            f"{share:.0%} of the whole expert"
        )
        for remark in plan.notes:
            note(remark)

    base = prepared.layout.config["base_model_name_or_path"]
    result.report(lambda: content, show, base=base)


def _loaded_bytes(adapter: Adapter) -> int:
    """The size in bytes of what PEFT loads: a file can hold modules that its config does not target."""
    tensors: list[Tensor | None] = [module.base for module in adapter.factors.values()]
    for module in adapter.modules.values():
        tensors += [module.a, module.b]
    for opaque in adapter.opaque.values():
        tensors += opaque.tensors.values()
    for whole in adapter.saved.values():
        tensors += whole.tensors.values()
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@declare("convert")
def convert_command(
    adapter: Expert,
    *,
    base_model: Expert | None = None,
    allow_pickle: bool = False,
    rank: Rank | None = None,
    saved_rank: Rank | None = None,
    dtype: Dtype | None = None,
    names: Literal["transformers4", "transformers5"] | None = None,
    layout: Literal["exact", "portable"] = "exact",
    format: Literal["peft", "mlx"] = "peft",
    max_error: Share | None = None,
    result: Result,
) -> None:
    """Convert an adapter: other names, layout or dtype, another kind to rsLoRA, from mlx-lm or for it.

    ADAPTER is an adapter of PEFT or mlx-lm (a folder or Hub id). A LoRA keeps its ΔW. PEFT loads other kinds (DoRA,
    LoHa, LoKr, OFT, (IA)³, …) into their base, and each module's ΔW is truncated to --rank; the relative error is
    reported.

    Args:
        base_model: The base model, if the adapter names none or another path.
        allow_pickle: Also read adapter_model.bin, with torch.load(weights_only=True), which runs no code.
        rank: Highest rank of a module.
        saved_rank: Turn modules trained in full (modules_to_save) into LoRA of at most this rank.
        dtype: Dtype of the tensors.  [default: the adapter's]
        names: Module names to write.
        layout: portable has one rank and scale 1, for any engine.
        format: mlx writes what mlx-lm loads.
        max_error: Fail if the relative error of any module's ΔW is larger.
        dry_run: Compute and report, but write nothing.

    Examples:
        adapterswap convert experts/math --layout portable -o math-portable
        adapterswap convert pickled --allow-pickle -o safe
    """
    from adapterswap.tools.conversion import convert

    with count_bar("converting") as advance:
        conversion = convert(
            adapter, result.out_path, names=names, layout=layout, dtype=dtype, rank=rank, max_error=max_error,
            saved_rank=saved_rank, format=format, base_model=base_model, allow_pickle=allow_pickle,
            overwrite=result.overwrite, dry_run=result.dry_run, progress=advance,
        )  # fmt: skip
    content = {
        "peft_type": conversion.peft_type,
        "pickled": conversion.pickled,
        "relative_error": conversion.relative_error,
        "modules": [asdict(module) for module in conversion.modules],
    }
    result.report(lambda: content, lambda: _print_conversion(conversion))


def _print_conversion(conversion: Conversion) -> None:
    """Print what kind of adapter was converted, and what its ΔW lost."""
    ranks = sorted({module.rank for module in conversion.modules})
    rank = f"rank {ranks[0]}"
    if len(ranks) > 1:
        rank = f"ranks {ranks[0]} to {ranks[-1]}"
    kind = conversion.peft_type
    if conversion.pickled:
        kind += ", pickled"
    echo(f"{kind}: {len(conversion.modules)} modules, {rank}")

    worst = conversion.worst
    at_most = ""
    if worst.error:
        at_most = f", {worst.error:.2g} at most ({worst.name})"
    note(f"relative error of ΔW: {conversion.relative_error:.2g} over all modules{at_most}")


_TELLING_ERROR = 0.1  # warn if a module misses more of its ΔW than this


@declare("extract")
def extract_command(
    full: Expert,
    *,
    base_model: Expert,
    layers: Annotated[str, "LAYERS"] | None = None,
    modules: Annotated[tuple[str, ...], "NAME"] = (),
    embeddings: bool = False,
    rank: Rank | None = None,
    dtype: Dtype | None = None,
    config_from: Literal["base"] | None = None,
    device: Device = "cpu",
    max_error: Share | None = None,
    result: Result,
) -> None:
    """Cut an adapter out of a full fine-tune.

    FULL is a checkpoint (a folder or Hub id) that was fine-tuned from --base-model. The difference of each linear
    weight in the layers is truncated to a rank and written as an rsLoRA adapter, which composes like any other. Norms,
    biases and everything else that an adapter cannot hold are reported.

    Args:
        base_model: The base that FULL was fine-tuned from.
        layers: Only these layers, such as 0-4,30-31.
        modules: Only attention, mlp, or a part of module names; repeatable.
        embeddings: Extract embeddings, heads and towers too.
        rank: Rank of every module; with --max-error, the highest.
        dtype: Dtype of the factors.  [default: FULL's]
        config_from: base: extract although FULL's config computes differently from the base's.
        device: auto, cpu, cuda, cuda:N, mps; mps computes on the CPU.
        max_error: Use the smallest rank with this relative error, per module.
        dry_run: Compute and report, but write nothing.

    Examples:
        adapterswap extract full/math --base-model org/base --rank 16 -o extracted
        adapterswap extract full/math --base-model org/base --rank 64 --max-error 0.9 -o close
    """
    from adapterswap.tools.extraction import extract

    if rank is None and max_error is None:
        raise click.UsageError("Pass --rank, --max-error, or both.")
    with count_bar("extracting") as advance:
        extraction = extract(
            full, base_model, result.out_path, rank=rank, max_error=max_error, layers=layers, modules=modules,
            embeddings=embeddings, dtype=dtype, config_from=config_from, device=device, overwrite=result.overwrite,
            dry_run=result.dry_run, progress=advance,
        )  # fmt: skip
    content = {
        "relative_error": extraction.error,
        "whole_relative_error": extraction.whole_error,
        "lost_share": extraction.lost_share,
        "modules": [asdict(module) for module in extraction.modules],
        "unchanged": list(extraction.unchanged),
        "in_full": list(extraction.in_full),
        "lost": [asdict(parameter) for parameter in extraction.lost],
    }
    result.report(lambda: content, lambda: _print_extraction(extraction, max_error), base=base_model)


def _print_extraction(extraction: Extraction, max_error: float | None) -> None:
    """Print what the adapter holds, what it does not, and a warning if it misses much."""
    from adapterswap.tools.extraction import Extraction

    # Modules that differ only by their layer share a row.
    groups: dict[str, list[Extracted]] = {}
    for module in extraction.modules:
        name_in_layer = module.name
        if module.layer is not None:
            name_in_layer = module.name.partition(f".{module.layer}.")[2]
        groups.setdefault(name_in_layer, []).append(module)

    rows: list[tuple[str, ...]] = []
    for name, modules in groups.items():
        group = Extraction(tuple(modules), (), ())
        layers = format_layers(module.layer for module in modules if module.layer is not None)
        largest = max(module.error for module in modules)
        rows.append((name, layers, group.ranks, f"{group.norm:.4g}", f"{group.error:.4f}", f"{largest:.4f}"))
    print_rows("module", "layers", "rank", "‖ΔW‖", "error", "largest", rows=rows, left=3)
    note(f"{len(extraction.modules)} modules: relative error of ΔW {extraction.error:.4f} over all of them")

    # What the adapter does not hold as LoRA
    if extraction.lost:
        note(f"relative error {extraction.whole_error:.4f} over everything that the fine-tune changed")
    if extraction.unchanged:
        note(f"{len(extraction.unchanged)} modules equal the base and are left out")
    if extraction.in_full:
        note(f"held whole, as the fine-tune has them: {', '.join(extraction.in_full)}")
    for line in extraction.lost_lines():
        note(f"not in the adapter: {line}")

    worst = max(extraction.modules, key=lambda module: module.error)
    if max_error is None and worst.error > _TELLING_ERROR:
        note(f"Warning: {worst.name} misses {worst.error:.0%} of its ΔW. Raise --rank, or pass --max-error.")
    if max_error is not None and worst.error > max_error:
        note(
            f"Warning: {worst.name} misses {worst.error:.2%} of its ΔW, because of --rank or the "
            "rounding of its factors. Raise --rank, or pass --dtype float32."
        )
