"""`adapterswap verify` and `diff`: does an output still match its sources, and how far apart are two adapters?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import click

from adapterswap.cli.options import Expert, Json, NamedExpert, name_and_path
from adapterswap.cli.output import (
    echo,
    note,
    number_text,
    print_errors,
    print_json,
    print_rows,
    rare_collections,
    working,
)
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.tools.comparison import Comparison
    from adapterswap.tools.recorded import Verification


_WHERE = {"full": "--expert full=PATH", "base": "--base-model"}  # the options that locate an extraction's sources
_SHOWN = 10  # tensors to name; with a wrong source nearly all of them differ


@declare("verify")
@rare_collections()
def verify_command(
    path: Expert,
    *,
    experts: tuple[NamedExpert, ...] = (),
    task_expert: Annotated[tuple[Expert, ...], "-t", "--task-expert"] = (),
    language_expert: Annotated[tuple[Expert, ...], "-l", "--language-expert"] = (),
    rules: Annotated[tuple[str, ...], "--rule", "RULE"] = (),
    base_model: Expert | None = None,
    as_json: Json = False,
) -> None:
    """Recompute an adapter or a model from its sources and compare.

    PATH is an adapter, a model or a GGUF file (or a folder of pieces) that adapterswap wrote. Its record names the
    sources: those from the Hub are found automatically; pass folders with --expert. If a source was composed itself,
    you can pass what it was composed of instead. Exits with 1 if anything differs.

    Three kinds of adapters are not made again: their files are compared by their SHA-256. Of an extracted adapter,
    --expert full=PATH and --base-model also check the error of every module's ΔW. Of a converted one, if an SVD or a
    pickle was involved, the source's files are compared too. Of an adapter that was trained from another one, so are
    those of --expert start=PATH.

    If PATH has no record, as after another tool's merge, say what to compare it with: pass the --base-model, and the
    experts that should be in it. The answer says what it is, within the rounding of its dtype: which expert, how much
    of it, in which layers.

    Args:
        experts: The folder of a source; repeatable.
        task_expert: The task expert, as for `compose`, instead of its name.
        language_expert: The language expert, likewise.
        rules: If PATH has no record: the composition to compare it with, as for `compose`; repeatable.  [default: the
            only expert]
        base_model: The base model, if it came from a folder.

    Examples:
        adapterswap verify math-swahili --expert math=experts/math --expert swahili=experts/swahili
        adapterswap verify other-tool --base-model org/base --expert math=experts/math
    """
    from adapterswap.cli.composition_options import parsed_rules
    from adapterswap.tools.attribution import Attribution
    from adapterswap.tools.verification import verify

    source_paths = dict(map(name_and_path, experts))
    with working("verifying"):
        verification = verify(
            path, source_paths, task_expert=task_expert, language_expert=language_expert, base_model=base_model,
            rules=parsed_rules(rules) or None,
        )  # fmt: skip
    if as_json:
        print_json(verification.as_json())
    elif isinstance(verification, Attribution):
        for answer in verification.answers:
            echo(answer)
    else:
        _print_verification(verification)
    for remark in verification.notes:
        note(remark)
    if verification.unchecked:
        options = [_WHERE.get(name, f"--expert {name}=PATH") for name in verification.unchecked]
        note(
            f"Not compared: {' and '.join(verification.unchecked)}, because no record says which folder it was. Pass "
            f"{' and '.join(options)}."
        )
    if not verification.equal and isinstance(verification, Attribution):
        note(f"Error: {path} is not {verification.stated}.")
        sys.exit(1)
    if not verification.equal:
        note(f"Error: {path} does not match its sources. Make it again, or pass the sources it was made from.")
        sys.exit(1)


def _print_verification(verification: Verification) -> None:
    """Print that a result is equal, or a line for each difference."""
    if verification.equal:
        echo(f"equal: {_checked(verification)}")
    for name, file in verification.changed_sources.items():
        echo(f"source changed: {name}'s {file} differs from what was {verification.made} (SHA-256)")
    for key in verification.differing[:_SHOWN]:
        echo(f"differs: {key}")
    if len(verification.differing) > _SHOWN:
        echo(f"differs: {len(verification.differing) - _SHOWN} more; --json lists them all")
    if verification.config_differs:
        echo(f"differs: {verification.config}")
    if verification.record_differs:
        echo(f"differs: {', '.join(verification.record_differs)} in adapterswap.json")


def _checked(verification: Verification) -> str:
    """What was compared, for a result that is equal."""
    if verification.made == "composed":
        return "every tensor, the config and the record match the sources"
    if verification.unchecked:
        return "the files match the record"
    if verification.made == "trained":
        return "the files and the start match the record; nothing was trained again"
    if verification.made == "converted":
        return "the files and the source match the record; nothing was converted again"
    return "the files match the record, and every module has the recorded error of ΔW"


_NOISE = 1e-7  # a distance of ΔW is known up to about 1e-8, see `compare`


@declare("diff")
@rare_collections()
def diff_command(
    one: Expert,
    other: Expert,
    *,
    by_module: Annotated[bool, "--modules"] = False,
    max_distance: float | None = None,
    as_json: Json = False,
) -> None:
    """Compare two adapters: distance and cosine of their ΔW.

    ONE and OTHER are PEFT LoRA folders or Hub ids. The distance is ‖ΔW₁ - ΔW₂‖ / ‖ΔW₁‖; a module that one of them lacks
    counts as ΔW = 0. Modules trained in full (modules_to_save) are compared by their whole weights,
    ‖W₁ - W₂‖ / ‖W₁‖. With --max-distance, a module that only one adapter holds in full counts as too far.

    Args:
        by_module: Print a row per module instead of per layer.
        max_distance: Exit with 1 if the distance of all modules together, or of one trained in full, is more than X.

    Examples:
        adapterswap diff experts/math experts/swahili
        adapterswap diff math-swahili experts/math --max-distance 2
    """
    from adapterswap.tools.comparison import diff

    if max_distance is not None and not max_distance >= 0:  # click lets `nan` pass
        raise click.UsageError(f"--max-distance is {max_distance:g}, but must be 0 or more.")
    with working("comparing"):
        comparison = diff(one, other)
    if as_json:
        print_json(comparison.as_json())
    else:
        _print_comparison(comparison, by_module=by_module)
    for remark in comparison.remarks:
        note(f"Warning: {remark}")
    if max_distance is not None:
        farther = _farther(comparison, max_distance)
        if farther:
            print_errors(f"{line}." for line in farther)
            sys.exit(1)


def _farther(comparison: Comparison, limit: float) -> list[str]:
    """A line for everything that is, or may be, farther apart than `limit`; rounding does not count."""
    total = comparison.total.distance
    lines: list[str] = []
    if total > max(limit, _NOISE):
        lines.append(f"the distance of ΔW is {total:.4g}, more than {limit:g}")
    for row in comparison.saved:
        if row.distance is None:
            lines.append(f"{row.name} is {row.remark}, so its distance may be more than {limit:g}")
        elif row.distance > limit:
            lines.append(f"the distance of {row.name} is {row.distance:.4g}, more than {limit:g}")
    return lines


def _print_comparison(comparison: Comparison, *, by_module: bool) -> None:
    """Print a table of ΔW, by layer or by module, and one of the modules that were trained in full."""
    if comparison.modules:
        heading, compared = "layer", comparison.layers
        if by_module:
            heading, compared = "module", comparison.modules
        rows: list[list[str]] = []
        for change in (*compared, comparison.total):
            norms = [f"{norm:.4g}" for norm in change.norms]
            distance, cosine = _distance_text(change.distance, _NOISE), number_text(change.cosine, ".4f")
            rows.append([change.name, *norms, distance, cosine])
        print_rows(heading, "‖ΔW₁‖", "‖ΔW₂‖", "distance", "cosine", rows=rows)

    if comparison.saved:
        rows = []
        for module in comparison.saved:
            norms = [number_text(value, ".4g") for value in (*module.norms, module.apart)]
            rows.append([module.name, module.shape, *norms, _distance_text(module.distance)])
        print_rows("trained in full", "shape", "‖W₁‖", "‖W₂‖", "‖W₁ - W₂‖", "distance", rows=rows, left=2)
        for module in comparison.saved:
            if module.remark:
                echo(f"{module.name}: {module.remark}")


def _distance_text(distance: float | None, noise: float = 0.0) -> str:
    """Four decimals, or `< 0.0001` where these would hide a distance that is more than `noise`."""
    if distance is not None and noise < distance < 0.00005:
        return "< 0.0001"
    return number_text(distance, ".4f")
