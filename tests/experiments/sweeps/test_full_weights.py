"""Cells judged as full weights, against `merge` and an evaluation of the model that it writes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from refusals import refused
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.writing.weights import merge
from adapterswap.experiments.evaluation import evaluate_model
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.experiments.reporting.report import compose_command, evaluate_command
from adapterswap.experiments.sweeps import Run, SweepRecipe, prepare, read_samples, sweep
from adapterswap.experiments.sweeps.judge import way_of
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.kit.errors import BaseModelError, ExpertError, FieldError, OutputError, RunError, UnsupportedError

from .conftest import SETTINGS

Recipe = Callable[..., SweepRecipe]
FULL = ("full-math", "full-sw", "full-joint")
TIES = {"name": "TIES", "method": "ties", "density": 0.4, "full_rank": True}


@pytest.fixture(scope="module")
def full(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with full checkpoints on `world`'s base, and with its base and adapters: every weight is changed."""
    folder = tmp_path_factory.mktemp("full")
    for seed, name in enumerate(FULL):
        model = AutoModelForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
        model.save_pretrained(folder / name)
    for path in world.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def recipe_of(full: Path, **changes: Any) -> SweepRecipe:
    content = {
        "base_model": str(full / "base"),
        "task_experts": {"math": str(full / "full-math")},
        "language_experts": {"sw": str(full / "full-sw")},
        "tasks": ["mgsm_direct_sw"],
        "settings": {**SETTINGS, "limit": 2},
        **changes,
    }
    return SweepRecipe.model_validate(content)


def check_beside_merge(prepared: PreparedSweep, run: Run, full: Path, tmp_path: Path) -> None:
    """Every cell has the outputs and scores of the model that `merge` writes; those that are switched, of the plan."""
    places = {**prepared.recipe.task_experts, **prepared.recipe.language_experts}
    places |= {"extra-1": str(full / "full-joint")}
    for result in run.results:
        cell, base, plan = result.cell, prepared.base, prepared.plans[result.cell.cell]
        composition = cell.parsed
        if composition is not None and way_of(prepared, cell) == "merged":
            requested = composition.model_copy(update={"base_model": str(full / "base")})
            merge(adapterswap.compose(requested, places), out_path=tmp_path / cell.cell)
            base, plan = OpenedBase.open(str(tmp_path / cell.cell)), None
        with Subject(base, plan=plan).loaded(device="cpu") as model:
            alone = evaluate_model(model, base.tokenizer, cell.tasks, prepared.settings)
        samples = read_samples(run.folder, cell.cell)
        expected = [{key: sample.as_json()[key] for key in samples[0]} for sample in alone.samples]
        assert samples == expected, cell.short
        for name, value in result.results.items():
            score = alone.tasks[name].score("normalized")
            assert (value.value, value.stderr) == (score.value, score.stderr)
        assert result.relative_error is None


def test_full_checkpoints_are_judged_as_merge_writes_them(full: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        full,
        extra={"joint SFT": str(full / "full-joint")},
        compositions=[
            {"bottom": 2, "top": 1, "bottom_transition": 1, "norms": ["average", "layer"]},
            {"method": "soup", "task_weight": 2},
            {"method": "soup", "weights": "magnitude"},
            {"method": "ties", "density": 0.4},
            {"method": "dare_linear", "density": 0.5, "seed": 3},
            {"method": "arcee_fusion"},
            {"language": "base", "bottom": 1, "top": 1},
            {"name": "rules", "rules": ["language: 0", "task*0.5 + language*0.5: 1", "task"]},
        ],
    )
    prepared = prepare(recipe)
    assert {way_of(prepared, cell) for cell in prepared.grid.cells if cell.composition} == {"merged"}
    run = sweep(prepared, tmp_path / "run", device="cpu")
    assert len(run.results) == 4 + 9
    check_beside_merge(prepared, run, full, tmp_path)
    outputs = {str([row["output"] for row in read_samples(run.folder, r.cell.cell)]) for r in run.results}
    assert len(outputs) > 10  # the methods do differ
    assert str(full) not in (run.folder / "sweep.json").read_text()
    assert run.described["experts"]["math"]["files"].keys() >= {"model.safetensors", "config.json"}


