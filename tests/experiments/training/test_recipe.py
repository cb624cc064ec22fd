from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused

from adapterswap.experiments.training import TrainRecipe
from adapterswap.experiments.training.recipe import AdapterOptions, DatasetSource, TrainingOptions, Validation
from adapterswap.kit.errors import AdapterswapError, FieldError, NotFoundError
from adapterswap.kit.files.yaml import find_recipe, shipped_recipes

MINIMAL = "base_model: base\ndatasets: [{path: rows.jsonl, text: '{text}'}]\n"


def _recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_shipped_recipe_is_found_by_name_and_a_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "train/llama-3.1-8b-instruct/math"
    assert find_recipe(name, "train") == shipped_recipes()[name]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("mine")
    assert find_recipe(name, "train") == Path(name)
    with refused(NotFoundError, "recipe", match=r"such as train/qwen3-1\.7b/math"):
        find_recipe("train/qwen3-1.7b/maths", "train")


def test_the_recipe_in_the_documentation_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "train.md").read_text(encoding="utf-8")
    recipe = TrainRecipe.read(_recipe(tmp_path, text.split("```yaml\n")[1].split("```")[0]))
    assert [source.path for source in recipe.datasets] == ["CohereForAI/aya_dataset", "more/rows.jsonl"]


@pytest.mark.parametrize("model", [TrainRecipe, AdapterOptions, DatasetSource, Validation, TrainingOptions])
def test_every_field_is_documented(model: type[TrainRecipe]) -> None:
    assert all(field.description for field in model.model_fields.values())


def test_overrides_reach_into_the_recipe(tmp_path: Path) -> None:
    path = _recipe(tmp_path, MINIMAL)
    changed = [
        "training.learning_rate=3e-4",
        "adapter.layers=[0, 1, 5]",
        "datasets.0.samples=7",
        "adapter.rslora=false",
    ]
    recipe = TrainRecipe.read(path, changed)
    assert recipe.training.learning_rate == 3e-4
    assert recipe.adapter.layers == "0-1,5"
    assert recipe.datasets[0].samples == 7
    assert not recipe.adapter.rslora
    assert recipe.folder == tmp_path


def test_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = """
base_model: base
adapter: {r: 0, layers: 5-2}
datasets:
  - {path: a, prompt: "{q}"}
  - {path: b, prompt: "{q.x}", completion: "{a}"}
  - {path: c, text: "{t}", messages: m}
training: {learning_rat: 1, max_grad_norm: .inf}
validation: {rows: 1, fraction: 0.5}
"""
    with pytest.raises(AdapterswapError) as caught:
        TrainRecipe.read(_recipe(tmp_path, text))
    message = str(caught.value)
    for expected in (
        "adapter.r is 0",
        "the range 5-2 runs backwards",
        "the dataset a needs prompt with completion",
        "not just a column's name",
        "the dataset c needs",
        "Did you mean 'learning_rate'",
        "training.max_grad_norm is inf",
        "exactly one of fraction, rows and datasets",
    ):
        assert expected in message
    assert len(caught.value.problems) == 8


def test_a_recipe_needs_a_base_and_rows(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=r"(?s)base_model is missing.*datasets is missing"):
        TrainRecipe.read(_recipe(tmp_path, "out_path: x\n"))
    with refused(FieldError, "datasets"):
        TrainRecipe.read(_recipe(tmp_path, "base_model: x\ndatasets: []\n"))
