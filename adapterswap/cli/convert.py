"""`adapterswap convert`: an adapter with other module names, in another layout or dtype, or as an rsLoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from adapterswap.cli.options import Dtype, Expert, Rank, Result, Share
from adapterswap.cli.printing import count_bar, echo, note
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.tools.deltas import Conversion


@declare("convert")
def command(
    adapter: Expert,
    *,
    base_model: Expert | None = None,
    allow_pickle: bool = False,
    rank: Rank | None = None,
    saved_rank: Rank | None = None,
    dtype: Dtype | None = None,
    names: Literal["transformers4", "transformers5"] | None = None,
    layout: Literal["exact", "portable"] = "exact",
    max_error: Share | None = None,
    result: Result,
) -> None:
    """Convert an adapter: other names, layout or dtype, or another kind to rsLoRA.

    ADAPTER is a PEFT adapter (a folder or Hub id). A LoRA keeps its ΔW. PEFT loads other kinds (DoRA, LoHa, LoKr, OFT,
    (IA)³, …) into their base, and each module's ΔW is truncated to --rank; the relative error is reported.

    Args:
        base_model: The base model, if the adapter names none or another path.
        allow_pickle: Also read adapter_model.bin, with torch.load(weights_only=True), which runs no code.
        rank: Highest rank of a module.
        saved_rank: Turn modules trained in full (modules_to_save) into LoRA of at most this rank.
        dtype: Dtype of the tensors.  [default: the adapter's]
        names: Module names to write.
        layout: portable has one rank and scale 1, for any engine.
        max_error: Fail if the relative error of any module's ΔW is larger.
        dry_run: Compute and report, but write nothing.
    """
    from adapterswap.tools.conversion import convert

    with count_bar("converting") as advance:
        conversion = convert(
            adapter, result.out_path, names=names, layout=layout, dtype=dtype, rank=rank, max_error=max_error,
            saved_rank=saved_rank, base_model=base_model, allow_pickle=allow_pickle, overwrite=result.overwrite,
            dry_run=result.dry_run, progress=advance,
        )  # fmt: skip
    result.report(lambda: _as_json(conversion), lambda: _print(conversion))


def _as_json(conversion: Conversion) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "peft_type": conversion.peft_type,
        "pickled": conversion.pickled,
        "relative_error": conversion.relative_error,
        "modules": [asdict(module) for module in conversion.modules],
    }


def _print(conversion: Conversion) -> None:
    ranks = sorted({module.rank for module in conversion.modules})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    kind = f"{conversion.peft_type}{', pickled' if conversion.pickled else ''}"
    echo(f"{kind}: {len(conversion.modules)} modules, {rank}")
    note(
        f"relative error of ΔW: {conversion.relative_error:.2g} over all modules, {conversion.worst.error:.2g} at most "
        f"({conversion.worst.name})"
    )
