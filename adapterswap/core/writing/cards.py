"""Model cards (README.md) of composed adapters and merged models: where they come from, and their licences.

Reads the front matter of an expert's README.md. The file is untrusted: a licence that cannot be read counts as not
stated. This compares what is written and gives no legal advice.

A card states what was composed, written and truncated. It makes no claims about quality and holds no scores.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap import __version__
from adapterswap.core.experts.keys import LORA
from adapterswap.core.methods.registry import find_method
from adapterswap.core.model.checkpoints import Checkpoint
from adapterswap.core.planning.composition import ZONES
from adapterswap.core.planning.describe import error_text
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.targets import Target
from adapterswap.core.writing.outputs import Layout
from adapterswap.core.writing.records import CompositionRecord
from adapterswap.kit.errors import AdapterswapError, printable
from adapterswap.kit.files.folders import CARD
from adapterswap.kit.files.text import read_small
from adapterswap.kit.files.yaml import dump_yaml, parse_yaml

_MAX_BYTES = 2**20
_MAX_NAME = 200  # characters of a name or a link


class Licence(NamedTuple):
    """A licence as the Hub's cards state it: `license`, and for `other` also `license_name` and `license_link`."""

    license: str
    name: str = ""
    link: str = ""

    def __str__(self) -> str:
        return self.name or self.license

    def front(self) -> dict[str, str]:
        """The keys of a card's front matter."""
        fields = {"license": self.license, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in fields.items() if value}


def licence_of(folder: Path) -> Licence | None:
    """The licence that the card in an expert's folder states; None if there is no card or it states no licence."""
    path = folder / CARD
    if not os.path.exists(path):
        return None
    try:
        text = read_small(path, "", limit=_MAX_BYTES).decode("utf-8")
    except (AdapterswapError, UnicodeDecodeError):
        return None

    # The front matter stands first, between two lines of dashes. Reading YAML takes milliseconds.
    parts = text.replace("\r\n", "\n").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip("\ufeff \n") or "license" not in parts[1]:
        return None
    try:
        front = parse_yaml(parts[1])
    except ValueError:
        return None
    if not isinstance(front, dict):
        return None

    stated = front.get("license")
    if isinstance(stated, list) and all(isinstance(item, str) for item in stated):
        stated = ", ".join(stated)
    values = []
    for value in (stated, front.get("license_name"), front.get("license_link")):
        text = value if isinstance(value, str) else ""
        values.append(printable(text.strip())[:_MAX_NAME])

    license_id, name, link = values
    if not license_id:
        return None
    return Licence(license_id.lower(), name, link)


class Licences(NamedTuple):
    """The licence that each expert's card states, by the expert's name."""

    stated: Mapping[str, Licence | None]

    @staticmethod
    def of(plan: Plan) -> Licences:
        return Licences({name: licence_of(expert.source.folder) for name, expert in plan.experts.items()})

    @property
    def warning(self) -> str | None:
        """A warning if experts state different licences; else None."""
        named = {name: licence for name, licence in self.stated.items() if licence is not None}
        if len(set(named.values())) < 2:
            return None
        listed = ", ".join(f"{name}: {licence}" for name, licence in named.items())
        return f"the experts' licences differ ({listed}): check whether you may share the result, and under which terms"

    def front(self) -> dict[str, str]:
        """The keys of the result's front matter; none if an expert states no licence, or they differ."""
        distinct = set(self.stated.values())
        if len(distinct) != 1:
            return {}
        (common,) = distinct
        return common.front() if common is not None else {}

    def text(self) -> str:
        """A warning if licences differ, or a note if only some experts state one, as Markdown."""
        if self.warning is not None:
            return f"\n**Warning**: {escaped(self.warning)}.\n"
        silent = [name for name, licence in self.stated.items() if licence is None]
        if silent and len(silent) < len(self.stated):
            names = " and ".join(map(escaped, silent))
            return f"\nThis card declares no licence, because the card of {names} does not state one.\n"
        return ""


