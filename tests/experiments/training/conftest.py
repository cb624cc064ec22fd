"""A pico base with a tokenizer, and rows that it can learn."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from adapterswap.experiments.training import TrainRecipe

WORDS = ["<pad>", "<eos>", "<unk>", "?", *(f"w{i}" for i in range(92))]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, so that the start of a completion is visible; 96 tokens, as in the pico bases."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=512
    )


@pytest.fixture(scope="session")
def pico(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`pico("llama")` is the folder of a pico base with a tokenizer; always named `pico-llama`."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama") -> Path:
        if architecture not in made:
            folder = tmp_path_factory.mktemp("bases") / f"pico-{architecture}"
            model = AutoModelForCausalLM.from_pretrained(base(architecture))
            # The random head is too weak for an adapter to make the model confident.
            model.get_output_embeddings().weight.data *= 20
            model.save_pretrained(folder)
            word_tokenizer().save_pretrained(folder)
            made[architecture] = folder
        return made[architecture]

    return make


def echo_rows(count: int, *, seed: int = 0, words: int = 4) -> list[dict[str, str]]:
    """Rows whose completion repeats the last word of the prompt."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = [f"w{chance.randrange(8)}" for _ in range(words)]
        rows.append({"question": "? " + " ".join(prompt), "answer": prompt[-1]})
    return rows


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def two_sides(folder: Path) -> list[dict[str, Any]]:
    """Datasets for two sides: 64 rows of the words w0 to w7 for the task, 32 of w8 to w15 for the language."""
    task = echo_rows(64)
    language = [
        {key: re.sub(r"w(\d+)", lambda word: f"w{int(word[1]) + 8}", text) for key, text in row.items()}
        for row in echo_rows(32, seed=1)
    ]
    return [
        {
            "path": str(write_jsonl(folder / f"{side}.jsonl", rows)),
            "prompt": "{question}",
            "completion": " {answer}",
            "side": side,
        }
        for side, rows in (("task", task), ("language", language))
    ]


def make_expert(
    base: Path, folder: Path, seed: int = 0, kind: type = LoraConfig, *, copies: bool = False, **changes: Any
) -> Path:
    """An adapter that PEFT made and saved, with random values everywhere."""
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    if kind is LoraConfig:
        options = {"r": 4, "lora_alpha": 8, "use_rslora": True, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), kind(**options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn_like(parameter) + (1.0 if "magnitude" in name else 0.0)
    model.save_pretrained(folder, save_embedding_layers=copies)  # True: with a copy of the base's own embedding
    return folder


def recipe_maker(base: Path, folder: Path) -> Callable[..., TrainRecipe]:
    """`make(training={…}, adapter={…}, rows=[…], …)`: a quick recipe with these changes, its rows in `folder`."""

    def make(**changes: Any) -> TrainRecipe:
        rows = changes.pop("rows", None) or echo_rows(64)
        data = write_jsonl(folder / "rows.jsonl", rows)
        content: dict[str, Any] = {
            "base_model": str(base),
            "adapter": {"r": 4, "alpha": 8},
            "datasets": [{"path": str(data), "prompt": "{question}", "completion": " {answer}"}],
            "training": {
                "batch_size": 8,
                "gradient_accumulation": 1,
                "learning_rate": 0.01,
                "max_length": 32,
                "save_every_samples": None,
                "logging_steps": 1,
            },
        }
        for key, value in changes.items():
            added = isinstance(content.get(key), dict) and isinstance(value, dict) and "method" not in value
            content[key] = {**content[key], **value} if added else value
        return TrainRecipe.model_validate(content)

    return make


@pytest.fixture
def make_recipe(pico: Callable[[str], Path], tmp_path: Path) -> Callable[..., TrainRecipe]:
    return recipe_maker(pico("llama"), tmp_path)
