"""Ask one server for several compositions at once.

    adapterswap serve --base-model BASE --experts examples/serving/experts.yaml
    python examples/serving/ask.py --url http://127.0.0.1:8000 --prompt "Bei ya..." math+swahili math+telugu

The server composes each on its first request and answers all in one batch. Needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(url: str, model: str, prompt: str, max_tokens: int) -> str:
    """The completion, or the server's reason for refusing."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        return f"[{error.code}] {json.load(error)['error']['message']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask one server for several compositions at once.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("models", nargs="+", help="such as math+swahili, math+swahili@bottom=2,top=1, math")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(len(arguments.models)) as pool:
        answers = pool.map(
            lambda model: ask(arguments.url, model, arguments.prompt, arguments.max_tokens), arguments.models
        )
        for model, answer in zip(arguments.models, answers, strict=True):
            print(f"{model}: {answer}")


if __name__ == "__main__":
    main()
