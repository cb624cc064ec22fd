"""What machines run out of while training, as errors that name the mend. Knows nothing of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterswap.errors import AdapterswapError

__all__ = ["told"]


@contextmanager
def told(what: str, where: Path) -> Iterator[None]:
    """Tell of a device out of memory, and of files that cannot be written.

    Args:
        what: is written in the block.
        where: to which folder.

    Raises:
        AdapterswapError: for these.
    """
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise AdapterswapError(
            f"the device ran out of memory: {str(error).partition('.')[0]}",
            "Lower training.batch_size and raise gradient_accumulation, or set gradient_checkpointing: true",
        ) from None
    except OSError as error:
        raise _unwritten(what, where, error.strerror or str(error)) from None
    except (SafetensorError, RuntimeError) as error:
        # A full disk, as safetensors and torch's zip writer tell it.
        if not any(sign in str(error) for sign in ("I/O error", "PytorchStreamWriter", "unexpected pos")):
            raise
        raise _unwritten(what, where, str(error).partition("\n")[0]) from None


def _unwritten(what: str, where: Path, reason: str) -> AdapterswapError:
    return AdapterswapError(
        f"{what} cannot be written to {where}: {reason}",
        "Free some space, or choose another `out_path`; earlier checkpoints are kept for `resume=True`",
    )
