"""The layout of variants of LoRA: what DoRA and biases of B add to A and B, and to the config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from adapterswap.core.changes.kinds import Storage
from adapterswap.core.experts.keys import ModuleKeys
from adapterswap.core.experts.parts import LoraModule
from adapterswap.core.planning.slots import Slot
from adapterswap.core.writing.outputs import OutputTensor, Piece, common_dtype
from adapterswap.core.writing.peft_config import Shape


def variant_settings(modules: Iterable[Slot]) -> dict[str, Any]:
    """The settings for a variant of LoRA (DoRA, biases of B), if a changed module uses one."""
    used: set[str] = set()
    for module in modules:
        if module.storage is not Storage.VARIANT:
            continue
        for term in module.opaque:
            used.update(key for key, value in term.change.part.settings.items() if value)
    return {key: True for key in ("use_dora", "lora_bias") if key in used}


def variant_tensors(module: Slot, shape: Shape, variant: Mapping[str, Any], like: LoraModule) -> Iterator[OutputTensor]:
    """The tensors of a variant of LoRA other than A and B.

    DoRA's magnitudes are copied: `check_form` has checked that every module has them. PEFT multiplies a bias of B by
    the module's scale, as it does B, so a blend's bias is Σ c_i s_i bias_i / s'. Plain LoRA's missing bias counts as 0.
    `like` has the shape of the module's LoRA.
    """
    for part, key in (("lora_magnitude_vector", "use_dora"), ("lora_B.bias", "lora_bias")):
        if not variant.get(key):
            continue

        pieces = []
        for term in module.opaque:
            tensors = term.change.part.tensors
            if part not in tensors:
                continue
            factor = term.coefficient * term.lora.scale / shape.scale
            if key == "use_dora" or math.isclose(factor, 1, rel_tol=1e-12):
                factor = 1.0
            pieces.append(Piece(term.expert, term.change.path, tensors[part], factor))

        size: tuple[int, ...] = (like.out_features,)
        dtype = like.dtype
        if pieces:
            size, dtype = pieces[0].tensor.shape, common_dtype(pieces)
        yield OutputTensor(ModuleKeys(module.name).part(part), dtype, size, None, tuple(pieces))
