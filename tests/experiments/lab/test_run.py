"""One small lab run end to end: experts, compositions, scores, and all output files."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap import AdapterswapError, layer_swap
from adapterswap.experiments.lab import SCENES, LabPlan, Sizes, Study
from adapterswap.experiments.lab.bases import write_base
from adapterswap.experiments.lab.run import LAB
from adapterswap.experiments.lab.scenes import draw_problems
from adapterswap.experiments.lab.seed import METHODS, SCALES, ZONES, Questions, SeedResult
from adapterswap.experiments.lab.study import CAVEAT
from adapterswap.kit.errors import BaseModelError, OutputError

from .conftest import Run


def expert(run: Run, name: str) -> PeftModel:
    seed = run.folder / "seed-0"
    base = AutoModelForCausalLM.from_pretrained(seed / "base")
    return PeftModel.from_pretrained(base, seed / name).eval()


def test_experts_of_two_seeds_do_not_compose(run: Run, tmp_path: Path) -> None:
    """The bases of all seeds are called `base`."""
    another = tmp_path / "base"
    write_base(SCENES["gap"], 1, another)
    folder = run.folder / "seed-0"
    layer_swap(folder / "math", folder / "language", base_model=folder / "base")
    with refused(BaseModelError, "base_model"):
        layer_swap(folder / "math", folder / "language", base_model=another)


def test_scoring_equals_greedy_generation(run: Run) -> None:
    model, tokenizer = expert(run, "math"), AutoTokenizer.from_pretrained(run.folder / "seed-0" / "base")
    marks = []
    for language in ("en", "xx"):
        problems = draw_problems(SCENES["gap"], "test", 40)
        fast = Questions(problems, language).exact_match(model)
        for problem, mark in zip(problems, fast, strict=True):
            prompt = tokenizer(problem.prompt(language), return_tensors="pt", return_token_type_ids=False)
            with torch.inference_mode():
                ids = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
            answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
            assert mark == (answer == f"{problem.answer} </s>")
        marks += list(fast)
    assert 0 < sum(marks) < len(marks)  # both kinds occur


def test_every_method_is_scored_on_every_problem(run: Run) -> None:
    (seed,) = run.study.seeds
    assert list(seed.right) == list(METHODS)
    assert all(right.shape == (120,) for by_language in seed.right.values() for right in by_language.values())
    assert set(seed.grid) == set(ZONES)
    assert set(seed.scales) == set(SCALES)
    swaps = {zone: value for zone, value in seed.grid.items() if zone != (0, 0)}
    assert seed.grid[seed.bottom, seed.top] == max(swaps.values())
    assert seed.scales[seed.scale] == max(seed.scales.values())
    english = run.study.score("math expert", "en").mean
    assert english > 0.3 > run.study.score("base", "en").mean


@pytest.mark.parametrize(("name", "method"), [("math", "math expert"), ("math+language", "layer swap")])
def test_written_adapters_score_as_the_live_ones(run: Run, name: str, method: str) -> None:
    problems = draw_problems(SCENES["gap"], "test", 120)
    with (run.folder / "answers.jsonl").open() as file:
        told = {(row["method"], row["language"]): row["right"] for row in map(json.loads, file)}
    for language in ("en", "xx"):
        right = Questions(problems, language).exact_match(expert(run, name))
        assert "".join("01"[mark] for mark in right.astype(int)) == told[method, language]


def test_the_folder(run: Run) -> None:
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "answers.jsonl", "grid.png", "report.html", "results.json", "scores.png", "seed-0",
        "summary.json", "tables.csv", "tables.tex", "words.png",
    ]  # fmt: skip
    for name in ("grid", "scores", "words"):
        assert (run.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (run.folder / "results.json").read_text()
    content = json.loads(text)
    listed = content.pop("files")
    assert listed == sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file())
    weights = {name for name in listed if name.endswith(".safetensors")}
    assert content.pop("fingerprints").keys() == weights
    assert content == json.loads(json.dumps(run.study.to_json()))
    assert content["caveat"] == CAVEAT
    assert content["seeds"][0]["test"]["layer swap"]["xx"] == run.study.score("layer swap", "xx").mean
    summary = json.loads((run.folder / "summary.json").read_text())
    told = {row["label"]: row["spread"]["mean"] for row in summary["targets"][0]["rows"]}
    assert told == {method: pytest.approx(run.study.score(method, "xx").mean) for method in METHODS}
    assert summary["name"] == "run"
    for path in [*run.folder.rglob("*.json"), run.folder / "report.html"]:
        assert str(run.folder.parent) not in path.read_text(), path
    (adapter,) = {json.loads(p.read_text())["base_model_name_or_path"] for p in run.folder.rglob("adapter_config.json")}
    assert adapter == "base"


def test_which_folders_may_be_replaced(run: Run, tmp_path: Path) -> None:
    """Its own folder may be replaced, unless it holds other files."""
    shutil.copytree(run.folder, tmp_path / "lab-run")
    record = tmp_path / "lab-run" / "results.json"
    assert LAB.strangers(record.parent) == []
    LAB.check(record.parent, overwrite=True)
    for name in ("thesis.txt", "seed-0/math/thesis.txt", "seed-0/mine/adapter_config.json"):
        path = record.parent / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        with refused(OutputError, "out_path"):
            LabPlan.of(SCENES["gap"], 1, record.parent, overwrite=True)
        path.unlink()
        if path.parent.name == "mine":
            path.parent.rmdir()


def test_progress_is_reported_in_order(run: Run) -> None:
    shares = [share for _, _, share in run.told]
    assert shares == sorted(shares)
    assert [what for what, _ in groupby(what for _, what, _ in run.told)] == [
        "base", "math expert", "language expert", "development set", "test set"
    ]  # fmt: skip


def made_up(seeds: int) -> Study:
    """A study of made-up answers, to check how several seeds are reported."""
    rng = np.random.default_rng(0)
    reports = []
    for number in range(seeds):
        right = {m: {lang: rng.random(200) < 0.1 * (i + 1) for lang in ("en", "xx")} for i, m in enumerate(METHODS)}
        grid = {zone: 0.1 * sum(zone) for zone in ZONES}
        reports.append(
            SeedResult(number, grid, dict.fromkeys(SCALES, 0.5), 2, 0, 0.8, right, np.arange(200) % 4, {"math": 0.1})
        )
    return Study(SCENES["gap"], tuple(reports))


def test_tables_show_means_spreads_and_paired_differences() -> None:
    from rich.console import Console

    study = made_up(3)
    console = Console(width=120, record=True, file=io.StringIO())
    for table in study.tables():
        console.print(table)
    text = console.export_text()
    swap = [float(seed.right["layer swap"]["xx"].mean()) for seed in study.seeds]
    reset = [float(seed.right["reset"]["xx"].mean()) for seed in study.seeds]
    assert f"{np.mean(swap):.3f} ± {np.std(swap, ddof=1):.3f}" in text
    assert f"{np.mean(swap) - np.mean(reset):+.3f}" in text
    assert "0 : 3 of 3" in text  # the made-up reset is better, and the table says so
    for method in ("tuned sum", "inverse swap"):  # neighbours: some seeds may be unclear and count for neither
        result = study.against(method)
        assert f"{result.won} : {result.lost} of 3" in text
    groups = study.by_unfamiliar("soup")
    assert list(groups) == ["0", "1", "2+"]
    whole = sum(groups[label].mean * n for label, n in (("0", 50), ("1", 50), ("2+", 100))) / 200
    assert whole == pytest.approx(study.score("soup", "xx").mean)


def test_a_failing_seed_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = replace(SCENES["gap"], math_rows=0, language_rows=8)
    with pytest.raises(AdapterswapError):
        LabPlan.of(broken, 1, tmp_path / "out", sizes=Sizes(10, 10)).run()
    assert list(tmp_path.iterdir()) == []
