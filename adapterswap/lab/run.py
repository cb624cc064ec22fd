"""The whole lab: run a study and write its folder.

Knows the files; knows nothing of the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterswap.errors import DependencyError
from adapterswap.experts.slices import PROVENANCE
from adapterswap.files.folders import OutputKind, atomic_folder, check_target
from adapterswap.files.smallfiles import expand
from adapterswap.lab.bases import pretrained_seeds
from adapterswap.lab.report import LAB_FORMAT
from adapterswap.lab.scenes import Scene
from adapterswap.lab.seed import DEFAULT_SIZES, METHODS, Sizes
from adapterswap.lab.study import Study, Tell, run_study
from adapterswap.reporting.writing import REPORT_FILES
from adapterswap.writing.folder import ADAPTER_FILES, MODEL_FILES

__all__ = ["LAB", "LabPlan", "plan_lab", "require_libraries", "run_lab"]

_LIBRARIES = ("trl", "datasets", "matplotlib", "scipy", "jinja2")
_RECORD = "results.json"


def _names(record: Mapping[str, Any]) -> Sequence[str]:
    if record.get("format") != LAB_FORMAT:
        return ()
    card = "README.md"
    experts = [f"{name}/{file}" for name in ("math", "language") for file in (*ADAPTER_FILES, card, "training.json")]
    composed = [f"math+language/{file}" for file in (*ADAPTER_FILES, card, PROVENANCE)]
    seeds = [*(f"base/{file}" for file in MODEL_FILES), *experts, *composed, "math.jsonl", "language.jsonl"]
    pictures = ("grid.png", "scores.png", "words.png")
    return (_RECORD, "answers.jsonl", *pictures, *REPORT_FILES, *(f"seed-*/{name}" for name in seeds))


LAB = OutputKind(_RECORD, _names)
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
        """The seeds whose base is pretrained, not taken from the package (about two minutes each on a core)."""
        return pretrained_seeds(self.scene, range(self.seeds), rebuild_base=self.rebuild_base)

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
    check_target(out_path, kind=LAB, overwrite=overwrite)
    return LabPlan(scene, seeds, Path(out_path), rebuild_base, sizes, overwrite)


def run_lab(plan: LabPlan, *, jobs: int | None = None, tell: Tell = lambda seed, step, share: None) -> Study:
    """Run a plan and write results.json, answers.jsonl, a report, pictures and the models of each seed.

    The folder appears when it is complete. On the same machine and with the same versions, the same plan gives the same
    numbers, however many seeds run at once.

    Args:
        plan: see `plan_lab`.
        jobs: seeds at once; by default as many as there are cores.
        tell: called with a seed, its current step, and the finished share of the seed.

    Raises:
        DependencyError: the `lab` extra is not installed.
        OutputError: the folder exists or cannot be written.
        AdapterswapError: a seed failed; see `run_study`.
    """
    require_libraries()
    from adapterswap.lab.pictures import draw_pictures
    from adapterswap.lab.report import answers, results
    from adapterswap.reporting import lab_source, make_report, write_files

    with atomic_folder(plan.out_path, kind=LAB, overwrite=plan.overwrite) as folder:
        study = run_study(
            plan.scene, plan.seeds, folder, rebuild_base=plan.rebuild_base, sizes=plan.sizes, jobs=jobs, tell=tell
        )
        content, rows = results(study), list(answers(study))
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / _RECORD).write_text(text + "\n", encoding="utf-8")
        (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        draw_pictures(study, folder)
        name = expand(plan.out_path).resolve().name
        write_files(make_report(lab_source(folder, json.loads(text), rows, name=name)), folder)
    return study


def require_libraries() -> None:
    """Raise `DependencyError` unless the `lab` extra is installed."""
    from importlib.util import find_spec

    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise DependencyError(
            f"packages that the lab needs are not installed: {', '.join(missing)}",
            "Run `pip install 'adapterswap[lab]'`",
        )
