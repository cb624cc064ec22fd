"""Cut an adapter out of a full fine-tune, and write it as a folder: weights, config, record, card.

Ranks are known only after the last weight, so the factors wait in a spool until the safetensors header can be written.
What the adapter cannot hold is measured and reported. The folder appears whole or not at all, and memory holds only a
few copies of the largest weight.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.companions.tokenizer import read_tokens
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.model.checkpoints import open_checkpoint
from adapterswap.core.model.layers import KeptLayers, Kind
from adapterswap.core.model.sources import CONFIG, PROVENANCE, WEIGHTS, Reference
from adapterswap.core.planning.base import check_base_weights
from adapterswap.core.planning.rules import BASE
from adapterswap.core.writing.adapter import COMPOSED
from adapterswap.core.writing.cards import extracted_card
from adapterswap.core.writing.outputs import Spool, torch_threads
from adapterswap.core.writing.peft_config import Shape, adapter_config, check_base_name
from adapterswap.core.writing.records import ExtractionRecord, SourceRecord
from adapterswap.kit.errors import ArgumentError, ExpertError
from adapterswap.kit.files.folders import CARD
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.tensorfile import open_files
from adapterswap.kit.files.text import write_json
from adapterswap.tools.comparison import norm_together
from adapterswap.tools.cut import Cut, CutForm, cut, leave_out_unloadable, norm_of_change
from adapterswap.tools.extracted import hashed
from adapterswap.tools.pairs import Reason, Selection, WeightPair, pair
from adapterswap.tools.recorded import files_in


@dataclass(frozen=True)
class Extracted:
    """One module of the adapter.

    Attributes:
        name, layer, kind: the module.
        out_features, in_features: the size of its ΔW.
        rank: the rank of its factors.
        norm: ‖ΔW‖, the Frobenius norm.
        error: ‖ΔW - B·A‖ / ‖ΔW‖, with the factors as they are written.
        dtype: the dtype of its factors, by its name in files.
    """

    name: str
    layer: int | None
    kind: Kind
    out_features: int
    in_features: int
    rank: int
    norm: float
    error: float
    dtype: str

    @classmethod
    def of(cls, cut: Cut) -> Extracted:
        weight = cut.matrix.weight
        return cls(weight.name, weight.layer, weight.kind, *cut.matrix.shape, cut.rank, cut.norm, cut.error, cut.dtype)


@dataclass(frozen=True)
class Lost:
    """A parameter that the fine-tune changed and the adapter does not hold: why, and ‖W_full - W_base‖."""

    name: str
    reason: Reason
    norm: float


@dataclass(frozen=True)
class Extraction:
    """What was cut out of a full fine-tune.

    Attributes:
        modules: the adapter's.
        unchanged: modules that the fine-tune did not change; the adapter leaves them out.
        lost: everything else that it changed.
        in_full: modules that the adapter holds whole, such as a classifier's head.
    """

    modules: tuple[Extracted, ...]
    unchanged: tuple[str, ...]
    lost: tuple[Lost, ...]
    in_full: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Extraction of {len(self.modules)} modules, rank {self.ranks}, relative error {self.error:.4g}>"

    @property
    def norm(self) -> float:
        """‖ΔW‖ over all of the adapter's modules together."""
        return norm_together(module.norm for module in self.modules)

    @property
    def ranks(self) -> str:
        """The rank of the modules, or the lowest and the highest: `4–64`."""
        ranks = sorted({module.rank for module in self.modules})
        if len(ranks) == 1:
            return str(ranks[0])
        return f"{ranks[0]}–{ranks[-1]}"

    @property
    def error(self) -> float:
        """‖ΔW - B·A‖ / ‖ΔW‖ over all of the adapter's modules together."""
        return norm_together(module.norm * module.error for module in self.modules) / self.norm

    @property
    def whole_error(self) -> float:
        """The same over everything that the fine-tune changed; the part that was left out counts in full."""
        lost = self._lost_norm
        return math.hypot(lost, self.norm * self.error) / math.hypot(lost, self.norm)

    @property
    def lost_share(self) -> float:
        """The part of ‖W_full - W_base‖ over all parameters that lies outside the adapter's modules."""
        lost = self._lost_norm
        return lost / math.hypot(lost, self.norm)

    @property
    def _lost_norm(self) -> float:
        """The norm of everything that lies outside the adapter's modules."""
        return norm_together(parameter.norm for parameter in self.lost)

    @property
    def lost_by_reason(self) -> Mapping[Reason, tuple[int, float]]:
        """For each reason the number of parameters, and their share as in `lost_share`."""
        total = math.hypot(self._lost_norm, self.norm)
        norms: dict[Reason, list[float]] = {}
        for parameter in sorted(self.lost, key=lambda parameter: parameter.reason):
            norms.setdefault(parameter.reason, []).append(parameter.norm)

        shares = {}
        for reason, of_reason in norms.items():
            shares[reason] = len(of_reason), norm_together(of_reason) / total
        return shares

    def lost_lines(self) -> list[str]:
        """A line for each reason why a changed parameter is not in the adapter, with the share and the names."""
        lines = []
        for reason, (count, share) in self.lost_by_reason.items():
            # Names that differ only in numbers are one, such as `model.layers.*.mlp.router.weight`.
            patterns: set[str] = set()
            for parameter in self.lost:
                if parameter.reason == reason:
                    patterns.add(re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter.name))

            names = sorted(patterns)
            shown = ", ".join(names[:_NAMES])
            if len(names) > _NAMES:
                shown += f" and {len(names) - _NAMES} more kinds"
            lines.append(f"{count} {reason} ({shown}): {share:.2%} of the norm of the whole change")
        return lines


