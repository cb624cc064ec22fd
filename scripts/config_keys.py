"""Which keys of a config.json change what a model computes? Found by computing it, for some forty architectures.

    python scripts/config_keys.py [--only REGEX]      writes tests/core/companions/config_keys.json

Every key of a pico model's config, at every depth, gets other values until one of them changes the logits of the same
weights. The file has, for each architecture, its config and these values. `tests/core/companions` flips them and sees
every one refused, and flips every neutral key and sees it accepted. A neutral key that changes logits is printed here,
and is an error.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from architectures import TASKS, build
from transformers import CONFIG_MAPPING

from adapterswap.core.companions.config import NEUTRAL

TABLE = Path(__file__).parents[1] / "tests" / "core" / "companions" / "config_keys.json"
CAUSAL = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "granite", "granitemoe", "olmo", "olmo2", "olmoe",
    "cohere", "cohere2", "starcoder2", "stablelm", "glm", "glm4", "gpt_oss", "mpt",
    "smollm3", "helium", "exaone4", "mamba", "persimmon", "arcee", "seed_oss", "ernie4_5",
]  # fmt: skip
MODELS = [
    *(("CAUSAL_LM", name) for name in CAUSAL),
    *(("SEQ_2_SEQ_LM", name) for name in ("bart", "t5")),
    *(("SEQ_CLS", name) for name in ("bert", "roberta")),
]
IDS = torch.tensor([[5, 9, 11, 7, 23, 42, 17, 3, 31, 8, 6, 12], [4, 8, 16, 32, 64, 33, 18, 9, 1, 1, 1, 1]])
LEAST = 1e-7  # a change of logits


def leaves(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a config, at every depth, with its value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def with_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The config with another value at one place."""
    changed = copy.deepcopy(config)
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return changed


def other_values(value: Any) -> list[Any]:
    """Other values of the same kind, to try one after the other."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value // 2, 1), max(value - 1, 0), 0]
    if isinstance(value, float):
        return [value * 3 + 0.01, value / 2, value * 1000]
    if isinstance(value, str):
        return ["relu", "gelu", "silu"] if value in ("relu", "gelu", "silu", "gelu_new", "gelu_pytorch_tanh") else []
    if isinstance(value, list):
        return [value[::-1], [value[0]] * len(value), [value[-1]] * len(value)] if value else []
    return [8, 0.5, True] if value is None else []


def logits(kind: Any, config: dict[str, Any], state: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The logits of these weights under a config; None if the two do not fit, or the model cannot be run."""
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
        model = kind(made).float()
        model.load_state_dict(state, strict=True)
        more = {"decoder_input_ids": IDS[:, :5]} if config["model_type"] == "t5" else {}
        with torch.no_grad():
            result: torch.Tensor = model.eval()(input_ids=IDS, **more).logits
    except Exception:  # with an untested config, a model class can raise anything
        return None
    return result if bool(result.isfinite().all()) else None


def examined(task: str, model_type: str, folder: Path) -> dict[str, Any]:
    """An architecture's line of the table."""
    model = build(task, model_type, folder).eval()
    config, state = json.loads((folder / "config.json").read_text()), model.state_dict()
    expected = logits(type(model), config, state)
    if expected is None:
        raise ValueError(f"{model_type} cannot be run again from its config.json")
    computes, neutral = {}, {}
    for path, value in leaves(config):
        if path[-1] in ("model_type", "vocab_size"):
            continue
        for other in other_values(value):
            actual = logits(type(model), with_value(config, path, other), state)
            if actual is None:
                continue
            if actual.shape != expected.shape or float((actual - expected).abs().max()) > LEAST:
                computes[".".join(path)] = other
                break
        else:
            if path[-1] in NEUTRAL and other_values(value):
                neutral[".".join(path)] = other_values(value)[0]
        if ".".join(path) in computes and path[-1] in NEUTRAL:
            print(f"{model_type} ({task}): the neutral key {'.'.join(path)} changes the logits", flush=True)
    return {"task": task, "config": config, "computes": computes, "neutral": neutral}


def main() -> None:
    """Examine the architectures, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = json.loads(options.out.read_text()) if options.out.exists() else {}
    for task, model_type in MODELS:
        name = model_type if task != "SEQ_CLS" else f"{model_type} (classifier)"
        if not re.search(options.only, name) or model_type not in TASKS[task]:
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                table[name] = examined(task, model_type, Path(place))
            except Exception as error:  # a class that cannot be built at this size
                print(f"{name} was left out: {type(error).__name__}: {error}", flush=True)
                continue
        print(f"{name}: {len(table[name]['computes'])} keys compute, {len(table[name]['neutral'])} do not", flush=True)
        options.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
