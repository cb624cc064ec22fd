"""The folder of a sweep: what resumes it, what it refuses, what is repaired."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from safetensors.torch import load, save

from adapterswap import report
from adapterswap.experiments.sweeps import Run, SweepRecipe, prepare, read_prompts, read_samples, sweep
from adapterswap.experiments.sweeps.recording import Recording, recording
from adapterswap.experiments.sweeps.results import Findings
from adapterswap.kit.errors import DataError, NotFoundError, OutputError, RunError

from .conftest import SETTINGS, plain

Recipe = Callable[..., SweepRecipe]


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = SweepRecipe.model_validate(
        {
            "base_model": str(world / "base"),
            "task_experts": {"math1": str(world / "math1")},
            "language_experts": {"sw1": str(world / "sw1")},
            "tasks": ["mgsm_direct_sw"],
            "settings": SETTINGS,
        }
    )
    return sweep(recipe, tmp_path_factory.mktemp("sweep") / "run", device="cpu")


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Path:
    """A copy of a finished sweep: base, math1, sw1."""
    shutil.copytree(finished.folder, tmp_path / "run")
    return tmp_path / "run"


def test_finished_cells_are_kept(run: Path, recipe: Recipe) -> None:
    before = (run / "cells.jsonl").read_bytes()
    cells = []
    sweep(recipe(), run, device="cpu", tell=lambda progress: cells.append(progress.cell))
    assert (run / "cells.jsonl").read_bytes() == before
    assert cells == [""]


def test_a_torn_line_is_cut_off_and_its_cell_judged_again(run: Path, recipe: Recipe) -> None:
    whole = plain(run)
    raw = (run / "cells.jsonl").read_bytes()
    (run / "cells.jsonl").write_bytes(raw[:-40])
    (run / "samples" / "0123456789ab.jsonl.tmp").write_text("half")
    (run / "sweep.json.tmp").write_text("half")
    assert len(Run.read(run).results) == 2
    assert [cell.short for cell in Run.read(run).unfinished] == ["sw1"]
    sweep(recipe(), run, device="cpu")
    assert plain(run) == whole


def test_a_damaged_line_is_reported_and_not_skipped(run: Path, recipe: Recipe) -> None:
    lines = (run / "cells.jsonl").read_bytes().splitlines(keepends=True)
    (run / "cells.jsonl").write_bytes(lines[0] + b"{}\n" + lines[2])
    for read in (lambda: Run.read(run), lambda: sweep(recipe(), run, device="cpu")):
        with refused(DataError, match="line 2"):
            read()


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"settings": {**SETTINGS, "limit": 2}}, ["tasks", "settings.limit"]),
        ({"settings": {**SETTINGS, "batch_size": 1}}, ["settings.batch_size"]),
        ({"selection": {"seed": 1}}, ["tasks"]),
        ({"baselines": ["base", "task", "language", "soup"]}, ["cells"]),
    ],
)
def test_another_sweep_is_refused_in_the_folder(
    changes: dict[str, object], differing: list[str], run: Path, recipe: Recipe
) -> None:
    before = plain(run)
    with refused(RunError, "out_path") as error:
        sweep(recipe(**changes), run, device="cpu")
    assert [problem.message.rpartition(" ")[2] for problem in error.value.problems] == differing
    assert plain(run) == before


def test_other_experts_under_the_same_names_are_refused(run: Path, recipe: Recipe, world: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(world / "math2", tmp_path / "elsewhere" / "math1")
    with refused(RunError, "out_path", match="experts"):
        sweep(recipe(task_experts={"math1": str(tmp_path / "elsewhere" / "math1")}), run, device="cpu")


def test_an_equivalent_recipe_resumes(run: Path, recipe: Recipe) -> None:
    sweep(recipe(baselines=["language", "task", "base"], pairs=[{"task": "math1", "language": ["sw1"]}]), run)


def test_other_prompts_are_refused(run: Path, recipe: Recipe) -> None:
    (run / "cells.jsonl").unlink()  # so that every cell is evaluated again
    path = run / "prompts" / "mgsm_direct_sw.jsonl"
    path.write_text(path.read_text().replace("Swali", "Suali"))
    with refused(RunError, "out_path", match="prompts"):
        sweep(recipe(), run, device="cpu")


def test_missing_prompts_are_refused(run: Path, recipe: Recipe) -> None:
    """As a file of samples has lines of the same documents, with their targets."""
    (run / "cells.jsonl").unlink()
    path = run / "prompts" / "mgsm_direct_sw.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({key: row[key] for key in ("doc_id", "target")}) + "\n" for row in rows))
    with refused(RunError, "out_path", match="prompts"):
        sweep(recipe(), run, device="cpu")


def test_other_right_answers_are_refused(run: Path, recipe: Recipe) -> None:
    (run / "cells.jsonl").unlink()  # so that every cell is evaluated again
    path = run / "prompts" / "mgsm_direct_sw.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["target"] = "1234567"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(RunError, "out_path", match="targets"):
        sweep(recipe(), run, device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_another_base_in_the_same_folder_is_refused(
    name: str, run: Path, recipe: Recipe, world: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "base", tmp_path / "base")
    file = tmp_path / "base" / name
    if name == "tokenizer.json":
        file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    else:
        tensors = load(file.read_bytes())
        tensors["model.norm.weight"][0] += 0.5
        file.write_bytes(save(tensors, {"format": "pt"}))
    with refused(RunError, "out_path", match="base_model"):
        sweep(recipe(base_model=str(tmp_path / "base")), run, device="cpu")


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the second line of cells.jsonl."""

    def edit(run: Path) -> None:
        lines = (run / "cells.jsonl").read_text().splitlines()
        content = json.loads(lines[1])
        change(content)
        lines[1] = json.dumps(content)
        (run / "cells.jsonl").write_text("".join(line + "\n" for line in lines))

    return edit


