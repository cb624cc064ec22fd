"""Find out how PEFT loads an adapter, by loading its factors into an empty model of the base.

A list of names and types would be out of date with the next version of PEFT. A trial takes about a second for an 8B
model, besides the import of PEFT. Knows modules; reads no tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PeftTrial", "try_in_peft"]


class PeftTrial(NamedTuple):
    """How PEFT loaded an adapter.

    Attributes:
        adapted: the modules that PEFT wrapped.
        missing: the keys of factors that PEFT created but the adapter lacks.
        dropped: the adapter's keys that PEFT did not load.
    """

    adapted: frozenset[str]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]


def try_in_peft(model: Any, config: Any, tensors: Mapping[str, Any]) -> PeftTrial | None:
    """Load an adapter into a model on torch's meta device; None if PEFT refuses.

    Args:
        model: a model without weights; PEFT changes it.
        config: the adapter's PEFT config.
        tensors: the adapter's tensors on the meta device, by PEFT's keys.
    """
    import torch
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted: Any = get_peft_model(model, config)
            outcome = set_peft_model_state_dict(adapted, dict(tensors), low_cpu_mem_usage=True)
        except Exception:  # PEFT has no error class for adapters that it refuses
            return None
    modules = adapted.base_model.model.named_modules()
    return PeftTrial(
        frozenset(name for name, module in modules if isinstance(module, BaseTunerLayer)),
        tuple(key for key in outcome.missing_keys if ".lora_" in key),
        tuple(outcome.unexpected_keys),
    )