_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is not markup
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_HUB = "https://huggingface.co"
_STUDY = "Bandarkar & Peng, 2025, arXiv:2505.18356"
_SETTINGS = (
    *ZONES, "task_weight", "language_weight", "weights", "density", "scale", "seed", "row_threshold", "norms",
)  # fmt: skip
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def escaped(text: str) -> str:
    """Markdown that shows any text, such as a folder's name, literally and on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def adapter_card(plan: Plan, record: CompositionRecord, layout: Layout) -> str:
    """The card as Markdown with the Hub's YAML front matter.

    Args:
        plan: the composition.
        record: the content of its adapterswap.json.
        layout: the tensors and config that were written.
    """
    base = plan.base.public_name
    licences = Licences.of(plan)
    peft_type = layout.config["peft_type"]
    is_lora = peft_type == LORA

    # The front matter, by which the Hub sorts models
    tags = ["adapterswap", "lora", "merge"] if is_lora else ["adapterswap", "merge"]
    front = {**_base_on_the_hub(base), "library_name": "peft", **licences.front(), "tags": tags}

    # The first sentence
    subject = "A LoRA adapter" if is_lora else f"An adapter of PEFT's type {peft_type}"
    if base:
        subject += f" for {escaped(base)}"
    if plan.slice is None:
        how_made = f"composed from {_counted_experts(plan)} by\n{_how_composed(plan)}"
    else:
        how_made = f"extracted from one expert:\nits {plan.slice} and its modules outside the layers,"

    remarks = [escaped(remark) for remark in (*record.origins, *plan.remarks)]
    remarks += [*_conversion(record), *_truncation(record)]

    return f"""---
{dump_yaml(front).strip()}
---

# {" + ".join(map(escaped, plan.experts))}

{subject}, {how_made} with adapterswap {__version__}.

{_experts_table(plan, licences)}

{_layers(plan)}

{_size(layout)}
{_list(remarks)}{licences.text()}
## Use

{loading(layout.config, base, task_type=plan.task_type)}
`adapterswap.json` records which expert every module came from, and the SHA-256 of the experts' files.
`adapterswap verify path/to/this/folder` composes the adapter again from its experts and compares the two.
{_citation(plan)}"""


def _base_on_the_hub(base: str | None) -> dict[str, str]:
    """The key of the front matter that names an adapter's base, if that is on the Hub."""
    if not base or "/" not in base:
        return {}
    return {"base_model": base}


def _counted_experts(plan: Plan) -> str:
    count = len(plan.experts)
    return "1 expert" if count == 1 else f"{count} experts"


def merged_card(plan: Plan, record: CompositionRecord) -> str:
    """The model card as Markdown with the Hub's YAML front matter."""
    # The front matter names the base or, without one, the experts, if they are on the Hub.
    base = None
    names = [expert.source.name for expert in plan.checkpoints.values()]
    subject = "Full weights"
    if plan.base.weights is not None:
        base = plan.base.weights.source.name
        names = [base]
        subject += f" of {escaped(base)}"

    ids = [name for name in names if "/" in name]
    licences = Licences.of(plan)
    front: dict[str, Any] = {}
    if ids:
        front |= {"base_model": ids, "base_model_relation": "merge"}
    front |= {"library_name": "transformers", **licences.front(), "tags": ["adapterswap", "merge"]}

    remarks = [escaped(remark) for remark in (*record.origins, *plan.remarks)]
    return f"""---
{dump_yaml(front).strip()}
---

# {" + ".join(map(escaped, plan.experts))}

{subject}, composed from {_counted_experts(plan)} by
{_how_composed(plan)} with adapterswap {__version__}.

{_experts_table(plan, licences)}

{_layers(plan)}
{_list(remarks)}{licences.text()}
`adapterswap.json` records where every tensor came from, with SHA-256 hashes of the experts.
`adapterswap verify path/to/this/folder` makes the weights again from their sources and compares the two.
{_citation(plan)}"""


def loading(
    config: Mapping[str, object],
    base: str | None,
    *,
    task_type: str | None,
    model_class: str = "AutoModelForCausalLM",
) -> str:
    """How to load an adapter in PEFT, vLLM and llama.cpp, or why the last two cannot read it.

    Args:
        config: the content of its adapter_config.json.
        base: the base's public name, if it is known.
        task_type: PEFT's name of the task.
        model_class: the class of transformers that loads the base, if the task is CAUSAL_LM.
    """
    revision = config.get("revision")
    is_id = base is not None and "/" in base
    is_causal = task_type == "CAUSAL_LM"

    # Only a causal model on the Hub can be named here; anything else the reader loads as usual.
    imports, opened = "", "...  # the base, loaded as usual"
    if is_id and is_causal:
        at = f', revision="{revision}"' if revision else ""
        imports = f"from transformers import {model_class}\n"
        opened = f'{model_class}.from_pretrained("{base}"{at})'

    with_peft = f"""With PEFT:

```python
from peft import PeftModel
{imports}
base_model = {opened}
model = PeftModel.from_pretrained(base_model, "path/to/this/folder")
```
"""
    reason = Target.why_not_served(config)
    if reason is not None:
        return (
            f"{with_peft}\nvLLM and llama.cpp read {reason}.\nTo serve this adapter with them, merge it into its base "
            "with `adapterswap merge`.\n"
        )
    if not is_causal:
        return with_peft
    servers = _servers(config, base if is_id else None, str(revision) if revision else None)
    return f"{with_peft}\n{servers}"


