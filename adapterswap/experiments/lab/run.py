"""The whole lab: run a study, write its folder, its tables and its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap import __version__
from adapterswap.experiments.lab.bases import shipped_file
from adapterswap.experiments.lab.scenes import Scene
from adapterswap.experiments.lab.seed import DEFAULT_SIZES, METHODS, SeedResult, Sizes
from adapterswap.experiments.lab.study import Finished, SeedReporter, Study, Summary, run_study
from adapterswap.kit.dependencies import require
from adapterswap.kit.drawing import STYLE, looks, new_figure, save, tidy
from adapterswap.kit.errors import visible
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import expand

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

LAB_FORMAT = "adapterswap-lab/1"
CAVEAT = (
    "A constructed demonstration of a mechanism on models of 0.4 million parameters. It is not evidence for the "
    "numbers of the layer-swapping papers, or for any real language."
)
_COMPARED = tuple(method for method in METHODS if method not in ("base", "layer swap"))
_REPORTED_LIBRARIES = ("torch", "transformers", "peft", "trl")


def tables(study: Study) -> Iterator[Table]:
    """The scores, the paired differences, and the scores by number of unfamiliar words."""
    from rich.table import Table

    number = len(study.seeds)
    problems = len(study.seeds[0].unfamiliar)
    over = f"{number} seed{'s' if number > 1 else ''} × {problems} held-out problems"

    spread = " (mean ± standard deviation over seeds)" if number > 1 else ""
    scores = Table(title=f"Exact match, {over}{spread}", title_justify="left")
    for heading in ("method", "xx math", "English math", "description"):
        scores.add_column(heading, justify="right" if "math" in heading else "left", no_wrap=heading != "description")
    for method, description in METHODS.items():
        values = [_with_spread(study.score(method, language)) for language in ("xx", "en")]
        scores.add_row(method, *values, description, style="bold" if method == "layer swap" else "")
    yield scores

    differences = Table(
        title="Layer swap minus the other method, xx math, paired\n"
        "(clearly: a seed's 95 % interval over its problems excludes 0)",
        title_justify="left",
    )
    for heading in ("than", "difference", "95 % over seeds", "clearly better : worse", "seed by seed"):
        differences.add_column(heading, justify="left" if heading in ("than", "seed by seed") else "right")
    for method in _COMPARED:
        paired = study.against(method)
        summary = paired.over_seeds
        differences.add_row(
            method,
            f"{summary.mean:+.3f}",
            "" if summary.interval is None else _interval(summary.mean, summary.interval),
            f"{paired.won} : {paired.lost} of {number}",
            " ".join(f"{value:+.3f}" for value in summary.values),
        )
    yield differences

    if study.scene.unfamiliar:
        groups = {method: study.by_unfamiliar(method) for method in METHODS}
        words = Table(title="xx math by unfamiliar words", title_justify="left")
        words.add_column("method")
        for label in groups["base"]:
            words.add_column(label, justify="right")
        for method, by_label in groups.items():
            words.add_row(method, *(f"{summary.mean:.3f}" for summary in by_label.values()))
        yield words


def _interval(mean: float, half: float) -> str:
    """The ends of the interval of a difference of shares, which is never beyond -1 and 1."""
    return f"[{max(mean - half, -1.0):+.3f}, {min(mean + half, 1.0):+.3f}]"


def _with_spread(summary: Summary) -> str:
    return f"{summary.mean:.3f}" + ("" if summary.spread is None else f" ± {summary.spread:.3f}")


def results(study: Study) -> dict[str, Any]:
    """All results as plain data, except the single answers."""
    scene = study.scene
    return {
        "format": LAB_FORMAT,
        "caveat": CAVEAT,
        "scene": {"name": scene.name, "question": scene.question, "unfamiliar": sorted(scene.unfamiliar)},
        "methods": METHODS,
        "problems": len(study.seeds[0].unfamiliar),
        "seeds": [
            {
                "seed": seed.seed,
                "bottom": seed.bottom,
                "top": seed.top,
                "scale": seed.scale,
                "development": {
                    "grid": [{"bottom": b, "top": u, "xx": value} for (b, u), value in seed.grid.items()],
                    "scales": [{"scale": scale, "xx": value} for scale, value in seed.scales.items()],
                },
                "test": {
                    method: {language: float(right.mean()) for language, right in by_language.items()}
                    for method, by_language in seed.right.items()
                },
                "training_losses": seed.losses,
            }
            for seed in study.seeds
        ],
        "scores": {
            method: {language: asdict(study.score(method, language)) for language in ("xx", "en")} for method in METHODS
        },
        "layer_swap_minus": {method: asdict(study.against(method)) for method in _COMPARED},
        "by_unfamiliar_words": {
            method: {label: asdict(summary) for label, summary in study.by_unfamiliar(method).items()}
            for method in METHODS
        },
        "versions": {"adapterswap": __version__, **{name: version(name) for name in _REPORTED_LIBRARIES}},
    }


def answers(study: Study) -> Iterator[dict[str, Any]]:
    """A row per seed, method and language, with a character per test problem: 1 for right, 0 for wrong."""
    for seed in study.seeds:
        for method, by_language in seed.right.items():
            for language, right in by_language.items():
                marks = "".join("01"[int(value)] for value in right)
                yield {"seed": seed.seed, "method": method, "language": language, "right": marks}


_PICTURES = {"scores": "scores", "landscape": "grid"}  # the report's figures that are also written as PNG
_WIDTH = 6.75  # inches


def _words(study: Study) -> Figure:
    """The scores of some methods by the number of words that the base hardly knows: bars are means, dots seeds."""
    figure = new_figure(_WIDTH, 3.6)
    axes = figure.add_subplot()
    labels = list(study.by_unfamiliar("base"))
    methods = ("math expert", "reset", "soup", "sum", "layer swap")
    width = 0.8 / len(methods)
    dots: dict[str, Any] = {"s": 12, "facecolors": "white", "edgecolors": STYLE.ink, "linewidths": 0.8, "zorder": 3}
    for position, (method, look) in enumerate(zip(methods, reversed(looks(len(methods))), strict=True)):
        summaries = study.by_unfamiliar(method)
        left = [group + (position - (len(methods) - 1) / 2) * width for group in range(len(labels))]
        axes.bar(left, [summaries[label].mean for label in labels], width * 0.9, color=look.colour, label=method)
        for place, label in zip(left, labels, strict=True):
            values = summaries[label].values
            axes.scatter([place] * len(values), values, **dots)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_xlabel("words of the problem that the base hardly knows")
    axes.set_ylabel("exact match, xx math")
    axes.set_title("Where the gain comes from (dots: seeds)", loc="left")
    tidy(axes, grid="y")
    axes.legend(ncols=2)
    return figure


_RECORD = "results.json"


LAB = OutputKind(_RECORD, lambda record: record.get("format") == LAB_FORMAT)
"""The output of `lab`."""


@dataclass(frozen=True)
class LabPlan:
    """A run of the lab, checked.

    Attributes:
        seeds: how many; they are 0 to `seeds` - 1.
        out_path: the folder to write.
        rebuild_base: pretrain the bases, even if they are shipped.
        sizes: how many problems are asked.
        overwrite: replace `out_path`, if the lab wrote it.
    """

    scene: Scene
    seeds: int
    out_path: Path
    rebuild_base: bool = False
    sizes: Sizes = DEFAULT_SIZES
    overwrite: bool = False

    @property
    def pretrained(self) -> tuple[int, ...]:
        """The seeds whose base is pretrained, not taken from the package (about three minutes each on a core)."""
        return tuple(s for s in range(self.seeds) if self.rebuild_base or not shipped_file(self.scene, s).exists())

    def to_json(self) -> dict[str, Any]:
        """What a dry run prints: rows and problems are those of one seed."""
        return {
            "scene": self.scene.name,
            "seeds": self.seeds,
            "pretrained": self.pretrained,
            "pretraining_rows": self.scene.pretraining_rows,
            "math_rows": self.scene.math_rows,
            "language_rows": self.scene.language_rows,
            "development": self.sizes.development,
            "test": self.sizes.test,
            "methods": tuple(METHODS),
        }

    def run(
        self,
        *,
        jobs: int | None = None,
        tell: SeedReporter = lambda seed, step, share: None,
        finished: Finished[SeedResult] = lambda seed, result: None,
    ) -> Study:
        """Run a plan and write results.json, answers.jsonl, a report, pictures and the models of each seed.

        The folder appears when it is complete. On the same machine and with the same versions, the same plan gives the
        same numbers, however many seeds run at once.

        Args:
            jobs: seeds at once; by default as many as there are cores.
            tell: called with a seed, its current step, and the finished share of the seed.
            finished: called with a seed and its result, as soon as it has one.

        Raises:
            DependencyError: the `lab` extra is not installed.
            OutputError: the folder exists or cannot be written.
            AdapterswapError: a seed failed; see `run_study`.
        """
        require("lab")
        from adapterswap.experiments.reporting import lab_source, make_report, write_files
        from adapterswap.experiments.reporting.figures import plan_figures

        with LAB.folder(self.out_path, overwrite=self.overwrite) as folder:
            study = run_study(
                self.scene, self.seeds, folder, rebuild_base=self.rebuild_base, sizes=self.sizes, jobs=jobs, tell=tell,
                finished=finished,
            )  # fmt: skip
            content, rows = results(study), list(answers(study))
            text = visible(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
            (folder / _RECORD).write_text(text + "\n", encoding="utf-8")
            (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            name = expand(self.out_path).resolve().name
            report = make_report(lab_source(folder, json.loads(text), rows, name=name))
            write_files(report, folder)
            for figure in plan_figures(report)[0]:
                if figure.kind in _PICTURES:
                    save(figure.draw(_WIDTH), folder, _PICTURES[figure.kind], ["png"])
            if self.scene.unfamiliar:
                with STYLE.applied():
                    save(_words(study), folder, "words", ["png"])
        return study


def plan_lab(
    scene: Scene,
    seeds: int,
    out_path: str | Path,
    *,
    rebuild_base: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    overwrite: bool = False,
) -> LabPlan:
    """Check a run of the lab; the arguments are the fields of `LabPlan`, with `scene` one of `SCENES`.

    Raises:
        OutputError: `out_path` exists or cannot be written.
    """
    LAB.check(out_path, overwrite=overwrite)
    return LabPlan(scene, seeds, Path(out_path), rebuild_base, sizes, overwrite)
