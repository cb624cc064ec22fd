"""A byte-reading pico base with two task and two language experts, and recipes over them. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from adapterswap.experiments.sweeps import SweepRecipe
from experiments.evaluation.conftest import byte_tokenizer, pico_model

RANKS = {"math1": 4, "math2": 8, "sw1": 4, "sw2": 2, "joint": 4}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {"num_fewshot": 1, "limit": 3, "max_gen_toks": 6, "batch_size": 3}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and the experts of `RANKS`: random rsLoRAs, large enough to change what is written."""
    folder = tmp_path_factory.mktemp("world")
    pico_model().save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for seed, (name, rank) in enumerate(RANKS.items()):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        lora = {"r": rank, "lora_alpha": 8, "use_rslora": True, "target_modules": PROJECTIONS}
        model = get_peft_model(base, LoraConfig(**lora, task_type="CAUSAL_LM"))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
        model.save_pretrained(folder / name, save_embedding_layers=False)
    return folder


@pytest.fixture
def content(world: Path) -> Callable[..., dict[str, Any]]:
    """`content(compositions=[…])` is a recipe as plain data, over one pair unless said otherwise."""

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "base_model": str(world / "base"),
            "task_experts": {"math1": str(world / "math1")},
            "language_experts": {"sw1": str(world / "sw1")},
            "tasks": ["mgsm_direct_sw"],
            "settings": SETTINGS,
            **changes,
        }

    return make


@pytest.fixture
def recipe(content: Callable[..., dict[str, Any]]) -> Callable[..., SweepRecipe]:
    """The same data as a recipe."""
    return lambda **changes: SweepRecipe.model_validate(content(**changes))


def plain(folder: Path) -> dict[str, Any]:
    """Every file of a sweep's folder; cells.jsonl and rungs.jsonl without the seconds."""
    import json

    files: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = (
            [{**json.loads(line), "seconds": None} for line in path.read_text().splitlines()]
            if path.name in ("cells.jsonl", "rungs.jsonl")
            else path.read_bytes()
        )
    return files
