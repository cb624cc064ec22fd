"""What PEFT makes of an adapter: it is asked, by loading factors into the base's model, built without its weights.

A list of names and types would be out of date with the next version of PEFT. Takes about a second for a model of 8B,
beside the import of PEFT. Knows modules; reads no tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PeftTrial", "try_in_peft"]


class PeftTrial(NamedTuple):
    """How PEFT loaded an adapter.

    Attributes:
        adapted: the modules that it wrapped.
        missing: the keys of factors that it has and the adapter does not.
        dropped: the adapter's keys that it has no place for.
    """

    adapted: frozenset[str]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]


def try_in_peft(model: Any, config: Any, tensors: Mapping[str, Any]) -> PeftTrial | None:
    """Load an adapter into a model on torch's meta device; None if PEFT refuses.

    Args:
        model: without weights; it is changed.
        config: PEFT's.
        tensors: the adapter's, on the meta device, by PEFT's keys.
    """
    import torch
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted: Any = get_peft_model(model, config)
            outcome = set_peft_model_state_dict(adapted, dict(tensors), low_cpu_mem_usage=True)
        except Exception:  # PEFT has no class of error for what it refuses
            return None
    modules = adapted.base_model.model.named_modules()
    return PeftTrial(
        frozenset(name for name, module in modules if isinstance(module, BaseTunerLayer)),
        tuple(key for key in outcome.missing_keys if ".lora_" in key),
        tuple(outcome.unexpected_keys),
    )
