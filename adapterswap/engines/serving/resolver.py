"""vLLM's LoRA resolver: for a name that vLLM does not know yet, it returns the composition's folder.

Imports vLLM.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from adapterswap.engines.serving.composer import NamedComposer
from adapterswap.engines.serving.names import UnknownNameError
from adapterswap.kit.errors import AdapterswapError

_log = init_logger("vllm.adapterswap")


class CompositionResolver(LoRAResolver):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Composes on first use.

    Args:
        start: creates the composer from the value of vLLM's --model; called once, at the first request.
    """

    def __init__(self, start: Callable[[str], NamedComposer]) -> None:
        self._start = start
        self._composer: NamedComposer | None = None
        self._lock = threading.Lock()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest:
        """Called by vLLM, which holds a lock per name and overwrites the id."""
        try:
            folder = await asyncio.to_thread(self._compose, base_model_name, lora_name)
        except UnknownNameError as error:
            raise VLLMNotFoundError(str(error)) from None
        except AdapterswapError as error:
            _log.warning("%s", error.__cause__ or error)  # the cause has the paths, which clients do not see
            raise VLLMValidationError(str(error), parameter="model") from None
        return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))

    def _compose(self, base_model: str, name: str) -> Path:
        """The folder of a composition, which is made if it is new."""
        with self._lock:
            self._composer = self._composer or self._start(base_model)
        times: list[float] = []
        folder = self._composer.folder(name, times.append)
        how = f"composed in {1000 * times[0]:.0f} ms" if times else "composed before"
        _log.info("%s: %s (%s)", name, how, folder.name)
        return folder
