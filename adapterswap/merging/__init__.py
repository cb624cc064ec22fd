"""Write full weights from a plan: the executor that streams tensors from shards to shards.

Memory is bounded by a few blocks of rows, not by the model; only nonlinear methods need whole tensors. The folder
appears whole or not at all, and the same inputs give the same bytes. Knows plans, but not the requests behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from adapterswap.arithmetic.resolving import resolve
from adapterswap.changes.copies import Carried, check_base, check_tied_rows, copy_beside
from adapterswap.changes.kinds import Whole
from adapterswap.errors import UnsupportedError, check_type
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.checkpoints import MODEL_INDEX, Checkpoint
from adapterswap.experts.identity import sha256_of
from adapterswap.experts.slices import PROVENANCE
from adapterswap.files.folders import atomic_folder, check_target
from adapterswap.files.smallfiles import expand, write_json
from adapterswap.merging.blocks import Entered
from adapterswap.merging.companions import check_tokens, copy_companions
from adapterswap.merging.computing import Rows
from adapterswap.merging.dequantizing import dequantized
from adapterswap.merging.shards import ModelForm, OutputShard, index_of, lay_out_model
from adapterswap.merging.streaming import choose_devices, stream
from adapterswap.planning.allocation import BASE
from adapterswap.planning.composing import adapter_plan
from adapterswap.planning.making import base_of, make_plan, merge_plan
from adapterswap.planning.one_base import check_base_weights
from adapterswap.planning.plan import Plan
from adapterswap.records.cards import merged_card
from adapterswap.records.record import (
    SourceRecord,
    adapter_source,
    checkpoint_source,
    composition_record,
    with_fingerprints,
)
from adapterswap.writing.folder import CARD, COMPOSED

__all__ = ["Merged", "ModelForm", "merge", "prepare_model", "write_model"]


@dataclass(frozen=True)
class Merged:
    """Full weights, ready to be written: the plan with its numbers, the form, the shards.

    Attributes:
        plan: the plan with its final coefficients.
        form, shards: how it is written.
        magnitudes: each expert's mean absolute ΔW, if weights depend on it.
        kept_rows: by (expert, module): which rows of an adapter's ΔW are kept.
        kept_share: the share of each adapter's rows that is kept, if the composition has a row threshold.
        quantised: the base that was dequantised, if any.
    """

    plan: Plan
    form: ModelForm
    shards: tuple[OutputShard, ...]
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    kept_rows: Rows = field(default_factory=dict)
    kept_share: Mapping[str, float] = field(default_factory=dict)
    quantised: Checkpoint | None = None

    @property
    def measured(self) -> dict[str, Any]:
        """Values measured on the tensors: magnitudes, and shares of kept rows."""
        measured = {"magnitudes": dict(self.magnitudes), "kept_rows": dict(self.kept_share)}
        return {key: values for key, values in measured.items() if values}


def merge(
    plan: Plan | Adapter | str | Path,
    base_model: str | Path | None = None,
    *,
    out_path: str | Path,
    max_shard_size: str | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    dequantize: bool = False,
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
        dequantize: merge into the weights that a quantised base computes with, in the model's dtype. The result is not
            quantised. This needs memory for the whole base, and the library that quantised it.
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
        AdapterswapError: see `open_expert`, `make_plan` and `bases.choose_device`.
    """
    check_type(
        plan, (Plan, Adapter, str, Path), "plan",
        "Pass a plan, as `compose` or `layer_swap` returns it, or an adapter: opened, a folder or a Hub id",
    )  # fmt: skip
    check_type(base_model, (str, Path, type(None)), "base_model", "Pass a local folder or a Hub id such as org/name")
    check_type(out_path, (str, Path), "out_path", "Pass the path of the folder to write")
    form = ModelForm(max_shard_size, dtype, dequantize or None)
    base_model = None if base_model is None else str(base_model)
    check_target(out_path, kind=COMPOSED, overwrite=overwrite)  # before the work, and again when it is published
    if isinstance(plan, Adapter | str | Path):
        plan = adapter_plan(plan, base_model)
    return write_model(prepare_model(plan, form, base_model), out_path, device=device, overwrite=overwrite)


