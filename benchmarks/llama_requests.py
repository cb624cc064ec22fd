"""The cost of a request in llama.cpp that composes by scales of pieces, compared with one to a composed file; and of
requests with several names at once, compared with as many with one name. A random model of 32 layers, four experts;
processor seconds of this process, which runs llama.cpp (the package xllamacpp), as ratios of interleaved runs; medians.

python benchmarks/llama_requests.py [--runs 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from peft import LoraConfig, get_peft_model

import adapterswap as asw

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from engines.exporting.bases import GATED, load, save_base, write_base

LAYERS, EXPERTS, TOKENS = 32, ("math", "swahili", "telugu", "code"), 32
PROMPT = [1, 140, 150, 5, 160, 170, 180, 40]
ZONES = [(4, 1), (5, 2), (3, 3), (6, 1), (2, 2), (8, 4), (1, 0), (7, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), options.runs)


def measure(folder: Path, runs: int) -> None:
    base = save_base("llama", folder / "base", num_hidden_layers=LAYERS)
    gguf = write_base(base, folder / "base.gguf", "llama")
    experts = {name: expert(base, folder / name, seed) for seed, name in enumerate(EXPERTS)}
    plans = [asw.layer_swap(experts["math"], experts["swahili"], bottom=b, top=u) for b, u in ZONES]
    ready = server(gguf, {plans[0].export(folder / "ready.gguf", outtype="f16").path: 1.0})
    pieces = [
        (name, file)
        for name, path in experts.items()
        for file in asw.export(path, folder / f"{name}-pieces", outtype="f16", pieces="kind").files
    ]
    composing = server(gguf, {file.path: 0.0 for _, file in pieces})
    places = [(name, file.layer, file.kind) for name, file in pieces]
    scales = [scales_of(plan, places) for plan in plans]
    took = side_by_side({"ready": lambda: ask(ready, None), "pieces": lambda: ask(composing, scales[0])}, runs)
    print(
        f"{LAYERS} layers, {len(pieces)} pieces, {TOKENS} tokens: composed by pieces {ratio(took, 'pieces', 'ready')}"
    )
    together = side_by_side(
        {
            "one name": lambda: at_once(composing, [scales[0]] * len(scales)),
            "several names": lambda: at_once(composing, scales),
        },
        runs,
    )
    print(f"{len(scales)} requests at once: by {len(scales)} names {ratio(together, 'several names', 'one name')}")


def expert(base: Path, folder: Path, seed: int) -> Path:
    model = get_peft_model(load(base), LoraConfig(r=16, lora_alpha=16, target_modules=GATED))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    model.save_pretrained(folder)
    return folder


def server(base: Path, adapters: Mapping[Path, float]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(base)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.cache_ram_mib = 1024, 8, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = params.fit_params = False
    params.verbosity = 0
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path), scale) for path, scale in adapters.items()]
    return xllamacpp.Server(params)


def scales_of(plan: asw.Plan, places: list[tuple[str, int | None, str | None]]) -> list[dict[str, Any]]:
    shares = {(term.expert, slot.layer, slot.kind): term.coefficient for slot in plan for term in slot.terms}
    return [{"id": i, "scale": shares.get(place, 0.0)} for i, place in enumerate(places)]  # type: ignore[call-overload]


def ask(server: Any, lora: list[dict[str, Any]] | None) -> None:
    request = {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    server.handle_completions(request | ({"lora": lora} if lora is not None else {}))


def at_once(server: Any, scales: list[list[dict[str, Any]]]) -> None:
    with ThreadPoolExecutor(len(scales)) as pool:
        list(pool.map(lambda lora: ask(server, lora), scales))


def side_by_side(tasks: Mapping[str, Callable[[], None]], runs: int) -> dict[str, list[float]]:
    """Processor seconds of each task, run in turn A B A B …, the first round left out."""
    took: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(runs + 1):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            if turn:
                took[name].append(time.process_time() - start)
    return took


def ratio(took: Mapping[str, list[float]], one: str, other: str) -> str:
    first, second = statistics.median(took[one]), statistics.median(took[other])
    return f"{first / second:.2f} × {other} ({first * 1000:.0f} and {second * 1000:.0f} ms)"


if __name__ == "__main__":
    main()
