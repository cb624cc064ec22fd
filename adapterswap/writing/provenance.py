"""adapterswap.json: what was composed, from which files, by which plan. No clock and no path of a machine.

Knows a plan and the hashes of its sources. Knows nothing of how the tensors were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adapterswap import __version__
from adapterswap.arithmetic.outputs import Form, Layout, Reduced
from adapterswap.arithmetic.resolving import Resolved
from adapterswap.experts.adapters import CONFIG, WEIGHTS, Adapter
from adapterswap.experts.sources import public_name
from adapterswap.planning.modules import coefficients
from adapterswap.planning.plan import Plan
from adapterswap.planning.slicing import sliced_layers

__all__ = ["Written", "describe_plan", "named_base", "numbers", "provenance"]

FORMAT = 2  # since it, the experts of a side are averaged before any method combines the sides


@dataclass(frozen=True)
class Written:
    """An adapter as it is (to be) written: the plan with its numbers, the form, the tensors."""

    resolved: Resolved
    form: Form
    layout: Layout
    reduced: Mapping[str, Reduced]

    @property
    def plan(self) -> Plan:
        return self.resolved.plan


def provenance(written: Written, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The content of adapterswap.json.

    Args:
        written: what was carried out.
        hashes: the SHA-256 of each expert's safetensors file.
    """
    plan = written.plan
    return {
        "format": FORMAT,
        **describe_plan(plan, hashes),
        "output": {key: value for key, value in asdict(written.form).items() if value is not None},
        "modules": {module.name: coefficients(module) for module in [*plan, *plan.saved.values()]},
        **({"slice": {"layers": layers}} if (layers := sliced_layers(plan)) else {}),
        **numbers(written),
    }


def describe_plan(plan: Plan, hashes: Mapping[str, str]) -> dict[str, Any]:
    """What was composed from which files, as plain data that may be published; see `provenance`."""
    asked = plan.composition.model_dump(
        mode="json", exclude_defaults=True, exclude={"experts", "base_model"}, by_alias=True
    )
    return {
        "adapterswap_version": __version__,
        "base_model": public_name(plan.base_model),
        "base_revision": plan.base_revision,
        "num_layers": plan.num_layers,
        "composition": {"method": plan.composition.method, **asked},
        "experts": {
            name: {
                "source": adapter.source.name,
                "revision": adapter.source.revision,
                "sha256": {WEIGHTS: hashes[name], CONFIG: adapter.config.sha256},
                **named_base(adapter),
            }
            for name, adapter in plan.experts.items()
        },
        "rules": [rule.model_dump(mode="json", exclude_defaults=True, by_alias=True) for rule in plan.rules],
    }


def named_base(adapter: Adapter) -> dict[str, str | None]:
    """The base that an adapter's own config names; a composition may declare another."""
    return {"base_model": public_name(adapter.config.base_model), "base_revision": adapter.config.revision}


def numbers(written: Written) -> dict[str, Any]:
    """What was only known from the tensors."""
    found: dict[str, Any] = {}
    if written.resolved.magnitudes:
        found["magnitudes"] = dict(written.resolved.magnitudes)
    if written.resolved.kept_rows:
        found["kept_rows"] = written.resolved.kept_share()
    if written.reduced:
        found["reduced"] = {
            name: {"rank": reduced.rank, "relative_error": reduced.error} for name, reduced in written.reduced.items()
        }
    return found
