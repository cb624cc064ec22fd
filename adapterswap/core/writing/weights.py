"""Write full weights from a plan: weights, config, tokenizer, record, card; a quantized base is dequantized first.

config.json is copied from the skeleton, and rewritten if the result has another dtype or vocabulary size, or an untied
head. The tokenizer is the experts' if they have tokens or a chat template of their own. A dequantized base is an
ordinary checkpoint in a temporary folder, from which merging can stream.

Memory is bounded by a few blocks of rows, not by the model; only nonlinear methods need whole tensors. The folder
appears whole or not at all, and the same inputs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from adapterswap.core.experts.adapter import Adapter
from adapterswap.core.model.checkpoints import MODEL_INDEX, Checkpoint
from adapterswap.core.model.sources import PROVENANCE
from adapterswap.core.planning.base import check_base_weights
from adapterswap.core.planning.functions import adapter_plan
from adapterswap.core.planning.plan import Plan
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import BASE
from adapterswap.core.writing.adapter import COMPOSED
from adapterswap.core.writing.blocks import Entered
from adapterswap.core.writing.cards import merged_card
from adapterswap.core.writing.gates import FullWeights, check
from adapterswap.core.writing.records import CompositionRecord, SourceRecord
from adapterswap.core.writing.resolution import KeptRows, Resolved
from adapterswap.core.writing.stream import ModelForm, OutputShard, choose_devices, index_of, lay_out_model, stream
from adapterswap.kit.errors import ArgumentError, UnsupportedError, and_more, check_type
from adapterswap.kit.files.folders import CARD
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.text import expand, write_json

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 and 4


def write_companions(plan: Plan, form: ModelForm, folder: Path) -> None:
    """Write config.json and the other files beside the weights into `folder`."""
    skeleton = plan.base.skeleton
    assert skeleton is not None  # of full weights
    owner = plan.checkpoints.get(plan.companions.config or "", skeleton)
    plan.companions.write_model(folder, _config(owner.config, plan, form, owner))


def resized_vocabulary(plan: Plan, checkpoint: Checkpoint) -> dict[int, int]:
    """A checkpoint's numbers of rows in embeddings and heads that the result resizes → the result's."""
    stored = checkpoint.parameters
    resized: dict[int, int] = {}
    for slot in plan:
        if slot.has_tokens and slot.name in stored:
            rows = stored[slot.name].tensor.shape[0]
            if rows != slot.shape[0]:
                resized[rows] = slot.shape[0]
    return resized


def _config(config: Mapping[str, Any], plan: Plan, form: ModelForm, owner: Checkpoint) -> dict[str, Any]:
    """The owner's config.json with the result's dtype, vocabulary size and ties, also in nested language models."""
    resized = resized_vocabulary(plan, owner)
    changed = dict(config)
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            changed[key] = _config(value, plan, form, owner)
        elif key in _DTYPE_KEYS and form.dtype:
            changed[key] = form.dtype
        elif key == "tie_word_embeddings" and plan.untied:
            changed[key] = False
        elif key == "vocab_size" and value in resized:
            changed[key] = resized[value]

    # The whole config says it even where the owner's left it to the default.
    if config is owner.config:
        if plan.untied:
            changed["tie_word_embeddings"] = False
        if form.dtype and not any(key in config for key in _DTYPE_KEYS):
            changed["torch_dtype"] = form.dtype  # which transformers 5 reads too
    return changed


class Merged(NamedTuple):
    """Full weights, ready to be written: the plan with its numbers, the form, the shards.

    Attributes:
        plan: the plan with its final coefficients.
        form, shards: how it is written.
        magnitudes: each expert's mean absolute ΔW, if weights depend on it.
        kept_rows: by (expert, module): which rows of an adapter's ΔW are kept.
        kept_share: the share of each adapter's rows that is kept, if the composition has a row threshold.
        quantized: the base that was dequantized, if any.
    """

    plan: Plan
    form: ModelForm
    shards: tuple[OutputShard, ...]
    magnitudes: Mapping[str, float] = {}
    kept_rows: KeptRows = MappingProxyType({})
    kept_share: Mapping[str, float] = {}
    quantized: Checkpoint | None = None

    @property
    def measured(self) -> dict[str, Any]:
        """Values measured on the tensors: magnitudes, and shares of kept rows."""
        measured = {"magnitudes": dict(self.magnitudes), "kept_rows": dict(self.kept_share)}
        return {key: values for key, values in measured.items() if values}

    def write(
        self,
        out_path: str | Path,
        *,
        device: str = "cpu",
        overwrite: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write the model; see `merge`. `progress` is called after every tensor."""
        out_path = expand(out_path)
        plan, form = self.plan, self.form
        devices = choose_devices(device)
        with COMPOSED.folder(out_path, overwrite=overwrite, inputs=plan.inputs) as folder:
            write_companions(plan, form, folder)
            entered = stream(plan, self.shards, folder, devices=devices, kept_rows=self.kept_rows, progress=progress)
            index = index_of(plan, self.shards, form)
            if index is not None:
                write_json(folder / MODEL_INDEX, index)

            # What was read is known only now: of a checkpoint, the tensors that entered the result count.
            experts = {name: _source(name, expert, entered) for name, expert in plan.experts.items()}
            base = None
            if plan.base.weights is not None:
                read = self.quantized or plan.base.weights
                base = SourceRecord.of_checkpoint(read, entered.of(BASE)).with_fingerprints(read.source)

            record = CompositionRecord.of(plan, experts, base, output=asdict(form), measured=self.measured)
            write_json(folder / PROVENANCE, record.content())
            (folder / CARD).write_text(merged_card(plan, record), encoding="utf-8")
        return out_path


