"""What a recipe may pass on to other libraries; the command line's own settings are the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from refusals import refused

from adapterswap.experiments.permitted import ENGINE, GENERATION
from adapterswap.experiments.sweeps import SweepRecipe
from adapterswap.experiments.training.recipe import TrainRecipe
from adapterswap.kit.errors import FieldError
from adapterswap.kit.files.yaml import shipped_recipes

SWEEP = {
    "base_model": "org/base",
    "task_experts": {"math": "org/math"},
    "language_experts": {"sw": "org/sw"},
    "tasks": ["mgsm_direct_sw"],
}
SETTINGS = {
    "custom_generate": {"gen_kwargs": {"custom_generate": "script", "trust_remote_code": True}},
    "assistant_model": {"gen_kwargs": {"temperature": 1.0, "assistant_model": "org/name"}},
    "stopping_criteria": {"gen_kwargs": {"stopping_criteria": ["script"]}},
    "until": {"gen_kwargs": {"until": [{"custom_generate": "script"}]}},  # a permitted name with a strange value
    "reasoning_parser_plugin": {"engine": "vllm", "engine_args": {"reasoning_parser_plugin": "script.py"}},
    "scheduler_cls": {"engine": "vllm", "engine_args": {"scheduler_cls": "script.Scheduler"}},
    "distributed_executor_backend": {"engine": "vllm", "engine_args": {"distributed_executor_backend": "script.Own"}},
    "kv_transfer_config": {"engine": "vllm", "engine_args": {"kv_transfer_config": {"kv_connector_module_path": "x"}}},
    "compilation_config": {"engine": "vllm", "engine_args": {"compilation_config": {"backend": "script.own"}}},
    "quantization": {"engine": "vllm", "engine_args": {"quantization": {"method": "script"}}},
}
ROWS = {
    "pandas": {"path": "pandas", "data_files": "rows.pkl"},
    "sql": {"path": "sql", "data_files": "rows.db"},
    "address": {"path": "json", "data_files": "http://169.254.169.254/latest"},
    "chained": {"path": "org/name", "data_files": ["a.json", "zip://a.json::https://example.com/a.zip"]},
    "folder": {"path": "org/name", "data_dir": "s3://bucket"},
}


def written(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sweep_passes_on_only_what_is_listed(run: Callable[..., Result], tmp_path: Path, name: str) -> None:
    key = "gen_kwargs" if "gen_kwargs" in SETTINGS[name] else "engine_args"
    path = written(tmp_path / "sweep.yaml", {**SWEEP, "settings": SETTINGS[name]})
    with refused(FieldError, f"settings.{key}.{name}", match=str(path)):
        SweepRecipe.read(path)
    checked = run("recipes", "validate", path)
    assert checked.exit_code == 1
    assert name in checked.output
    swept = run("sweep", path, "-o", tmp_path / "out", "--dry-run")
    assert (swept.exit_code, name in swept.stderr, (tmp_path / "out").exists()) == (2, True, False)


def test_a_fragment_is_a_file_too(tmp_path: Path) -> None:
    fragment = written(tmp_path / "fragment.yaml", {"settings": SETTINGS["custom_generate"]})
    path = written(tmp_path / "sweep.yaml", {**SWEEP, "extends": "fragment.yaml", "settings": {"num_fewshot": 0}})
    with refused(FieldError, "settings.gen_kwargs.custom_generate", match=str(fragment)):
        SweepRecipe.read(path)


def test_what_you_type_is_your_own(tmp_path: Path) -> None:
    path = written(tmp_path / "sweep.yaml", {**SWEEP, "settings": {"gen_kwargs": {"temperature": 0.5}}})
    typed = ["settings.engine=vllm", "settings.engine_args.scheduler_cls=own.Scheduler"]
    typed += ["settings.gen_kwargs.custom_generate=own"]
    settings = SweepRecipe.read(path, typed).settings
    assert settings.engine_args == {"scheduler_cls": "own.Scheduler"}
    assert settings.gen_kwargs == {"temperature": 0.5, "custom_generate": "own"}
    whole = SweepRecipe.read(path, ["settings={gen_kwargs: {custom_generate: own}}"]).settings
    assert whole.gen_kwargs == {"custom_generate": "own"}
    in_python = SweepRecipe(**SWEEP, settings={"gen_kwargs": {"custom_generate": "own"}})
    assert in_python.settings.gen_kwargs == {"custom_generate": "own"}
    bad = written(tmp_path / "bad.yaml", {**SWEEP, "settings": SETTINGS["custom_generate"]})
    with refused(FieldError, "settings.gen_kwargs.trust_remote_code"):  # one that you replace does not excuse another
        SweepRecipe.read(bad, ["settings.gen_kwargs.custom_generate=null"])
    assert SweepRecipe.read(bad, ["settings.gen_kwargs={temperature: 1}"]).settings.gen_kwargs == {"temperature": 1}


def test_usual_settings_pass(tmp_path: Path) -> None:
    settings = {
        "engine": "vllm",
        "engine_args": dict.fromkeys(sorted(ENGINE), 1),
        "gen_kwargs": {**dict.fromkeys(sorted(GENERATION), 1), "until": ["\n", "."], "bad_words_ids": [[1, 2], [3]]},
    }
    path = written(tmp_path / "sweep.yaml", {**SWEEP, "settings": settings})
    assert SweepRecipe.read(path).settings.engine_args == settings["engine_args"]
    for recipe in shipped_recipes("sweep").values():
        SweepRecipe.read(recipe)


@pytest.mark.parametrize("name", ROWS)
def test_training_reads_files_and_the_hub(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "train.yaml", {"base_model": "org/base", "datasets": [{**ROWS[name], "text": "{t}"}]})
    with refused(FieldError, "datasets.0", match=str(path)):
        TrainRecipe.read(path)


def test_usual_rows_pass(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    usual: list[dict[str, Any]] = [
        {"path": "org/name", "data_files": "hf://datasets/org/name/*.json"},
        {"path": "json", "data_files": ["a.json", "b.json"]},
        {"path": "folder", "data_files": "a.csv"},
        {"path": "rows.jsonl"},
        {"path": "../elsewhere/rows.parquet"},
    ]
    datasets = [{**source, "text": "{t}"} for source in usual]
    path = written(tmp_path / "train.yaml", {"base_model": "org/base", "datasets": datasets})
    assert len(TrainRecipe.read(path).datasets) == len(usual)
    for recipe in shipped_recipes("train").values():
        TrainRecipe.read(recipe)
