"""`adapterswap merge`: an adapter or a composition → full weights; also `compose` of full checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from adapterswap.cli.composition_options import Requested, plan_of, recipe_dtype
from adapterswap.cli.options import Device, Dtype, Expert, ExpertOrRecipe, Result, Writing
from adapterswap.cli.printing import human_bytes, note, progress_bar, working
from adapterswap.cli.signature import declare
from adapterswap.cli.summary import plan_as_json, print_magnitudes, print_plan

if TYPE_CHECKING:
    from adapterswap.planning.plan import Plan
    from adapterswap.writing.streaming import ModelForm
    from adapterswap.writing.weights import Merged


def write_full_weights(
    plan: Plan, form: ModelForm, result: Writing, *, base_model: str | None = None, device: str = "cpu"
) -> None:
    """Write a plan's full weights, unless it is a dry run, and print a summary."""
    from adapterswap.files.folders import check_inputs, check_target
    from adapterswap.files.text import expand
    from adapterswap.writing.adapter import COMPOSED
    from adapterswap.writing.weights import prepare_model, write_model

    check_target(result.out_path, kind=COMPOSED, overwrite=result.overwrite, inputs=plan.inputs)
    with working("preparing"):
        merged = prepare_model(plan, form, base_model)
    if result.dry_run:
        check_inputs(expand(result.out_path), merged.plan.inputs)  # now including the base's folder, as in a real run
    else:
        with progress_bar("merging", len(merged.plan.slots)) as advance:
            write_model(merged, result.out_path, device=device, overwrite=result.overwrite, progress=advance)
    result.report(lambda: _as_json(merged), lambda: _print(merged))


def _as_json(merged: Merged) -> dict[str, Any]:
    from adapterswap.writing.weights import differing_tokenizers, tokenizer_source

    plan = merged.plan
    return {
        **plan_as_json(plan),
        "base_model": str(plan.base.source) if plan.base else None,
        "tokenizer_from": tokenizer_source(plan),
        "other_tokenizers": differing_tokenizers(plan),
        "copied": _copied(merged),
        "shards": [shard.name for shard in merged.shards],
        "bytes": sum(shard.size for shard in merged.shards),
        "magnitudes": dict(merged.magnitudes),
        "kept_rows": dict(merged.kept_share),
    }


def _copied(merged: Merged) -> int:
    places = {key: place for shard in merged.shards for key, place in shard.places.items()}
    copied_tensors = [(slot.copied, places[slot.name].dtype) for slot in merged.plan]
    return sum(copied is not None and copied.tensor.dtype == dtype for copied, dtype in copied_tensors)


def _print(merged: Merged) -> None:
    from adapterswap.writing.weights import config_source, differing_tokenizers, tokenizer_source

    plan = merged.plan
    total = human_bytes(sum(shard.size for shard in merged.shards))
    shards = f"{len(merged.shards)} shard{'s' * (len(merged.shards) > 1)}"
    source, owner, folder = config_source(plan), tokenizer_source(plan), plan.skeleton.name
    place = source + f" ({folder})" * (folder != source)
    print_plan(
        plan,
        f"{_copied(merged)} of {len(plan.slots)} tensors are copied byte for byte; {total} in {shards}",
        f"config and tokenizer from {place}" if owner == source else f"config from {place}, tokenizer from {owner}",
    )
    for name in differing_tokenizers(plan):
        note(f"Warning: {name} has a different tokenizer.json; the result does not use it")
    print_magnitudes(merged.magnitudes, merged.kept_share)


@declare("merge")
def command(
    path: ExpertOrRecipe | None = None,
    *,
    request: Requested,
    base_model: Expert | None = None,
    device: Device = "cpu",
    dtype: Dtype | None = None,
    dequantize: bool = False,
    max_shard_size: Annotated[str, "SIZE"] | None = None,
    result: Result,
) -> None:
    """Merge an adapter or a composition into full weights.

    PATH is an adapter or a recipe (YAML, mergekit's too). Without PATH, the options say what to compose. Experts can be
    full checkpoints. Tensors stream from the base's shards to the result's: every ΔW is summed in float32 and rounded
    once, and unchanged tensors are copied byte for byte.

    Args:
        device: auto, cpu, cuda, cuda:N, mps; cuda is all GPUs.
        dtype: Dtype of the result.  [default: each tensor's dtype in the base]
        dequantize: Merge into the dequantized weights of a quantized base.
        max_shard_size: Largest file, such as 2GB.  [default: the base's shards]
    """
    from adapterswap.writing.streaming import ModelForm

    form = ModelForm(max_shard_size, recipe_dtype(path, dtype), dequantize or None)
    plan = plan_of(path, request, base_model=base_model)
    write_full_weights(plan, form, result, base_model=base_model, device=device)
