"""What a merged model says of itself: adapterswap.json and the model card. No clock, and no path of a machine.

Knows plans and what entered; nothing of how the tensors were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from adapterswap import __version__
from adapterswap.experts.adapters import CONFIG, WEIGHTS, Adapter
from adapterswap.experts.checkpoints import MODEL_CONFIG, Checkpoint
from adapterswap.merging.blocks import Entered
from adapterswap.merging.shards import ModelForm
from adapterswap.planning.allocation import BASE
from adapterswap.planning.model_describe import model_strip, model_unusual
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.modules import coefficients
from adapterswap.writing.card import escaped, how_composed
from adapterswap.writing.copying import sha256_of
from adapterswap.writing.provenance import FORMAT, named_base

__all__ = ["describe_model", "merged_card"]


def describe_model(
    plan: ModelPlan, form: ModelForm, entered: Entered, magnitudes: Mapping[str, float], kept: Mapping[str, float]
) -> dict[str, Any]:
    """The content of adapterswap.json: what was composed from what, as plain data that may be published."""
    asked = plan.composition.model_dump(
        mode="json", exclude_defaults=True, exclude={"experts", "base_model"}, by_alias=True
    )
    return {
        "format": FORMAT,
        "kind": "model",
        "adapterswap_version": __version__,
        "base_model": _describe(BASE, plan.base, entered) if plan.base else None,
        "num_layers": plan.num_layers,
        "composition": {"method": plan.composition.method, **asked},
        "experts": {name: _describe(name, expert, entered) for name, expert in plan.experts.items()},
        "rules": [rule.model_dump(mode="json", exclude_defaults=True, by_alias=True) for rule in plan.rules],
        "output": {key: value for key, value in asdict(form).items() if value is not None},
        "tensors": {parameter.name: coefficients(parameter) for parameter in plan},
        **({"magnitudes": dict(magnitudes)} if magnitudes else {}),
        **({"kept_rows": dict(kept)} if kept else {}),
    }


def _describe(name: str, expert: Adapter | Checkpoint, entered: Entered) -> dict[str, Any]:
    source = expert.source
    told: dict[str, Any] = {"source": source.name, "revision": source.revision}
    if isinstance(expert, Adapter):
        hashes = {WEIGHTS: sha256_of(expert.file.path), CONFIG: expert.config.sha256}
        return {**told, "sha256": hashes, **named_base(expert)}
    return {**told, "sha256": {MODEL_CONFIG: sha256_of(source.folder / MODEL_CONFIG)}, "entered": entered.of(name)}


def merged_card(plan: ModelPlan) -> str:
    """The model card as Markdown with the Hub's YAML front matter."""
    base = plan.base.source.name if plan.base else None
    sources = {name: str(expert.source) for name, expert in plan.experts.items()}
    ids = [name for name in ([base] if base else [expert.source.name for expert in plan.full.values()]) if "/" in name]
    front = {
        "library_name": "transformers",
        "tags": ["adapterswap", "merge"],
        **({"base_model": ids, "base_model_relation": "merge"} if ids else {}),
    }
    kinds = {name: "LoRA adapter" if name in plan.adapters else "full checkpoint" for name in plan.experts}
    experts = "\n".join(f"| {escaped(name)} | {escaped(sources[name])} | {kinds[name]} |" for name in plan.experts)
    remarks = "".join(f"- {escaped(line)}\n" for line in model_unusual(plan))
    return f"""---
{yaml.safe_dump(front, sort_keys=True).strip()}
---

# {" + ".join(map(escaped, plan.experts))}

Full weights{f" of {escaped(base)}" if base else ""}, composed from {len(sources)} expert{"s" * (len(sources) > 1)} by
{how_composed(plan.composition)} with adapterswap {__version__}.

| expert | from | kind |
|---|---|---|
{experts}

Layers from bottom (left) to top (right):

```
{model_strip(plan)}
```
{f"{chr(10)}{remarks}" if remarks else ""}
`adapterswap.json` says what every tensor came from, with SHA-256 hashes of the experts.
"""
