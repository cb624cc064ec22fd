"""Two questions on fresh seeds of the lab: where to start on few problems, and which checkpoints to swap.

    python benchmarks/starts_lab.py FOLDER [--seeds 10] [--first-seed 5] [--bases OTHER] [--processes 1]

docs/constructed.md has the plan. A seed with a seed-N.json is finished, so the same command resumes a stopped run.
`--bases` takes OTHER/seed-N/base instead of pretraining a base.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from methods_lab import ZONES, answers
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from adapterswap import Composition, compose
from adapterswap.experiments.lab.bases import NUM_LAYERS, write_base
from adapterswap.experiments.lab.scenes import SCENES, Scene, draw_problems, language_rows, math_rows
from adapterswap.experiments.lab.seed import LEARNING_RATES, Questions, train_expert
from adapterswap.experiments.lab.seeds import run_seeds
from adapterswap.experiments.lab.study import summarize
from adapterswap.experiments.lab.tasks import LabRow

PAIR = ("math", "language")
METHODS: dict[str, dict[str, Any]] = {
    "swap": {"method": "layer_swap", **ZONES[0]},
    "sum": {"method": "task_arithmetic"},
    "soup": {"method": "soup"},
}
STARTS = [*METHODS, *PAIR, "base"]
FEW = (10, 30, 100)
TRAININGS = [{"learning_rate": rate, "max_steps": steps} for rate, steps in product((1.5e-3, 5e-4), (20, 80))]
RUNGS = 6
COMPARED = ("best pair", "best experts", "last")
SIZES = {"development": 300, "test": 1000, "held out": 500}


@dataclass(frozen=True)
class Asked:
    """A row of training data as a problem of `Questions`."""

    row: LabRow

    def prompt(self, language: str) -> str:
        return self.row.prompt

    @property
    def answer(self) -> str:
        return self.row.completion


def study_seed(
    scene: Scene, folder: Path, bases: Path | None, seed: int, tell: Callable[[str, float], None]
) -> dict[str, Any]:
    """Make a seed's models in `folder`/seed-N, evaluate everything, and write seed-N.json; read it if it exists."""
    record, place = folder / f"seed-{seed}.json", folder / f"seed-{seed}"
    if record.exists():
        return json.loads(record.read_text())  # type: ignore[no-any-return]
    disable_progress_bar()
    shutil.rmtree(place, ignore_errors=True)
    tell("base and experts", 0)
    if bases:
        shutil.copytree(bases / f"seed-{seed}" / "base", place / "base")
    else:
        write_base(scene, seed, place / "base")
    for name, rows in zip(PAIR, (math_rows, language_rows), strict=True):
        train_expert(
            place / "base", place / name, rows(scene, seed), seed, learning_rate=LEARNING_RATES[name],
            fields={"selection": {"ladder": RUNGS}}, save_every_samples=10**6,
        )  # fmt: skip
    number = SIZES["development"]
    problems, test = draw_problems(scene, "development", number + max(FEW)), draw_problems(scene, "test", SIZES["test"])
    tell("checkpoints", 0.3)
    pairs = checkpoints(scene, place, seed, problems[:number], test)
    tell("starts", 0.5)
    trained = starts(place, seed, problems[number:], Questions(problems[:number], "xx"), Questions(test, "xx"))
    content = {"seed": seed, "checkpoints": pairs, "starts": trained}
    record.write_text(json.dumps(content))
    return content


def composed(place: Path, math: Path, language: Path, **fields: Any) -> Any:
    """The plan of a composition of two adapters of a seed."""
    experts = {"math": str(math), "language": str(language)}
    both = {"experts": experts, "task": "math", "language": "language", "base_model": str(place / "base")}
    return compose(Composition(**both, num_layers=NUM_LAYERS, **fields))