def merge(
    plan: Plan | Adapter | str | Path,
    base_model: str | Path | None = None,
    *,
    out_path: str | Path,
    max_shard_size: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    dequantize: bool = False,
    tokenizer: str | None = None,
    config_from: str | None = None,
    device: str = "cpu",
    overwrite: bool = False,
) -> Path:
    """Write full weights: a base with an adapter or a composition merged into it, or composed full checkpoints.

    ΔW are summed in float32 and rounded once. Tensors that no expert changes, or that one full checkpoint owns, are
    copied byte for byte. Config, tokenizer and shard layout are the base's (without a base, the first full expert's).

    Args:
        plan: a plan, or an adapter: opened, a folder or a Hub id.
        base_model: the base; by default the one that the experts name. Optional if none of its bytes are needed.
        out_path: the folder, which appears whole or not at all.
        max_shard_size: such as `2GB`; by default the base's shards are kept.
        dtype: the dtype of the result; by default each tensor keeps the base's dtype.
        dequantize: merge into the weights that a quantized base computes with, in the model's dtype. The result is not
            quantized. This needs memory for the whole base, and the library that quantized it. Without it, adapters may
            change only what an FP8, MXFP4 or compressed-tensors base stores in floating point; the rest is copied.
        tokenizer: whose tokenizer and chat templates the result takes: an expert's, by its name in the plan, or the
            `base`'s; by default the experts' where they agree, else the task expert's.
        config_from: likewise, whose config the result takes, of full checkpoints and the base; by default the base's.
        device: where torch computes: auto, cpu, cuda (all visible GPUs), cuda:N or mps.
        overwrite: replace the folder if adapterswap wrote it.

    Returns:
        The path of the folder.

    Raises:
        ArgumentError: an argument has the wrong type or value.
        OutputError: the folder exists (without `overwrite`), holds other files, overlaps an input, or cannot be
            written.
        NotFoundError, BaseModelError: the base is unknown or damaged, does not fit the experts, or differs from the
            copies of its weights that they carry.
        ExpertError: a source holds NaN or infinity, or changed after it was opened; the experts' tokenizers cannot be
            united.
        UnsupportedError: a result overflows its dtype, or cannot be computed from these tensors.
        AdapterswapError: see `open_expert`, `make_plan` and `stream.choose_devices`.
    """
    check_type(
        plan,
        (Plan, Adapter, str, Path),
        "plan",
        "Pass a plan, as `compose` or `layer_swap` returns it, or an adapter: opened, a folder or a Hub id",
    )
    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")
    check_type(out_path, (str, Path), "out_path", "Pass the path of the folder to write")
    owners = {"tokenizer": tokenizer, "config_from": config_from}
    for key, owner in owners.items():
        check_type(owner, (str, type(None)), key, "Pass an expert's name, or `base`")
    form = ModelForm(max_shard_size, dtype, dequantize or None)
    if base_model is not None:
        base_model = str(base_model)
    COMPOSED.check(out_path, overwrite=overwrite)  # before the work, and again when it is published

    if isinstance(plan, Adapter | str | Path):
        plan = adapter_plan(plan, base_model)
    chosen = {key: owner for key, owner in owners.items() if owner is not None}
    if chosen:
        plan = make_plan(plan.composition.model_copy(update=chosen), plan.experts, num_layers=plan.num_layers)
    return prepare_model(plan, form, base_model).write(out_path, device=device, overwrite=overwrite)


