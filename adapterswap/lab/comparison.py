"""All methods on several seeds: a folder that is written a seed at a time, so that it can be stopped and resumed.

A seed whose seed-N.json is there is finished; bases and experts that are there are used. Knows what is written; knows
nothing of the terminal.
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
from adapterswap.lab.bases import shipped_file
from adapterswap.lab.choices import BUDGET, chosen_methods
from adapterswap.lab.comparing import CONTROLS, DEFAULT_SIZES, FEW, ComparisonSizes, compare_seed
from adapterswap.lab.comparison_table import COMPARISON_FORMAT, compared
from adapterswap.lab.run import require_libraries
from adapterswap.lab.scenes import Scene
from adapterswap.lab.study import Tell, run_seeds

__all__ = ["COMPARISON", "FRESH_SEED", "ComparisonPlan", "plan_comparison", "run_comparison"]

FRESH_SEED = 5
"""The first seed that took no part in the design of the scenes and of the training; bases of 0 to 4 are shipped."""

_RECORD, _RESULTS, _LOCK = "comparison.json", "results.json", "lab.lock"

COMPARISON = OutputKind(
    _RECORD,
    lambda record: (
        (_RECORD, _RESULTS, _LOCK, "seed-*.json", "seed-*.part", "seed-*/**")
        if record.get("format") == COMPARISON_FORMAT
        else ()
    ),
)
"""What `lab --methods` writes."""


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison does.

    Attributes:
        seeds: each a base and its experts.
        methods: what is compared; `layer_swap` is always among what is judged.
        controls: what else is judged.
        budget: configurations of each, at most.
        few: numbers of problems in xx to choose on, and to train on.
        sizes: how many problems are asked.
        pretrained: the seeds whose base is pretrained (about two minutes each on a core), unless it is there already.
    """

    scene: str
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    controls: tuple[str, ...]
    budget: int
    few: tuple[int, ...]
    sizes: ComparisonSizes
    pretrained: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_comparison(
    scene: Scene,
    methods: str,
    seeds: int,
    out_path: str | Path,
    *,
    first_seed: int = FRESH_SEED,
    rebuild_base: bool = False,
    sizes: ComparisonSizes = DEFAULT_SIZES,
    overwrite: bool = False,
) -> ComparisonPlan:
    """What `run_comparison` would do with the same arguments; errors as there."""
    numbers = range(first_seed, first_seed + seeds)
    expected = ComparisonPlan(
        scene=scene.name,
        seeds=tuple(numbers),
        methods=chosen_methods(methods),
        controls=tuple(CONTROLS),
        budget=BUDGET,
        few=FEW,
        sizes=sizes,
        pretrained=tuple(seed for seed in numbers if rebuild_base or not shipped_file(scene, seed).exists()),
    )
    _check(expand(out_path), _described(expected), overwrite=overwrite)
    return expected


def run_comparison(
    scene: Scene,
    methods: str,
    seeds: int,
    out_path: str | Path,
    *,
    first_seed: int = FRESH_SEED,
    rebuild_base: bool = False,
    sizes: ComparisonSizes = DEFAULT_SIZES,
    jobs: int | None = None,
    overwrite: bool = False,
    tell: Tell = lambda seed, what, done: None,
) -> dict[str, Any]:
    """Judge methods on seeds `first_seed`… of a scene, and write comparison.json, results.json and each seed's models.

    A folder that holds a part of the same comparison is continued; seeds may be added. On one machine and with the same
    versions, the same arguments give the same numbers.

    Args:
        scene: one of `SCENES`.
        methods: `all`, or names separated by commas.
        seeds: how many.
        out_path: the folder to write, or to continue.
        first_seed: where seeds begin; by default with the first that nothing was tuned on.
        rebuild_base: pretrain the bases, even where they are shipped.
        sizes: how many problems are asked.
        jobs: seeds at once; by default as many as there are cores.
        overwrite: replace `out_path`, if such a comparison is there.
        tell: called with a seed, what it is doing, and the share of it that is done.

    Returns:
        What results.json says; see `compared`.

    Raises:
        ArgumentError: there is no such method.
        DependencyError: the `lab` extra is not installed.
        OutputError: `out_path` holds something else, is being written by another process, or cannot be written.
        RunError: it holds another comparison; a seed's process died.
        AdapterswapError: a seed failed; see `compare_seed`.
    """
    require_libraries()
    expected = plan_comparison(
        scene, methods, seeds, out_path,
        first_seed=first_seed, rebuild_base=rebuild_base, sizes=sizes, overwrite=overwrite,
    )  # fmt: skip
    folder = expand(out_path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / _LOCK, f"Another process is writing {folder}"):
            if overwrite:
                _clear(folder)
            with replacing(folder / _RECORD) as building:
                write_json(building, _described(expected))
            work = partial(compare_seed, scene, expected.methods, folder, rebuild_base, sizes)
            content = compared(_described(expected), run_seeds(work, expected.seeds, jobs=jobs, tell=tell))
            with replacing(folder / _RESULTS) as building:
                write_json(building, content)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror}", "Choose another path", parameter="out_path"
        ) from error
    return content


def _described(expected: ComparisonPlan) -> dict[str, Any]:
    """What every seed depends on; more seeds may be added."""
    return {
        "format": COMPARISON_FORMAT,
        "scene": expected.scene,
        "methods": list(expected.methods),
        "controls": list(expected.controls),
        "budget": expected.budget,
        "few": list(expected.few),
        "sizes": asdict(expected.sizes),
    }


def _check(folder: Path, described: Mapping[str, Any], *, overwrite: bool) -> None:
    check_place(folder)
    if not exists(folder) or not any(path.name != _LOCK for path in folder.iterdir()):
        return
    if not exists(folder / _RECORD):
        raise OutputError(
            f"{folder} already exists and holds no comparison of methods", "Choose another path", parameter="out_path"
        )
    if overwrite:
        refuse_strangers(folder, strangers(folder, COMPARISON))
        return
    stored = read_json(folder / _RECORD)
    if changed := [key for key, value in described.items() if stored.get(key) != value]:
        raise RunError(
            f"{folder} holds another comparison, begun with other {', '.join(changed)}",
            "Repeat its settings, choose another path, or pass `overwrite=True`",
            parameter="out_path",
        )


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