def prepare_model(plan: Plan, form: ModelForm, base_model: str | None = None, *, recorded: bool = False) -> Merged:
    """Compute the numbers that the plan leaves open, and lay out the shards. Writes nothing.

    For `recorded` see `make_plan`.

    Raises:
        AdapterswapError: see `merge`.
    """
    quantised = None
    if not plan.is_model:
        base = base_of(plan, base_model)
        if not recorded:
            check_base_weights(plan.recorded_bases, base.source)
        if form.dequantize:
            quantised, base = base, dequantized(base)
        merge_plan(plan, base)  # reports what does not fit before anything is read
        resolved = resolve(plan)
        full = merge_plan(resolved.plan, base)
    else:
        if form.dequantize:
            raise UnsupportedError(
                f"{next(iter(plan.checkpoints))} is a full checkpoint; only the base of adapters can be dequantised",
                "Use checkpoints with floating point weights",
                parameter="dequantize",
            )
        if base_model is not None and base_model != plan.composition.base_model:
            plan = make_plan(plan.composition.model_copy(update={"base_model": base_model}), plan.experts)
        resolved = resolve(plan)
        full = resolved.plan
    check_tied_rows(full.adapters)
    if full.base is not None:
        check_base(
            _copies(full), full.base, full.base.name,
            effect="which PEFT would put in its place",
            remedy="Pass the base that it was trained on as `base_model`",
            parameter="base_model",
        )  # fmt: skip
    check_tokens(full)
    if quantised is not None:
        note = f"the base {quantised.name} is quantised: ΔW is added to the weights that it computes with"
        full = replace(full, notes=(*full.notes, note))
    return Merged(
        full, form, lay_out_model(full, form), resolved.magnitudes, resolved.kept_rows, resolved.kept_share(), quantised
    )


def _copies(plan: Plan) -> Iterator[Carried]:
    """The experts' copies of base weights whose LoRA takes part."""
    for slot in plan:
        adapted = [term for term in slot.all_terms if not isinstance(term.change, Whole)]
        for expert, copy in {term.expert: copy_beside(term.change) for term in adapted}.items():
            if copy is not None and slot.base is not None:
                yield Carried(expert, plan.adapters[expert], slot.name, copy, slot.base)


def write_model(
    merged: Merged,
    out_path: str | Path,
    *,
    device: str = "cpu",
    overwrite: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write the result of `prepare_model`; see `merge`. `progress` is called after every tensor."""
    out_path = expand(out_path)
    plan, form = merged.plan, merged.form
    devices = choose_devices(device)
    with atomic_folder(out_path, kind=COMPOSED, overwrite=overwrite, inputs=plan.inputs) as folder:
        copy_companions(plan, form, folder)
        entered = stream(plan, merged.shards, folder, devices=devices, kept_rows=merged.kept_rows, progress=progress)
        index = index_of(plan, merged.shards, form)
        if index is not None:
            write_json(folder / MODEL_INDEX, index)
        record = composition_record(
            plan,
            {name: _source(name, expert, entered) for name, expert in plan.experts.items()},
            _base(merged.quantised or plan.base, entered) if plan.base else None,
            output=asdict(form),
            measured=merged.measured,
        )
        write_json(folder / PROVENANCE, record.content())
        (folder / CARD).write_text(merged_card(plan, record), encoding="utf-8")
    return out_path


def _base(base: Checkpoint, entered: Entered) -> SourceRecord:
    return with_fingerprints(checkpoint_source(base, entered.of(BASE)), base.source)


def _source(name: str, expert: Adapter | Checkpoint, entered: Entered) -> SourceRecord:
    if isinstance(expert, Adapter):
        return adapter_source(expert, sha256_of(expert.file.path))
    return checkpoint_source(expert, entered.of(name))