def scores(content: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = next(iter(content["results"].values()))
    return result


EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "NaN": ("finite", edited(lambda cell: scores(cell).update(value=float("nan")))),
    "a text": ("number", edited(lambda cell: scores(cell)["docs"].__setitem__(0, [0, "1"]))),
    "true": ("number", edited(lambda cell: scores(cell)["docs"].__setitem__(0, [0, True]))),
    "an unknown task": ("line 2", edited(lambda cell: cell["results"].update(t=scores(cell)))),
    "an unknown cell": ("line 2", edited(lambda cell: cell.update(cell="0123456789ab"))),
    "another composition": ("line 2", edited(lambda cell: cell.update(short="math1+sw1"))),
    "no tasks": ("tasks", edited(lambda cell: cell.pop("tasks"))),
    "cut in part": ("cut", edited(lambda cell: scores(cell).update(cut=0.5))),
}


@pytest.mark.parametrize("kind", EDITS)
def test_results_that_are_not_of_this_sweep_are_refused(kind: str, run: Path) -> None:
    reason, edit = EDITS[kind]
    edit(run)
    with refused(DataError, match=reason):
        Run.read(run)


TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: DATA, train: DATA}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
CHANGES: dict[str, tuple[str, str, str]] = {
    "choices": ("rows.jsonl", '"ba"]', '"bo"]'),  # neither a prompt nor a target
    "the metric": ("own.yaml", "higher_is_better: true", "higher_is_better: true, ignore_case: true"),
    "what is between": ("own.yaml", "task: own", "task: own\ntarget_delimiter: '.'"),
    "its code": ("scoring.py", "return 1", "return 2"),
    "what the code reads": ("weights.json", "1", "2"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_task_that_was_changed_is_refused(kind: str, recipe: Recipe, tmp_path: Path) -> None:
    tasks, rows = tmp_path / "tasks", [{"question": "a b", "choices": ["ab", "ba"], "label": n % 2} for n in range(4)]
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "own.yaml").write_text(TASK.replace("DATA", str(tasks / "rows.jsonl")))
    (tasks / "scoring.py").write_text("def acc(items):\n    return 1\n")
    (tasks / "weights.json").write_text("[1]")
    requested = {"tasks": ["own"], "settings": {"include_path": str(tasks)}, "baselines": ["base"]}
    prepared = prepare(recipe(**requested))
    with recording(tmp_path / "run", prepared.described) as record:
        record.begin(prepared.described)
    with recording(tmp_path / "run", prepare(recipe(**requested)).described):
        pass
    name, old, new = CHANGES[kind]
    text = (tasks / name).read_text()
    assert old in text
    (tasks / name).write_text(text.replace(old, new))
    with (
        refused(RunError, "out_path", match="task"),
        recording(tmp_path / "run", prepare(recipe(**requested)).described),
    ):
        pass


def test_overwrite_starts_over_but_only_over_a_sweep(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    changed = recipe(settings={**SETTINGS, "limit": 2}, baselines=["base"])
    strangers = [run / "report.html", run / "samples" / "mine.jsonl", run / "prompts" / "mine.jsonl", run / "notes.tmp"]
    for path in strangers:
        path.write_text("mine")
        with refused(OutputError, "out_path", match=path.name):
            sweep(changed, run, device="cpu", overwrite=True)
    sweep(recipe(), run, device="cpu")  # the same sweep goes on beside them, and leaves them alone
    for path in strangers:
        assert path.read_text() == "mine"
        path.unlink()
    again = sweep(changed, run, device="cpu", overwrite=True)
    assert len(again.results) == 1
    assert sorted(path.name for path in run.iterdir()) == ["cells.jsonl", "prompts", "samples", "sweep.json"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with refused(OutputError, "out_path"):
        sweep(changed, tmp_path / "mine", device="cpu", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_the_output_may_not_lie_in_an_expert(recipe: Recipe, world: Path, tmp_path: Path) -> None:
    with refused(OutputError, "out_path"):
        sweep(recipe(), world / "math1" / "run", device="cpu")
    assert not (world / "math1" / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(recipe().model_dump(mode="json", exclude_defaults=True)))
    # A folder that no sweep made is refused before anything is read; --overwrite does not help.
    for options in ({}, {"overwrite": True}):
        with refused(OutputError, "out_path"):
            sweep(tmp_path / "run" / "recipe.yaml", tmp_path / "run", device="cpu", **options)


def test_two_sweeps_do_not_share_a_folder(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    """The kernel holds the lock for another process, and releases it when that process dies."""
    script = (
        "import sys; from adapterswap.experiments.sweeps.recording import recording\n"
        f"with recording({str(run)!r}, {{}}): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with refused(OutputError, "out_path"):
        sweep(recipe(), run, device="cpu")
    holder.kill()
    holder.communicate()
    assert len(sweep(recipe(), run, device="cpu").results) == 3
    assert not (run / "sweep.lock").exists()


def test_a_sweep_that_was_killed_before_its_description_was_written(run: Path, recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sweep.lock").touch()
    (tmp_path / "early" / "sweep.json.tmp").write_text('{"format": 1, "recipe"')
    sweep(recipe(), tmp_path / "early", device="cpu")
    assert plain(tmp_path / "early") == plain(run)


def test_a_sweep_that_fails_at_the_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), recording(tmp_path / "deep" / "run", {}):
        raise KeyboardInterrupt
    assert not (tmp_path / "deep" / "run").exists()


def test_prompts_with_lone_surrogates_are_compared_correctly(tmp_path: Path) -> None:
    rows = [{"doc_id": 0, "prompt": "half: \ud800", "target": "\udfff"}]
    for _ in range(2):  # written first, then read and compared
        Recording(tmp_path, Findings()).keep_questions("t", rows)
    with refused(RunError, "out_path", match="prompts"):
        Recording(tmp_path, Findings()).keep_questions("t", [rows[0] | {"prompt": "half: ?"}])


def test_other_folders_are_refused(run: Path, tmp_path: Path) -> None:
    with refused(NotFoundError, "run"):
        Run.read(tmp_path)
    content = json.loads((run / "sweep.json").read_text())
    (run / "sweep.json").write_text(json.dumps({**content, "format": 2}))
    with refused(DataError, match="format 2"):
        Run.read(run)
    (run / "sweep.json").write_text(json.dumps({**content, "tasks": {"a": {}}}))
    with refused(DataError):
        Run.read(run)
    (run / "sweep.json").write_text("{")
    with refused(DataError):
        Run.read(run)
    with refused(DataError):
        read_samples(run, "0123456789ab")
    (run / "prompts" / "a.jsonl").write_text("{")
    with refused(DataError):
        read_prompts(run, "a")


def test_a_repeated_line_and_a_huge_score_are_refused(run: Path) -> None:
    path = run / "cells.jsonl"
    written = path.read_text()
    path.write_text(written + written.splitlines(keepends=True)[0])
    with refused(DataError, match=f"line {len(written.splitlines()) + 1} repeats"):
        Run.read(run)
    path.write_text(written)
    edited(lambda cell: scores(cell).update(value=1e300))(run)
    with refused(DataError, match="line 2"):
        Run.read(run)


LINKED = ("sweep.json", "cells.jsonl", "rungs.jsonl", "samples", "prompts", "samples/{cell}.jsonl", "sweep.json.tmp")


@pytest.mark.parametrize("name", LINKED)
def test_links_in_somebody_elses_folder_are_refused(
    run: Path, recipe: Recipe, finished: Run, tmp_path: Path, name: str
) -> None:
    """A report would publish what they lead to, and a resumed sweep would write or cut it."""
    name = name.format(cell=finished.results[0].cell.cell)
    private, place = tmp_path / "private", run / name
    if place.is_dir():
        shutil.move(place, private)
    else:
        private.write_text(place.read_text() + "half a line" if place.exists() else "private\nhalf a line")
        place.unlink(missing_ok=True)
    place.symlink_to(private)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}
    attempts = (
        lambda: Run.read(run),
        lambda: report(run, tmp_path / "report"),
        lambda: sweep(recipe(), run, device="cpu"),
    )
    for attempt in attempts:
        with refused(DataError, match="outside its folder"):
            attempt()
    for path, content in before.items():
        assert path.read_bytes() == content
    if private.is_dir():
        with refused(OutputError, "out_path", match=name):
            sweep(recipe(), run, device="cpu", overwrite=True)
        return
    sweep(recipe(), run, device="cpu", overwrite=True)  # which removes links, and not what they lead to
    assert not place.is_symlink()
    assert all(path.read_bytes() == before[path] for path in before if path.is_relative_to(private))


@pytest.mark.parametrize("name", ["sweep.lock", "preregistration.json"])
def test_links_in_a_folder_without_a_sweep_are_refused(run: Path, recipe: Recipe, tmp_path: Path, name: str) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (tmp_path / "private").write_text("private")
    (run / name).symlink_to(tmp_path / "private")
    with pytest.raises((DataError, OutputError)):
        sweep(recipe(), run, device="cpu")
    assert (tmp_path / "private").read_text() == "private"


def test_a_pipe_in_a_sweeps_folder_does_not_wait(run: Path, recipe: Recipe) -> None:
    os.mkfifo(run / "samples" / "pipe.jsonl")
    for attempt in (lambda: Run.read(run), lambda: sweep(recipe(), run, device="cpu")):
        with refused(DataError, match="is not a regular file"):
            attempt()
