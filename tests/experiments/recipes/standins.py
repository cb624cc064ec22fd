"""Small stand-ins for what the shipped recipes name: bases of the same family, rows of the same columns.

The form of a row is taken from the recipe itself, so that ids and columns are only in the data fragments.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from adapterswap.experiments.training import TrainRecipe, train
from adapterswap.experiments.training.recipe import DatasetSource, Template
from adapterswap.kit.files.yaml import shipped_recipes

FAMILIES: dict[str, type[PretrainedConfig]] = {
    "meta-llama/Llama-3.1-8B": transformers.LlamaConfig,
    "meta-llama/Llama-3.1-8B-Instruct": transformers.LlamaConfig,
    "Qwen/Qwen2.5-7B-Instruct": transformers.Qwen2Config,
    "CohereForAI/aya-expanse-8b": transformers.CohereConfig,
    "tiiuae/Falcon3-7B-Instruct": transformers.LlamaConfig,
    "Qwen/Qwen3-1.7B": transformers.Qwen3Config,
}
LAYERS = 32  # for the one base whose recipes name layers; 4 are enough for the others
SPECIAL = ["<pad>", "<eos>"]
BYTES = sorted(ByteLevel.alphabet())
CHAT = "{% for m in messages %}? {{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}? {% endif %}"
ROWS = 24

Base = Callable[..., Path]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token to a byte. Families that bring a tokenizer class of their own rebuild it from these parts."""
    tokenizer = Tokenizer(BPE({token: place for place, token in enumerate(SPECIAL + BYTES)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """`standin("Qwen/Qwen3-1.7B", layers=4)`: the folder of a base of its family, of width 16, with random weights."""
    made: dict[tuple[str, int], Path] = {}

    def make(name: str, *, layers: int) -> Path:
        if (name, layers) not in made:
            config = FAMILIES[name](
                vocab_size=len(SPECIAL + BYTES), hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1,
                eos_token_id=1,
            )  # fmt: skip
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp("standins") / name.rpartition("/")[2]
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer = byte_tokenizer()
            if name != "meta-llama/Llama-3.1-8B":  # the one base without a chat template
                tokenizer.chat_template = CHAT
            tokenizer.save_pretrained(folder)
            made[name, layers] = folder
        return made[name, layers]

    return make


def rows_like(source: DatasetSource) -> list[dict[str, Any]]:
    """Rows of nonsense words with the columns that `source` names; half of them in another language."""
    chance = random.Random(source.path)

    def words() -> str:
        return " ".join(f"w{chance.randrange(90)}" for _ in range(4))

    templates = [template for template in (source.prompt, source.completion, source.text) if template]
    columns = {field for template in templates for field in Template(template).fields}
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        row: dict[str, Any] = {column: words() for column in columns} | {"another column": number}
        if source.messages:
            row[source.messages] = [[words(), words()], [words(), words()]]
        for column, value in source.filter.items():
            row[column] = value if number % 2 else "another"
        rows.append(row)
    return rows


def small_recipe(name: str, standin: Base, folder: Path) -> TrainRecipe:
    """The shipped recipe `name`, on a stand-in base and rows, for two steps of two rows."""
    shipped = TrainRecipe.read(shipped_recipes()[name])
    speaks_of_layers = shipped.adapter.layers or shipped.adapter.partition or shipped.simultaneous
    base = standin(shipped.base_model, layers=LAYERS if speaks_of_layers else 4)
    settings = [
        f"base_model={base}", "validation.rows=4", "training.max_steps=2",
        "training.batch_size=2", "training.gradient_accumulation=1", "training.warmup=0", "training.max_length=128",
        "training.save_every_samples=null", "training.logging_steps=1", "training.device=cpu",
    ]  # fmt: skip
    if shipped.start is not None:  # an adapter that the user has
        settings += [f"start={_a_start(base, folder / 'start')}"]
    for position, source in enumerate(shipped.datasets):
        path = folder / f"{position}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_like(source)), encoding="utf-8")
        place = f"datasets.{source_names(name)[position]}"
        settings += [f"{place}.path={path}", f"{place}.split=train"]
        settings += [f"{place}.{key}=null" for key in ("name", "data_files", "data_dir", "revision")]
    return TrainRecipe.read(shipped_recipes()[name], settings)


def _a_start(base: Path, folder: Path) -> Path:
    """An adapter for a stand-in, as PEFT saves it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, task_type="CAUSAL_LM"))
    model.save_pretrained(folder)
    return folder


def source_names(name: str) -> list[str]:
    """The names of a shipped recipe's sources, as its fragments give them."""
    from adapterswap.experiments.recipes import resolve_recipe

    content, _ = resolve_recipe(shipped_recipes()[name])
    return [key for key, value in content["datasets"].items() if value is not None]


def check_that_it_trains(name: str, standin: Base, folder: Path) -> None:
    """Train the recipe for two steps and check the output."""
    recipe = small_recipe(name, standin, folder)
    report = train(recipe, out_path=folder / "out", progress=False)
    assert report.steps == 2
    assert all(0 < loss < 100 for _, loss in [*report.train_losses, *report.eval_losses])
    assert report.rows.validation == 4
    assert len(report.rows.sources) == len(recipe.datasets)
    filtered = [bool(source.filter) for source in recipe.datasets]
    kept = [source["kept"] for source in report.rows.sources]
    assert kept == [ROWS // 2 if halved else ROWS for halved in filtered]
    assert report.rows.dropped == 0
    weights = "model.safetensors" if recipe.adapter.method == "none" else "adapter_model.safetensors"
    assert (folder / "out" / weights).is_file()


def train_recipes(*models: str) -> list[str]:
    """The shipped train recipes for these models."""
    found = [name for name in shipped_recipes("train") if name.split("/")[1] in models]
    assert found
    return found
