"""The result and cost of a search compared with a grid, replayed on the lab's sweep, in which every cell is known.

    python benchmarks/search_lab.py FOLDER [--seeds 20] [--json]

FOLDER is one that `sweep_lab.py --out-path FOLDER` wrote: 9 pairs × 76 layer swaps. A search asks for the same cells
and documents as it would if they were still to be judged, and gets the scores that are known. `documents` is the
share of the grid's documents that it asks for; `chosen` the score of the configuration that it chose on the documents
to choose on, `reported` on the others, means over seeds; `as_good` how often what it chose reports at least what the
grid's choice does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from adapterswap.experiments.sweeps import CellResult, Run, SweepRecipe, prepare
from adapterswap.experiments.sweeps.grid import Assignment
from adapterswap.experiments.sweeps.prepared import PreparedSweep
from adapterswap.experiments.sweeps.recipe import Search
from adapterswap.experiments.sweeps.results import Findings
from adapterswap.experiments.sweeps.search import batches
from adapterswap.experiments.sweeps.summary import half_value

HALVING = {"min_documents": 6, "reduction_factor": 3}
SEARCHES: dict[str, dict[str, Any]] = {
    f"{sampler} {trials}{' halving' if halving else ''}": {"sampler": sampler, "trials": trials, "halving": halving}
    for trials, halving in ((10, None), (20, None), (40, None), (40, HALVING), (76, HALVING))
    for sampler in ("random", "tpe")
}


def chosen(results: Iterable[CellResult], run: Run) -> tuple[float, float]:
    """(on the documents to choose on, on the others) of the configuration with the best mean over its pairs."""
    configurations: dict[str, list[CellResult]] = {}
    for result in results:
        configurations.setdefault(result.cell.configuration, []).append(result)

    def score(half: str, found: list[CellResult]) -> float:
        return mean(half_value(result, run.tasks, half) or 0.0 for result in found)

    best = max(configurations.values(), key=lambda found: score("select", found))
    return score("select", best), score("report", best)


def replay(prepared: PreparedSweep, run: Run) -> tuple[int, float, float]:
    """(documents evaluated, score on the choosing half, score on the reporting half) of one search."""
    known = Findings.of(run.results, ())
    _, *asked = batches(prepared, known)  # the first are the baselines
    assignments = [assignment for batch in asked for assignment in batch]
    whole = [known.results[assignment.cell.cell] for assignment in assignments if assignment.rung is None]
    return sum(documents_of(assignment, run) for assignment in assignments), *chosen(whole, run)


def documents_of(assignment: Assignment, run: Run) -> int:
    if assignment.documents is None:
        return sum(run.tasks[task].num_docs for task in assignment.cell.tasks)
    return sum(map(len, assignment.documents.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepared = prepare(SweepRecipe.read(options.folder / "recipe.yaml"))
    run = Run.read(options.folder / "whole")
    swaps = [result for result in run.results if result.cell.family == "layer_swap"]
    whole = sum(documents_of(Assignment(result.cell), run) for result in swaps)
    best = chosen(swaps, run)
    rows = [{"search": "grid", "documents": 1.0, "chosen": best[0], "reported": best[1], "as_good": 1.0}]
    for name, content in SEARCHES.items():
        found = []
        for seed in range(options.seeds):
            search = Search.model_validate({**content, "seed": seed})
            found.append(replay(replace(prepared, recipe=prepared.recipe.model_copy(update={"search": search})), run))
        documents, at, reported = zip(*found, strict=True)
        rows.append(
            {
                "search": name,
                "documents": mean(documents) / whole,
                "chosen": mean(at),
                "reported": mean(reported),
                "as_good": mean(value >= best[1] for value in reported),
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'search':<18}{'documents':>10}{'chosen':>8}{'reported':>10}{'as good':>9}")
    for row in rows:
        print("{search:<18}{documents:>10.3f}{chosen:>8.3f}{reported:>10.3f}{as_good:>9.2f}".format(**row))


if __name__ == "__main__":
    main()