def _servers(config: Mapping[str, object], base: str | None, revision: str | None) -> str:
    """How to load an adapter in vLLM and llama.cpp; for the arguments see `loading`."""
    ranks = [config.get("r")]
    pattern = config.get("rank_pattern")
    if isinstance(pattern, Mapping):
        ranks += pattern.values()
    rank = max(rank for rank in ranks if isinstance(rank, int))
    fitting = next((allowed for allowed in _VLLM_RANKS if allowed >= rank), None)
    at = f" --revision {revision}" if revision else ""

    # vLLM has one scale for all modules and SGLang refuses patterns, so for them the scales are folded into B.
    folder, why, first = "path/to/this/folder", "", ""
    if not Target.has_one_scale(config):
        folder = "portable"
        why = ", which applies one scale to all modules, in a layout with one rank and one scale"
        first = f"adapterswap convert path/to/this/folder --layout portable -o {folder}\n"

    if fitting is None:
        vllm = (
            f"vLLM reads ranks up to {_VLLM_RANKS[-1]}, but this adapter has rank {rank}: compose it again with "
            f"`--max-rank {_VLLM_RANKS[-1]}`.\n"
        )
    else:
        vllm = f"""With vLLM{why}:

```bash
{first}vllm serve {base or "BASE"}{at} --enable-lora --max-lora-rank {fitting} --lora-modules composed={folder}
```
"""
    return f"""{vllm}
With llama.cpp, after converting the base to `base.gguf` with its `convert_hf_to_gguf.py`:

```bash
adapterswap export path/to/this/folder -o composed.gguf
llama-server -m base.gguf --lora composed.gguf
```
"""


def _how_composed(plan: Plan) -> str:
    """The method, with its paper."""
    composition = plan.composition
    if composition.allocation is not None:
        return "rules for layers and modules"
    if composition.partition is not None:
        return f"layer swapping by partition {composition.partition} (Bandarkar & Peng 2025)"
    return find_method(composition.method).title


def _experts_table(plan: Plan, licences: Licences) -> str:
    """A row for each expert: where it is from, its kind, role, rank and licence."""
    roles = dict.fromkeys(plan.composition.task, "task") | dict.fromkeys(plan.composition.language, "language")
    rows = [("expert", "from", "kind", "role", "rank", "licence"), ("---",) * 6]
    for name, expert in plan.experts.items():
        # Where it is from, with a link to its commit if that is on the Hub
        source = expert.source
        link = escaped(source.name)
        if source.revision is not None:
            link = f"[{link}]({_HUB}/{source.name}/tree/{source.revision}) at `{source.revision[:12]}`"

        kind, rank = "full checkpoint", "–"
        adapter = plan.adapters.get(name)
        if adapter is not None:
            kind = "LoRA adapter"
            ranks = sorted({module.rank for module in adapter.modules.values()})
            if len(ranks) == 1:
                rank = str(ranks[0])
            elif ranks:
                rank = f"{ranks[0]}–{ranks[-1]}"

        licence = licences.stated[name]
        licence_text = "not stated" if licence is None else escaped(str(licence))
        rows.append((escaped(name), link, kind, roles.get(name, "–"), rank, licence_text))

    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _layers(plan: Plan) -> str:
    """The strip of layers, the settings, and where each layer comes from."""
    picture = plan.picture
    rows = "\n".join(f"| {layers} | {escaped(origin)} |" for layers, origin in picture.zones)
    return f"""Layers from bottom (left) to top (right):

```
{picture.text}
```
{_settings(plan)}

| layers of {plan.depth} | from |
|---|---|
{rows}"""


def _settings(plan: Plan) -> str:
    """A line with the composition's settings, defaults filled in: zones, weights, the method's parameters."""
    settled = plan.composition.settled(plan.num_layers, full=bool(plan.checkpoints))
    texts = []
    for name in _SETTINGS:
        if name not in settled:
            continue
        value = settled[name]
        if isinstance(value, float):
            value = f"{value:g}"
        texts.append(f"{name} {value}")
    if not texts:
        return ""
    return f"\nSettings: {escaped(', '.join(texts))}.\n"


