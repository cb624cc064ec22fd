"""`adapterswap merge`: an adapter or a composition → full weights; also `compose` of full checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from adapterswap.cli.composition_options import Requested, plan_of, recipe_dtype
from adapterswap.cli.options import Device, Dtype, Expert, ExpertOrRecipe, Json, Output, Pushed
from adapterswap.cli.printing import echo, human_bytes, note, note_output, print_json, progress_bar, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.planning.plan import Plan
    from adapterswap.writing.streaming import ModelForm
    from adapterswap.writing.weights import Merged


def write_full_weights(
    plan: Plan,
    form: ModelForm,
    out_path: str,
    *,
    base_model: str | None = None,
    device: str = "cpu",
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a plan's full weights, unless it is a dry run, and print a summary."""
    from adapterswap.files.folders import check_inputs, check_target
    from adapterswap.files.text import expand
    from adapterswap.writing.adapter import COMPOSED
    from adapterswap.writing.weights import prepare_model, write_model

    check_target(out_path, kind=COMPOSED, overwrite=overwrite, inputs=plan.inputs)  # before reading the experts
    with working("preparing"):
        merged = prepare_model(plan, form, base_model)
    if dry_run:
        check_inputs(expand(out_path), merged.plan.inputs)  # now including the base's folder, as in a real run
    else:
        with progress_bar("merging", len(merged.plan.slots)) as advance:
            write_model(merged, out_path, device=device, overwrite=overwrite, progress=advance)
    if as_json:
        print_json(_as_json(merged, out_path, dry_run))
    else:
        _print(merged, out_path, dry_run)


def _as_json(merged: Merged, out_path: str, dry_run: bool) -> dict[str, Any]:
    from adapterswap.planning.describe import unusual
    from adapterswap.writing.cards import licences
    from adapterswap.writing.weights import differing_tokenizers, tokenizer_source

    plan = merged.plan
    return {
        "out_path": out_path,
        "written": not dry_run,
        "method": plan.composition.method,
        "num_layers": plan.num_layers,
        "base_model": str(plan.base.source) if plan.base else None,
        "experts": {name: str(expert.source) for name, expert in plan.experts.items()},
        "rules": [str(rule) for rule in plan.rules],
        "tensors": {slot.name: slot.coefficients for slot in plan},
        "unusual": unusual(plan),
        "tokenizer_from": tokenizer_source(plan),
        "licences": {name: licence and str(licence) for name, licence in licences(plan).items()},
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


def _print(merged: Merged, out_path: str, dry_run: bool) -> None:
    from adapterswap.planning.describe import strip, unusual
    from adapterswap.writing.adapter import united_tokenizer
    from adapterswap.writing.cards import licence_warning, licences
    from adapterswap.writing.weights import config_source, differing_tokenizers, tokenizer_source

    plan = merged.plan
    echo(*strip(plan).splitlines())
    for line in unusual(plan):
        echo(line)
    total = human_bytes(sum(shard.size for shard in merged.shards))
    shards = f"{len(merged.shards)} shard{'s' * (len(merged.shards) > 1)}"
    note(f"{_copied(merged)} of {len(plan.slots)} tensors are copied byte for byte; {total} in {shards}")
    source, owner, folder = config_source(plan), tokenizer_source(plan), plan.skeleton.name
    place = source + f" ({folder})" * (folder != source)
    note(f"config and tokenizer from {place}" if owner == source else f"config from {place}, tokenizer from {owner}")
    for remark in plan.notes:
        note(remark)
    if (clash := licence_warning(licences(plan))) is not None:
        note(f"Warning: {clash}")
    for name in differing_tokenizers(plan):
        note(f"Warning: {name} has a different tokenizer.json; the result does not use it")
    if (united := united_tokenizer(plan)) is not None:
        for name in united.other_templates:
            note(f"Warning: {name} has a different chat template; the result uses the one of {united.template}")
    for name, magnitude in merged.magnitudes.items():
        note(f"{name}: mean |ΔW| {magnitude:.4g}, weight 1/{magnitude:.4g}")
    for name, share in merged.kept_share.items():
        note(f"{name}: {share:.1%} of its rows kept")
    note_output(out_path, dry_run=dry_run)


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
    out_path: Output,
    push: Pushed,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Merge an adapter or a composition into full weights.

    PATH is an adapter or a recipe (YAML, mergekit's too). Without PATH, the options say what to compose. Experts can be
    full checkpoints. Tensors stream from the base's shards to the result's: every ΔW is summed in float32 and rounded
    once, and unchanged tensors are copied byte for byte.

    Args:
        device: auto, cpu, cuda, cuda:N, mps; cuda is all GPUs.
        dtype: Dtype of the result.  [default: each tensor's dtype in the base]
        dequantize: Merge into the dequantised weights of a quantised base.
        max_shard_size: Largest file, such as 2GB.  [default: the base's shards]
    """
    from adapterswap.writing.streaming import ModelForm

    form = ModelForm(max_shard_size, recipe_dtype(path, dtype), dequantize or None)
    write_full_weights(
        plan_of(path, request, base_model=base_model), form, out_path, base_model=base_model,
        device=device, overwrite=overwrite, dry_run=dry_run, as_json=as_json,
    )  # fmt: skip
    if not dry_run:
        push.upload(out_path)
