"""Model cards (README.md) of composed adapters and merged models: what they are made of, as a picture in text.

Knows plans, and which modules were truncated. Says nothing else: no scores, no claims.
"""

from __future__ import annotations

import re

from adapterswap import __version__
from adapterswap.experts.sources import public_name
from adapterswap.files.yamltext import dump_yaml
from adapterswap.methods.registry import find_method
from adapterswap.planning.compositions import Composition
from adapterswap.planning.describe import error_text, strip, unusual
from adapterswap.planning.plan import Plan
from adapterswap.planning.slicing import sliced_layers
from adapterswap.records.record import CompositionRecord

__all__ = ["adapter_card", "escaped", "merged_card"]

_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is none


def _how_composed(composition: Composition) -> str:
    """What was done, with the paper that it is from."""
    if composition.allocation is not None:
        return "rules for layers and modules"
    if composition.partition is not None:
        return f"layer swapping by partition {composition.partition} (Bandarkar & Peng 2025)"
    return find_method(composition.method).title


def escaped(text: str) -> str:
    """Text that may hold any characters, such as a folder's name, as Markdown that shows it on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def adapter_card(plan: Plan, record: CompositionRecord) -> str:
    """The card as Markdown with the Hub's YAML front matter."""
    base = public_name(plan.base_model)
    sources = [str(adapter.source) for adapter in plan.experts.values()]
    front = {
        **({"base_model": base} if base and "/" in base else {}),
        "library_name": "peft",
        "tags": ["adapterswap", "lora", "merge"],
    }
    layers = sliced_layers(plan)
    made = (
        f"composed from {len(sources)} expert{'s' * (len(sources) > 1)} by\n{_how_composed(plan.composition)}"
        if layers is None
        else f"cut out of one expert:\nits layers {layers}, and what it has outside the layers,"
    )
    experts = "\n".join(
        f"| {escaped(name)} | {escaped(source)} |" for name, source in zip(plan.experts, sources, strict=True)
    )
    lines = [*map(escaped, [*record.origins, *unusual(plan)]), *_conversion(record), *_truncation(record)]
    remarks = "".join(f"- {line}\n" for line in lines)
    return f"""---
{dump_yaml(front).strip()}
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


def merged_card(plan: Plan, record: CompositionRecord) -> str:
    """The model card as Markdown with the Hub's YAML front matter."""
    base = plan.base.source.name if plan.base else None
    sources = {name: str(expert.source) for name, expert in plan.experts.items()}
    ids = [
        name
        for name in ([base] if base else [expert.source.name for expert in plan.checkpoints.values()])
        if "/" in name
    ]
    front = {
        **({"base_model": ids, "base_model_relation": "merge"} if ids else {}),
        "library_name": "transformers",
        "tags": ["adapterswap", "merge"],
    }
    kinds = {name: "LoRA adapter" if name in plan.adapters else "full checkpoint" for name in plan.experts}
    experts = "\n".join(f"| {escaped(name)} | {escaped(sources[name])} | {kinds[name]} |" for name in plan.experts)
    remarks = "".join(f"- {escaped(line)}\n" for line in [*record.origins, *unusual(plan)])
    return f"""---
{dump_yaml(front).strip()}
---

# {" + ".join(map(escaped, plan.experts))}

Full weights{f" of {escaped(base)}" if base else ""}, composed from {len(sources)} expert{"s" * (len(sources) > 1)} by
{_how_composed(plan.composition)} with adapterswap {__version__}.

| expert | from | kind |
|---|---|---|
{experts}

Layers from bottom (left) to top (right):

```
{strip(plan)}
```
{f"{chr(10)}{remarks}" if remarks else ""}
`adapterswap.json` says what every tensor came from, with SHA-256 hashes of the experts.
"""


def _conversion(record: CompositionRecord) -> list[str]:
    """A line on where the numbers come from, if they were not those of a LoRA in a safetensors file."""
    found = record.conversion
    if found is None or not found.modules:
        return [] if found is None else ["converted from a pickled file (adapter_model.bin)"]
    ranks = sorted({module["rank"] for module in found.modules.values()})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks from {ranks[0]} to {ranks[-1]}"
    error = escaped(error_text(found.relative_error or 0.0))
    return [f"converted from {escaped(found.peft_type)} to rsLoRA of {rank}: the relative error of ΔW is {error}"]


def _truncation(record: CompositionRecord) -> list[str]:
    """A line on modules whose ΔW is not exact, if there are any."""
    if not record.reduced:
        return []
    worst = escaped(error_text(max(module["relative_error"] for module in record.reduced.values())))
    ranks = sorted({module["rank"] for module in record.reduced.values()})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks from {ranks[0]} to {ranks[-1]}"
    count = "1 module was" if len(record.reduced) == 1 else f"{len(record.reduced)} modules were"
    how = "reduced to" if record.output.keys() & {"max_rank", "max_error"} else "computed at"
    return [f"{count} {how} {rank}: the relative error of a module's ΔW (Frobenius norm) is up to {worst}"]
