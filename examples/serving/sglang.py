"""Ask SGLang for compositions: by `model`, as OpenAI's clients do, or by `lora_path`, several in one batch.

    adapterswap compose -t experts/math -l experts/swahili --layout portable -o served/math-swahili
    python -m sglang.launch_server --model-path BASE --enable-lora --lora-paths math-swahili=served/math-swahili \
        --max-loras-per-batch 4
    python examples/serving/sglang.py --base BASE --prompt "Bei ya..." math-swahili

Not run here. The requests follow SGLang's documentation (docs/advanced_features/lora.ipynb, November 2026). Needs only
Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from typing import Any


def openai_request(base: str, adapter: str, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and body for OpenAI's API: the model's name is BASE:ADAPTER."""
    body = {"model": f"{base}:{adapter}", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return "/v1/completions", body


def native_request(adapters: Sequence[str | None], prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and body for SGLang's own API: one prompt for each adapter, in one batch; None is the base."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 0}
    return "/generate", {"text": [prompt] * len(adapters), "sampling_params": sampling, "lora_path": list(adapters)}


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The server's answer."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask SGLang for several compositions.")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--base", required=True, help="as SGLang's --model-path says")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("adapters", nargs="+", help="names from --lora-paths")
    options = parser.parse_args()
    for adapter in options.adapters:
        answer = post(options.url, *openai_request(options.base, adapter, options.prompt, options.max_tokens))
        print(f"{adapter}: {answer['choices'][0]['text']}")
    answers = post(options.url, *native_request(options.adapters, options.prompt, options.max_tokens))
    for adapter, answer in zip(options.adapters, answers, strict=True):
        print(f"{adapter}, in one batch: {answer['text']}")


if __name__ == "__main__":
    main()
