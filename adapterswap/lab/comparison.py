"""All methods on several seeds, in a folder that is written seed by seed, so that a run can be stopped and resumed.

A seed with a seed-N.json is finished; existing bases and experts are used again. Knows the files; knows nothing of the
terminal.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adapterswap.errors import OutputError, RunError
from adapterswap.files.folders import OutputKind, check_place, locked, refuse_strangers, replacing, strangers
from adapterswap.files.smallfiles import exists, expand, read_json, write_json
from adapterswap.lab.bases import pretrained_seeds
from adapterswap.lab.choices import BUDGET, chosen_methods
from adapterswap.lab.comparing import CONTROLS, DEFAULT_SIZES, FEW, ComparisonSizes, compare_seed
from adapterswap.lab.comparison_table import COMPARISON_FORMAT, compared
from adapterswap.lab.run import require_libraries
from adapterswap.lab.scenes import Scene
from adapterswap.lab.study import Tell, run_seeds

__all__ = ["COMPARISON", "FRESH_SEED", "ComparisonPlan", "plan_comparison", "run_comparison"]

FRESH_SEED = 5
"""The first seed that was not used to design scenes and training; the bases of 0 to 4 are shipped."""

_RECORD, _RESULTS, _LOCK, _BUILDING = "comparison.json", "results.json", "lab.lock", "lab.tmp"

COMPARISON = OutputKind(
    _RECORD,
    lambda record: (
        (_RECORD, _RESULTS, _LOCK, _BUILDING, "seed-*.json", "seed-*.part", "seed-*/**")
        if record.get("format") == COMPARISON_FORMAT
        else ()
    ),
)
"""The output of `lab --methods`."""


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison of methods, checked.

    Attributes:
        seeds: each a base and its experts.
        methods: what is compared; `layer_swap` is always included.
        out_path: the folder to write, or to continue.
        rebuild_base: pretrain the bases, even if they are shipped.
        sizes: numbers of problems.
        overwrite: replace `out_path`, if such a comparison is there.
    """

    scene: Scene
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    out_path: Path
    rebuild_base: bool = False
    sizes: ComparisonSizes = DEFAULT_SIZES
    overwrite: bool = False

    @property
    def pretrained(self) -> tuple[int, ...]:
        """The seeds whose base is pretrained (about two minutes each on a core), unless it already exists."""
        return pretrained_seeds(self.scene, self.seeds, rebuild_base=self.rebuild_base)

    def to_json(self) -> dict[str, Any]:
        """What a dry run prints: at most `budget` configurations of each method, chosen on `few` problems too."""
        return {
            "scene": self.scene.name,
            "seeds": self.seeds,
            "methods": self.methods,
            "controls": tuple(CONTROLS),
            "budget": BUDGET,
            "few": FEW,
            "sizes": asdict(self.sizes),
            "pretrained": self.pretrained,
        }


def plan_comparison(
    scene: Scene,
    methods: str,
    seeds: int,
    out_path: str | Path,
    *,
    first_seed: int | None = None,
    rebuild_base: bool = False,
    sizes: ComparisonSizes = DEFAULT_SIZES,
    overwrite: bool = False,
) -> ComparisonPlan:
    """Check a comparison. A folder that holds a part of the same one will be continued; seeds may be added.

    Args:
        scene: one of `SCENES`.
        methods: `all`, or names separated by commas; see `chosen_methods`.
        seeds: how many.
        first_seed: the first of them; by default `FRESH_SEED`.
        out_path, rebuild_base, sizes, overwrite: see `ComparisonPlan`.

    Raises:
        ArgumentError: there is no such method.
        OutputError: `out_path` holds something else.
        RunError: `out_path` holds another comparison.
    """
    first = FRESH_SEED if first_seed is None else first_seed
    numbers = tuple(range(first, first + seeds))
    plan = ComparisonPlan(scene, numbers, chosen_methods(methods), Path(out_path), rebuild_base, sizes, overwrite)
    _check(expand(out_path), _described(plan), overwrite=overwrite)
    return plan


def run_comparison(
    plan: ComparisonPlan, *, jobs: int | None = None, tell: Tell = lambda seed, step, share: None
) -> dict[str, Any]:
    """Evaluate the methods on every seed, and write comparison.json, results.json and the models of each seed.

    On one machine and with the same versions, the same plan gives the same numbers.

    Args:
        plan: see `plan_comparison`.
        jobs: seeds at once; by default as many as there are cores.
        tell: called with a seed, its current step, and the finished share of the seed.

    Returns:
        What results.json says; see `compared`.

    Raises:
        DependencyError: the `lab` extra is not installed.
        OutputError: the folder holds other files, is being written by another process, or cannot be written.
        RunError: a seed's process died.
        AdapterswapError: a seed failed; see `compare_seed`.
    """
    require_libraries()
    folder = expand(plan.out_path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / _LOCK, f"Another process is writing {folder}"):
            _check(folder, _described(plan), overwrite=plan.overwrite)
            if plan.overwrite:
                _clear(folder)
            with replacing(folder / _RECORD, folder / _BUILDING) as building:
                write_json(building, _described(plan))
            compare = partial(compare_seed, plan.scene, plan.methods, folder, plan.rebuild_base, plan.sizes)
            content = compared(_described(plan), run_seeds(compare, plan.seeds, jobs=jobs, tell=tell))
            with replacing(folder / _RESULTS, folder / _BUILDING) as building:
                write_json(building, content)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror}", "Choose another path", parameter="out_path"
        ) from error
    return content


def _described(plan: ComparisonPlan) -> dict[str, Any]:
    """What every seed depends on; more seeds may be added."""
    content = plan.to_json()
    del content["seeds"], content["pretrained"]
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}
    return {"format": COMPARISON_FORMAT, **listed}


def _check(folder: Path, described: Mapping[str, Any], *, overwrite: bool) -> None:
    check_place(folder)
    if not exists(folder) or not any(path.name not in (_LOCK, _BUILDING) for path in folder.iterdir()):
        return
    if not exists(folder / _RECORD):
        raise OutputError(
            f"{folder} already exists and does not contain a comparison of methods",
            "Choose another path",
            parameter="out_path",
        )
    if overwrite:
        refuse_strangers(folder, strangers(folder, COMPARISON))
        return
    stored = read_json(folder / _RECORD)
    if changed := [key for key, value in described.items() if stored.get(key) != value]:
        raise RunError(
            f"{folder} contains a comparison that was started with different {', '.join(changed)}",
            "Use the same settings, choose another path, or pass `overwrite=True`",
            parameter="out_path",
        )


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
