"""LoRA on the fused experts of a mixture (`target_parameters`) as PEFT before 0.19 stored it, in today's layout.

PEFT before 0.19 always took the first axis of an expert's matrix for its inputs: A is (experts·rank ×
first) and B (second × rank·experts). Since then A belongs to the inputs, which in most models are the second axis. The
numbers are the same, so A and B change places, transposed for each expert. Knows PEFT's layouts; computes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from adapterswap.errors import BaseModelError, Problems, UnsupportedError
from adapterswap.experts.adapters import CONFIG, WEIGHTS, LoraModule, read_adapter
from adapterswap.experts.checkpoints import Checkpoint
from adapterswap.experts.orientation import Orientation
from adapterswap.experts.sources import Source
from adapterswap.files.smallfiles import read_json, shown, write_json

__all__ = ["is_older", "write_current"]

_CURRENT = "0.19.0"  # the first version of PEFT with today's layout


def is_older(folder: Path) -> bool:
    """Whether the adapter in a folder has LoRA on parameters, and a config of PEFT before 0.19 or without a version."""
    config = read_json(folder / CONFIG)
    if not config.get("target_parameters") or config.get("peft_type") != "LORA":
        return False
    match = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))
    return match is None or (int(match[1]), int(match[2])) < (0, 19)


def write_current(folder: Path, out: Path, base: Checkpoint) -> bool:
    """Write the adapter in `folder` with today's layout into the empty folder `out`.

    Args:
        folder: the adapter's; see `is_older`.
        out: gets its weights and its config.
        base: its matrices show which axis belongs to the inputs.

    Returns:
        Whether A and B changed places.

    Raises:
        BaseModelError: the base lacks a parameter, or has it in another shape.
        UnsupportedError: all matrices are square, so the axis of A cannot be determined.
        ExpertError, UnsupportedError: see `read_adapter`.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    write_json(out / CONFIG, {**read_json(folder / CONFIG), "peft_version": _CURRENT})
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors, out / WEIGHTS)
    adapter = read_adapter(Source(out, str(folder)))
    fused = [module for module in adapter.modules.values() if module.experts > 1]
    if not _is_swapped(fused, adapter.container, base):
        return False
    for module in fused:
        a, b = tensors[module.a.name], tensors[module.b.name]
        count, rank = module.experts, module.rank
        # A of expert e is B's columns e, e + experts, … of the rank axis, transposed; and the other way round.
        first = b.reshape(-1, rank, count).permute(2, 1, 0).reshape(count * rank, -1)
        second = a.reshape(count, rank, -1).permute(2, 1, 0).reshape(-1, rank * count)
        tensors[module.a.name], tensors[module.b.name] = first.contiguous(), second.contiguous()
    save_file(tensors, out / WEIGHTS)
    return True


def _is_swapped(fused: list[LoraModule], container: str | None, base: Checkpoint) -> bool:
    """Whether A belongs to the outputs. A model's matrices have one layout, so one that is not square decides."""
    orientation = Orientation(base)
    problems = Problems(BaseModelError)
    layouts: dict[bool, str] = {}
    for module in fused:
        parameter = orientation.fused(module.name, container)
        fits = []
        if parameter is not None and parameter.shape[0] == module.experts:
            out, into = reversed(parameter.shape[1:]) if parameter.transposed else parameter.shape[1:]
            fits = [(module.out_features, module.in_features) == (out, into)]
            fits += [(module.out_features, module.in_features) == (into, out) and not parameter.transposed]
        if not any(fits):
            stored = f"has it as {shown(parameter.shape)}" if parameter is not None else "has no such parameter"
            problems.add(
                f"{module.name} has factors of {module.experts} matrices, {module.in_features} and "
                f"{module.out_features} long, and {base.name} {stored}",
                "Give the base that the adapter was trained on with `base_model`",
                parameter="base_model",
            )
        elif not all(fits):
            layouts.setdefault(fits[1], module.name)
    problems.raise_if_any()
    if len(layouts) != 1 and fused:
        which = f"{layouts[True]} and {layouts[False]} differ" if layouts else f"{fused[0].name} is square"
        raise UnsupportedError(
            f"PEFT before 0.19 stored A and B of fused experts the other way round for some models, and {which}, so "
            "the shapes do not say whether it did here",
            "Merge the adapter into its base with the version of PEFT that made it",
            parameter="adapter",
        )
    return True in layouts
