"""A chain of adapters as an expert of a sweep, against full weights that PEFT merges one adapter after the other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close
from transformers import AutoModelForCausalLM

from adapterswap import evaluate
from adapterswap.experiments.recipes import check_recipe
from adapterswap.experiments.reporting.report import compose_command
from adapterswap.experiments.sweeps import Run, SweepRecipe, read_samples
from adapterswap.kit.errors import FieldError
from experiments.evaluation.conftest import byte_tokenizer

from .conftest import PROJECTIONS

Content = Callable[..., dict[str, Any]]


def full(base: Path, *adapters: Path) -> Any:
    """The base with adapters merged into it by PEFT, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for adapter in adapters:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


@pytest.fixture(scope="module")
def top(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was trained on the base with `math1` merged in."""
    folder = tmp_path_factory.mktemp("chain")
    full(world / "base", world / "math1").save_pretrained(folder / "merged")
    base = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(folder / "top", save_embedding_layers=False)
    return folder / "top"


def test_a_chain_is_one_expert(
    content: Content,
    world: Path,
    top: Path,
    run: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, in a swap, a soup and by rules; and by the command that a report prints for each."""
    (tmp_path / "top").symlink_to(top)
    compositions = [{"bottom": 1, "top": 0}, {"method": "soup"}, {"name": "own", "rules": ["language: 1", "task"]}]
    file = tmp_path / "recipe.yaml"
    chain = {"chain": [str(world / "math1"), "top"]}
    file.write_text(
        yaml.safe_dump(content(task_experts={"math": chain}, compositions=compositions, baselines=["base", "task"]))
    )
    assert check_recipe(file) == "sweep"
    result = run("sweep", file, "-o", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    judged = Run.read(tmp_path / "run")
    assert judged.described["recipe"]["task_experts"] == {"math": {"chain": ["math1", "top"]}}
    math, language = full(world / "base", world / "math1", top), full(world / "base", world / "sw1")
    base = full(world / "base")
    models = {"math": math, "language": language, "base": base}
    weights = {
        name: {key: tensor.clone() for key, tensor in model.state_dict().items()} for name, model in models.items()
    }

    def mixed(choose: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: choose(name) for name in weights["base"]}

    expected = {
        "base": weights["base"],
        "task expert": weights["math"],
        "layer_swap": mixed(lambda name: weights["language" if ".layers.0." in name else "math"][name]),
        "soup": mixed(lambda name: (weights["math"][name] + weights["language"][name]) / 2),
        "own": mixed(lambda name: weights["language" if ".layers.1." in name else "math"][name]),
    }
    assert [result.cell.family for result in judged.results] == [*expected]
    texts = {}
    for one in judged.results:
        folder = tmp_path / one.cell.family
        math.load_state_dict(expected[one.cell.family])
        math.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        settings = {"num_fewshot": 1, "limit": 3, "max_gen_toks": 6, "batch_size": 3}
        alone = evaluate(folder, list(one.cell.tasks), device="cpu", **settings)
        texts[one.cell.family] = [sample["output"] for sample in read_samples(judged.folder, one.cell.cell)]
        assert texts[one.cell.family] == [sample.output for sample in alone.samples], one.cell.short
    assert len({json.dumps(each) for each in texts.values()}) == len(texts)
    monkeypatch.chdir(tmp_path)
    places = {"math-1": world / "math1", "math-2": top, "sw1": world / "sw1"}
    for one in judged.results[2:]:
        command = compose_command(judged, one.cell)
        assert command is not None
        words = shlex.split(command)[1:]
        for name, place in places.items():
            words = [f"{name}={place}" if word.startswith(f"{name}=") else word for word in words]
        words = [str(world / "base") if word == "base" else word for word in words]
        assert run(*words).exit_code == 0, command
        written = full(world / "base", Path(one.cell.cell)).state_dict()
        for name, weight in expected[one.cell.family].items():
            close(written[name], weight, name=name, depth=2)


def test_names_that_a_chain_takes_are_refused(content: Content, world: Path) -> None:
    chain = {"chain": [str(world / "math1"), str(world / "sw1")]}
    short = {"math": {"chain": chain["chain"][:1]}}
    for experts, parameter in (
        ({"math": chain, "math-2": chain["chain"][0]}, None),
        (short, "task_experts.math.chain"),
    ):
        with refused(FieldError, parameter):
            SweepRecipe.model_validate(content(task_experts=experts))