def prepare_model(plan: Plan, form: ModelForm, base_model: str | None = None, *, recorded: bool = False) -> Merged:
    """Compute the numbers that the plan leaves open, and lay out the shards. Writes nothing.

    For `recorded` see `make_plan`.
    """
    quantized = None
    if plan.is_model:
        if form.dequantize:
            raise UnsupportedError(
                f"{next(iter(plan.checkpoints))} is a full checkpoint; only the base of adapters can be dequantized",
                "Use checkpoints with floating point weights",
                parameter="dequantize",
            )
        if base_model is not None and base_model != plan.composition.base_model:
            plan = make_plan(plan.composition.model_copy(update={"base_model": base_model}), plan.experts)
        resolved = Resolved.of(plan)
        full = resolved.plan
    else:
        base = plan.base.open(base_model)
        if not recorded:
            check_base_weights(plan.base.recorded, base.source, plan.base.named)
        if form.dequantize:
            if base.quantization is None:
                raise ArgumentError(
                    f"`dequantize` is set, but the base {base.name} is not quantized",
                    "Leave it out",
                    parameter="dequantize",
                )
            quantized, base = base, base.dequantized()
        resolved = Resolved.of(plan)
        full = resolved.plan.merged_into(base)

    check(FullWeights(full, form))
    if quantized is not None:
        notes = [f"the base {quantized.name} is quantized: ΔW is added to the weights that it computes with"]
        lost = _lost(quantized, full)
        if lost:
            notes.append(f"Not in the result, because transformers does not load it: {and_more(lost)}")
        full = replace(full, notes=(*full.notes, *notes))

    shards = lay_out_model(full, form)
    return Merged(full, form, shards, resolved.magnitudes, resolved.kept_rows, resolved.kept_share(), quantized)


def _lost(quantized: Checkpoint, plan: Plan) -> list[str]:
    """The modules of a quantized base that the dequantized one lacks, because transformers does not load them."""
    assert plan.base.skeleton is not None  # of full weights
    left = {parameter.module for parameter in plan.base.skeleton.parameters.values()}

    # A weight's scales may be stored below it, as `q_proj.weight.absmax`.
    stored = dict.fromkeys(parameter.module.removesuffix(".weight") for parameter in quantized.parameters.values())
    model = quantized.base
    lost = []
    for module in stored:
        if module not in left and model.convert(f"{module}.weight")[0] not in model.parameters:
            lost.append(module)
    return lost


def _source(name: str, expert: Adapter | Checkpoint, entered: Entered) -> SourceRecord:
    if isinstance(expert, Adapter):
        return SourceRecord.of_adapter(expert, sha256_of(expert.file.path))
    return SourceRecord.of_checkpoint(expert, entered.of(name))
