"""The lab as a whole: run a study and write its folder.

Knows where the results go; knows nothing of the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapterswap.errors import DependencyError
from adapterswap.experts.adapters import PROVENANCE
from adapterswap.files.folders import OutputKind, atomic_folder
from adapterswap.files.smallfiles import expand
from adapterswap.lab.bases import shipped_file
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
"""What `lab` writes."""


@dataclass(frozen=True)
class LabPlan:
    """What a run would do, for one seed unless said otherwise.

    Attributes:
        pretrained: the seeds whose base is pretrained, not taken from the package (about two minutes each on a core).
        pretraining_rows, math_rows, language_rows: rows of the base and of the experts.
        development, test: problems asked.
        methods: what is compared.
    """

    scene: str
    seeds: int
    pretrained: tuple[int, ...]
    pretraining_rows: int
    math_rows: int
    language_rows: int
    development: int
    test: int
    methods: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_lab(scene: Scene, seeds: int, *, rebuild_base: bool = False, sizes: Sizes = DEFAULT_SIZES) -> LabPlan:
    """What `run_lab` would do with the same arguments."""
    return LabPlan(
        scene=scene.name,
        seeds=seeds,
        pretrained=tuple(seed for seed in range(seeds) if rebuild_base or not shipped_file(scene, seed).exists()),
        pretraining_rows=scene.pretraining_rows,
        math_rows=scene.math_rows,
        language_rows=scene.language_rows,
        development=sizes.development,
        test=sizes.test,
        methods=tuple(METHODS),
    )


def run_lab(
    scene: Scene,
    seeds: int,
    out_path: str | Path,
    *,
    rebuild_base: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    jobs: int | None = None,
    overwrite: bool = False,
    tell: Tell = lambda seed, what, done: None,
) -> Study:
    """Run seeds 0…`seeds`-1 of a scene and write results.json, answers.jsonl, a report, pictures, each seed's models.

    The folder appears when it is complete. On the same machine and with the same versions, the same arguments give the
    same numbers, however many seeds run at once.

    Args:
        scene: one of `SCENES`.
        out_path: the folder to write.
        rebuild_base: pretrain the bases, even where they are shipped.
        sizes: how many problems are asked.
        jobs: seeds at once; by default as many as there are cores.
        overwrite: replace `out_path`, if the lab wrote it.
        tell: called with a seed, what it is doing, and the share of it that is done.

    Raises:
        DependencyError: the `lab` extra is not installed.
        OutputError: `out_path` exists or cannot be written.
        AdapterswapError: a seed failed; see `run_study`.
    """
    require_libraries()
    from adapterswap.lab.pictures import draw_pictures
    from adapterswap.lab.report import answers, results
    from adapterswap.reporting import lab_source, make_report, write_files

    with atomic_folder(out_path, kind=LAB, overwrite=overwrite) as folder:
        study = run_study(scene, seeds, folder, rebuild_base=rebuild_base, sizes=sizes, jobs=jobs, tell=tell)
        content, rows = results(study), list(answers(study))
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / _RECORD).write_text(text + "\n", encoding="utf-8")
        (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        draw_pictures(study, folder)
        name = expand(out_path).resolve().name
        write_files(make_report(lab_source(folder, json.loads(text), rows, name=name)), folder)
    return study


def require_libraries() -> None:
    """Raise a `DependencyError` where the `lab` extra is not installed."""
    from importlib.util import find_spec

    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise DependencyError(
            f"the lab needs {' and '.join(missing)}, which is not installed", "pip install 'adapterswap[lab]'"
        )
