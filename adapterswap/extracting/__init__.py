"""Cut an adapter out of a full fine-tune: ΔW = W_full - W_base, truncated weight by weight, written as an rsLoRA.

The rest is measured and reported. The folder appears whole or not at all, and memory holds only a
few copies of the largest weight. Knows checkpoints and adapter folders; knows nothing of compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapterswap.arithmetic.outputs import OutputTensor
from adapterswap.arithmetic.peft_config import check_base_name
from adapterswap.arithmetic.spooling import Spool
from adapterswap.arithmetic.threads import cores, torch_threads
from adapterswap.errors import ArgumentError, ExpertError
from adapterswap.experts.checkpoints import open_checkpoint
from adapterswap.experts.identity import hashed
from adapterswap.extracting.cutting import Cut, CutForm, cut, norm_of_change
from adapterswap.extracting.loadable import leave_out_unloadable
from adapterswap.extracting.output import write_folder
from adapterswap.extracting.pairing import Selection, WeightPair, pair
from adapterswap.extracting.result import Extracted, Extraction, Lost
from adapterswap.files.dtypes import FLOAT_NAMES
from adapterswap.files.folders import atomic_folder, check_target
from adapterswap.files.numbers import open_files
from adapterswap.files.smallfiles import expand_text
from adapterswap.planning.one_base import check_base_weights
from adapterswap.writing.folder import COMPOSED

__all__ = ["Extracted", "Extraction", "Lost", "extract"]


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
        UnsupportedError: a checkpoint is quantised, or has dtypes without arithmetic; the base has an encoder and a
            decoder; PEFT cannot adapt the selected modules.
    """
    if dtype is not None and dtype not in FLOAT_NAMES:
        raise ArgumentError(f"unknown dtype {dtype!r}", f"Choose from {', '.join(FLOAT_NAMES)}", parameter="dtype")
    form = CutForm(rank, max_error, FLOAT_NAMES[dtype] if dtype else None, _device(device))
    check_target(out_path, kind=COMPOSED, overwrite=overwrite, inputs=[full, base_model])  # before a download
    opened = open_checkpoint(full, what="full fine-tune"), open_checkpoint(base_model)
    check_base_weights({opened[0].name: opened[0].base_fingerprints}, opened[1].source)
    check_base_name(str(base_model))
    inputs = [checkpoint.source.folder for checkpoint in opened]
    selection = Selection(layers, tuple(modules), embeddings)
    matched = leave_out_unloadable(pair(*opened, selection))
    if dry_run:
        return _carry_out(matched, form, progress)
    with (
        atomic_folder(out_path, kind=COMPOSED, overwrite=overwrite, inputs=inputs) as folder,
        hashed(opened) as hashes,
    ):
        spool, tensors = Spool(folder), list[OutputTensor]()
        extraction = _carry_out(matched, form, progress, lambda cut: tensors.extend(cut.stored(spool)))
        write_folder(folder, matched, form, selection, extraction, tensors, hashes(), expand_text(str(base_model)))
    return extraction


def _device(name: str) -> Any:
    """The torch device that computes.

    MPS has no float64, which norms are summed in. Its SVD is not used either: the reported errors depend on it, and it
    was never tested (for the first one, of PyTorch 2.14, see issue 196112).
    """
    from adapterswap.bases import choose_device

    device = choose_device(name)
    return "cpu" if device.type == "mps" else device


def _carry_out(
    matched: WeightPair,
    form: CutForm,
    progress: Callable[[int, int], None],
    keep: Callable[[Cut], None] = lambda cut: None,
) -> Extraction:
    names = (matched.full.name, matched.base.name)
    total = len(matched.matrices) + len(matched.left_out)
    extracted, unchanged, lost = [], [], []
    with open_files([*matched.full.shards, *matched.base.shards]) as files, torch_threads(cores() - 1):
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
        detail = f"; what differs is in {', '.join(sorted({parameter.reason for parameter in lost}))}" if lost else ""
        raise ExpertError(
            f"{names[0]} has the same selected weights as {names[1]}, so there is nothing to extract{detail}",
            "Pass a full fine-tune of this base, or select what it changed",
            parameter="full",
        )
    return Extraction(tuple(extracted), tuple(unchanged), tuple(lost))
