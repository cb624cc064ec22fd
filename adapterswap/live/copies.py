"""Copies of the base's weights that an expert carries: compared with the running base's, never loaded over them.

PEFT would overwrite the base's weights for every expert, in the copies' dtype, and untie weights that are tied to them;
it would also hold the expert's factors in that dtype. Knows PEFT's folders and layers, but not compositions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterswap.changes.copies import Weight, is_one_weight, stored_weight
from adapterswap.errors import ExpertError, Problems, UnsupportedError
from adapterswap.experts.adapter_keys import copies_in
from adapterswap.experts.adapters import CONFIG, WEIGHTS, Adapter
from adapterswap.files.dtypes import FLOAT_NAMES, FLOATS
from adapterswap.files.folders import atomic_folder
from adapterswap.files.numbers import open_files
from adapterswap.files.scratch import scratch_folder
from adapterswap.files.tensorfile import TensorFile

__all__ = ["check_copies", "folder_without_copies", "without_copies"]


def check_copies(
    file: TensorFile, owner: str, modules: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> None:
    """Compare every copy with the model's own weight, up to the rounding of the narrower of their dtypes.

    Args:
        file: the header of the safetensors file of the expert, or of any kind of adapter that PEFT loads.
        owner: what to call the expert in messages, such as `the expert 'math'`.
        modules: the base's modules by full name, possibly inside LoRA layers of other experts.
        names: the model's name of each module that has another name in the file, by the name in the file.

    Raises:
        ExpertError: a copy differs from the model's own weight, or has an unknown dtype.
        UnsupportedError: adapters are merged, or the model's own weight cannot be compared with the copy.
    """
    copies = {(names or {}).get(module, module): copy for module, copy in copies_in(file).items()}
    carried = {module: copy for module, copy in copies.items() if module in modules}
    if not carried:
        return
    if any(getattr(modules[module], "merged", False) for module in carried):
        raise UnsupportedError("adapters are merged into the model's weights", "Call unmerge_adapter() first")
    problems = Problems(ExpertError)
    with open_files([file]) as files:
        for module, copy in carried.items():
            model_weight = _own_weight(modules[module])
            conflict = (
                f"{owner} carries a copy of {module}.weight ({copy.name}), with which PEFT would overwrite the model's "
                "own"
            )
            if copy.dtype not in FLOATS:
                problems.add(
                    f"{conflict}, and its dtype is {copy.dtype}",
                    f"Save it as one of {', '.join(FLOATS)}",
                    parameter="expert",
                )
            elif model_weight is None:
                problems.add(
                    f"{conflict}. The two cannot be compared, because the model's is quantised, sharded or offloaded",
                    "Load the model with that weight whole, in float32, bfloat16 or float16",
                    parameter="model",
                    kind=UnsupportedError,
                )
            elif not is_one_weight(stored_weight(copy, files[file.path]), model_weight):
                problems.add(
                    f"{conflict}. The two differ, so the expert was trained on another base",
                    "Load it into the base that it was trained on, in the dtype in which that base is stored",
                    parameter="expert",
                )
    problems.raise_if_any()


def _own_weight(module: Any) -> Weight | None:
    """The weight of a module, or of the one inside a LoRA layer; None unless it is a plain floating-point tensor."""
    import torch

    weight: Any = getattr(module.get_base_layer() if hasattr(module, "get_base_layer") else module, "weight", None)
    names = {getattr(torch, name): stored for name, stored in FLOAT_NAMES.items()} | {torch.float64: "F32"}
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta or weight.dtype not in names:
        return None
    flat = weight.detach().reshape(-1)
    return Weight(names[weight.dtype], tuple(weight.shape), lambda start, stop: flat[start:stop].float().cpu().numpy())


def without_copies(adapter: Adapter) -> Adapter:
    """The adapter without the copies of the base's weights that it carries."""
    return replace(adapter, modules={name: replace(module, base=None) for name, module in adapter.modules.items()})


@contextmanager
def folder_without_copies(file: TensorFile) -> Iterator[Path]:
    """A folder with an adapter's config and its tensors without the copies: its own folder if it carries none.

    Raises:
        OutputError: there is no room for a temporary folder.
    """
    source = file.path.parent
    copies = {copy.name for copy in copies_in(file).values()}
    if not copies:
        yield source
        return
    from safetensors import safe_open
    from safetensors.torch import save

    with scratch_folder("live") as place:
        bare = place / "bare"
        with atomic_folder(bare) as folder, safe_open(file.path, "pt") as tensors:
            others = {key: tensors.get_tensor(key) for key in file.tensors if key not in copies}
            (folder / WEIGHTS).write_bytes(save(others))
            shutil.copyfile(source / CONFIG, folder / CONFIG)
        yield bare
