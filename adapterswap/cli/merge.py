"""`adapterswap merge`: an adapter or a composition → full weights of the base."""

from __future__ import annotations

from typing import Any, Literal

import click

from adapterswap.cli.composition_options import composition_options, plan_of, recipe_dtype
from adapterswap.cli.device_options import device_option, dtype_option
from adapterswap.cli.full_weights import write_full_weights
from adapterswap.cli.paths import EXPERT, EXPERT_OR_RECIPE, FOLDER
from adapterswap.cli.pushing import Push, push_options


@click.command("merge")
@click.argument("path", type=EXPERT_OR_RECIPE, required=False)
@composition_options
@click.option("-o", "--out-path", type=FOLDER, required=True, metavar="O", help="Folder to write.")
@click.option(
    "--base-model", type=EXPERT, metavar="PATH|ID", help="The base model.  [default: the one that the experts name]"
)
@click.option("--max-shard-size", metavar="SIZE", help="Largest file, such as 2GB.  [default: the base's shards]")
@dtype_option("Dtype of the result.  [default: each tensor's dtype in the base]")
@click.option("--dequantize", is_flag=True, help="Merge into the dequantised weights of a quantised base.")
@device_option("cpu", more="; cuda is all GPUs")
@push_options
@click.option("--overwrite", is_flag=True, help="Replace an adapter or a model that adapterswap wrote there.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    path: str | None,
    out_path: str,
    base_model: str | None,
    max_shard_size: str | None,
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    dequantize: bool,
    device: str,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Merge an adapter or a composition into full weights.

    PATH is an adapter or a recipe (YAML, mergekit's too). Without PATH, the options say what to compose. Experts can be
    full checkpoints. Tensors stream from the base's shards to the result's: every ΔW is summed in float32 and rounded
    once, and unchanged tensors are copied byte for byte.
    """
    from adapterswap.merging import ModelForm

    push = Push.of(options)
    form = ModelForm(max_shard_size, recipe_dtype(path, dtype), dequantize or None)
    write_full_weights(
        plan_of(path, options, base_model=base_model), form, out_path, base_model=base_model,
        device=device, overwrite=overwrite, dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
    if not dry_run:
        push.upload(out_path)
