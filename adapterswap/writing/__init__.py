"""Write a plan as an adapter folder that PEFT loads: the executor that copies byte ranges.

The folder appears whole or not at all. The same inputs give the same bytes. Knows how a plan is carried out on files;
knows nothing of how it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from adapterswap.arithmetic.copies import check_one_base
from adapterswap.arithmetic.layout import lay_out
from adapterswap.arithmetic.outputs import Form
from adapterswap.arithmetic.reduction import reduce
from adapterswap.arithmetic.resolving import resolve
from adapterswap.errors import AdapterswapError, check_type
from adapterswap.experts.adapter_config import check_written
from adapterswap.experts.adapters import CONFIG, PROVENANCE, WEIGHTS
from adapterswap.files.folders import atomic_folder, check_target
from adapterswap.files.smallfiles import expand, write_json
from adapterswap.planning.model_plan import AnyPlan, ModelPlan, adapters_only, inputs_of
from adapterswap.planning.plan import Plan
from adapterswap.writing.card import model_card
from adapterswap.writing.folder import CARD, COMPOSED
from adapterswap.writing.loadable import check_heads, loadable_form, with_loadable_names
from adapterswap.writing.provenance import Written, provenance
from adapterswap.writing.tensors import write_tensors

__all__ = ["Written", "prepare", "write_adapter", "write_prepared"]


def write_adapter(
    plan: AnyPlan,
    out_path: str | Path,
    *,
    layout: Literal["exact", "portable"] = "exact",
    max_rank: int | None = None,
    max_error: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the composed adapter to the folder `out_path`.

    It holds `adapter_model.safetensors`, `adapter_config.json`, `adapterswap.json` (what was composed from what) and a
    model card. Modules with one owner are copied byte for byte; blends are rank concatenations, computed in float32
    and rounded once to the experts' dtype.

    Args:
        plan: what to write.
        out_path: the folder; it appears whole or not at all.
        layout: `exact`, or `portable` (one rank, plain LoRA, scale 1: every engine reads it).
        max_rank: truncate modules of a higher rank; nonlinear methods need this or `max_error`.
        max_error: truncate blends to the smallest rank with at most this relative error of ΔW (Frobenius norm).
        overwrite: replace the folder, if `compose` or its like wrote it.

    Returns:
        The folder's path.

    Raises:
        AdapterswapError: an expert is a full checkpoint; the folder exists (without `overwrite`), holds other files,
            overlaps an input, or cannot be written; an expert holds NaN or infinity, or changed since it was opened;
            two experts carry different copies of a weight of their base; the plan leaves no module to write; a
            nonlinear method without a rank.
    """
    check_type(plan, (Plan, ModelPlan), "plan", "Pass a plan, as `compose` or `layer_swap` returns it")
    check_type(out_path, (str, Path), "out_path", "Pass the path of the folder to write")
    form = Form(layout=layout, max_rank=max_rank, max_error=max_error)
    plan = adapters_only(plan)
    check_target(out_path, kind=COMPOSED, overwrite=overwrite, inputs=inputs_of(plan))  # before the work
    return write_prepared(prepare(plan, form), out_path, overwrite=overwrite)


def prepare(plan: Plan, form: Form, progress: Callable[[str], None] = lambda name: None) -> Written:
    """Find the numbers that the plan leaves open, truncate what must be, lay the tensors out. Writes nothing.

    Args:
        plan: what to write.
        form: how.
        progress: called with the name of every module that was truncated.

    Raises:
        AdapterswapError: see `write_adapter`.
    """
    if not any(module.terms for module in plan):
        raise AdapterswapError("every module stays as in the base, so there is nothing to write", "Change the layers")
    check_heads(plan)
    check_one_base(plan)
    form = loadable_form(plan, form)
    resolved = resolve(with_loadable_names(plan))
    reduced = reduce(resolved, form, progress)
    layout = lay_out(resolved, form, reduced)
    check_written(layout.config)
    return Written(resolved, form, layout, reduced)


def write_prepared(
    written: Written, out_path: str | Path, *, overwrite: bool = False, hashes: Mapping[str, str] | None = None
) -> Path:
    """Write what `prepare` made; see `write_adapter`.

    `hashes` are the SHA-256 of the experts' files by name, where they were found since the experts were opened: hashing
    is most of a swap's time. They are believed.
    """
    out_path = expand(out_path)
    with atomic_folder(out_path, kind=COMPOSED, overwrite=overwrite, inputs=inputs_of(written.plan)) as folder:
        found = write_tensors(written.plan, written.layout, folder / WEIGHTS, hashes)
        write_json(folder / CONFIG, written.layout.config)
        write_json(folder / PROVENANCE, provenance(written, found))
        (folder / CARD).write_text(model_card(written.plan, written.reduced), encoding="utf-8")
    return out_path
