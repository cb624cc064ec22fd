"""Execute a plan of full weights: several threads read, compute and write one tensor after another into shards.

By default the skeleton's shards and their names are kept; another size can be requested in Hugging Face's notation. One
thread can read and hash while another computes, and memory holds one block per thread.
"""

from __future__ import annotations

import importlib
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from adapterswap.core.model.checkpoints import MODEL_INDEX
from adapterswap.core.model.opened_base import choose_device
from adapterswap.core.model.sources import MODEL_WEIGHTS
from adapterswap.core.planning.plan import Plan
from adapterswap.core.writing.blocks import Entered, ResultTensor, read_blocks
from adapterswap.core.writing.computing import compute, needs_torch
from adapterswap.core.writing.outputs import cores, header_bytes, torch_threads
from adapterswap.core.writing.resolution import KeptRows
from adapterswap.kit.errors import ArgumentError, check_type
from adapterswap.kit.files.numbers import Dtype, write_at
from adapterswap.kit.files.tensorfile import Tensor, TensorFile, open_files
from adapterswap.kit.files.text import read_json

_Item = TypeVar("_Item")

Stopped = Callable[[], bool]


def work_off(items: Iterable[_Item], do: Callable[[_Item, Stopped], None], workers: int) -> None:
    """Call `do` for every item, in up to `workers` threads. Items are started in order.

    Args:
        items: the items, independent of each other.
        do: called with an item and a function that returns whether to stop. Its errors are raised here.
        workers: the number of threads, one or more.
    """
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            do(item, stopped.is_set)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for finished in as_completed([pool.submit(run) for _ in range(workers)]):
                finished.result()
        finally:
            stopped.set()  # the other threads stop at their next block


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ModelForm:
    """How full weights are written.

    Attributes:
        max_shard_size: such as `2GB`; None keeps the skeleton's shards.
        dtype: float32, float16 or bfloat16 for all floating point tensors; None keeps each tensor's dtype.
        dequantize: dequantize a quantized base first; None means False.
    """

    max_shard_size: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    dequantize: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in Dtype.NAMES:
            remedy = f"Pass {', '.join(Dtype.NAMES)}"
            raise ArgumentError(f"The dtype {self.dtype!r} is unknown", remedy, parameter="dtype")
        check_type(self.max_shard_size, (str, type(None)), "max_shard_size", "Write for instance 2GB, 500MB or 4GiB")
        _ = self.shard_bytes

    @property
    def shard_bytes(self) -> int | None:
        """`max_shard_size` in bytes; raises an `ArgumentError` if it is not a size."""
        if self.max_shard_size is None:
            return None
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,3})?)\s*([A-Za-z]*)\s*", self.max_shard_size)
        if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
            raise ArgumentError(
                f"The shard size {self.max_shard_size!r} is not a size",
                "Write for instance 2GB, 500MB or 4GiB",
                parameter="max_shard_size",
            )
        return int(float(match[1]) * _UNITS[match[2].upper()])

    def dtype_of(self, stored: str) -> str:
        """The dtype in which a tensor is written that is stored as `stored`."""
        if self.dtype is None or stored not in Dtype.FLOATS:
            return stored
        return Dtype.NAMES[self.dtype]


class OutputShard(NamedTuple):
    """A safetensors file to write: its name, its header's bytes, and the place of every tensor in it."""

    name: str
    header: bytes
    places: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return max((place.stop for place in self.places.values()), default=len(self.header))


def lay_out_model(plan: Plan, form: ModelForm) -> tuple[OutputShard, ...]:
    """The shards of a plan's result, in the order in which they are written."""
    dtypes = {slot.name: form.dtype_of(slot.dtype) for slot in plan}
    groups = _own_shards(plan) if form.shard_bytes is None else _sized(plan, dtypes, form.shard_bytes)

    shards = []
    for name, members in groups.items():
        header, places = header_bytes((key, dtypes[key], plan.slots[key].shape) for key in members)
        shards.append(OutputShard(name, header, places))
    return tuple(shards)


