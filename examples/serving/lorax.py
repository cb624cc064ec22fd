"""Ask LoRAX for compositions in folders on its machine.

    adapterswap compose -t experts/math -l experts/swahili --layout portable -o /data/served/math-swahili
    lorax-launcher --model-id BASE
    python examples/serving/lorax.py --prompt "Bei ya..." /data/served/math-swahili

Not run here. The request follows LoRAX's documentation (docs/models/adapters/index.md and docs/reference). Needs only
Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any


def request(adapter: str, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and body: the parameters name an adapter and its source."""
    parameters = {"adapter_id": adapter, "adapter_source": "local", "max_new_tokens": max_tokens, "do_sample": False}
    return "/generate", {"inputs": prompt, "parameters": parameters}


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The server's answer."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask LoRAX for several compositions.")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("adapters", nargs="+", help="folders, as LoRAX sees them")
    options = parser.parse_args()
    for adapter in options.adapters:
        answer = post(options.url, *request(adapter, options.prompt, options.max_tokens))
        print(f"{adapter}: {answer['generated_text']}")


if __name__ == "__main__":
    main()
