"""Find out how PEFT loads an adapter, by loading it into an empty model of the base.

A list of names and types would be out of date with the next version of PEFT. A trial takes about a second for an 8B
model, besides the import of PEFT, which imports torch: it is for configs that cannot be read without the base.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adapterswap.core.experts.keys import canonical_key, misnamed
from adapterswap.core.model.base import empty_model
from adapterswap.core.model.sources import Reference
from adapterswap.kit.errors import ExpertError, UnsupportedError, and_more, reason_of
from adapterswap.kit.files.tensorfile import TensorFile


class PeftTrial(NamedTuple):
    """How PEFT loaded an adapter.

    Attributes:
        adapted: the modules that PEFT wrapped.
        parameters: those with LoRA on a parameter → the parameter's name. PEFT nests one in another, as `base_layer`.
        missing: the keys of factors that PEFT created but the adapter lacks.
        dropped: the adapter's keys that PEFT did not load.
    """

    adapted: frozenset[str]
    parameters: Mapping[str, str]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]


def try_in_peft(model: Any, config: Any, tensors: Mapping[str, Any]) -> PeftTrial | None:
    """Load an adapter into a model on torch's meta device; None if PEFT refuses. The arguments are those of `_load`."""
    try:
        return _load(model, config, tensors)
    except Exception:  # PEFT has no error class for adapters that it refuses
        return None


def load_into_base(folder: Path, base: str, task_type: str | None, file: TensorFile, names: Iterable[str]) -> PeftTrial:
    """How PEFT loads an adapter into its base.

    Args:
        folder: the adapter's folder, which messages leave to the caller.
        base: the base's folder or Hub id; only its config is read.
        task_type: the adapter's.
        file: the header of its tensors.
        names: its modules, which the base must have.

    Raises:
        BaseModelError, NotFoundError: the base's config cannot be read.
        ExpertError: PEFT refuses the adapter.
        UnsupportedError: the base has not all of the modules.
    """
    import torch
    from peft import PeftConfig

    model = empty_model(Reference(base).config()[0].folder, base, task_type=task_type)
    known_names = {name for name, _ in model.named_modules()}
    bare_names = {re.sub(r"(\.base_layer)+$", "", name) for name in names}
    unknown = sorted(bare_names - known_names)
    if unknown:
        raise UnsupportedError(
            f"{base} has no module {and_more(unknown)} in the installed transformers",
            misnamed(unknown[0]) or "Save the adapter again with this version of transformers and PEFT",
        )

    tensors = {canonical_key(key): torch.empty(tensor.shape, device="meta") for key, tensor in file.tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(folder))
        return _load(model, config, tensors)
    except Exception as error:  # as in `try_in_peft`
        raise ExpertError(
            f"PEFT cannot load it into {base}: {reason_of(error)}",
            "Correct adapter_config.json, or save the adapter again with PEFT",
        ) from None


def _load(model: Any, config: Any, tensors: Mapping[str, Any]) -> PeftTrial:
    """Load an adapter into a model on torch's meta device, or raise what PEFT raises."""
    import torch
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = get_peft_model(model, config)
        outcome = set_peft_model_state_dict(adapted, dict(tensors), low_cpu_mem_usage=True)

    adapted_names: set[str] = set()
    parameters: dict[str, str] = {}
    for name, module in adapted.base_model.model.named_modules():
        if isinstance(module, BaseTunerLayer):
            adapted_names.add(name)
        if isinstance(module, ParamWrapper):
            parameters[name] = module.parameter_name

    missing = tuple(key for key in outcome.missing_keys if ".lora_" in key)
    return PeftTrial(frozenset(adapted_names), parameters, missing, tuple(outcome.unexpected_keys))
