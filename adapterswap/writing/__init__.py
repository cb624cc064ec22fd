"""Write a plan as an adapter folder that PEFT loads: the executor that copies byte ranges.

The folder appears whole or not at all. The same inputs give the same bytes. Knows how a plan is carried out on files;
knows nothing of how it was asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapterswap.adapters import CONFIG, PROVENANCE, WEIGHTS
from adapterswap.errors import AdapterswapError
from adapterswap.folders import atomic_folder
from adapterswap.layout import Layout, OutputTensor, exact_layout
from adapterswap.plan import Plan
from adapterswap.tensorfile import Tensor, header_bytes

__all__ = ["write_adapter"]


def write_adapter(plan: Plan, out_path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the composed adapter to the folder `out_path`.

    It holds `adapter_model.safetensors`, `adapter_config.json`, `adapterswap.json` (what was composed from what) and a
    model card. Modules with one owner are copied byte for byte; blends are rank concatenations, computed in float32
    and rounded once to the experts' dtype.

    Returns:
        The folder's path.

    Raises:
        AdapterswapError: the folder exists (without `overwrite`), overlaps an expert's, or cannot be written; an expert
            holds NaN or infinity, or changed since it was opened; the plan leaves no module to write.
    """
    from adapterswap.writing.card import model_card
    from adapterswap.writing.provenance import provenance

    out_path = Path(out_path)
    layout = exact_layout(plan)
    if not layout.tensors:
        raise AdapterswapError("every module stays as in the base, so there is nothing to write", "Change the layers")
    inputs = [adapter.source.folder for adapter in plan.experts.values()]
    with atomic_folder(out_path, overwrite=overwrite, inputs=inputs) as folder:
        hashes = _write_tensors(plan, layout, folder / WEIGHTS)
        _write_json(folder / CONFIG, layout.config)
        _write_json(folder / PROVENANCE, provenance(plan, hashes))
        (folder / "README.md").write_text(model_card(plan), encoding="utf-8")
    return out_path


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _write_tensors(plan: Plan, layout: Layout, path: Path) -> dict[str, str]:
    """Write the safetensors file; return each source file's SHA-256 by expert."""
    from adapterswap.arithmetic import assemble
    from adapterswap.writing.copying import copy_and_hash, write_at

    header, places = header_bytes((tensor.key, tensor.dtype, tensor.shape) for tensor in layout.tensors)
    targets = _copy_targets(plan, layout, places)
    computed = [tensor for tensor in layout.tensors if not tensor.is_copied]

    def compute(tensor: OutputTensor) -> None:
        write_at(output.fileno(), assemble(tensor, files), places[tensor.key].start)

    with ExitStack() as stack:
        output = stack.enter_context(path.open("xb"))
        output.write(header)
        output.flush()
        workers = stack.enter_context(ThreadPoolExecutor(min(4, os.cpu_count() or 1)))
        hashing = {
            name: workers.submit(copy_and_hash, name, adapter.file, targets[name], output.fileno())
            for name, adapter in plan.experts.items()
        }
        hashes = {name: future.result() for name, future in hashing.items()}
        files = {
            name: stack.enter_context(adapter.file.path.open("rb")).fileno() for name, adapter in plan.experts.items()
        }
        list(workers.map(compute, computed))
    return hashes


def _copy_targets(plan: Plan, layout: Layout, places: Mapping[str, Tensor]) -> dict[str, dict[str, list[int]]]:
    """Per expert and source tensor: the offsets in the output to which its bytes are copied."""
    targets: dict[str, dict[str, list[int]]] = {name: {} for name in plan.experts}
    for tensor in layout.tensors:
        if not tensor.is_copied:
            continue
        place = places[tensor.key]
        row = place.nbytes // tensor.shape[0]  # copied pieces lie one after the other along the first axis, or alone
        for piece in tensor.pieces:
            offset = place.start + (piece.offset * row if tensor.axis == 0 else 0)
            targets[piece.expert].setdefault(piece.tensor.name, []).append(offset)
    return targets
