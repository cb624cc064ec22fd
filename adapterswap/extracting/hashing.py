"""The SHA-256 of checkpoints' shards, computed beside other work. Knows files; nothing of what is done meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.identity import sha256_of

__all__ = ["hashed"]


@contextmanager
def hashed(checkpoints: Sequence[Checkpoint]) -> Iterator[Callable[[], list[dict[str, str]]]]:
    """Hash the shards beside the work; what is yielded waits for each checkpoint's SHA-256 by file."""
    with ThreadPoolExecutor(1) as worker:
        waiting = [{shard.path.name: worker.submit(sha256_of, shard.path) for shard in c.shards} for c in checkpoints]
        try:
            yield lambda: [{name: future.result() for name, future in files.items()} for files in waiting]
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
