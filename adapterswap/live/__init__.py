"""Compose at inference, on a PeftModel that is loaded: no copy of a tensor, one composition or one for every row.

`LiveComposer` is the way in. Imports torch, transformers and PEFT only when it is used.
"""

from adapterswap.live.composer import LiveComposer
from adapterswap.live.loading import load_expert, load_experts
from adapterswap.live.streaming import Answers, stream
from adapterswap.live.switching import why_not_live

__all__ = ["Answers", "LiveComposer", "load_expert", "load_experts", "stream", "why_not_live"]
