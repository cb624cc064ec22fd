"""A sweep beside the ordinary way, on a random model of 0.37 billion parameters: ratios measured in one run.

    OMP_NUM_THREADS=1 python benchmarks/sweep.py [--cells 30] [--ordinary 3] [--json]

The sweep is one process: `adapterswap sweep`, layer swaps over one pair, a multiple-choice task of 50 documents. The
ordinary way is, for each cell: compose an adapter, merge it into the base and save that (one process), and evaluate it
with `lm_eval --model hf` (another). Each way's seconds are divided by its cells, starting and loading included; the
first `--ordinary` cells are done the ordinary way too. Scores must agree. More threads than idle cores slow both down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from measuring import run_once
from shapes import llama_projections, random_adapter, random_llama

SHAPE = {"hidden": 1024, "intermediate": 2816, "layers": 24, "heads": 16, "vocab": 32000}
DOCUMENTS = 50
TASK = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


def random_world(folder: Path, shape: dict[str, int]) -> None:
    """A random Llama that reads bytes, in `base`, and two rank-16 experts of it, `math` and `swahili`."""
    random_llama(folder / "base", **shape)
    byte_tokenizer().save_pretrained(folder / "base")
    projections = llama_projections(shape["hidden"], shape["intermediate"], shape["hidden"])
    for seed, name in enumerate(("math", "swahili")):
        random_adapter(
            folder / name,
            seed=seed,
            rank=16,
            layers=shape["layers"],
            shapes=projections,
            base_model=str(folder / "base"),
        )


def make_world(folder: Path, cells: int) -> Path:
    """A random base, a math and a language expert, the task, and a recipe with so many layer swaps."""
    random_world(folder, SHAPE)
    random = Random(0)
    (folder / "tasks").mkdir()
    file = folder / "tasks" / "choice.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = (
        {
            "question": "".join(random.choices(letters, k=12)),
            "choices": ["".join(random.choices(letters, k=2)) for _ in range(2)],
            "label": random.randrange(2),
        }
        for _ in range(DOCUMENTS)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / "choice.yaml").write_text(TASK.format(file=file))
    zones = [(bottom, top) for bottom in range(1, 11) for top in range(3)][:cells]
    families = [{"bottom": bottom, "top": top} for bottom, top in zones]
    recipe = {
        "base_model": "base",
        "task_experts": {"math": "math"},
        "language_experts": {"swahili": "swahili"},
        "baselines": [],
        "compositions": families,
        "tasks": ["choice"],
        "settings": {"include_path": "tasks", "batch_size": 16},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "recipe.yaml"


def byte_tokenizer() -> Any:
    """One token for each byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<eos>")


def merge_one(folder: Path, out_path: Path, bottom: int, top: int) -> None:
    """Compose, merge and save one cell: what the first process of the ordinary way does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adapterswap import layer_swap, write_adapter

    plan = layer_swap(folder / "math", folder / "swahili", num_layers=SHAPE["layers"], bottom=bottom, top=top)
    adapter = write_adapter(plan, out_path.with_name("composed"), overwrite=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(out_path)
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(out_path)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ordinary(folder: Path, bottom: int, top: int) -> tuple[float, float, int, float]:
    """Wall and processor seconds, bytes written, and the score of one cell."""
    merged, scores = folder / "merged", folder / "scores"
    shutil.rmtree(merged, ignore_errors=True)
    merge = [sys.executable, __file__, "--merge", json.dumps([str(folder), str(merged), bottom, top])]
    evaluate = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={merged},dtype=float32",
        "--tasks", "choice", "--include_path", str(folder / "tasks"), "--batch_size", "16", "--device", "cpu",
        "--output_path", str(scores),
    ]  # fmt: skip
    measured = [run_once(merge), run_once(evaluate)]
    found = json.loads(max(scores.rglob("results*.json"), key=lambda path: path.stat().st_mtime).read_text())
    score = found["results"]["choice"]["acc,none"]
    written = bytes_in(merged) + bytes_in(folder / "composed")
    return sum(m[0] for m in measured), sum(m[1] for m in measured), written, score


def compare(folder: Path, cells: int, number: int) -> dict[str, Any]:
    recipe = make_world(folder, cells)
    sweep = [sys.executable, "-m", "adapterswap", "sweep", str(recipe), "-o", str(folder / "run"), "--device", "cpu"]
    wall, cpu, _ = run_once([*sweep, "--dtype", "float32"])
    lines = [json.loads(line) for line in (folder / "run" / "cells.jsonl").open()]
    one_by_one = [
        ordinary(folder, *(line["composition"][zone] for zone in ("bottom", "top"))) for line in lines[:number]
    ]
    agree = [line["results"]["choice"]["value"] == one[3] for line, one in zip(lines, one_by_one, strict=False)]
    each_wall = sum(one[0] for one in one_by_one) / number
    each_cpu = sum(one[1] for one in one_by_one) / number
    switch = sum(line["seconds"]["switch"] for line in lines) / sum(line["seconds"]["evaluate"] for line in lines)
    return {
        "cells": cells,
        "cells_the_ordinary_way": number,
        "sweep_seconds_a_cell": round(wall / cells, 2),
        "ordinary_seconds_a_cell": round(each_wall, 2),
        "ratio": round(each_wall / (wall / cells), 2),
        "ratio_in_processor_seconds": round(each_cpu / (cpu / cells), 2),
        "switch_share": round(switch, 5),
        "sweep_bytes": bytes_in(folder / "run"),
        "ordinary_bytes_a_cell": round(sum(one[2] for one in one_by_one) / number),
        "same_scores": f"{sum(agree)} of {len(agree)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=30, help="cells of the sweep, at most 30")
    parser.add_argument("--ordinary", type=int, default=3, help="how many of them are done the ordinary way too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--merge", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    if options.merge:
        folder, out_path, bottom, top = json.loads(options.merge)
        merge_one(Path(folder), Path(out_path), bottom, top)
        return
    with tempfile.TemporaryDirectory() as place:
        found = compare(Path(place), options.cells, min(options.ordinary, options.cells))
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{key:<28}{v}" for key, v in found.items()))


if __name__ == "__main__":
    main()