def test_adapters_at_full_rank_between_cells_that_are_switched(full: Path, tmp_path: Path) -> None:
    """The base and its adapters are loaded again after a merged model; beside a full checkpoint adapters are merged."""
    recipe = recipe_of(
        full,
        task_experts={"math1": str(full / "math1")},
        language_experts={"sw1": str(full / "sw1"), "sw": str(full / "full-sw")},
        pairs=[{"task": "math1", "language": "sw1"}, {"task": "math1", "language": "sw"}],
        compositions=[
            TIES,
            {"method": "soup"},
            {"name": "fused", "method": "arcee_fusion", "full_rank": True},
            {"name": "cut", "rules": ["sw1: 0-1", "math1"], "row_threshold": 0.05, "full_rank": True},
            {"name": "switched", "rules": ["sw1: 0-1", "math1"]},
        ],
    )
    prepared = prepare(recipe)
    ways = {(cell.family, *cell.language_expert): way_of(prepared, cell) for cell in prepared.grid.cells}
    assert ways == {
        ("base",): "switched", ("task expert",): "switched", ("language expert", "sw1"): "switched",
        ("language expert", "sw"): "merged", ("TIES", "sw1"): "merged", ("TIES", "sw"): "merged",
        ("soup", "sw1"): "switched", ("soup", "sw"): "merged", ("fused", "sw1"): "merged", ("fused", "sw"): "merged",
        ("cut", "sw1"): "merged", ("switched", "sw1"): "switched",
    }  # fmt: skip
    run = sweep(prepared, tmp_path / "run", device="cpu")
    check_beside_merge(prepared, run, full, tmp_path)


