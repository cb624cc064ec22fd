"""`adapterswap compose`, `merge` and `export`: a composition → an adapter, full weights, or LoRA in GGUF.

All three print the same summary of the plan that was applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.composition_options import Requested, any_plan_from_options, plan_of, recipe_dtype
from adapterswap.cli.options import (
    Count,
    Device,
    Dtype,
    EntryPath,
    Expert,
    ExpertOrRecipe,
    Json,
    RecipePath,
    Result,
    Share,
    Writing,
    only_with,
)
from adapterswap.cli.output import echo, human_bytes, note, progress_bar, rare_collections, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.core import Form, ModelForm, Plan
    from adapterswap.core.writing.adapter import Prepared
    from adapterswap.core.writing.weights import Merged
    from adapterswap.engines.gguf.export import Exported
    from adapterswap.engines.gguf.layout import PreparedGguf


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The part of `--json` that does not depend on the output's form."""
    from adapterswap.core.writing.cards import Licences

    parts = "modules"
    if plan.is_model:
        parts = "tensors"
    return {
        "method": plan.composition.method,
        "num_layers": plan.num_layers,
        "experts": {name: str(expert.source) for name, expert in plan.experts.items()},
        "rules": [str(rule) for rule in plan.rules],
        parts: {slot.name: slot.coefficients for slot in plan},
        "remarks": plan.remarks,
        "notes": list(plan.notes),
        "companions": plan.companions.as_json(),
        "licenses": {name: licence and str(licence) for name, licence in Licences.of(plan).stated.items()},
    }


def print_plan(plan: Plan, *remarks: str, companions: bool = True) -> None:
    """Print the strip and what it does not show, the plan's notes, `remarks` on the output, and warnings."""
    from adapterswap.core.writing.cards import Licences

    echo(*plan.strip.splitlines(), *plan.remarks)
    for remark in (*plan.notes, *remarks):
        note(remark)
    if (clash := Licences.of(plan).warning) is not None:
        note(f"Warning: {clash}")
    if companions:
        for line in plan.companions.lines:
            note(line)


def print_magnitudes(magnitudes: Mapping[str, float], kept: Mapping[str, float]) -> None:
    """Print the mean |ΔW| of each side and the share of rows above the threshold, where these were measured."""
    for name, magnitude in magnitudes.items():
        note(f"{name}: mean |ΔW| {magnitude:.4g}, weight 1/{magnitude:.4g}")
    for name, share in kept.items():
        note(f"{name}: {share:.1%} of its rows kept")


def print_errors_of_rank(errors: Mapping[str, float], treatment: str = "truncated") -> None:
    """Print how much of ΔW the reduced modules lost; nothing if there are none."""
    from adapterswap.core import error_text

    if not errors:
        return
    worst = max(errors, key=errors.__getitem__)
    note(
        f"{len(errors)} modules {treatment}: relative error of ΔW {error_text(sum(errors.values()) / len(errors))} on "
        f"average, {error_text(errors[worst])} at most ({worst})"
    )


_TELLING_ERROR = 0.1  # warn if truncation loses more of ΔW than this


