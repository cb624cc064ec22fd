"""Carry out a plan of full weights: read, compute and write at the same time, a block after another.

One pipeline for each device; each holds a few blocks. Knows plans, files and threads; computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from adapterswap.arithmetic.cores import spared_cores
from adapterswap.arithmetic.tensors import open_files
from adapterswap.errors import AdapterswapError
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.files.tensorfile import TensorFile
from adapterswap.merging.ahead import ahead
from adapterswap.merging.blocks import Hashes, Work, read_blocks
from adapterswap.merging.computing import Rows, compute
from adapterswap.merging.shards import OutputShard
from adapterswap.planning.model_plan import ModelPlan
from adapterswap.planning.parameters import Stored
from adapterswap.writing.copying import write_at

__all__ = ["choose_devices", "stream"]

_READ_AHEAD, _COMPUTED_AHEAD = 3, 2  # blocks that wait for the next stage


def choose_devices(name: str) -> list[str]:
    """torch's names of the devices to compute on: one, or every visible GPU for `cuda`.

    Raises:
        AdapterswapError: torch knows no such device, or sees none here.
    """
    if name == "cpu":
        return [name]
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200].removesuffix(".")
        raise AdapterswapError(
            f"the device {name!r} cannot be used: {reason}", "Give cpu, cuda for all GPUs, or cuda:N"
        ) from None
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if name == "cuda" else [name]


def stream(
    plan: ModelPlan,
    shards: Sequence[OutputShard],
    folder: Path,
    *,
    devices: Sequence[str],
    kept_rows: Rows,
    progress: Callable[[], None] = lambda: None,
) -> Hashes:
    """Write the shards into `folder`; return the hashes of what was read.

    Args:
        plan: with its final coefficients.
        shards: what to write.
        folder: where.
        devices: torch's names; layers are spread over them from the bottom up.
        kept_rows: which rows of an adapter's ΔW stay.
        progress: called whenever a tensor is written.

    Raises:
        AdapterswapError: NaN or infinity in a source, overflow of a result, a source that changed.
        OSError: a file cannot be written.
    """
    hashes = Hashes()
    with ExitStack() as stack:
        files = stack.enter_context(open_files(_sources(plan)))
        works: list[list[Work]] = [[] for _ in devices]
        for shard in shards:
            output = stack.enter_context((folder / shard.name).open("xb", buffering=0))
            output.write(shard.header)
            output.truncate(shard.size)
            for key in (key for key in plan.parameters if key in shard.places):
                parameter = plan.parameters[key]
                share = (parameter.layer or 0) * len(devices) // plan.num_layers
                works[share].append(Work(parameter, shard.places[key], output.fileno()))

        if any(work.copied is None and work.parameter.is_linear for own in works for work in own):
            stack.enter_context(spared_cores(2))  # for reading with its hashes, and for writing

        def run(device: str, own: Sequence[Work]) -> None:
            blocks = ahead(read_blocks(own, files, hashes), _READ_AHEAD)
            results = ahead(compute(blocks, device, kept_rows, plan.composition.seed), _COMPUTED_AHEAD)
            with closing(results):
                for done in results:
                    write_at(done.work.output, done.data, done.offset)
                    if done.last:
                        progress()

        if len(devices) == 1:  # in this thread, which the user can interrupt
            run(devices[0], works[0])
        else:
            with ThreadPoolExecutor(len(devices)) as pool:
                list(pool.map(run, devices, works))
    return hashes


def _sources(plan: ModelPlan) -> list[TensorFile]:
    """The files that hold what enters."""
    used: set[Path] = set()
    for parameter in plan:
        copied = parameter.copied
        stored: list[Stored] = [copied] if copied else [term.stored for term in parameter.whole]
        if parameter.base is not None and copied is None and parameter.needs_base:
            stored.append(parameter.base)
        used |= {found.path for found in stored} | {term.path for term in parameter.low_rank}
    checkpoints = [expert for expert in plan.experts.values() if isinstance(expert, Checkpoint)]
    checkpoints += [plan.base] if plan.base else []
    known = [shard for checkpoint in checkpoints for shard in checkpoint.shards]
    known += [adapter.file for adapter in plan.adapters.values()]
    return [file for file in known if file.path in used]
