"""Write extracted factors as an adapter folder: weights, PEFT's config, the record, a model card.

Ranks are known only after the last weight, so the factors wait in a spool until the safetensors header can be written.
Knows adapter folders; computes no factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterswap import __version__
from adapterswap.arithmetic.outputs import OutputTensor
from adapterswap.arithmetic.peft_config import Shape, adapter_config, most_common, written_scale
from adapterswap.experts.adapters import CONFIG, WEIGHTS
from adapterswap.experts.anatomy import class_of
from adapterswap.experts.identity import sha256_of
from adapterswap.experts.slices import PROVENANCE, KeptLayers
from adapterswap.experts.sources import public_name
from adapterswap.extracting.cutting import CutForm
from adapterswap.extracting.pairing import Selection, WeightPair
from adapterswap.extracting.result import Extracted, Extraction, shortened
from adapterswap.files.smallfiles import write_json
from adapterswap.files.yamltext import dump_yaml
from adapterswap.records.cards import escaped, loading
from adapterswap.records.licences import licence_of
from adapterswap.records.record import (
    FORMAT,
    ExtractedModule,
    ExtractionRecord,
    ExtractionRequest,
    LeftOut,
    SliceRecord,
    shards_source,
    with_fingerprints,
)
from adapterswap.writing.folder import CARD
from adapterswap.writing.tensors import write_computed

__all__ = ["lost_lines", "write_folder"]

_NAMES = 8  # kinds of names that a line shows; adapterswap.json has all names


def write_folder(
    folder: Path, pair: WeightPair, form: CutForm, selection: Selection, extraction: Extraction,
    tensors: Sequence[OutputTensor], hashes: list[dict[str, str]], base_model: str,
) -> None:  # fmt: skip
    """Fill the empty `folder`.

    Args:
        pair, form, selection: what was requested.
        extraction: the result.
        tensors: the factors.
        hashes: the SHA-256 of the fine-tune's and of the base's shards.
        base_model: the base, as the user named it.

    Raises:
        OSError: the folder cannot be written.
    """
    write_computed(tensors, folder / WEIGHTS)
    config = _config(pair, extraction, base_model)
    write_json(folder / CONFIG, config)
    base = public_name(pair.base.source.name if pair.base.source.revision else base_model)
    record = ExtractionRecord(
        format=FORMAT,
        kind="extraction",
        adapterswap_version=__version__,
        base_model=base,
        num_layers=pair.num_layers,
        sha256={name: sha256_of(folder / name) for name in (WEIGHTS, CONFIG)},
        extraction=ExtractionRequest(
            full=shards_source(pair.full, hashes[0]),
            base=with_fingerprints(shards_source(pair.base, hashes[1]), pair.base.source),
            rank=form.rank,
            max_error=form.max_error,
            layers=selection.layers,
            modules=list(selection.modules),
            embeddings=selection.embeddings,
        ),
        extracted={
            module.name: ExtractedModule(rank=module.rank, relative_error=module.error, norm=module.norm)
            for module in extraction.modules
        },
        unchanged=list(extraction.unchanged),
        left_out={
            parameter.name: LeftOut(reason=parameter.reason, norm=parameter.norm) for parameter in extraction.lost
        },
        **SliceRecord.of(pair.full.kept_layers if selection.layers is None else KeptLayers.of(selection.layers)),
    )
    write_json(folder / PROVENANCE, record.content())
    (folder / CARD).write_text(_card(pair, extraction, base, config), encoding="utf-8")


def _config(pair: WeightPair, extraction: Extraction, base_model: str) -> dict[str, Any]:
    """PEFT's config: α = √r gives rsLoRA's scale α/√r = 1 for every module, exactly, so that B·A is ΔW itself."""
    ranks = {m.name: m.rank for m in extraction.modules}
    weights = [matrix.weight for matrix in pair.matrices if matrix.weight.name in ranks]
    ranks |= {head: ranks[weight.name] for weight in weights for head in weight.tied}
    shapes = {name: Shape(rank, *written_scale(rank, True, 1.0)) for name, rank in ranks.items()}
    rank, alpha = most_common(((shape.rank, shape.alpha) for shape in shapes.values()), default=(1, 1.0))
    base = pair.base.source
    return adapter_config(
        shapes,
        rank,
        alpha,
        rslora=True,
        base_model=base.name if base.revision else base_model,
        revision=base.revision,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(weight.transposed and not weight.embedding for weight in weights),
        tied=any(weight.tied for weight in weights),
    )


def _card(pair: WeightPair, extraction: Extraction, base: str | None, config: Mapping[str, Any]) -> str:
    """The model card: what the adapter was cut out of, its error, and what is missing."""
    front = {
        **({"base_model": base} if base and "/" in base else {}),
        "library_name": "peft",
        **(licence.front() if (licence := licence_of(pair.full.source.folder)) else {}),
        "tags": ["adapterswap", "lora"],
    }
    rows = "\n".join(_row(f"layer {layer}" if layer is not None else "no layer", extraction.modules, layer)
                     for layer in dict.fromkeys(m.layer for m in extraction.modules))  # fmt: skip
    lost = "".join(f"- {escaped(line)}\n" for line in lost_lines(extraction))
    return f"""---
{dump_yaml(front).strip()}
---

# {escaped(pair.full.source.name)} as an adapter

An rsLoRA adapter for {escaped(str(base))}, cut out of the full fine-tune {escaped(pair.full.name)} with
adapterswap {__version__}. Its relative error is {extraction.error:.4f} over the weights that it adapts, and
{extraction.whole_error:.4f} over everything that the fine-tune changed (‖what is missing‖ / ‖change‖, Frobenius norm).

| | modules | rank | relative error |
|---|---|---|---|
{rows}
{f"{chr(10)}Changed by the fine-tune and not in the adapter:{chr(10)}{chr(10)}{lost}" if lost else ""}
## Use

{loading(config, base, task_type="CAUSAL_LM", model_class=class_of(pair.base))}
`adapterswap.json` has the error of every module, and the SHA-256 of what it was cut out of.
"""


def lost_lines(extraction: Extraction) -> list[str]:
    """A line for each reason why a changed parameter is not in the adapter, with the share and the names."""
    lines = []
    for reason, (count, share) in extraction.lost_by_reason.items():
        names = shortened(parameter.name for parameter in extraction.lost if parameter.reason == reason)
        shown = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more kinds" if len(names) > _NAMES else "")
        lines.append(f"{count} {reason} ({shown}): {share:.2%} of the norm of the whole change")
    return lines


def _row(name: str, modules: tuple[Extracted, ...], layer: int | None) -> str:
    group = Extraction(tuple(m for m in modules if m.layer == layer), (), ())
    return f"| {name} | {len(group.modules)} | {group.ranks} | {group.error:.4f} |"
