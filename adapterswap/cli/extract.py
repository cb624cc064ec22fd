"""`adapterswap extract`: cut an adapter out of a full fine-tune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import click

from adapterswap.cli.options import Device, Dtype, Expert, Rank, Result, Share
from adapterswap.cli.printing import count_bar, note, print_rows
from adapterswap.cli.signature import declare
from adapterswap.model.layers import format_layers

if TYPE_CHECKING:
    from adapterswap.tools.extraction import Extraction

_TELLING_ERROR = 0.1  # warn if a module misses more of its ΔW than this


@declare("extract")
def command(
    full: Expert,
    *,
    base_model: Expert,
    layers: Annotated[str, "LAYERS"] | None = None,
    modules: Annotated[tuple[str, ...], "NAME"] = (),
    embeddings: bool = False,
    rank: Rank | None = None,
    dtype: Dtype | None = None,
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
        device: auto, cpu, cuda, cuda:N, mps; mps computes on the CPU.
        max_error: Use the smallest rank with this relative error, per module.
        dry_run: Compute and report, but write nothing.
    """
    from adapterswap.tools.extraction import extract

    if rank is None and max_error is None:
        raise click.UsageError("Pass --rank, --max-error, or both.")
    with count_bar("extracting") as advance:
        extraction = extract(
            full, base_model, result.out_path, rank=rank, max_error=max_error, layers=layers, modules=modules,
            embeddings=embeddings, dtype=dtype, device=device, overwrite=result.overwrite, dry_run=result.dry_run,
            progress=advance,
        )  # fmt: skip
    result.report(lambda: _as_json(extraction), lambda: _print(extraction, max_error))


def _as_json(extraction: Extraction) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "relative_error": extraction.error,
        "whole_relative_error": extraction.whole_error,
        "lost_share": extraction.lost_share,
        "modules": [asdict(module) for module in extraction.modules],
        "unchanged": list(extraction.unchanged),
        "lost": [asdict(parameter) for parameter in extraction.lost],
    }


def _print(extraction: Extraction, max_error: float | None) -> None:
    from adapterswap.tools.extraction import lost_lines

    heads = ("module", "layers", "rank", "‖ΔW‖", "error", "largest")
    print_rows(*heads, rows=_rows(extraction), left=3)
    note(f"{len(extraction.modules)} modules: relative error of ΔW {extraction.error:.4f} over all of them")
    if extraction.lost:
        note(f"relative error {extraction.whole_error:.4f} over everything that the fine-tune changed")
    if extraction.unchanged:
        note(f"{len(extraction.unchanged)} modules equal the base and are left out")
    for line in lost_lines(extraction):
        note(f"not in the adapter: {line}")
    worst = max(extraction.modules, key=lambda module: module.error)
    if max_error is None and worst.error > _TELLING_ERROR:
        note(f"Warning: {worst.name} misses {worst.error:.0%} of its ΔW. Raise --rank, or pass --max-error.")
    if max_error is not None and worst.error > max_error:
        note(
            f"Warning: {worst.name} misses {worst.error:.2%} of its ΔW, because of --rank or the "
            "rounding of its factors. Raise --rank, or pass --dtype float32."
        )


def _rows(extraction: Extraction) -> list[tuple[str, ...]]:
    """Modules that differ only by their layer share a row."""
    from adapterswap.tools.extraction import Extraction

    groups: dict[str, list[Any]] = {}
    for module in extraction.modules:
        within = module.name if module.layer is None else module.name.partition(f".{module.layer}.")[2]
        groups.setdefault(within, []).append(module)
    rows: list[tuple[str, ...]] = []
    for name, modules in groups.items():
        group = Extraction(tuple(modules), (), ())
        layers = format_layers(module.layer for module in modules if module.layer is not None)
        largest = max(module.error for module in modules)
        rows.append((name, layers, group.ranks, f"{group.norm:.4g}", f"{group.error:.4f}", f"{largest:.4f}"))
    return rows
