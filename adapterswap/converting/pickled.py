"""Turn an adapter's pickled weights into safetensors, with torch's restricted unpickler, which runs no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterswap.errors import ExpertError, reason_of
from adapterswap.experts.adapters import PICKLED, WEIGHTS

__all__ = ["PICKLED", "as_safetensors"]


def as_safetensors(pickled: Path, folder: Path) -> None:
    """Write the tensors in the file `pickled` to the folder's `adapter_model.safetensors`.

    Only `torch.load(weights_only=True)` reads the file: it builds only tensors and plain containers.

    Raises:
        ExpertError: the file is damaged, or holds anything but named tensors.
    """
    import torch
    from safetensors.torch import save_file

    remedy = "Save the adapter again with PEFT, which writes safetensors"
    try:
        content: Any = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no single class for these errors
        raise ExpertError(f"{pickled} cannot be read without running code: {reason_of(error)}", remedy) from None
    if not isinstance(content, dict):
        raise ExpertError(f"{pickled} holds a {type(content).__name__} instead of named tensors", remedy)
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ExpertError(f"{pickled}: {key!r} is not a dense tensor with a name", remedy)
    tensors = {key: content[key].detach().clone().contiguous() for key in sorted(content)}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
