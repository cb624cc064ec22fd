"""The latency of the first request for a composition, compared with a request for a ready adapter folder.

.venv-vllm/bin/python benchmarks/serving.py [--runs 8] [--scratch DIR]

1. The composer alone at Llama-3.1-8B's shape, two experts of rank 64 in bfloat16, beside `cp` of the result.
2. vLLM in this process, a random base of 16 layers × 1024: compose and load, beside load alone, interleaved; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shapes import llama_projections, random_adapter, random_llama

WEIGHTS = "adapter_model.safetensors"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
HIDDEN, INTERMEDIATE, LAYERS = 1024, 2816, 16  # of the base that vLLM loads here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="A folder with 5 GB free; default: a temporary one.")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        composing(Path(scratch) / "8b", options.runs)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        loading(Path(scratch) / "small", options.runs)


def composing(folder: Path, runs: int) -> None:
    """The composer alone, at 8B shape."""
    from adapterswap.engines.serving import Cache, Manifest, NamedComposer

    base, experts = folder / "base", folder / "experts"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(LLAMA_8B))
    for name, seed in (("math", 1), ("swahili", 2)):
        random_adapter(experts / name, seed=seed, rank=64)
    cache = Cache(folder / "cache")
    _, started = timed(lambda: NamedComposer(Manifest.read(experts), str(base), cache, 128))
    composer, restarted = timed(lambda: NamedComposer(Manifest.read(experts), str(base), cache, 128))
    _, hashed = timed(lambda: [cache.hash_of(composer.open(name)) for name in ("math", "swahili")])
    swaps, soups, copies = [], [], []
    for run in range(runs):
        made, seconds = timed(lambda run=run: composer.folder(f"math+swahili@bottom={run},top=1"))
        swaps.append(seconds)
        size = (made / WEIGHTS).stat().st_size
        copies.append(timed(lambda made=made: subprocess.run(["cp", made / WEIGHTS, folder / "copy"], check=True))[1])
        shutil.rmtree(made)  # several gigabytes would not fit
        soup, seconds = timed(lambda run=run: composer.folder(f"math+swahili@method=soup,task_weight={run + 1}"))
        soups.append(seconds)
        shutil.rmtree(soup)
    composer.folder("math+swahili")
    _, known = timed(lambda: composer.folder("math+swahili"))
    print(
        f"8B shape, 2 × rank 64, bfloat16: start {started:.2f} s, again {restarted:.2f} s; hashing both {hashed:.2f} s"
    )
    swap, copy = statistics.median(swaps), statistics.median(copies)
    print(f"  swap {swap:.2f} s for {size / 1e6:.0f} MB; cp of it {copy:.2f} s, {swap / copy:.1f} × as long")
    print(f"  soup (rank 128) {statistics.median(soups):.2f} s; known already {known * 1000:.0f} ms")


def loading(folder: Path, runs: int) -> None:
    """vLLM's engine: an unseen composition, and a ready folder of the same size."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from adapterswap.engines.serving import Cache, Manifest, NamedComposer
    from adapterswap.engines.serving.resolver import CompositionResolver

    base, experts = folder / "base", folder / "experts"
    random_llama(base, hidden=HIDDEN, intermediate=INTERMEDIATE, layers=LAYERS, heads=16, vocab=1024)
    modules = llama_projections(HIDDEN, INTERMEDIATE, HIDDEN)
    for name, seed in (("math", 1), ("swahili", 2)):
        random_adapter(experts / name, seed=seed, rank=64, layers=LAYERS, shapes=modules, base_model=str(base))
    names = [f"math+swahili@bottom={1 + run},top={run % 3}" for run in range(runs)]
    manifest = Manifest.read(experts)
    elsewhere = NamedComposer(manifest, str(base), Cache(folder / "elsewhere"), 64)
    ready = [elsewhere.folder(name) for name in names]
    cache = Cache(folder / "cache")
    for name in manifest.experts:  # as `adapterswap serve` does before it starts the server
        cache.hash_of(elsewhere.open(name))
    composer = NamedComposer(manifest, str(base), cache, 64)
    resolver = CompositionResolver(lambda _: composer)
    llm = LLM(
        str(base), dtype="bfloat16", max_model_len=128, enforce_eager=True, max_num_seqs=8, enable_lora=True,
        max_lora_rank=64, max_loras=2, max_cpu_loras=4, kv_cache_memory_bytes=2**28,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=1)

    def answer(request: LoRARequest, number: int) -> None:
        request.lora_int_id = number  # as the server does
        llm.llm_engine.add_lora(request)
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], sampling, lora_request=request, use_tqdm=False)

    answer(LoRARequest("warm", 1, str(elsewhere.folder("math"))), 1)
    unseen, loaded, again = [], [], []
    for run, (name, path) in enumerate(zip(names, ready, strict=True)):
        number = 2 * run + 2
        loaded.append(timed(lambda n=number, p=path: answer(LoRARequest(f"ready-{n}", n, str(p)), n))[1])
        unseen.append(
            timed(lambda n=number + 1, name=name: answer(asyncio.run(resolver.resolve_lora(str(base), name)), n))[1]
        )
        request = LoRARequest(name, number + 1, str(composer.folder(name)))
        again.append(timed(lambda n=number + 1, r=request: answer(r, n))[1])
    size = (ready[0] / WEIGHTS).stat().st_size / 1e6
    first, plain = statistics.median(unseen), statistics.median(loaded)
    later = statistics.median(again)
    print(f"vLLM, adapters of {size:.0f} MB: a ready folder's first request {plain * 1000:.0f} ms, an unseen")
    print(f"  composition's {first * 1000:.0f} ms, {first / plain:.2f} × as long; later ones {later * 1000:.0f} ms")


def timed(function: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
