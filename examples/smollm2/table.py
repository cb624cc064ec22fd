"""The table of docs/lab.md from a sweep over several pairs: means, and the layer swap minus each row with intervals.

python examples/smollm2/table.py runs/french
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from adapterswap.experiments.lab.french import over_templates
from adapterswap.experiments.lab.word_problems import draw_problems
from adapterswap.experiments.sweeps import CellResult, read_run

SWAP = "layer swap"
Pair = tuple[str, str]


def scores(result: CellResult, templates: int) -> NDArray[np.float64]:
    (value,) = result.results.values()
    assert len(value.docs) == templates
    return np.array([value.docs[number] for number in sorted(value.docs)])


def by_pair(results: list[CellResult], pairs: list[Pair], templates: int) -> dict[str, list[NDArray[np.float64]]]:
    """Row → scores of each pair (problems,). A single expert stands in each pair that contains it, the base in all."""
    rows: dict[str, list[NDArray[np.float64]]] = {}
    for family in dict.fromkeys(result.cell.family for result in results):
        cells = [result for result in results if result.cell.family == family]
        for task, language in pairs:
            fitting = [
                one
                for one in cells
                if set(one.cell.task_expert) <= {task} and set(one.cell.language_expert) <= {language}
            ]
            rows.setdefault(family, []).extend(scores(one, templates) for one in fitting[:1])
    return rows


def main() -> None:
    run = read_run(sys.argv[1] if len(sys.argv) > 1 else Path("runs/french"))
    problems = draw_problems("test")
    names = [problem.template for problem in problems]
    pairs = sorted(
        {(one.cell.task_expert[0], one.cell.language_expert[0]) for one in run.results if one.cell.family == SWAP}
    )
    rows = by_pair(list(run.results), pairs, len(problems))
    print(
        "| | " + " | ".join(" + ".join(pair) for pair in pairs) + " | mean | swap − it | over templates | over pairs |"
    )
    print("|---|" + "---:|" * (len(pairs) + 4))
    for family, values in rows.items():
        means = [float(value.mean()) for value in values]
        cells = [f"{mean:.3f}" for mean in means] + [f"{np.mean(means):.3f}"]
        if family != SWAP and len(values) == len(pairs):
            difference, half = over_templates(np.mean(rows[SWAP], axis=0), np.mean(values, axis=0), names)
            each = [float(swap.mean() - value.mean()) for swap, value in zip(rows[SWAP], values, strict=True)]
            spread = stats.t.ppf(0.975, len(each) - 1) * np.std(each, ddof=1) / len(each) ** 0.5
            cells += [f"{difference:+.3f}", f"± {half:.3f}", f"± {spread:.3f}"]
        print(f"| {family} | " + " | ".join(cells) + " |")
    for operation in "+-*/":
        chosen = np.array([problem.operation == operation for problem in problems])
        parts = {family: np.mean([value[chosen].mean() for value in values]) for family, values in rows.items()}
        print(operation, {family: round(float(part), 3) for family, part in parts.items()})


if __name__ == "__main__":
    main()
