"""The shipped sweeps over published checkpoints run dry on pico models with the same names, depth and embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from adapterswap import compose, merge
from adapterswap.core.methods.registry import all_methods
from adapterswap.core.planning.composition import Composition
from adapterswap.experiments.evaluation.tasks import split_shots
from adapterswap.experiments.sweeps.recipe import SweepRecipe
from adapterswap.kit.files.yaml import shipped_recipes

from .standins import BYTES, CHAT, SPECIAL, byte_tokenizer

Run = Callable[..., Result]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + BYTES), "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
BASES: dict[str, PretrainedConfig] = {
    "sweep/llama-3.2-3b/mergebench": LlamaConfig(**SIZES, num_hidden_layers=28, tie_word_embeddings=True),
    "sweep/qwen3-8b-base/lighton-swahili": Qwen3Config(
        **SIZES, num_hidden_layers=36, max_position_embeddings=32768, tie_word_embeddings=False
    ),
}


def checkpoint(folder: Path, config: PretrainedConfig, seed: int) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def on_standins(name: str, folder: Path) -> tuple[SweepRecipe, list[str]]:
    """The shipped sweep, and the settings that put full checkpoints of random weights in the place of its own."""
    shipped = SweepRecipe.read(shipped_recipes()[name])
    named = {
        "base_model": shipped.base_model,
        **{f"task_experts.{expert}": place for expert, place in shipped.task_experts.items()},
        **{f"language_experts.{expert}": place for expert, place in shipped.language_experts.items()},
        **{f"extra.{row}": place for row, place in shipped.extra.items()},
    }
    places = {key: folder / str(place).replace("/", "--") for key, place in named.items()}
    for seed, place in enumerate(places.values()):
        checkpoint(place, BASES[name], seed)
    words = ["--set", "tasks=[mgsm_direct_sw]", "--set", "retention=[]", "--set", "settings.limit=2"]
    for key, place in places.items():
        words += ["--set", f"{key}={place}"]
    return shipped, words


@pytest.mark.parametrize("name", BASES)
def test_it_runs_dry(name: str, run: Run, tmp_path: Path) -> None:
    shipped, words = on_standins(name, tmp_path)
    result = run("sweep", name, *words, "--out-path", tmp_path / "out", "--dry-run", "--json", exit_code=0)
    counted = json.loads(result.stdout)["families"]
    assert counted.keys() >= {family.name for family in shipped.compositions} | shipped.extra.keys()
    assert all(counted.values())


@pytest.mark.parametrize("name", BASES)
def test_its_tasks_are_known(name: str, known_tasks: frozenset[str]) -> None:
    shipped = SweepRecipe.read(shipped_recipes()[name])
    stems = {split_shots(task)[0] for task in (*shipped.tasks, *shipped.retention)}
    stems = {stem.replace("mgsm_rev2", "mgsm") for stem in stems}
    assert stems <= known_tasks


# adamergex needs a third expert, core_* need LoRA; linear is task arithmetic whose weights are divided by their sum.
NOT_POSSIBLE = {"adamergex", "core_ties", "core_dare_ties", "linear"}


def test_mergebench_has_every_method_of_two_experts() -> None:
    shipped = SweepRecipe.read(shipped_recipes()["sweep/llama-3.2-3b/mergebench"])
    compared = {str(method) for family in shipped.compositions for method in family.method}
    assert {"layer_swap", *compared, *shipped.baselines} >= all_methods().keys() - NOT_POSSIBLE


def test_lightons_layers_can_be_read_off_the_released_swap(run: Run, tmp_path: Path) -> None:
    """docs/recipes.md: in the layers of the swap, released and English experts have a cosine of 1."""
    config = BASES["sweep/qwen3-8b-base/lighton-swahili"]
    places = [checkpoint(tmp_path / name, config, seed) for seed, name in enumerate(("base", "english", "swahili"))]
    shipped = SweepRecipe.read(shipped_recipes()["sweep/qwen3-8b-base/lighton-swahili"])
    for family in shipped.compositions[:2]:
        assert family.rules is not None
        experts = {"english": str(places[1]), "swahili": str(places[2])}
        plan = compose(Composition(experts=experts, rules=family.rules, base_model=str(places[0])))
        released = merge(plan, places[0], out_path=tmp_path / family.name.replace(" ", "-"))
        shown = run("analyze", f"released={released}", f"english={places[1]}", "--base-model", places[0], "--json")
        (pair,) = json.loads(shown.stdout)["pairs"]
        equal = {int(layer) for layer, values in pair["layers"].items() if values["cosine"] > 0.9999}
        first = int(family.name.rpartition(" ")[2])
        assert equal == set(range(13 - first, 23 - first))
