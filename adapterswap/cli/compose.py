"""`adapterswap compose`: options or a recipe → a plan → an adapter folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from adapterswap.cli.composition_options import Requested, any_plan_from_options, recipe_dtype
from adapterswap.cli.options import Count, Expert, RecipePath, Result, Share
from adapterswap.cli.printing import human_bytes, note, progress_bar, rare_collections, working
from adapterswap.cli.signature import declare
from adapterswap.cli.summary import plan_as_json, print_errors_of_rank, print_magnitudes, print_plan

if TYPE_CHECKING:
    from adapterswap.model.layers import Stack
    from adapterswap.planning.plan import Plan
    from adapterswap.writing.adapter import Prepared
    from adapterswap.writing.outputs import Form, Layout


_TELLING_ERROR = 0.1  # warn if truncation loses more of ΔW than this


@declare("compose")
@rare_collections()
def command(
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
    """
    from adapterswap.files.folders import check_target
    from adapterswap.writing.adapter import COMPOSED, prepare, write_prepared
    from adapterswap.writing.outputs import Form

    form = Form(layout, max_rank, max_error, names)
    with working("opening the experts"):
        plan = any_plan_from_options(request, recipe=recipe, base_model=base_model)
    if plan.is_model:
        if form != Form():
            raise click.UsageError(
                "--layout, --max-rank, --max-error and --names are for adapters, but an expert is a full checkpoint."
            )
        from adapterswap.cli.merge import write_full_weights
        from adapterswap.writing.streaming import ModelForm

        write_full_weights(plan, ModelForm(dtype=recipe_dtype(recipe)), result)
        return
    check_target(result.out_path, kind=COMPOSED, overwrite=result.overwrite, inputs=plan.inputs)
    with truncating(plan, form) as advance:
        prepared = prepare(plan, form, advance)
    if not result.dry_run:
        with working("writing"):
            write_prepared(prepared, result.out_path, overwrite=result.overwrite)
    result.report(lambda: _as_json(prepared), lambda: _print(prepared))


@contextmanager
def truncating(plan: Plan, form: Form) -> Iterator[Callable[[str], None]]:
    """Show the progress of truncating a plan's modules; yields what to call with the name of each."""
    from adapterswap.writing.reduction import must_reduce

    with progress_bar("truncating", sum(must_reduce(module, form) for module in plan)) as advance:
        yield lambda name: advance()


def _as_json(prepared: Prepared) -> dict[str, Any]:
    layout, largest = prepared.layout, _largest_rank(prepared.layout)
    return {
        **plan_as_json(prepared.plan),
        "rank": None if largest is None else {"global": layout.config["r"], "largest": largest},
        "bytes": layout.nbytes,
        **prepared.measured,
    }


def _largest_rank(layout: Layout) -> int | None:
    """The largest rank of the LoRA modules; None for other kinds. Copies of the base's weights have none."""
    if layout.config["peft_type"] != "LORA":
        return None
    ranks: list[int] = [layout.config["r"], *layout.config["rank_pattern"].values()]
    return max(ranks)


def _print(prepared: Prepared) -> None:
    from adapterswap.writing.adapter import united_tokenizer

    plan, layout = prepared.plan, prepared.layout
    if (zones := _zones_text(plan)) is not None:
        note(zones)
    copied = sum(tensor.is_copied for tensor in layout.tensors)
    # Modules without terms stay as in the base and are not written.
    changed = sum(bool(slot.terms) for slot in plan.modules.values())
    modules = f"{changed} of {len(plan.modules)} modules" if changed < len(plan.modules) else f"{changed} modules"
    summary = f"{modules}; {copied} of {len(layout.tensors)} tensors are copied byte for byte"
    largest = _largest_rank(layout)
    rank = f"; rank up to {largest}" if largest is not None else ""
    print_plan(plan, f"{summary}{rank}; {human_bytes(layout.nbytes)}")
    if (united := united_tokenizer(plan)) is not None:
        for name in united.others:
            note(f"Warning: {name} has a different tokenizer; the result uses the one of {united.owner}")
    for first, second in _same(plan):
        note(f"Warning: {first} and {second} are the same folder, so everything comes from one expert")
    print_magnitudes(prepared.resolved.magnitudes, prepared.resolved.kept_share())
    _print_errors(prepared)


def _same(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of names that stand for the same folder."""
    from itertools import combinations

    places = {name: adapter.source.folder.resolve() for name, adapter in plan.experts.items()}
    return [(first, second) for first, second in combinations(places, 2) if places[first] == places[second]]


def _print_errors(prepared: Prepared) -> None:
    form, reduced = prepared.form, prepared.reduced
    is_bounded = form.max_rank is not None or form.max_error is not None
    print_errors_of_rank(reduced, "truncated" if is_bounded else "computed at their full rank")
    largest, name = max(((module.written_error, name) for name, module in reduced.items()), default=(0.0, ""))
    if form.max_error is not None and max((m.error for m in reduced.values()), default=0) <= form.max_error < largest:
        note(
            f"Warning: rounding {name} to its dtype raises its error to {largest:.2g}, above --max-error "
            f"{form.max_error:g}"
        )
    if largest > _TELLING_ERROR:
        note(f"Warning: more than {_TELLING_ERROR:.0%} of a module's ΔW is lost. Raise --max-rank to keep more.")


def _zones_text(plan: Plan) -> str | None:
    """The zones in numbers, and whether they are the paper's defaults; None if it is not a layer swap."""
    composition = plan.composition
    if composition.method != "layer_swap" or composition.allocation is not None or composition.partition:
        return None
    return "; ".join(_zones_of(plan, stack) for stack in composition.stacks(plan.num_layers))


def _zones_of(plan: Plan, stack: Stack | None) -> str:
    from adapterswap.model.layers import depth_of

    composition, count = plan.composition, depth_of(stack, plan.num_layers)
    bottom, top, bottom_transition, top_transition = composition.zones(plan.num_layers, stack)
    scaled = [
        f"{name} {resolved}"
        for name, resolved, requested in (("bottom", bottom, composition.bottom), ("top", top, composition.top))
        if requested is None
    ]
    zones_text = f"zones of {count} {f'{stack} ' if stack else ''}layers: bottom {bottom} and top {top} "
    zones_text += f"from {' and '.join(composition.language)}, transitions {bottom_transition} and {top_transition}"
    return zones_text + (f" ({', '.join(scaled)}: the paper's default, in proportion)" if scaled else "")