_NAMES = 8  # kinds of names that a line shows; adapterswap.json has all names


def _request(
    pair: WeightPair,
    form: CutForm,
    selection: Selection,
    hashes: list[dict[str, str]],
    config_from: Literal["base"] | None,
) -> dict[str, Any]:
    """The request for the record; `hashes` are the SHA-256 of the fine-tune's and of the base's shards."""
    return {
        "full": SourceRecord.of_shards(pair.full, hashes[0]),
        "base": SourceRecord.of_shards(pair.base, hashes[1]).with_fingerprints(pair.base.source),
        "rank": form.rank,
        "max_error": form.max_error,
        "layers": selection.layers,
        "modules": list(selection.modules),
        "embeddings": selection.embeddings,
        "config_from": config_from,
    }


def _write_folder(
    folder: Path, pair: WeightPair, extraction: Extraction, spool: Spool, request: Mapping[str, Any], base_model: str
) -> None:
    """Fill the empty `folder`; `spool` keeps the tensors."""
    spool.write(folder / WEIGHTS)
    config = _config(pair, extraction, base_model)
    write_json(folder / CONFIG, config)
    companions = companions_of(pair)
    companions.write(folder)

    # The record: the request, with what came of it
    base_name = base_model
    if pair.base.source.revision:
        base_name = pair.base.source.name
    base = Reference(base_name).public_name
    kept = pair.full.kept_layers
    if request["layers"] is not None:
        kept = KeptLayers.of(request["layers"])
    in_full: dict[str, list[str]] = {}
    if pair.in_full:
        in_full["in_full"] = sorted(pair.in_full)
    extracted: dict[str, dict[str, Any]] = {}
    for module in extraction.modules:
        extracted[module.name] = {"rank": module.rank, "relative_error": module.error, "norm": module.norm}
    left_out: dict[str, dict[str, Any]] = {}
    for parameter in extraction.lost:
        left_out[parameter.name] = {"reason": parameter.reason, "norm": parameter.norm}
    record = ExtractionRecord.of(
        request,
        kept=kept,
        base_model=base,
        num_layers=pair.num_layers,
        sha256={name: sha256_of(folder / name) for name in files_in(folder)},
        companions=companions.record,
        extracted=extracted,
        unchanged=list(extraction.unchanged),
        **in_full,
        left_out=left_out,
    )
    write_json(folder / PROVENANCE, record.content())
    (folder / CARD).write_text(_card(pair, extraction, base, config), encoding="utf-8")


def companions_of(pair: WeightPair) -> CompanionPlan:
    """The companions of the adapter: the fine-tune's, unless its tokenizer has tokens that the base has no row for."""
    folder = pair.full.source.folder
    rows = pair.base.rows_of_tokens
    decided = CompanionPlan.decide({"full": folder}, beside=pair.base.source.folder)
    tokens = read_tokens(folder)
    if tokens and rows and max(tokens) >= min(rows.values()):
        return decided.without_tokenizer()
    return decided


