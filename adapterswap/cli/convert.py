"""`adapterswap convert`: an adapter with other module names, in another layout or dtype, or as an rsLoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.options import EXPERT, FOLDER, Push, dtype_option, push_options
from adapterswap.cli.printing import count_bar, echo, note, note_output, print_json

if TYPE_CHECKING:
    from adapterswap.tools.deltas import Conversion

_PICKLE = "Also read adapter_model.bin, with torch.load(weights_only=True), which runs no code."


@click.command("convert")
@click.argument("adapter", type=EXPERT)
@click.option("-o", "--out-path", type=FOLDER, required=True, metavar="O", help="Folder to write.")
@click.option("--names", type=click.Choice(["transformers4", "transformers5"]), help="Module names to write.")
@click.option(
    "--layout", type=click.Choice(["exact", "portable"]), default="exact", show_default=True,
    help="portable has one rank and scale 1, for any engine.",
)  # fmt: skip
@dtype_option("Dtype of the tensors.  [default: the adapter's]")
@click.option("--rank", type=click.IntRange(1, 65536), metavar="R", help="Highest rank of a module.")
@click.option("--max-error", type=float, metavar="E", help="Fail if the relative error of any module's ΔW is larger.")
@click.option(
    "--saved-rank", type=click.IntRange(1, 65536), metavar="R",
    help="Turn modules trained in full (modules_to_save) into LoRA of at most this rank.",
)  # fmt: skip
@click.option(
    "--base-model", type=EXPERT, metavar="PATH|ID", help="The base model, if the adapter names none or another path."
)
@click.option("--allow-pickle", is_flag=True, help=_PICKLE)
@push_options
@click.option("--overwrite", is_flag=True, help="Replace an adapter or a model that adapterswap wrote there.")
@click.option("--dry-run", is_flag=True, help="Compute and report, but write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every module.")
def command(adapter: str, out_path: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Convert an adapter: other names, layout or dtype, or another kind to rsLoRA.

    ADAPTER is a PEFT adapter (a folder or Hub id). A LoRA keeps its ΔW. PEFT loads other kinds (DoRA, LoHa, LoKr, OFT,
    (IA)³, …) into their base, and each module's ΔW is truncated to --rank; the relative error is reported.
    """
    from adapterswap.tools.conversion import convert

    push = Push.of(options)
    with count_bar("converting") as advance:
        conversion = convert(adapter, out_path, dry_run=dry_run, progress=advance, **options)
    if not dry_run:
        push.upload(out_path)
    if as_json:
        print_json(_as_json(conversion, out_path, dry_run))
    else:
        _print(conversion)
        note_output(out_path, dry_run=dry_run)


def _as_json(conversion: Conversion, out_path: str, dry_run: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "out_path": out_path,
        "written": not dry_run,
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