@declare("compose")
@rare_collections()
def compose_command(
    recipe: Annotated[str, RecipePath("compose")] | None = None,
    *,
    request: Requested,
    base_model: Expert | None = None,
    layout: Literal["exact", "portable"] = "exact",
    names: Literal["task", "language", "transformers4", "transformers5"] | None = None,
    max_rank: Annotated[Count, "R"] | None = None,
    max_error: Share | None = None,
    result: Result,
) -> None:
    """Compose adapters by layer into a new adapter.

    Bottom and top layers come from the language expert, the middle from the task expert, byte for byte; transition
    zones are exact weighted averages. Experts are PEFT LoRA folders or Hub ids (org/name@revision). You can put all of
    it in a RECIPE (YAML) instead: `adapterswap compose RECIPE.yaml --out-path O`. If an expert is a full checkpoint,
    full weights are written, as by `adapterswap merge`.

    Args:
        base_model: The experts' base model, if they name none or different ones.
        layout: exact keeps every number; portable has one rank and scale 1, for any engine.
        names: Module names to write: an expert's, or those of a transformers version.  [default: the first expert's]

    Examples:
        adapterswap compose -t experts/math -l experts/swahili --bottom 5 --top 2 -o math-swahili
        adapterswap compose --expert m=experts/math --expert sw=experts/swahili --rule 'sw: 0-4' --rule m -o by-rules
    """
    from adapterswap.core import COMPOSED, Form, prepare

    form = Form(layout, max_rank, max_error, names)
    with working("opening the experts"):
        plan = any_plan_from_options(request, recipe=recipe, base_model=base_model)

    if plan.is_model:
        if form != Form():
            raise click.UsageError(
                "--layout, --max-rank, --max-error and --names are for adapters, but an expert is a full checkpoint."
            )
        from adapterswap.core import ModelForm

        write_full_weights(plan, ModelForm(dtype=recipe_dtype(recipe)), result)
        return

    COMPOSED.check(result.out_path, overwrite=result.overwrite, inputs=plan.inputs)
    with truncating(plan, form) as advance:
        prepared = prepare(plan, form, advance)
    if not result.dry_run:
        with working("writing"):
            prepared.write(result.out_path, overwrite=result.overwrite)
    base = prepared.layout.config["base_model_name_or_path"]
    result.report(lambda: _adapter_as_json(prepared), lambda: _print_adapter(prepared), base=base)


@contextmanager
def truncating(plan: Plan, form: Form) -> Iterator[Callable[[str], None]]:
    """Show the progress of truncating a plan's modules; yields what to call with the name of each."""
    number = sum(form.reduces(module) for module in plan)
    with progress_bar("truncating", number) as advance:
        yield lambda name: advance()


def _adapter_as_json(prepared: Prepared) -> dict[str, Any]:
    """What --json prints of an adapter."""
    layout = prepared.layout
    largest_rank = _largest_rank(prepared)
    rank = None
    if largest_rank is not None:
        rank = {"global": layout.config["r"], "largest": largest_rank}
    return {
        **plan_as_json(prepared.plan),
        "rank": rank,
        "bytes": layout.nbytes,
        **prepared.measured,
    }


def _largest_rank(prepared: Prepared) -> int | None:
    """The largest rank of the LoRA modules; None for other kinds. Copies of the base's weights have none."""
    config = prepared.layout.config
    if config["peft_type"] != "LORA":
        return None
    ranks: list[int] = [config["r"], *config["rank_pattern"].values()]
    return max(ranks)


def _print_adapter(prepared: Prepared) -> None:
    """Print the zones, the strip, and what the adapter holds."""
    plan, layout = prepared.plan, prepared.layout
    zones = plan.zones_text
    if zones is not None:
        note(zones)

    # Modules without terms stay as in the base and are not written.
    changed = sum(bool(slot.terms) for slot in plan.modules.values())
    modules = f"{changed} modules"
    if changed < len(plan.modules):
        modules = f"{changed} of {len(plan.modules)} modules"
    copied = sum(tensor.is_copied for tensor in layout.tensors)
    summary = f"{modules}; {copied} of {len(layout.tensors)} tensors are copied byte for byte"
    largest_rank = _largest_rank(prepared)
    if largest_rank is not None:
        summary += f"; rank up to {largest_rank}"
    print_plan(plan, f"{summary}; {human_bytes(layout.nbytes)}")

    folders = {name: adapter.source.folder.resolve() for name, adapter in plan.experts.items()}
    for first, second in combinations(folders, 2):
        if folders[first] == folders[second]:
            note(f"Warning: {first} and {second} are the same folder")
    print_magnitudes(prepared.resolved.magnitudes, prepared.resolved.kept_share())
    _print_errors(prepared)


