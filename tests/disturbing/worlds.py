"""Small worlds in which a sweep, a training run or a server reads every kind of file that it supports.

A world is a folder with all inputs; commands run inside it, with relative paths, and write below `runs/`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from experiments.evaluation.conftest import byte_tokenizer, pico_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from adapterswap.cli import main as command_line

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "tasks/data/test.jsonl", "train": "tasks/data/shots.jsonl"}},
    "test_split": "test", "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": 1,
}  # fmt: skip
CHOICE = """
include: ../shared/common.yaml
task: own_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """
include: ../shared/common.yaml
task: own_written
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
process_results: !function scoring.score
generation_kwargs: {until: ["~"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: length, aggregation: mean, higher_is_better: true}
"""
SCORING = """
import json
from pathlib import Path

WEIGHTS = json.loads(Path(__file__).with_name("weights.json").read_text())


def score(doc, results):
    return {"length": sum(len(results[0].encode()) % 7 * weight for weight in WEIGHTS)}
"""


def drawn(chance: random.Random, count: int) -> str:
    return "".join(chance.choices("abcdefgh", k=count))


def write_base(folder: Path, *, layers: int = 4) -> None:
    """In three shards, with an index."""
    pico_model(layers=layers).save_pretrained(folder, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("# A base\n")
    assert len([*folder.glob("*.safetensors")]) > 1


def write_expert(base: Path, folder: Path, *, seed: int, **changes: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": PROJECTIONS, **changes}
    adapted = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "tokenizer_config.json").write_text("{}")


def write_sliced_expert(base: Path, folder: Path, *, seed: int) -> None:
    """An expert with an adapterswap.json that lists its layers."""
    whole = folder.with_name("whole")
    write_expert(base, whole, seed=seed)
    arguments = ["slice", str(whole), "--layers", "0-2", "--base-model", str(base), "--out-path", str(folder)]
    command_line(arguments, standalone_mode=False)
    shutil.rmtree(whole)


def write_tasks(folder: Path, *, documents: int = 4) -> None:
    """A multiple-choice task and a generation task, which share an included file, data, shots and a scorer."""
    chance = random.Random(0)
    (folder / "tasks" / "data").mkdir(parents=True)
    (folder / "shared").mkdir()
    (folder / "shared" / "common.yaml").write_text(yaml.safe_dump(COMMON))
    for name, count in (("test", documents), ("shots", 2)):
        rows = [
            {"question": drawn(chance, 6), "choices": [drawn(chance, 2), drawn(chance, 2)], "label": number % 2,
             "answer": drawn(chance, 2)}
            for number in range(count)
        ]  # fmt: skip
        (folder / "tasks" / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / "choice.yaml").write_text(CHOICE)
    (folder / "tasks" / "written.yaml").write_text(WRITTEN)
    (folder / "tasks" / "scoring.py").write_text(SCORING)
    (folder / "tasks" / "weights.json").write_text("[1, 2]")
    (folder / "tasks" / "README.md").write_text("# Tasks\n")


def write_sweep_world(folder: Path) -> None:
    write_base(folder / "base")
    write_expert(folder / "base", folder / "math", seed=1)
    write_sliced_expert(folder / "base", folder / "sw", seed=2)
    write_tasks(folder)
    common = {"base_model": "base", "settings": {"batch_size": 4, "include_path": "tasks"}}
    recipe = {
        "extends": "common.yaml",
        "task_experts": {"math": "math"},
        "language_experts": {"sw": "sw"},
        "tasks": ["own_choice"],
        "retention": ["own_written"],
        "compositions": {"swap": {"bottom": [1, 2], "top": 0}},
        "baselines": ["base", "task"],
        "search": {"sampler": "random", "trials": 2, "halving": {"min_documents": 1, "reduction_factor": 2}},
        "selection": {"fraction": 0.75},
    }
    (folder / "common.yaml").write_text(yaml.safe_dump(common))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "runs").mkdir()


def write_train_world(folder: Path) -> None:
    write_base(folder / "base", layers=2)
    write_tasks(folder)
    chance = random.Random(1)
    for name, count in (("rows", 24), ("held-out", 6), ("overlap", 3)):
        rows = [{"question": drawn(chance, 8), "answer": drawn(chance, 3)} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"prompt": "{question} ", "completion": "{answer}"}
    common = {"base_model": "base", "adapter": {"r": 2, "alpha": 4}}
    recipe = {
        "extends": "common.yaml",
        "datasets": [{"path": "rows.jsonl", **source}],
        "validation": {"datasets": [{"path": "held-out.jsonl", **source}]},
        "training": {
            "batch_size": 4, "gradient_accumulation": 1, "learning_rate": 0.01, "max_length": 64, "max_steps": 6,
            "save_every_samples": 8, "logging_steps": 1,
        },
        "selection": {"tasks": ["own_choice"], "include_path": "tasks", "batch_size": 4, "keep_best": 2},
    }  # fmt: skip
    (folder / "common.yaml").write_text(yaml.safe_dump(common))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "runs").mkdir()


def write_serving_world(folder: Path) -> None:
    write_base(folder / "base")
    write_expert(folder / "base", folder / "experts" / "math", seed=1)
    write_expert(folder / "base", folder / "experts" / "sw", seed=2)
    write_expert(folder / "base", folder / "experts" / "code", seed=3, r=2)
    (folder / "experts" / "math" / "README.md").write_text("# An expert\n")
    (folder / "experts.yaml").write_text(
        yaml.safe_dump({"experts": {name: f"experts/{name}" for name in ("math", "sw", "code")}})
    )
    (folder / "runs").mkdir()


WORLDS = {"sweep": write_sweep_world, "train": write_train_world, "serve": write_serving_world}
