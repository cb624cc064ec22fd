"""Run by the vLLM environment's Python: registry → resolver → engine → generate, in one process. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(base: str, names: list[str], prompts: list[list[int]], length: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.resolver import LoRAResolverRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    resolver = LoRAResolverRegistry.get_resolver("adapterswap")
    llm = LLM(
        base, dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=8, enable_lora=True,
        max_lora_rank=16, max_loras=2, max_cpu_loras=4, kv_cache_memory_bytes=2**26,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=length, logprobs=5, ignore_eos=True)
    answers: dict[str, list[dict[str, object]]] = {}
    unloaded: dict[str, str] = {}
    for number, name in enumerate(names, start=1):
        request = asyncio.run(resolver.resolve_lora(base, name))
        request.lora_int_id = number  # as the server does
        try:
            assert llm.llm_engine.add_lora(request)
        except ValueError as error:  # what this architecture of vLLM does not adapt; the others go on
            unloaded[name] = str(error)
            continue
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, lora_request=request, use_tqdm=False
        )
        answers[name] = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    {token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs
                ],
            }
            for output in outputs
        ]
    refused = {}
    for name in ("nosuch", "math+nosuch", "math+swahili@", "math+swahili@bottom=99", "code+math@method=soup"):
        try:
            asyncio.run(resolver.resolve_lora(base, name))
        except Exception as error:
            refused[name] = [type(error).__name__, str(error)]
    print("ANSWERS" + json.dumps({"answers": answers, "unloaded": unloaded, "refused": refused}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