def starts(place: Path, seed: int, few: Sequence[Any], chosen_on: Questions, test: Questions) -> dict[str, Any]:
    """For each start and number of problems: the answers on the test problems, of the training chosen on others."""
    for name, fields in METHODS.items():
        composed(place, place / "math", place / "language", **fields).write(place / name)
    base, worked = place / "base", [LabRow(problem.prompt("xx"), problem.answer) for problem in few]
    found: dict[str, Any] = {}
    for start in STARTS:
        begins = None if start == "base" else place / start
        found[start] = {"0": {"xx": marks(answers(({}, begins, base), test)[0])}}
        for number in FEW:
            right, folders = [], []
            for options in TRAININGS:
                folders.append(place / f"{start}-{number}-{len(folders)}")
                train_expert(
                    base, folders[-1], worked[:number], seed, batch_size=10, **options,
                    fields={"start": str(begins)} if begins else {},
                )  # fmt: skip
                right.append(float(answers(({}, folders[-1], base), chosen_on)[0].mean()))
            best = int(np.argmax(right))
            xx = marks(answers(({}, folders[best], base), test)[0])
            found[start][str(number)] = {"chosen": TRAININGS[best], "development": right, "xx": xx}
    return found


def checkpoints(scene: Scene, place: Path, seed: int, chosen_on: Sequence[Any], test: Sequence[Any]) -> dict[str, Any]:
    """The development accuracy of every pair of checkpoints, and the test answers of the pairs that are compared."""
    held_out = [Asked(row) for row in language_rows(scene, seed + 1000)[: SIZES["held out"]]]
    own = {"math": Questions(chosen_on, "en"), "language": Questions(held_out, "xx")}  # type: ignore[arg-type]
    base, xx, rungs, alone = place / "base", Questions(chosen_on, "xx"), {}, {}
    for name in PAIR:
        rungs[name] = sorted(place.glob(f"{name}/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        alone[name] = [float(answers(({}, rung, base), own[name])[0].mean()) for rung in rungs[name]]
    plans = {
        (i, j): composed(place, math, language, **METHODS["swap"])
        for (i, math), (j, language) in product(enumerate(rungs["math"]), enumerate(rungs["language"]))
    }
    grid = {pair: float(answers(({}, plan, base), xx)[0].mean()) for pair, plan in plans.items()}
    best = max(grid, key=lambda pair: (grid[pair], *pair))  # of equals the later checkpoints
    best_experts = tuple(max(range(RUNGS), key=lambda i, of=name: (alone[of][i], i)) for name in PAIR)
    compared = dict(zip(COMPARED, (best, best_experts, (RUNGS - 1, RUNGS - 1)), strict=True))
    asked = Questions(test, "xx")
    return {
        "alone": alone,
        "grid": [[grid[i, j] for j in range(RUNGS)] for i in range(RUNGS)],
        "pairs": compared,
        "xx": {name: marks(answers(({}, plans[pair], base), asked)[0]) for name, pair in compared.items()},
    }


def marks(right: NDArray[np.bool_]) -> str:
    return "".join("01"[int(value)] for value in right)


def summarized(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracies over seeds, and paired differences with the t interval over seeds."""

    def accuracy(rows: Iterable[Mapping[str, Any]]) -> list[float]:
        return [row["xx"].count("1") / len(row["xx"]) for row in rows]

    def spread(values: Sequence[float]) -> dict[str, Any]:
        summary = summarize(values)
        return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval, "per_seed": list(values)}

    def minus(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
        return spread([a - b for a, b in zip(one, other, strict=True)])

    scores = {
        (start, n): accuracy(seed["starts"][start][n] for seed in seeds)
        for start, n in product(STARTS, map(str, (0, *FEW)))
    }
    pairs = {name: accuracy({"xx": seed["checkpoints"]["xx"][name]} for seed in seeds) for name in COMPARED}
    return {
        "starts": {f"{start} {n}": spread(values) for (start, n), values in scores.items()},
        "swap minus": {
            f"{start} {n}": minus(scores["swap", n], values) for (start, n), values in scores.items() if start != "swap"
        },
        "checkpoints": {name: spread(values) for name, values in pairs.items()},
        "best pair minus": {name: minus(pairs["best pair"], pairs[name]) for name in COMPARED[1:]},
        "same pair": sum(seed["checkpoints"]["pairs"]["best pair"] == seed["checkpoints"]["pairs"]["best experts"]
                         for seed in seeds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=5)
    parser.add_argument("--bases", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    work = partial(study_seed, SCENES["gap"], options.folder, options.bases)
    found = run_seeds(work, seeds, jobs=options.processes, tell=lambda seed, step, _: print(f"seed {seed}: {step}"))
    (options.folder / "results.json").write_text(json.dumps(summarized(found), indent=2) + "\n")


if __name__ == "__main__":
    main()