def index_of(plan: Plan, shards: tuple[OutputShard, ...], form: ModelForm) -> dict[str, Any] | None:
    """The content of model.safetensors.index.json; None if a single file needs no index."""
    skeleton = plan.base.skeleton
    assert skeleton is not None  # of full weights
    keeps_shards = form.shard_bytes is None and skeleton.shards[0].path.name != MODEL_WEIGHTS
    if len(shards) == 1 and not keeps_shards:
        return None

    # What the skeleton's index says besides stays if its shards do.
    metadata: dict[str, Any] = {}
    if keeps_shards:
        own_metadata = read_json(skeleton.source.folder / MODEL_INDEX).get("metadata")
        if isinstance(own_metadata, dict):
            metadata = own_metadata

    total = 0
    weight_map: dict[str, str] = {}
    for shard in shards:
        total += sum(place.nbytes for place in shard.places.values())
        weight_map |= dict.fromkeys(shard.places, shard.name)
    return {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _own_shards(plan: Plan) -> dict[str, list[str]]:
    """The names of tensors by the shards in which the skeleton has them."""
    groups: dict[str, list[str]] = {}
    skeleton = plan.base.skeleton
    assert skeleton is not None  # of full weights
    file_of = {name: slot.path.name for name, slot in skeleton.parameters.items()}
    last = next(iter(file_of.values()))
    for key in plan.slots:
        last = file_of.get(key, last)  # an untied head follows its embedding
        groups.setdefault(last, []).append(key)
    return groups


def _sized(plan: Plan, dtypes: Mapping[str, str], limit: int) -> dict[str, list[str]]:
    """Tensors in order, with a new shard whenever the next one does not fit; a larger tensor gets its own shard."""
    groups: list[list[str]] = [[]]
    size = 0
    for slot in plan:
        nbytes = Dtype.BYTES[dtypes[slot.name]] * prod(slot.shape)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(slot.name)
        size += nbytes

    if len(groups) == 1:
        return {MODEL_WEIGHTS: groups[0]}
    named = {}
    for number, group in enumerate(groups, 1):
        named[f"model-{number:05d}-of-{len(groups):05d}.safetensors"] = group
    return named


_WORKERS = 4  # more would only wait for the disk


def choose_devices(name: str) -> list[str]:
    """torch's names of the devices to compute on: one, or every visible GPU for CUDA without a number."""
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
    kept_rows: KeptRows,
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

        # What is copied byte for byte, and what is computed, each with its device
        copied: list[tuple[str, ResultTensor]] = []
        computed: list[tuple[str, ResultTensor]] = []
        for shard in shards:
            output = stack.enter_context((folder / shard.name).open("xb", buffering=0))
            output.write(shard.header)
            output.truncate(shard.size)
            for key, slot in plan.slots.items():
                if key not in shard.places:
                    continue
                device = devices[(slot.layer or 0) * len(devices) // plan.depth.of(None)]
                result = ResultTensor(slot, shard.places[key], output.fileno())
                if result.copied is not None:
                    copied.append((device, result))
                else:
                    computed.append((device, result))

        def carry_out(item: tuple[str, ResultTensor], stopped: Stopped) -> None:
            device, result = item
            for chunk in compute(read_blocks(result, files, entered), device, kept_rows, plan.composition.seed):
                if stopped():
                    return
                write_at(result.output, chunk.data, chunk.offset)
            progress()

        # Importing torch takes as long as copying a gigabyte, so do both at once.
        with_torch = False
        for device, result in computed:
            if any(needs_torch(result.slot, span, device) for span in result.slot.ranges):
                with_torch = True
                break
        if with_torch:
            threading.Thread(target=_import_torch, daemon=True).start()
        work_off(copied, carry_out, min(_WORKERS, cores()))

        workers = min(max(_WORKERS, 2 * len(devices)), cores())
        if any(result.slot.is_held_whole for _, result in computed):
            workers = 1  # whole tensors are in memory
        if with_torch:
            stack.enter_context(torch_threads(cores() // workers))
        work_off(computed, carry_out, workers)
    return entered


def _import_torch() -> None:
    """Import torch early. If it is missing, the thread that needs it says so."""
    with suppress(ImportError):
        importlib.import_module("torch")


def _sources(plan: Plan) -> list[TensorFile]:
    """The files with tensors that the result uses."""
    paths: set[Path] = set()
    for slot in plan:
        if slot.copied is not None:
            paths.add(slot.copied.path)
            continue
        for span in slot.ranges:
            paths.update(term.change.path for term in span.terms)
            paths.update(whole.path for whole in slot.base_of(span))

    candidates: list[TensorFile] = []
    for checkpoint in plan.checkpoints.values():
        candidates += checkpoint.shards
    if plan.base.weights is not None:
        candidates += plan.base.weights.shards
    candidates += [adapter.file for adapter in plan.adapters.values()]
    return [file for file in candidates if file.path in paths]
