"""vLLM as an engine of evaluations: one base in this process, and compositions that come and go as LoRA adapters.

* vLLM keys its caches of adapters by number, its prefix cache by name and path, and compares adapters by name. None of
  the three is ever used again here.
* On the CPU a row without an adapter may be answered by the last adapter in its batch, so the base has an adapter of
  zeros, whose answers are exactly the base's.
* Full weights take the place of the base's in the running engine, and the base's return when another subject is put.
* A step that raises leaves its requests queued. They are withdrawn and asked once more, then asked of a new engine.

Imports vLLM only when an engine is opened.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from adapterswap.core import Adapter, Base, OpenedBase, Plan
from adapterswap.core.model.sources import CONFIG, WEIGHTS
from adapterswap.engines.serving.composer import check_fits
from adapterswap.engines.serving.vllm import RANKS, Launch
from adapterswap.experiments.evaluation.engine import Engine, FullWeights, Loadable, Output
from adapterswap.experiments.evaluation.requests import Answer, Generation, Likelihood, Request
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, RunError, UnsupportedError, reason_of
from adapterswap.kit.files.folders import scratch_folder

_RESERVED = {"model", "tokenizer", "dtype", "seed", "skip_tokenizer_init", "generation_config"}
_RESERVED |= {"enable_lora", "lora_target_modules"}  # vLLM leaves out the modules that are not listed, without a word
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}  # that mean the same in both engines
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # errors in a step arrive here
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_TOP_K = 50  # transformers' default for sampling
_MAX_LORAS = 8  # adapters in one batch
_CACHE_SIZES = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
_FAILURES = 3  # steps that may raise while one composition is evaluated


@dataclass(frozen=True)
class Needs:
    """What an engine must be able to hold; the settings of vLLM that follow can be overridden.

    Attributes:
        ranks: the highest rank that each adapter may have.
        modules: the last parts of the names of all adapted modules; none if no composition is an adapter.
        zeros: the tensors of the base's adapter of zeros with their shapes: one adapted module of each kind.
        width: the sum of inputs and outputs of all modules that may be adapted.
        longest: tokens of the longest request with its answer.
        likelihoods: whether log-likelihoods are requested.
        in_flight: compositions at once.
    """

    ranks: Mapping[str, int]
    modules: tuple[str, ...]
    zeros: Mapping[str, tuple[int, int]]
    width: int
    longest: int
    likelihoods: bool
    in_flight: int = 1

    def settings(self) -> dict[str, Any]:
        """vLLM's settings."""
        chosen: dict[str, Any] = {"max_model_len": self.longest}
        if self.modules:
            chosen |= {
                "enable_lora": True,
                "max_lora_rank": next(rank for rank in RANKS if rank >= max(self.ranks.values())),
                "max_loras": min(self.in_flight, _MAX_LORAS),
                "max_cpu_loras": self.in_flight + 1,
                "lora_target_modules": list(self.modules),
            }
        return chosen

    def slots(self) -> int:
        """The numbers that vLLM reserves for adapters on the accelerator: each slot has the highest rank everywhere."""
        settings = self.settings()
        return self.width * int(settings.get("max_lora_rank", 0)) * int(settings.get("max_loras", 0))

    @staticmethod
    def of(
        adapters: Mapping[str, tuple[Plan, Output]],
        requests: Iterable[Request],
        in_flight: int,
        base: OpenedBase,
    ) -> Needs:
        """What vLLM must hold for compositions of a base's experts as adapters."""
        # The highest rank that each adapter may have.
        ranks: dict[str, int] = {}
        for name, (plan, output) in adapters.items():
            ranks[name] = min(plan.largest_rank, output.get("max_rank") or plan.largest_rank)
        highest = max(ranks, key=lambda name: ranks[name], default=None)
        if highest is not None and ranks[highest] > RANKS[-1]:
            raise UnsupportedError(
                f"{highest} has rank {ranks[highest]}, and vLLM supports at most {RANKS[-1]}",
                "Reduce it with `max_rank`, or use `engine=transformers`",
                parameter="engine",
            )

        # vLLM adapts modules by the last parts of their names, so all of the base's that end in one of them count.
        adapted = set()
        for plan, _ in adapters.values():
            for module in plan.modules.values():
                if module.terms:
                    adapted.add(module.name.rpartition(".")[2])
        width = 0
        for name, shape in _shapes_of(base).items():
            if name.rpartition(".")[2] in adapted:
                width += sum(map(int, shape.split()[0].split("×")))

        requests = tuple(requests)
        return Needs(
            ranks=ranks,
            modules=tuple(sorted(adapted)),
            zeros=_zeros(plan for plan, _ in adapters.values()),
            width=width,
            longest=longest_of(requests),
            likelihoods=any(isinstance(request, Likelihood) for request in requests),
            in_flight=in_flight,
        )


