"""Pico bases as folders and as GGUF, and experts for them; made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

Bases = Callable[..., tuple[Path, Path]]
Experts = Callable[..., Path]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """`bases("llama")` is a pico base's folder, and the same as a GGUF file."""
    from engines.exporting.bases import save_base, write_base

    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str, **options: Any) -> tuple[Path, Path]:
        key = repr((name, sorted(options.items())))
        if key not in made:
            folder = save_base(name, tmp_path_factory.mktemp("base") / name, **options)
            made[key] = folder, write_base(folder, folder.with_suffix(".gguf"), name)
        return made[key]

    return make


@pytest.fixture(scope="session")
def experts(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Experts:
    """`experts("llama", "math", seed=1, r=4)` is the folder of a random rsLoRA saved by PEFT."""
    from engines.exporting.bases import PICOS, load

    made: dict[str, Path] = {}

    def make(
        name: str, called: str = "math", *, seed: int = 1, base_options: dict[str, Any] | None = None, **options: Any
    ) -> Path:
        key = repr((name, called, seed, base_options, sorted(options.items())))
        if key not in made:
            settings: dict[str, Any] = {
                "r": 8,
                "lora_alpha": 16,
                "use_rslora": True,
                "target_modules": PICOS[name].targets,
            }
            settings |= {"fan_in_fan_out": name == "gpt2", "task_type": "CAUSAL_LM"} | options
            model = get_peft_model(load(bases(name, **(base_options or {}))[0]), LoraConfig(**settings))
            generator = torch.Generator().manual_seed(seed)
            for key_, parameter in model.named_parameters():
                if "lora_" in key_:
                    parameter.data = torch.randn(parameter.shape, generator=generator) * 0.06
            made[key] = tmp_path_factory.mktemp("expert") / called
            ends = any(target.startswith("embed") for target in settings["target_modules"])
            model.save_pretrained(made[key], save_embedding_layers=ends)  # with a copy of the base's own weight
        return made[key]

    return make
