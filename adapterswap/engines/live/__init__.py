"""Compose at inference on a loaded PeftModel, without copying tensors: one composition, or one for each row of a batch.

Begin with `LiveComposer`. torch, transformers and PEFT are imported only when it is used.
"""

from adapterswap.engines.live.composer import LiveComposer
from adapterswap.engines.live.loader import load_expert, load_experts
from adapterswap.engines.live.peft_adapter import find_adapter, with_adapter
from adapterswap.engines.live.reading import Reading
from adapterswap.engines.live.streaming import Answers, stream
from adapterswap.engines.live.switch import why_not_live

__all__ = [
    "Answers",
    "LiveComposer",
    "Reading",
    "find_adapter",
    "load_expert",
    "load_experts",
    "stream",
    "why_not_live",
    "with_adapter",
]