def _print_errors(prepared: Prepared) -> None:
    """Print how much of ΔW is lost, with a warning if rounding or a low rank loses much."""
    form = prepared.form
    treatment = "computed at their full rank"
    if form.max_rank is not None or form.max_error is not None:
        treatment = "truncated"
    print_errors_of_rank(prepared.errors, treatment)

    largest, name = 0.0, ""
    for module, error in prepared.errors.items():
        largest, name = max((largest, name), (error, module))
    before_rounding = max((module.error for module in prepared.reduced.values()), default=0)
    if form.max_error is not None and before_rounding <= form.max_error < largest:
        note(
            f"Warning: rounding {name} to its dtype raises its error to {largest:.2g}, above --max-error "
            f"{form.max_error:g}"
        )
    if largest > _TELLING_ERROR:
        note(f"Warning: more than {_TELLING_ERROR:.0%} of a module's ΔW is lost. Raise --max-rank to keep more.")


def write_full_weights(
    plan: Plan, form: ModelForm, result: Writing, *, base_model: str | None = None, device: str = "cpu"
) -> None:
    """Write a plan's full weights, unless it is a dry run, and print a summary."""
    from adapterswap.core import COMPOSED, prepare_model

    COMPOSED.check(result.out_path, overwrite=result.overwrite, inputs=plan.inputs)
    with working("preparing"):
        merged = prepare_model(plan, form, base_model)
    if result.dry_run:
        # Again, now that the base's folder is known, as in a real run.
        COMPOSED.check(result.out_path, overwrite=result.overwrite, inputs=merged.plan.inputs)
    else:
        with progress_bar("merging", len(merged.plan.slots)) as advance:
            merged.write(result.out_path, device=device, overwrite=result.overwrite, progress=advance)
    result.report(lambda: _weights_as_json(merged), lambda: _print_weights(merged))


def _weights_as_json(merged: Merged) -> dict[str, Any]:
    """What --json prints of full weights."""
    weights = merged.plan.base.weights
    return {
        **plan_as_json(merged.plan),
        "base_model": weights and str(weights.source),
        "copied": _copied(merged),
        "shards": [shard.name for shard in merged.shards],
        "bytes": sum(shard.size for shard in merged.shards),
        "magnitudes": dict(merged.magnitudes),
        "kept_rows": dict(merged.kept_share),
    }


def _copied(merged: Merged) -> int:
    """How many tensors are copied byte for byte."""
    dtypes: dict[str, str] = {}
    for shard in merged.shards:
        for name, place in shard.places.items():
            dtypes[name] = place.dtype

    copied = 0
    for slot in merged.plan:
        if slot.copied is not None and slot.copied.tensor.dtype == dtypes[slot.name]:
            copied += 1
    return copied


def _print_weights(merged: Merged) -> None:
    """Print the strip, what the weights hold, and whose config and tokenizer they have."""
    plan = merged.plan
    total = human_bytes(sum(shard.size for shard in merged.shards))
    shards = "1 shard"
    if len(merged.shards) != 1:
        shards = f"{len(merged.shards)} shards"
    summary = f"{_copied(merged)} of {len(plan.slots)} tensors are copied byte for byte; {total} in {shards}"

    assert plan.base.skeleton is not None  # full weights have one
    config_owner = plan.companions.config
    config = folder = plan.base.skeleton.name
    if folder != config_owner:
        config = f"{config_owner} ({folder})"
    origins = f"config and tokenizer from {config}"
    tokenizer_owner = plan.companions.owner("tokenizer")
    if tokenizer_owner not in (None, config_owner):
        origins = f"config from {config}, tokenizer from {tokenizer_owner}"
    print_plan(plan, summary, origins)
    print_magnitudes(merged.magnitudes, merged.kept_share)