def test_the_commands_of_a_report_make_and_judge_the_cell(
    full: Path, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run counts merged cells, and a report's lines write full weights that score as the cell did."""
    families = [{"method": "ties", "density": 0.4}, {"rules": ["language: 0-1", "task"]}]
    recipe = recipe_of(full, compositions=families, baselines=["base"])
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    counted = json.loads(run("sweep", file, "-o", tmp_path / "run", "--dry-run", "--json").stdout)
    assert (counted["switched"], counted["reduced"], counted["merged"]) == (1, 0, 2)
    assert list(counted["strips"]) == ["math+sw@rules=language: 0-1; task"]
    assert "2 merged into full weights first" in run("sweep", file, "-o", tmp_path / "run", "--dry-run").stdout
    result = run("sweep", file, "-o", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    judged = Run.read(tmp_path / "run")
    cell = next(one for one in judged.results if one.cell.family == "ties")
    command = compose_command(judged, cell.cell)
    assert command is not None
    assert shlex.split(command)[:2] == ["adapterswap", "merge"]
    monkeypatch.chdir(full)
    *words, _ = shlex.split(command)[1:]
    written = run(*words, tmp_path / cell.cell.cell)
    assert written.exit_code == 0, written.stderr
    monkeypatch.chdir(tmp_path)
    again = run(*shlex.split(evaluate_command(judged, cell.cell))[1:], "--json", "--device", "cpu")
    assert again.exit_code == 0, again.stderr
    scores = {task["name"]: task["scores"] for task in json.loads(again.stdout)["tasks"]}
    found = {f"{score['metric']},{score['filter']}": score["value"] for score in scores["mgsm_direct_sw"]}
    assert found == cell.results["mgsm_direct_sw"].scores
    adapterswap.report(tmp_path / "run", tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "full-math</td>" in page
    assert "full checkpoint, config <code>" in page


def test_other_weights_under_the_same_name_are_refused(full: Path, tmp_path: Path) -> None:
    recipe = recipe_of(full, compositions=[{"method": "soup"}], baselines=[])
    sweep(recipe, tmp_path / "run", device="cpu")
    other = recipe_of(full, compositions=[{"method": "soup"}], baselines=[])
    other.task_experts["math"] = str(full / "full-joint")
    with refused(RunError, "out_path", match="experts"):
        sweep(other, tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("family", "parameter"),
    [
        ({"method": "soup", "max_rank": 4}, "max_rank"),
        ({"method": "soup", "max_error": 0.1}, "max_error"),
        ({"rules": ["task + language"], "max_rank": 4}, "max_rank"),
    ],
)
def test_a_full_checkpoint_has_no_rank_to_bound(full: Path, family: dict[str, Any], parameter: str) -> None:
    with refused(FieldError, parameter, match="math is a full checkpoint"):
        prepare(recipe_of(full, compositions=[family]))


def test_two_forms_of_a_family_are_refused() -> None:
    with refused(FieldError, "compositions.0"):
        recipe_of(Path("x"), compositions=[{"method": "ties", "density": 0.4, "max_rank": 4, "full_rank": True}])


def test_weights_that_do_not_fit_are_refused_before_anything_is_judged(full: Path, tmp_path: Path) -> None:
    """A checkpoint of another depth, and adapters at full rank on a base whose weights have another shape."""
    from experiments.evaluation.conftest import byte_tokenizer, pico_model

    pico_model(layers=4).save_pretrained(tmp_path / "shallow")
    byte_tokenizer().save_pretrained(tmp_path / "shallow")
    with refused(ExpertError, None, match="num_hidden_layers"):
        prepare(recipe_of(full, task_experts={"math": str(tmp_path / "shallow")}, compositions=[{"method": "soup"}]))
    grown = AutoModelForCausalLM.from_pretrained(full / "full-math")
    grown.resize_token_embeddings(grown.config.vocab_size + 2, mean_resizing=False)
    grown.save_pretrained(tmp_path / "grown")
    byte_tokenizer().save_pretrained(tmp_path / "grown")
    with refused(UnsupportedError):
        prepare(recipe_of(full, task_experts={"math": str(tmp_path / "grown")}, compositions=[{"method": "soup"}]))
    adapters = {"task_experts": {"m": str(full / "math1")}, "language_experts": {"s": str(full / "sw1")}}
    model = pico_model()
    model.config.intermediate_size = 64
    type(model)(model.config).save_pretrained(tmp_path / "wider")
    byte_tokenizer().save_pretrained(tmp_path / "wider")
    with refused(BaseModelError, "base_model", match="32×48 in m, but 32×64"):
        prepare(recipe_of(full, base_model=str(tmp_path / "wider"), compositions=[TIES], baselines=[], **adapters))


@pytest.fixture
def longer(full: Path, tmp_path: Path) -> Path:
    """A copy of the math checkpoint for a longer context: its rotary embedding has another theta."""
    shutil.copytree(full / "full-math", tmp_path / "longer")
    config = json.loads((tmp_path / "longer" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (tmp_path / "longer" / "config.json").write_text(json.dumps(config))
    return tmp_path / "longer"


def test_a_recipe_says_whose_config_compositions_take(full: Path, longer: Path, tmp_path: Path) -> None:
    """A role names the owner in each pair; an expert alone keeps its own; the commands of a report say the same."""
    content = {"task_experts": {"math": str(longer)}, "compositions": [{"bottom": 2, "top": 1}]}
    with refused(ExpertError, "config_from", match="rope_theta is .* and 100"):
        prepare(recipe_of(full, **content))
    thetas = {"task": {"math": 100.0, "sw": 10000.0, "math+sw": 100.0}, "base": {"math+sw": 10000.0}}
    for owner, expected in thetas.items():
        prepared = prepare(recipe_of(full, config_from=owner, **content))
        run = sweep(prepared, tmp_path / owner, device="cpu")
        check_beside_merge(prepared, run, full, tmp_path / f"{owner}-merged")
        for result in run.results:
            merged = tmp_path / f"{owner}-merged" / result.cell.cell / "config.json"
            if (theta := expected.get(result.cell.short.partition("@")[0])) is not None:
                assert json.loads(merged.read_text())["rope_parameters"]["rope_theta"] == theta
    judged = Run.read(tmp_path / "task")
    cell = next(one.cell for one in judged.results if "+" in one.cell.short)
    words = shlex.split(str(compose_command(judged, cell)))
    assert words[words.index("--config-from") + 1] == "math"
    assert "math=longer" in words
    assert judged.described["recipe"]["config_from"] == "task"


def test_an_owner_of_configs_that_decides_nothing_is_refused(full: Path) -> None:
    adapters = {"task_experts": {"m": str(full / "math1")}, "language_experts": {"s": str(full / "sw1")}}
    with refused(FieldError, "config_from"):
        prepare(recipe_of(full, config_from="base", compositions=[{"bottom": 1}], **adapters))


def test_vllm_keeps_the_bases_config(full: Path, longer: Path) -> None:
    from adapterswap.experiments.sweeps.engines import _check_merged

    content = {"task_experts": {"math": str(longer)}, "compositions": [{"bottom": 2}], "baselines": ["base"]}
    settings = {**SETTINGS, "engine": "vllm"}
    with refused(UnsupportedError, "engine", match="rope_parameters.rope_theta"):
        _check_merged(prepare(recipe_of(full, config_from="task", settings=settings, **content)))
    _check_merged(prepare(recipe_of(full, config_from="base", settings=settings, **content)))


def test_a_full_disk_names_the_temporary_folder(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished cells are kept; the remedy names the temporary folder, since the sweep's folder has space."""
    import tempfile

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("adapterswap.core.writing.stream.OutputShard.size", property(lambda shard: 2**62))
    with pytest.raises(OutputError, match="TMPDIR"):
        sweep(recipe_of(full, compositions=[{"method": "soup"}], baselines=["base"]), tmp_path / "run", device="cpu")
    assert [result.cell.family for result in Run.read(tmp_path / "run").results] == ["base"]
