"""Execute a plan of full weights: several threads read, compute and write one tensor each, block by block.

One thread can read and hash while another computes, and memory holds one block per thread. Knows plans and files;
computes nothing itself.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from adapterswap.arithmetic.threads import cores, torch_threads
from adapterswap.bases import choose_device
from adapterswap.changes.kinds import Whole
from adapterswap.experts.layers import deepest
from adapterswap.files.numbers import open_files, write_at
from adapterswap.files.tensorfile import TensorFile
from adapterswap.merging.blocks import Entered, ResultTensor, read_blocks
from adapterswap.merging.computing import Rows, compute, needs_torch
from adapterswap.merging.shards import OutputShard
from adapterswap.merging.workers import Stopped, work_off
from adapterswap.planning.plan import Plan

__all__ = ["choose_devices", "stream"]

_WORKERS = 4  # more would only wait for the disk


def choose_devices(name: str) -> list[str]:
    """torch's names of the devices to compute on: one, or every visible GPU for CUDA without a number.

    Raises:
        AdapterswapError: see `bases.choose_device`.
    """
    if name == "cpu":  # does not need torch
        return [name]
    device = choose_device(name)
    if device.type != "cuda" or device.index is not None:
        return [str(device)]
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def stream(
    plan: Plan,
    shards: Sequence[OutputShard],
    folder: Path,
    *,
    devices: Sequence[str],
    kept_rows: Rows,
    progress: Callable[[], None] = lambda: None,
) -> Entered:
    """Write the shards into `folder`, and return which source tensors were used.

    Args:
        plan: the plan with its final coefficients.
        shards: the shards to write.
        folder: the folder to write to.
        devices: torch's names of devices; layers are spread over them from the bottom up.
        kept_rows: which rows of an adapter's ΔW are kept.
        progress: called after every tensor.

    Raises:
        ExpertError: a source holds NaN or infinity, or has changed.
        UnsupportedError: a result overflows.
        OSError: a file cannot be written.
    """
    entered = Entered()
    with ExitStack() as stack:
        files = stack.enter_context(open_files(_sources(plan)))
        copied: list[tuple[str, ResultTensor]] = []
        computed: list[tuple[str, ResultTensor]] = []
        for shard in shards:
            output = stack.enter_context((folder / shard.name).open("xb", buffering=0))
            output.write(shard.header)
            output.truncate(shard.size)
            for key in (key for key in plan.slots if key in shard.places):
                slot = plan.slots[key]
                device = devices[(slot.layer or 0) * len(devices) // deepest(plan.num_layers)]
                result = ResultTensor(slot, shard.places[key], output.fileno())
                (computed if result.copied is None else copied).append((device, result))

        def carry_out(item: tuple[str, ResultTensor], stopped: Stopped) -> None:
            device, result = item
            for chunk in compute(read_blocks(result, files, entered), device, kept_rows, plan.composition.seed):
                if stopped():
                    return
                write_at(result.output, chunk.data, chunk.offset)
            progress()

        with_torch = any(needs_torch(result.slot, device) for device, result in computed)
        if with_torch:  # importing it takes as long as copying a gigabyte, so do both at once
            threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
        work_off(copied, carry_out, min(_WORKERS, cores()))
        workers = min(max(_WORKERS, 2 * len(devices)), cores())
        if any(result.slot.is_held_whole for _, result in computed):
            workers = 1  # whole tensors are in memory
        if with_torch:
            stack.enter_context(torch_threads(cores() // workers))
        work_off(computed, carry_out, workers)
    return entered


def _sources(plan: Plan) -> list[TensorFile]:
    """The files with tensors that the result uses."""
    paths: set[Path] = set()
    for slot in plan:
        copied = slot.copied
        whole = [copied] if copied else [term.change for term in slot.all_terms if isinstance(term.change, Whole)]
        if slot.base is not None and copied is None and slot.needs_base:
            whole.append(slot.base)
        factors = [term.change.path for term in slot.all_terms if not isinstance(term.change, Whole)]
        paths |= {part.path for part in whole} | set(factors)
    checkpoints = [*plan.checkpoints.values(), *([plan.base] if plan.base else [])]
    candidates = [shard for checkpoint in checkpoints for shard in checkpoint.shards]
    candidates += [adapter.file for adapter in plan.adapters.values()]
    return [file for file in candidates if file.path in paths]
