"""The summary of a plan that was applied: the same lines and the same JSON from compose, merge and export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapterswap.cli.printing import echo, note

if TYPE_CHECKING:
    from adapterswap.planning.plan import Plan
    from adapterswap.writing.outputs import Reduced


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The part of `--json` that does not depend on the output's form."""
    from adapterswap.planning.describe import unusual
    from adapterswap.writing.cards import licences

    return {
        "method": plan.composition.method,
        "num_layers": plan.num_layers,
        "experts": {name: str(expert.source) for name, expert in plan.experts.items()},
        "rules": [str(rule) for rule in plan.rules],
        "tensors" if plan.is_model else "modules": {slot.name: slot.coefficients for slot in plan},
        "unusual": unusual(plan),
        "notes": list(plan.notes),
        "licences": {name: licence and str(licence) for name, licence in licences(plan).items()},
    }


def print_plan(plan: Plan, *remarks: str, has_template: bool = True) -> None:
    """Print the strip and what it does not show, the plan's notes, `remarks` on the output, and warnings."""
    from adapterswap.planning.describe import strip, unusual
    from adapterswap.writing.adapter import united_tokenizer
    from adapterswap.writing.cards import licence_warning, licences

    echo(*strip(plan).splitlines(), *unusual(plan))
    for remark in (*plan.notes, *remarks):
        note(remark)
    if (clash := licence_warning(licences(plan))) is not None:
        note(f"Warning: {clash}")
    if has_template and (united := united_tokenizer(plan)) is not None:
        for name in united.other_templates:
            note(f"Warning: {name} has a different chat template; the result uses the one of {united.template}")


def print_magnitudes(magnitudes: Mapping[str, float], kept: Mapping[str, float]) -> None:
    """Print the mean |ΔW| of each side and the share of rows above the threshold, where these were measured."""
    for name, magnitude in magnitudes.items():
        note(f"{name}: mean |ΔW| {magnitude:.4g}, weight 1/{magnitude:.4g}")
    for name, share in kept.items():
        note(f"{name}: {share:.1%} of its rows kept")


def print_errors_of_rank(reduced: Mapping[str, Reduced], treatment: str = "truncated") -> None:
    """Print how much of ΔW the reduced modules lost; nothing if there are none."""
    from adapterswap.planning.describe import error_text

    if not reduced:
        return
    errors = {name: module.written_error for name, module in reduced.items()}
    worst = max(errors, key=errors.__getitem__)
    note(
        f"{len(errors)} modules {treatment}: relative error of ΔW {error_text(sum(errors.values()) / len(errors))} on "
        f"average, {error_text(errors[worst])} at most ({worst})"
    )