def longest_of(requests: Sequence[Request]) -> int:
    """Tokens of the longest request with its answer; of likelihoods vLLM decodes one more token."""
    lengths = []
    for request in requests:
        limit = request.limit if isinstance(request, Generation) else 1
        lengths.append(len(request.tokens) + limit)
    return max(lengths)


def _shapes_of(base: OpenedBase) -> dict[str, str]:
    """Each module of the base that LoRA can adapt, with its shape in the format of `LoraModule.shape`."""
    weights = Base.at(base.source.folder, f"the base {base.reference}")
    return {name: weight.shape for name, weight in weights.items()}


def _zeros(plans: Iterable[Plan]) -> dict[str, tuple[int, int]]:
    """The keys of the factors of one adapted module of each kind, with their shapes at rank 1."""
    kinds: dict[str, Any] = {}
    for plan in plans:
        for adapter in plan.adapters.values():
            for module in adapter.modules.values():
                if not module.parameter:
                    kinds[module.name.rpartition(".")[2]] = module

    shapes = {}
    for module in kinds.values():
        shapes[module.a.name] = (1, module.in_features)
        shapes[module.b.name] = (module.out_features, 1)
    return shapes


class VLLMEngine(Engine):
    """See `Engine`. It runs inside its `with` block.

    Args:
        base: the base.
        needs: what it must hold.
        arguments: the user's own settings of vLLM, by their names in Python; they override what `needs` chooses.
        device, dtype: as for `evaluate`; vLLM finds its device itself.
        seed: vLLM's own.

    Raises:
        DependencyError: vLLM is not installed.
        ArgumentError: a setting is unknown or chosen elsewhere, or vLLM works on another device.
        UnsupportedError: vLLM cannot do this on this device.
        RunError: vLLM does not start, with its reason.
    """

    def __init__(
        self, base: OpenedBase, needs: Needs, arguments: Mapping[str, Any], *, device: str, dtype: str, seed: int
    ) -> None:
        require("vllm")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm.platforms import current_platform

        # What this device can do
        self._base, self._arguments = base, dict(arguments)
        self._platform = str(current_platform.device_type)
        if device.partition(":")[0] not in ("auto", self._platform):
            raise ArgumentError(
                f"The device is {device!r}, but vLLM works on {self._platform} here", "Leave it out", parameter="device"
            )
        if current_platform.is_cuda() and current_platform.has_device_capability(80):
            os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")  # its LoRA kernels otherwise add up in any order
        if self._platform == "cpu" and needs.likelihoods and "lm_head" in needs.modules:
            raise UnsupportedError(
                "vLLM on the CPU cannot compute log-likelihoods with LoRA on the head (lm_head)",
                "Use `engine=transformers`, or evaluate tasks that generate",
                parameter="engine",
            )

        on_cpu: dict[str, Any] = {}
        if self._platform == "cpu":
            on_cpu["enforce_eager"] = True  # compiling takes longer than a small sweep
            cache_bytes = Launch.cpu_cache_bytes()
            if cache_bytes is not None and not _CACHE_SIZES & self._arguments.keys():
                on_cpu["kv_cache_memory_bytes"] = cache_bytes
        self._settings = {
            "model": str(base.source.folder),
            "dtype": dtype,
            "seed": seed,
            "generation_config": "vllm",
            "disable_log_stats": True,
            **on_cpu,
            **needs.settings(),
            **self._checked(needs),
        }

        self._zeros = dict(needs.zeros)
        self._subjects: dict[str, Loadable] = {}
        self._adapters: dict[str, Any] = {}  # key → vLLM's LoRARequest
        self._asked: dict[str, tuple[str, Request]] = {}  # vLLM's number of a request → what was asked
        self._numbers = count(1)
        self._failures = 0
        self._full_weights: Path | None = None
        self._engine: Any = None

    def __enter__(self) -> VLLMEngine:
        with ExitStack() as stack:
            self._folder = stack.enter_context(scratch_folder("engine"))
            stack.callback(self._stop)
            self._engine = self._started()
            if self._zeros:  # modules that this vLLM cannot adapt are refused before anything is evaluated
                self._engine.remove_lora(self._load("LoRA on these modules", None).lora_int_id)
            self._place = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._place.close()

    @staticmethod
    def cannot_hold(adapters: Mapping[str, Adapter], base: OpenedBase) -> set[str]:
        """The experts whose changes vLLM cannot hold as LoRA, so that their compositions are full weights."""
        shapes = _shapes_of(base)
        unfit = set()
        for name, adapter in adapters.items():
            try:
                check_fits(adapter, shapes, name)
            except UnsupportedError:
                unfit.add(name)
        return unfit

    @property
    def described(self) -> dict[str, Any]:
        """The same keys as `surroundings`, and whether sums do not depend on the batch."""
        import vllm

        versions = {name: version(name) for name in ("lm_eval", "peft", "torch", "transformers")}
        generation = self._base.generation_config().to_diff_dict()
        generation.pop("transformers_version", None)  # it is among the versions
        return {
            "dtype": str(self._engine.model_config.dtype).removeprefix("torch."),
            "device": self._platform,
            "generation_config": generation,
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
            "versions": {**versions, "vllm": vllm.__version__},
        }

    def put(self, key: str, subject: Loadable) -> None:
        """See `Engine`. An adapter that vLLM refuses is refused here."""
        full_weights: Path | None = None
        adapter: Path | None = None
        if isinstance(subject, FullWeights):
            full_weights = subject.folder
        else:
            adapter = subject

        self._subjects[key] = subject
        self._put_weights(full_weights)
        if self._zeros:
            self._adapters[key] = self._load(key, adapter)

    def ask(self, key: str, request: Request) -> None:
        """See `Engine`."""
        number = str(next(self._numbers))
        parameters = _parameters(request)
        prompt = {"prompt_token_ids": list(request.tokens)}
        try:
            self._engine.add_request(number, prompt, parameters, lora_request=self._adapters.get(key))
        except Exception as error:  # from any of vLLM's layers
            raise ArgumentError(
                f"vLLM refuses a request of {len(request.tokens)} tokens: {_reason(error)}",
                "Use `engine=transformers`, or change `engine_args`",
                parameter="engine_args",
            ) from error
        self._asked[number] = key, request

    def answers(self) -> Iterator[tuple[str, Request, Answer]]:
        """See `Engine`: the answers that one step of vLLM finishes."""
        try:
            outputs = self._engine.step()
        except Exception as error:  # from any of vLLM's layers
            self._recover(error)
            return
        for output in outputs:
            if output.finished:
                key, request = self._asked.pop(output.request_id)
                yield key, request, _answer(request, output)

    def drop(self, key: str) -> None:
        """See `Engine`."""
        del self._subjects[key]
        if self._engine is None:  # it did not start again
            return
        queued = [number for number, (asked_of, _) in self._asked.items() if asked_of == key]
        if queued:
            self._engine.abort_request(queued)
            for number in queued:
                del self._asked[number]
        adapter = self._adapters.pop(key, None)
        if adapter is not None:
            self._engine.remove_lora(adapter.lora_int_id)
        self._failures = 0

    def _checked(self, needs: Needs) -> dict[str, Any]:
        """The user's settings, if vLLM has them and nothing else decides them."""
        from vllm import EngineArgs

        known = {field.name for field in fields(EngineArgs)}
        for name in self._arguments:
            if name in _RESERVED:
                reason = "is decided by other options"
            elif name not in known:
                reason = "is not a setting of this vLLM"
            else:
                continue
            raise ArgumentError(f"engine_args: {name} {reason}", "Leave it out", parameter="engine_args")

        length = self._arguments.get("max_model_len", needs.longest)
        if not isinstance(length, int) or length < needs.longest:  # vLLM would end answers there
            raise ArgumentError(
                f"engine_args: max_model_len is {length}, but the longest request with its answer has {needs.longest} "
                "tokens",
                "Leave it out, or lower `max_gen_toks`",
                parameter="engine_args",
            )
        return self._arguments

    def _started(self) -> Any:
        """A running engine."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            return LLMEngine.from_engine_args(EngineArgs(**self._settings))
        except Exception as error:  # from any of vLLM's layers
            raise RunError(
                f"vLLM does not start: {_reason(error)}",
                "Change its settings with `engine_args`, or use `engine=transformers`",
                parameter="engine",
            ) from error

    def _stop(self) -> None:
        """Stop the engine and free its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self._engine is None:  # it did not start
            return
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _load(self, key: str, folder: Path | None) -> Any:
        """Load an adapter, or one of zeros; returns vLLM's LoRARequest."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        if folder is None:
            folder = self._folder / f"zeros-{number}"
            folder.mkdir()
            zeros = {name: np.zeros(shape, np.float32) for name, shape in self._zeros.items()}
            save_file(zeros, folder / WEIGHTS)
            modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in self._zeros})
            config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": modules, "bias": "none"}
            (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")

        adapter = LoRARequest(lora_name=f"{key}-{number}", lora_int_id=number, lora_path=str(folder))
        try:
            if not self._engine.add_lora(adapter):
                raise RuntimeError("add_lora returned False")
        except Exception as error:  # from any of vLLM's layers
            raise UnsupportedError(
                f"vLLM cannot load {key}: {_reason(error)}", "Use `engine=transformers`", parameter="engine"
            ) from error
        return adapter

    def _put_weights(self, folder: Path | None) -> None:
        """Give the model the weights of a folder, or its own."""
        if folder == self._full_weights:
            return
        path = str(folder or self._base.source.folder)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self._engine.reset_prefix_cache()
        self._full_weights = folder

    def _recover(self, error: Exception) -> None:
        """Ask again what is queued: first of this engine, then of a new one. Then give up."""
        import torch

        self._failures += 1
        if self._failures == _FAILURES or isinstance(error, torch.OutOfMemoryError):
            remedy = "Lower max_num_seqs or gpu_memory_utilization in `engine_args`, or use `engine=transformers`"
            raise RunError(f"vLLM failed: {_reason(error)}", remedy, parameter="engine") from error

        queued = self._asked
        self._asked = {}
        self._engine.abort_request(list(queued))
        if self._failures > 1:
            self._stop()
            self._engine = self._started()
            self._full_weights = None
            for key, subject in list(self._subjects.items()):
                self.put(key, subject)
        for key, request in queued.values():
            self.ask(key, request)


def _parameters(request: Request) -> Any:
    """A request as vLLM's SamplingParams."""
    from vllm import SamplingParams

    if isinstance(request, Likelihood):
        return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)

    sampling = dict(request.sampling)
    samples = sampling.pop("do_sample", False)
    unknown = sorted(sampling.keys() - _SAMPLING)
    if unknown:
        raise UnsupportedError(
            f"vLLM has no generation setting {unknown[0]} that means what it means in transformers",
            "Leave it out, or use `engine=transformers`",
            parameter="gen_kwargs",
        )
    if samples:
        sampling = {"temperature": 1.0, "top_k": _TOP_K, **sampling, "seed": (request.seed or 0) % 2**63}
    else:
        sampling["temperature"] = 0
    return SamplingParams(
        **sampling,
        max_tokens=request.limit,
        stop=list(request.stop),
        stop_token_ids=list(request.ends),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


def _answer(request: Request, output: Any) -> Answer:
    """A generation's tokens; or the log-likelihood of the last tokens, and whether each was the likeliest one."""
    if isinstance(request, Generation):
        return tuple(output.outputs[0].token_ids)

    total = 0
    is_greedy = True
    scored = list(zip(request.tokens, output.prompt_logprobs, strict=True))[-request.scored :]
    for token, entries in scored:
        ranks = {candidate: entry.rank for candidate, entry in entries.items()}
        total += entries[token].logprob
        is_greedy = is_greedy and token == min(ranks, key=ranks.__getitem__)
    return float(total), is_greedy


def _reason(error: BaseException) -> str:
    """The first of the errors that led to this one: vLLM wraps its reasons in general ones."""
    while error.__cause__ is not None:
        error = error.__cause__
    return reason_of(error, 800)