def _size(layout: Layout) -> str:
    """The ranks, the scale, the number of parameters and the size of an adapter."""
    config = layout.config
    form = f"PEFT's {config['peft_type']}"
    if config["peft_type"] == LORA:
        ranks = sorted({config["r"], *config["rank_pattern"].values()})
        rank = f"Rank {ranks[0]}"
        if len(ranks) > 1:
            rank = f"Ranks {ranks[0]} to {ranks[-1]}"
        scale = "scale α/r"
        if config.get("use_rslora"):
            scale = "rank-stabilized scale α/√r"
        form = f"{rank}; {scale}"

    parameters = sum(math.prod(tensor.shape) for tensor in layout.tensors)
    dtypes = sorted({tensor.dtype for tensor in layout.tensors})
    return f"{form}; {parameters:,} parameters in {', '.join(dtypes)}, {layout.nbytes / 1e6:.1f} MB."


def _conversion(record: CompositionRecord) -> list[str]:
    """A line on the conversion, if the adapter was converted from another kind or from a pickled file."""
    conversion = record.conversion
    if conversion is None or not (conversion.modules or conversion.pickled):
        return []
    if not conversion.modules:
        return ["converted from a pickled file (adapter_model.bin)"]

    rank = _ranks(conversion.modules.values())
    error = escaped(error_text(conversion.relative_error or 0.0))
    if conversion.peft_type == LORA:
        return [f"modules trained in full were converted to LoRA of {rank}: the relative error of their ΔW is {error}"]
    return [f"converted from {escaped(conversion.peft_type)} to rsLoRA of {rank}: the relative error of ΔW is {error}"]


def _truncation(record: CompositionRecord) -> list[str]:
    """A line on modules whose ΔW was truncated, if any."""
    if not record.reduced:
        return []

    count = "1 module was" if len(record.reduced) == 1 else f"{len(record.reduced)} modules were"
    verb = "computed at"
    if record.output.keys() & {"max_rank", "max_error"}:
        verb = "reduced to"
    rank = _ranks(record.reduced.values())
    worst = max(module["relative_error"] for module in record.reduced.values())
    error = escaped(error_text(worst))
    return [f"{count} {verb} {rank}: the relative error of a module's ΔW (Frobenius norm) is up to {error}"]


def _ranks(modules: Iterable[Mapping[str, int | float]]) -> str:
    ranks = sorted({module["rank"] for module in modules})
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks from {ranks[0]} to {ranks[-1]}"


def _list(lines: Iterable[str]) -> str:
    text = "".join(f"- {line}\n" for line in lines)
    if not text:
        return ""
    return f"\n{text}"


def _citation(plan: Plan) -> str:
    """The papers to cite for the methods used, with links."""
    if plan.slice is not None:
        return ""

    composition = plan.composition
    if composition.allocation is not None:
        references = [find_method("layer_swap").reference]
        for slot in plan:
            if slot.method != "linear":
                references.append(find_method(slot.method).reference)
    elif composition.partition is not None:
        references = [_STUDY]
    else:
        references = [find_method(composition.method).reference]
        if composition.method == "layer_swap" and plan.adapters:
            references.append(_STUDY)

    lines = [_ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", reference) for reference in dict.fromkeys(references)]
    return "\n## Citation\n" + _list(lines)


def extracted_card(
    full: Checkpoint,
    base: str | None,
    config: Mapping[str, Any],
    *,
    model_class: str,
    task_type: str | None,
    errors: tuple[float, float],
    rows: Sequence[str],
    lost: Sequence[str],
) -> str:
    """The card of an adapter that was cut out of a full fine-tune.

    Args:
        full: the fine-tune.
        base: the public name of its base.
        config: the adapter's config.
        model_class: the class in transformers that loads the base.
        task_type: PEFT's name of the task; None for a class without one.
        errors: the relative error over the adapted weights, and over everything that the fine-tune changed.
        rows: rows of a table of modules, rank and relative error.
        lost: a line for each reason why changes are missing.
    """
    front: dict[str, Any] = {**_base_on_the_hub(base), "library_name": "peft"}
    licence = licence_of(full.source.folder)
    if licence is not None:
        front |= licence.front()
    front["tags"] = ["adapterswap", "lora"]

    table = "\n".join(rows)
    missing = ""
    if lost:
        missing = f"\nChanged by the fine-tune and not in the adapter:\n{_list(map(escaped, lost))}"
    return f"""---
{dump_yaml(front).strip()}
---

# {escaped(full.source.name)} as an adapter

An rsLoRA adapter for {escaped(str(base))}, cut out of the full fine-tune {escaped(full.name)} with
adapterswap {__version__}. Its relative error is {errors[0]:.4f} over the weights that it adapts, and
{errors[1]:.4f} over everything that the fine-tune changed (‖what is missing‖ / ‖change‖, Frobenius norm).

| | modules | rank | relative error |
|---|---|---|---|
{table}
{missing}
## Use

{loading(config, base, task_type=task_type, model_class=model_class)}
`adapterswap.json` has the error of every module, and the SHA-256 of what it was cut out of.
"""
