"""llama.cpp in this process (the package xllamacpp): greedy tokens and all log-probabilities of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xllamacpp

from engines.exporting.bases import CONTEXT, VOCABULARY

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: Numbers  # steps × vocabulary


class Engine:
    """A base in GGUF with adapters; an adapter is a path, or a path and its scale."""

    def __init__(self, base: Path, adapters: Sequence[Path | tuple[Path, float]] = ()) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(base)
        params.n_ctx = CONTEXT
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        params.warmup = False
        params.fit_params = False
        params.verbosity = 0
        # The default cache has 16 bits and hides errors below 5e-3.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        loaded = []
        for adapter in adapters:
            path, scale = adapter if isinstance(adapter, tuple) else (adapter, 1.0)
            loaded.append(xllamacpp.CommonAdapterLoraInfo(str(path), scale))
        params.lora_adapters = loaded
        self._server = xllamacpp.Server(params)

    def answer(self, prompt: Sequence[int], steps: int = 6, scales: Mapping[int, float] | None = None) -> Answer:
        request: dict[str, Any] = {
            "prompt": list(prompt), "n_predict": steps, "temperature": 0, "n_probs": VOCABULARY,
            "cache_prompt": False,
        }  # fmt: skip
        if scales is not None:
            request["lora"] = [{"id": place, "scale": scale} for place, scale in scales.items()]
        result = self._server.handle_completions(request)
        taken = result["choices"][0]["logprobs"]["content"]
        rows = np.full((len(taken), VOCABULARY), np.nan)
        for row, step in zip(rows, taken, strict=True):
            for one in step["top_logprobs"]:
                row[one["id"]] = one["logprob"]
        return Answer([step["id"] for step in taken], rows)


def reference(model: torch.nn.Module, prompt: Sequence[int], steps: int = 6) -> Answer:
    """The same answer from transformers and PEFT."""
    tokens: list[int] = []
    rows = []
    with torch.no_grad():
        for _ in range(steps):
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            rows.append(torch.log_softmax(logits.double(), -1).numpy())
            tokens.append(int(logits.argmax()))
    return Answer(tokens, np.stack(rows))