def _config(pair: WeightPair, extraction: Extraction, base_model: str) -> dict[str, Any]:
    """PEFT's config: α = √r gives rsLoRA's scale α/√r = 1 for every module, exactly, so that B·A is ΔW itself."""
    ranks = {module.name: module.rank for module in extraction.modules}
    weights = []
    for matrix in pair.matrices:
        if matrix.weight.name in ranks:
            weights.append(matrix.weight)
    for weight in weights:
        ranks |= dict.fromkeys(weight.tied, ranks[weight.name])
    shapes = {name: Shape.of_scale(rank, True, 1.0) for name, rank in ranks.items()}

    revision, auto_mapping = pair.base.source.revision, None
    if revision:
        base_model = pair.base.source.name
    if not pair.task_type:
        auto_mapping = pair.model.auto_mapping
    return adapter_config(
        shapes,
        rslora=True,
        base_model=base_model,
        revision=revision,
        task_type=pair.task_type,
        auto_mapping=auto_mapping,
        saved=pair.saved,
        fan_in_fan_out=any(weight.transposed and not weight.embedding for weight in weights),
        tied=any(weight.tied for weight in weights),
    )


def _card(pair: WeightPair, extraction: Extraction, base: str | None, config: Mapping[str, Any]) -> str:
    """The model card: what the adapter was cut out of, its error, and what is missing."""
    model_class = pair.model.class_name
    if pair.task_type == "CAUSAL_LM" and not pair.model.is_multimodal:
        model_class = "AutoModelForCausalLM"

    rows: list[str] = []
    for layer in dict.fromkeys(module.layer for module in extraction.modules):
        name = f"layer {layer}"
        if layer is None:
            name = "no layer"
        of_layer = tuple(module for module in extraction.modules if module.layer == layer)
        group = Extraction(of_layer, (), ())
        rows.append(f"| {name} | {len(of_layer)} | {group.ranks} | {group.error:.4f} |")

    return extracted_card(
        pair.full,
        base,
        config,
        model_class=model_class,
        task_type=pair.task_type,
        errors=(extraction.error, extraction.whole_error),
        rows=rows,
        lost=extraction.lost_lines(),
    )


