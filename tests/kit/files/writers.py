"""Commands that write, each with two runs whose results differ, and what they read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.reporting.crafting import craft, recipe
from safetensors.numpy import load_file, save_file

Words = tuple[str, ...]

ZONES = ("-t", "math", "-l", "swahili", "--bottom", "1", "--top")
WRITERS: dict[str, tuple[Words, Words]] = {
    "slice": (("slice", "math", "--layers", "0-1"), ("slice", "math", "--layers", "2")),
    "convert": (("convert", "math"), ("convert", "math", "--layout", "portable")),
    "compose": (("compose", *ZONES, "0"), ("compose", *ZONES, "1", "--layout", "portable", "--max-rank", "1")),
    "merge": (("merge", *ZONES, "0"), ("merge", *ZONES, "1", "--max-shard-size", "20KB")),
    "extract": (("extract", "tuned", "--base-model", "base", "--rank", "1"),
                ("extract", "tuned", "--base-model", "base", "--rank", "2")),
    "export": (("export", *ZONES, "0"), ("export", *ZONES, "1")),
    "pieces": (("export", "--pieces", *ZONES, "0"), ("export", "--pieces", "--by", "zone", *ZONES, "1")),
    "analyze": (("analyze", "math", "swahili"), ("analyze", "swahili", "math")),
    "suggest": (("suggest", "-t", "math", "-l", "swahili"), ("suggest", "-t", "swahili", "-l", "math")),
    "recipes": (("recipes", "cp", "compose/llama-3.1-8b/swahili"),
                ("recipes", "cp", "compose/llama-3.1-8b-instruct/swahili")),
    "report": (("report", "run"), ("report", "run", "--reference", "soup")),
}  # fmt: skip

# They take seconds for their figures, and write into a folder as the others do.
DRAWING = {"analyze", "report"}


def commands(*names: str) -> dict[str, list[Words]]:
    """Both runs of these commands, to which only the output's path is to be added; by default of all."""
    return {
        name: [words if name == "recipes" else (*words, "-o") for words in WRITERS[name]] for name in names or WRITERS
    }


def make_inputs(folder: Path, base: Callable[[str], Path], expert: Callable[..., Path]) -> None:
    """Write what the commands read into a folder, in which they are then run.

    Args:
        folder: for a base, two experts, a fine-tune and a sweep.
        base, expert: the fixtures.
    """
    shutil.copytree(base("llama"), folder / "base")
    for seed, name in enumerate(("math", "swahili"), 1):
        shutil.copytree(expert(seed=seed, r=2, target_modules=["q_proj", "down_proj"]), folder / name)
        config = json.loads((folder / name / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(folder / "base")
        (folder / name / "adapter_config.json").write_text(json.dumps(config))

    shutil.copytree(folder / "base", folder / "tuned")
    weights = load_file(folder / "base" / "model.safetensors")
    changed = {key: value + 0.1 * (value.ndim == 2) for key, value in weights.items()}
    save_file(changed, folder / "tuned" / "model.safetensors", metadata={"format": "pt"})

    small = recipe(
        task_experts={"math1": "experts/math1"}, language_experts={"sw1": "experts/sw1"}, retention=[],
        compositions=[{"bottom": [3], "top": [0]}],
    )  # fmt: skip
    craft(folder / "run", small, documents=6)
