"""The model card (README.md) of a composed adapter: what it is made of, as a picture in text, and how to load it.

Knows plans, and which modules were truncated. Says nothing else: no scores, no claims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from adapterswap import __version__
from adapterswap.arithmetic.outputs import Reduced
from adapterswap.experts.sources import public_name
from adapterswap.planning.compositions import Composition
from adapterswap.planning.describe import strip, unusual
from adapterswap.planning.plan import Plan
from adapterswap.planning.slicing import sliced_layers

__all__ = ["escaped", "how_composed", "model_card"]

_METHODS = {
    "layer_swap": "layer swapping (Bandarkar et al. 2025)",
    "soup": "a model soup (Wortsman et al. 2022)",
    "task_arithmetic": "task arithmetic (Ilharco et al. 2023)",
    "ties": "TIES merging (Yadav et al. 2023)",
    "dare_linear": "DARE (Yu et al. 2024)",
    "dare_ties": "DARE with TIES' election of signs (Yu et al. 2024)",
    "slerp": "spherical interpolation of ΔW (SLERP)",
    "magnitude_prune": "magnitude pruning",
}


_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is none


def how_composed(composition: Composition) -> str:
    """What was done, with the paper that it is from."""
    if composition.allocation is not None:
        return "rules for layers and modules"
    if composition.partition is not None:
        return f"layer swapping by partition {composition.partition} (Bandarkar & Peng 2025)"
    return _METHODS[composition.method]


def escaped(text: str) -> str:
    """Text that may hold any characters, such as a folder's name, as Markdown that shows it on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def model_card(plan: Plan, reduced: Mapping[str, Reduced]) -> str:
    """The card as Markdown with the Hub's YAML front matter; `reduced` are the modules that were truncated."""
    base = public_name(plan.base_model)
    sources = [str(adapter.source) for adapter in plan.experts.values()]
    front = {
        "library_name": "peft",
        "tags": ["adapterswap", "lora", "merge"],
        **({"base_model": base} if base and "/" in base else {}),
    }
    layers = sliced_layers(plan)
    made = (
        f"composed from {len(sources)} expert{'s' * (len(sources) > 1)} by\n{how_composed(plan.composition)}"
        if layers is None
        else f"cut out of one expert:\nits layers {layers}, and what it has outside the layers,"
    )
    experts = "\n".join(
        f"| {escaped(name)} | {escaped(source)} |" for name, source in zip(plan.experts, sources, strict=True)
    )
    remarks = "".join(f"- {line}\n" for line in [*map(escaped, unusual(plan)), *_truncation(reduced)])
    return f"""---
{yaml.safe_dump(front, sort_keys=True).strip()}
---

# {" + ".join(map(escaped, plan.experts))}

A LoRA adapter{f" for {escaped(base)}" if base else ""}, {made} with adapterswap {__version__}.

| expert | from |
|---|---|
{experts}

Layers from bottom (left) to top (right):

```
{strip(plan)}
```
{f"{chr(10)}{remarks}" if remarks else ""}
Load it with PEFT:

```python
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "path/to/this/folder")
```

`adapterswap.json` says which expert every module came from, with the SHA-256 of the experts' files.
"""


def _truncation(reduced: Mapping[str, Reduced]) -> list[str]:
    """A line on modules whose ΔW is not exact, if there are any."""
    if not reduced:
        return []
    worst = max(module.error for module in reduced.values())
    ranks = sorted({module.rank for module in reduced.values()})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks from {ranks[0]} to {ranks[-1]}"
    count = "1 module was" if len(reduced) == 1 else f"{len(reduced)} modules were"
    return [f"{count} reduced to {rank}: the relative error of a module's ΔW (Frobenius norm) is up to {worst:.3f}"]