def extract(
    full: str | Path,
    base_model: str | Path,
    out_path: str | Path,
    *,
    rank: int | None = None,
    max_error: float | None = None,
    layers: str | None = None,
    modules: Sequence[str] = (),
    embeddings: bool = False,
    dtype: str | None = None,
    config_from: Literal["base"] | None = None,
    device: str = "cpu",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extraction:
    """Write the rsLoRA adapter in `out_path` that turns the base into the full fine-tune as nearly as its rank allows.

    Every linear weight in the layers is cut: ΔW ≈ B·A by truncated SVD, A = √Σ·Vᵀ (rank×in) and B = U·√Σ (out×rank),
    the best of its rank in the Frobenius norm (Eckart & Young 1936). lora_alpha is √rank, so that rsLoRA's scale α/√r
    is 1. Norms, biases and everything else that an adapter cannot hold are left out and reported.

    Args:
        full: the fine-tune, a full checkpoint: a folder or Hub id.
        base_model: the base that it was fine-tuned from, a folder or Hub id.
        out_path: the folder to write; it appears whole or not at all.
        rank: the rank of every module; with `max_error`, the highest allowed.
        max_error: each module gets the smallest rank with at most this relative error of ΔW, before its factors are
            rounded to `dtype`.
        layers: for example `0-4,30-31`; all by default.
        modules: kinds (attention, mlp, other) or parts of names (self_attn, q_proj); all by default.
        embeddings: cut the matrices outside the layers too: embeddings, heads, vision and audio towers, projectors.
        dtype: float32, bfloat16 or float16; by default each factor has the dtype of the fine-tune's weight.
        config_from: `base`, if the fine-tune's config computes differently from the base's, which is otherwise an
            error: the adapter is used with the base's config.
        device: where torch computes: auto, cpu, cuda, cuda:N or mps, which computes on the CPU.
        overwrite: replace the folder, if `extract` or a similar command wrote it.
        dry_run: compute and report everything, and write nothing.
        progress: called after each parameter with the number of finished parameters and the total.

    Returns:
        The extracted modules with their ranks and errors, and the parameters that were left out.

    Raises:
        ArgumentError: neither `rank` nor `max_error` was passed, or a value is out of range; the models lack the layers
            or modules; the dtype or device is unknown; the base's path, which the adapter names, is not printable.
        OutputError: the folder exists (without `overwrite`), holds other files, or cannot be written.
        NotFoundError: a checkpoint does not exist, or could not be downloaded.
        ExpertError: a checkpoint is damaged or holds NaN or infinity; there is no difference to extract.
        BaseModelError: the two are of different architectures, depths or shapes, or transformers cannot build one.
        UnsupportedError: a checkpoint is quantized, or has dtypes without arithmetic; the base has an encoder and a
            decoder; PEFT cannot adapt the selected modules.
    """
    if dtype is not None and dtype not in Dtype.NAMES:
        raise ArgumentError(f"Unknown dtype {dtype!r}", f"Choose from {', '.join(Dtype.NAMES)}", parameter="dtype")
    form = CutForm(rank, max_error, dtype and Dtype.NAMES[dtype], _device(device))
    COMPOSED.check(out_path, overwrite=overwrite, inputs=[full, base_model])  # before a download

    # What is cut
    tuned, base = open_checkpoint(full, what="full fine-tune"), open_checkpoint(base_model)
    check_base_weights({tuned.name: tuned.base_fingerprints}, base.source)
    check_base_name(str(base_model))
    inputs = [tuned.source.folder, base.source.folder]
    selection = Selection(layers, tuple(modules), embeddings)
    if config_from not in (None, BASE):
        raise ArgumentError(
            f"`config_from` is {config_from!r}, but an adapter is used with the base's config",
            "Pass `config_from=base`, or leave it out",
            parameter="config_from",
        )
    matched = leave_out_unloadable(pair(tuned, base, selection, config_from=config_from))
    if dry_run:
        return _carry_out(matched, form, progress)

    with (
        COMPOSED.folder(out_path, overwrite=overwrite, inputs=inputs) as folder,
        hashed((tuned, base)) as hashes,
    ):
        spool = Spool(folder)
        extraction = _carry_out(matched, form, progress, lambda cut: cut.keep(spool))
        _keep_heads(matched, spool)
        request = _request(matched, form, selection, hashes(), config_from)
        _write_folder(folder, matched, extraction, spool, request, os.path.expanduser(str(base_model)))
    return extraction


def _device(name: str) -> Any:
    """The torch device that computes.

    MPS has no float64, which norms are summed in. Its SVD is not used either: the reported errors depend on it, and it
    was never tested (for the first one, of PyTorch 2.14, see issue 196112).
    """
    from adapterswap.core.model.opened_base import choose_device

    device = choose_device(name)
    if device.type == "mps":
        return "cpu"
    return device


def _keep_heads(matched: WeightPair, spool: Spool) -> None:
    """Keep the heads that the adapter holds whole, as PEFT stores a module that was trained in full."""
    with open_files(matched.full.shards) as files:
        for name, whole in sorted(matched.in_full.items()):
            module, _, parameter = name.rpartition(".")
            spool.keep_copy(ModuleKeys(module).parameter(parameter), whole.tensor, files[whole.path])


def _carry_out(
    matched: WeightPair,
    form: CutForm,
    progress: Callable[[int, int], None],
    keep: Callable[[Cut], None] = lambda cut: None,
) -> Extraction:
    names = (matched.full.name, matched.base.name)
    total = len(matched.matrices) + len(matched.left_out)
    extracted: list[Extracted] = []
    unchanged: list[str] = []
    lost: list[Lost] = []
    with open_files([*matched.full.shards, *matched.base.shards]) as files, torch_threads():
        for count, matrix in enumerate(matched.matrices, start=1):
            factors = cut(matrix, form, files, names)
            if factors is None:
                unchanged.append(matrix.weight.name)
            else:
                extracted.append(Extracted.of(factors))
                keep(factors)
            progress(count, total)

        for count, left_out in enumerate(matched.left_out, start=len(matched.matrices) + 1):
            norm = norm_of_change(left_out, files, names)
            if norm:
                lost.append(Lost(left_out.name, left_out.reason, norm))
            progress(count, total)

    if not extracted:
        detail = ""
        if lost:
            reasons = sorted({parameter.reason for parameter in lost})
            detail = f"; what differs is in {', '.join(reasons)}"
        raise ExpertError(
            f"{names[0]} has the same selected weights as {names[1]}, so there is nothing to extract{detail}",
            "Pass a full fine-tune of this base, or select what it changed",
            parameter="full",
        )
    return Extraction(tuple(extracted), tuple(unchanged), tuple(lost), tuple(matched.saved))