@declare("merge")
def merge_command(
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

    Examples:
        adapterswap merge math-swahili -o merged
        adapterswap merge -t experts/math -l experts/swahili --method ties --density 0.5 -o merged-ties
    """
    from adapterswap.core import ModelForm

    form = ModelForm(max_shard_size, recipe_dtype(path, dtype), dequantize or None)
    plan = plan_of(path, request, base_model=base_model)
    write_full_weights(plan, form, result, base_model=base_model, device=device)


@declare("export")
def export_command(
    path: ExpertOrRecipe | None = None,
    *,
    request: Requested,
    base_model: Expert | None = None,
    out_path: Annotated[str, EntryPath(), "-o", "--out-path", "FILE"],
    outtype: Literal["f32", "f16", "bf16", "q8_0"] = "f32",
    pieces: bool = False,
    by: Literal["layer", "kind", "zone"] | None = None,
    max_rank: Annotated[Count, "R"] | None = None,
    max_error: Share | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Export an adapter or a composition as LoRA in GGUF.

    PATH is an adapter or a recipe (YAML). Without PATH, the options say what to compose. llama.cpp, Ollama and similar
    engines load the file together with the base in GGUF, which llama.cpp's convert_hf_to_gguf.py makes. The command
    prints an Ollama Modelfile and the llama-server command line.

    Args:
        out_path: File to write, or with --pieces a folder.
        outtype: Number format. f32 is exact; q8_0 needs ranks that are multiples of 32.
        pieces: Write several files; requests to llama-server combine them by their scales.
        by: What each piece holds: a layer, its attention or MLP, or a zone of the composition.  [default: layer]

    Examples:
        adapterswap export math-swahili -o math-swahili.gguf
        adapterswap export -t experts/math -l experts/swahili --pieces --by zone -o pieces
    """
    from adapterswap.core import Form
    from adapterswap.engines.gguf.export import check_gguf, write_gguf
    from adapterswap.engines.gguf.layout import PreparedGguf

    only_with("--pieces", pieces, "by")
    division = None
    if pieces:
        division = by or "layer"

    form = Form(max_rank=max_rank, max_error=max_error)
    plan = plan_of(path, request, base_model=base_model)
    check_gguf(plan, out_path, pieces=division, overwrite=overwrite)
    with truncating(plan, form) as advance:
        prepared = PreparedGguf.of(plan, form, advance)

    exported = write_gguf(prepared, out_path, outtype=outtype, pieces=division, overwrite=overwrite, dry_run=dry_run)
    result = Writing(out_path, overwrite, dry_run, as_json)
    result.report(lambda: _gguf_as_json(prepared, exported), lambda: _print_gguf(prepared, exported))


def _gguf_as_json(prepared: PreparedGguf, exported: Exported) -> dict[str, Any]:
    """What --json prints of GGUF files."""
    files: list[dict[str, Any]] = []
    for file in exported.files:
        facts = {
            "name": file.path.name,
            "layer": file.layer,
            "kind": file.kind,
            "layers": list(file.layers),
            "modules": file.modules,
            "bytes": file.nbytes,
        }
        files.append(facts)

    return {
        **plan_as_json(prepared.plan),
        "architecture": exported.architecture,
        "outtype": exported.outtype,
        "alpha": exported.alpha,
        "base_model": exported.base_model,
        "files": files,
        "bytes": exported.nbytes,
        "modelfile": exported.modelfile(),
        "server_command": exported.server_command(),
        **prepared.adapter.measured,
    }


def _print_gguf(prepared: PreparedGguf, exported: Exported) -> None:
    """Print the strip, what the files hold, and how to run them."""
    import shlex

    from adapterswap.core.companions.companions import CompanionPlan

    plan = prepared.plan
    modules = sum(file.modules for file in exported.files)
    summary = f"{modules} modules of {exported.architecture} as {exported.outtype}"
    if exported.is_pieces:
        summary += f" in {len(exported.files)} files"
    print_plan(plan, f"{summary}; alpha {exported.alpha:g}; {human_bytes(exported.nbytes)}", companions=False)

    base_folder = None
    if plan.base.at_hand is not None:
        base_folder = plan.base.at_hand.folder
    experts = {name: expert.source.folder for name, expert in plan.experts.items()}
    for line in CompanionPlan.on_the_base(experts, base_folder):
        note(line)
    print_errors_of_rank(prepared.adapter.errors)

    # How to run it
    modelfile = exported.modelfile()
    if modelfile is not None:
        echo("", f"Ollama Modelfile, for a file beside {exported.path.name}:", "")
        echo(*modelfile.removesuffix("\n").split("\n", 1), "")
    else:
        echo("", "A file has no effect until a request gives its id a scale:")
        echo('"lora": [{"id": 0, "scale": 1.0}, ...]', "")
    echo(shlex.join(exported.server_command()), "")
    if exported.base_model is not None:
        note(f"base.gguf is {exported.base_model}, converted by llama.cpp's convert_hf_to_gguf.py")
