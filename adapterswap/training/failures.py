"""What machines run out of while training, as errors that name the mend. Knows nothing of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterswap.errors import AdapterswapError

__all__ = ["told"]


@contextmanager
def told(checkpoints: Path) -> Iterator[None]:
    """Tell of a device out of memory, and of checkpoints that cannot be written.

    Raises:
        AdapterswapError: for these.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise AdapterswapError(
            f"the device ran out of memory: {str(error).partition('.')[0]}",
            "Lower training.batch_size and raise gradient_accumulation, or set gradient_checkpointing: true",
        ) from None
    except OSError as error:
        raise _unwritten(checkpoints, error.strerror or str(error)) from None
    except RuntimeError as error:
        # A full disk, as torch's zip writer and safetensors tell it.
        if not any(sign in str(error) for sign in ("PytorchStreamWriter", "unexpected pos", "No space left")):
            raise
        raise _unwritten(checkpoints, str(error).partition("\n")[0]) from None


def _unwritten(checkpoints: Path, reason: str) -> AdapterswapError:
    return AdapterswapError(
        f"a checkpoint cannot be written to {checkpoints}: {reason}",
        "Free some space, or choose another --out-path; earlier checkpoints are kept for --resume",
    )
