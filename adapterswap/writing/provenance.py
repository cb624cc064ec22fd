"""adapterswap.json: what was composed, from which files, by which plan. No clock and no path of a machine.

Knows a plan and the hashes of its sources. Knows nothing of how the tensors were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterswap import __version__
from adapterswap.adapters import CONFIG, WEIGHTS
from adapterswap.plan import Plan, coefficients
from adapterswap.sources import public_name
from adapterswap.writing.copying import sha256_of

__all__ = ["provenance"]

FORMAT = 1


def provenance(plan: Plan, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The content of adapterswap.json.

    Args:
        plan: what was carried out.
        hashes: the SHA-256 of each expert's safetensors file.
    """
    asked = plan.composition.model_dump(mode="json", exclude_defaults=True, exclude={"experts", "base_model"})
    return {
        "format": FORMAT,
        "adapterswap_version": __version__,
        "base_model": public_name(plan.base_model),
        "num_layers": plan.num_layers,
        "composition": {"method": plan.composition.method, **asked},
        "experts": {
            name: {
                "source": adapter.source.name,
                "revision": adapter.source.revision,
                "sha256": {WEIGHTS: hashes[name], CONFIG: sha256_of(adapter.source.folder / CONFIG)},
            }
            for name, adapter in plan.experts.items()
        },
        "rules": [rule.model_dump(mode="json", exclude_defaults=True) for rule in plan.rules],
        "modules": {module.name: coefficients(module) for module in plan},
    }
