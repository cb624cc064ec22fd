"""The whole lab: run a study, write its folder and its pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.experiments.lab.bases import shipped_file
from adapterswap.experiments.lab.scenes import SCENES, Scene
from adapterswap.experiments.lab.seed import DEFAULT_SIZES, METHODS, SeedResult, Sizes
from adapterswap.experiments.lab.seeds import Finished, SeedReporter, run_study
from adapterswap.experiments.lab.study import LAB_FORMAT, Study
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import visible
from adapterswap.kit.files.folders import OutputKind
from adapterswap.kit.files.text import expand
from adapterswap.kit.style import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = {"scores": "scores", "landscape": "grid"}  # the report's figures that are also written as PNG
_WIDTH = 6.75  # inches


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
        sizes: how many problems are drawn.
        overwrite: replace `out_path`, if the lab wrote it.
    """

    scene: Scene
    seeds: int
    out_path: Path
    rebuild_base: bool = False
    sizes: Sizes = DEFAULT_SIZES
    overwrite: bool = False

    @staticmethod
    def of(
        scene: Scene | str,
        seeds: int,
        out_path: str | Path,
        *,
        rebuild_base: bool = False,
        sizes: Sizes = DEFAULT_SIZES,
        overwrite: bool = False,
    ) -> LabPlan:
        """Check a run of the lab; the arguments are the fields, with `scene` one of `SCENES` or its name.

        Raises:
            OutputError: `out_path` exists or cannot be written.
        """
        LAB.check(out_path, overwrite=overwrite)
        scene = SCENES[scene] if isinstance(scene, str) else scene
        return LabPlan(scene, seeds, Path(out_path), rebuild_base, sizes, overwrite)

    @property
    def pretrained(self) -> tuple[int, ...]:
        """The seeds whose base is pretrained, not taken from the package (about three minutes each on a core)."""
        if self.rebuild_base:
            return tuple(range(self.seeds))
        return tuple(seed for seed in range(self.seeds) if not shipped_file(self.scene, seed).exists())

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
        from adapterswap.experiments.reporting.output import write_lab_report

        with LAB.folder(self.out_path, overwrite=self.overwrite) as folder:
            study = run_study(
                self.scene, self.seeds, folder, rebuild_base=self.rebuild_base, sizes=self.sizes, jobs=jobs, tell=tell,
                finished=finished,
            )  # fmt: skip

            text = visible(json.dumps(study.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
            (folder / _RECORD).write_text(text + "\n", encoding="utf-8")
            rows = list(study.answers())
            (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

            name = expand(self.out_path).resolve().name
            write_lab_report(folder, json.loads(text), rows, name=name, pictures=_PICTURES, width=_WIDTH)
            if self.scene.unfamiliar:
                with STYLE.applied():
                    STYLE.save(_draw_unfamiliar(study), folder, "words", ["png"])
        return study


def _draw_unfamiliar(study: Study) -> Figure:
    """The scores of some methods by the number of words that the base hardly knows: bars are means, dots seeds."""
    labels = list(study.by_unfamiliar("base"))
    methods = ("math expert", "reset", "soup", "sum", "layer swap")
    looks = reversed(STYLE.looks(len(methods)))

    figure = STYLE.figure(_WIDTH, 3.6)
    axes = figure.add_subplot()
    width = 0.8 / len(methods)
    dots: dict[str, Any] = {"s": 12, "facecolors": "white", "edgecolors": STYLE.ink, "linewidths": 0.8, "zorder": 3}
    for position, (method, look) in enumerate(zip(methods, looks, strict=True)):
        summaries = study.by_unfamiliar(method)
        offset = (position - (len(methods) - 1) / 2) * width  # from the middle of a group of bars
        middles = [group + offset for group in range(len(labels))]
        means = [summaries[label].mean for label in labels]
        axes.bar(middles, means, width * 0.9, color=look.colour, label=method)
        for middle, label in zip(middles, labels, strict=True):
            values = summaries[label].values
            axes.scatter([middle] * len(values), values, **dots)

    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_xlabel("words of the problem that the base hardly knows")
    axes.set_ylabel("exact match, xx math")
    axes.set_title("Where the gain comes from (dots: seeds)", loc="left")
    STYLE.grid(axes, "y")
    axes.legend(ncols=2)
    return figure
