"""Turn a device out of memory or a full disk into an error that says what to do. Knows nothing of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapterswap.errors import OutputError, RunError

__all__ = ["explained"]


@contextmanager
def explained(what: str, where: Path) -> Iterator[None]:
    """Raise an error with a remedy if the device runs out of memory or a file cannot be written.

    Args:
        what: what the block writes, for the message.
        where: the folder that it writes to.

    Raises:
        RunError: the device ran out of memory.
        OutputError: a file cannot be written.
    """
    import torch
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of memory on the device: {str(error).partition('.')[0]}",
            "Lower training.batch_size and raise gradient_accumulation, or set gradient_checkpointing: true",
            parameter="training.batch_size",
        ) from None
    except OSError as error:
        raise _unwritten(what, where, error.strerror or str(error)) from None
    except (SafetensorError, RuntimeError) as error:
        # A full disk, as safetensors and torch's zip writer report it.
        if not any(sign in str(error) for sign in ("I/O error", "PytorchStreamWriter", "unexpected pos")):
            raise
        raise _unwritten(what, where, str(error).partition("\n")[0]) from None


def _unwritten(output: str, folder: Path, reason: str) -> OutputError:
    return OutputError(
        f"{output} cannot be written to {folder}: {reason}",
        "Free some space, or choose another `out_path`; earlier checkpoints are kept for `resume=True`",
        parameter="out_path",
    )
