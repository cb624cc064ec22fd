"""The results of the comparison of all methods: means, paired intervals over seeds and problems, and the table.

Numbers in, numbers and text out; `scripts/methods_page.py` uses it to make docs/methods.md from a stored result. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from adapterswap.lab.choices import SUGGESTED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

__all__ = ["COMPARED_WITH", "COMPARISON_FORMAT", "compared", "comparison_tables", "markdown_tables", "training_line"]

COMPARISON_FORMAT = "adapterswap-lab-methods/1"
COMPARED_WITH = ("layer_swap", "math expert")
_DRAWS = 2000  # of the bootstrap: some 70 intervals take half a minute
_LIBRARIES = ("adapterswap", "torch", "transformers", "peft", "trl")


def compared(described: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers over seeds.

    Args:
        described: the settings of the comparison.
        seeds: the result of `compare_seed` for each.

    Returns:
        `described`, `seeds` (their numbers), `versions` and `rows`: by method and control `configurations` (how many),
        `xx` and `en` (mean and standard deviation over seeds of the test accuracy), `per_seed`, `chosen` (each seed's
        configuration), `few` (number of problems → the mean of configurations chosen on that many) and `minus` (other
        row → the mean difference in xx, its 95 % interval over seeds and problems, and in how many seeds it is better
        or worse beyond the 95 % interval over problems). `training` has, by number of problems, the `best` method
        chosen on them, and the differences of that method and of the layer swap to training on them.
    """
    names = list(seeds[0]["rows"])
    rows = {name: _row(name, seeds, described["few"]) for name in names}
    return {
        **described,
        "seeds": [seed["seed"] for seed in seeds],
        "rows": rows,
        "training": {str(n): _training(n, rows, seeds, described["controls"]) for n in described["few"]},
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def _row(name: str, seeds: Sequence[Mapping[str, Any]], few: Sequence[int]) -> dict[str, Any]:
    seed_rows = [seed["rows"][name] for seed in seeds]
    right = _right(name, seeds)
    on_few = {str(n): _right(name, seeds, str(n)) for n in few if str(n) in seed_rows[0]["chosen"]}
    return {
        "configurations": len(seed_rows[0]["configurations"]),
        "xx": _spread([float(row.mean()) for row in right]),
        "en": _spread([row["en"].count("1") / len(row["en"]) for row in seed_rows]),
        "per_seed": [round(float(row.mean()), 6) for row in right],
        "chosen": [row["configurations"][row["chosen"]["all"]] for row in seed_rows],
        "few": {n: round(float(values.mean()), 6) for n, values in on_few.items()},
        "minus": {other: _difference(right, _right(other, seeds)) for other in COMPARED_WITH if other != name},
    }


def _training(
    number: int, rows: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]], controls: Sequence[str]
) -> dict[str, Any]:
    few = str(number)
    means = {name: row["few"][few] for name, row in rows.items() if name not in controls}
    best = max(means, key=lambda name: means[name])
    training = _right(f"trained on {number}", seeds)
    minus = {name: _difference(_right(name, seeds, few), training) for name in dict.fromkeys((best, COMPARED_WITH[0]))}
    return {"best": best, "minus": minus}


def _right(name: str, seeds: Sequence[Mapping[str, Any]], chosen_on: str = "all") -> NDArray[np.bool_]:
    """Whether the chosen configuration answered each test problem in xx correctly (seeds, problems)."""
    import numpy as np

    rows = [seed["rows"][name] for seed in seeds]
    return np.array([[mark == "1" for mark in row["xx"][str(row["chosen"][chosen_on])]] for row in rows])


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    from adapterswap.lab.statistics import summarize

    summary = summarize(values)
    return {"mean": round(summary.mean, 6), "spread": None if summary.spread is None else round(summary.spread, 6)}


def _difference(right: NDArray[np.bool_], reference: NDArray[np.bool_]) -> dict[str, float | int | None]:
    from adapterswap.lab.statistics import difference
    from adapterswap.reporting.statistics import bootstrap

    summary = bootstrap(right.astype(float) - reference.astype(float), draws=_DRAWS)
    seeds = difference(list(right), list(reference))
    interval = {"low": summary.low, "high": summary.high}
    rounded = {key: None if value is None else round(value, 6) for key, value in interval.items()}
    return {"mean": round(summary.mean, 6), **rounded, "better": seeds.won, "worse": seeds.lost}


def _ordered(results: Mapping[str, Any]) -> list[str]:
    """Methods by their mean, the best first; then the controls in their listed order."""
    rows = results["rows"]
    methods = [name for name in rows if name not in results["controls"]]
    return [*sorted(methods, key=lambda name: -rows[name]["xx"]["mean"]), *results["controls"]]


def _cells(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """The headings, then the cells of each row."""
    few = [str(n) for n in reversed(results["few"])]
    minus = [f"minus {other} (95 %)" for other in COMPARED_WITH]
    yield ["method", "tried", "xx maths", "English", *minus, *(f"on {n}" for n in few)]
    for name in _ordered(results):
        row = results["rows"][name]
        scores = [_with_spread(row[language]) for language in ("xx", "en")]
        differences = [_interval(row["minus"].get(other)) for other in COMPARED_WITH]
        chosen = [f"{row['few'][n]:.3f}" if n in row["few"] else "" for n in few]
        yield [name, f"{row['configurations']}", *scores, *differences, *chosen]


def _with_spread(value: Mapping[str, float | None]) -> str:
    return f"{value['mean']:.3f}" + ("" if value["spread"] is None else f" ± {value['spread']:.3f}")


def _interval(value: Mapping[str, float | None] | None) -> str:
    if value is None:
        return ""
    low, high = value["low"], value["high"]
    return f"{value['mean']:+.3f}" + ("" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]")


def training_line(results: Mapping[str, Any]) -> list[list[str]]:
    """Headings, then per number of problems: the score of training on them, and of methods chosen on them."""
    headings = ["problems in xx", "trained on them", "best method chosen on them", "difference (95 %)", "layer_swap's"]
    lines = [headings]
    for number, result in results["training"].items():
        best, minus = result["best"], result["minus"]
        chosen = f"{best}, {results['rows'][best]['few'][number]:.3f}"
        training = _with_spread(results["rows"][f"trained on {number}"]["xx"])
        lines.append([number, training, chosen, _interval(minus[best]), _interval(minus[COMPARED_WITH[0]])])
    return lines


def comparison_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """The table of methods, and the line of plain training, for a terminal."""
    from rich.table import Table

    over = f"{len(results['seeds'])} seeds × {results['sizes']['test']:,} problems"
    for title, lines in (
        (f"Exact match, {over}", list(_cells(results))),
        ("Training on the same problems", training_line(results)),
    ):
        table = Table(title=title, title_justify="left")
        for place, heading in enumerate(lines[0]):
            table.add_column(heading, justify="right" if place else "left")
        for cells in lines[1:]:
            table.add_row(*cells)
        yield table


def markdown_tables(results: Mapping[str, Any]) -> tuple[str, str]:
    """The same two tables in Markdown; methods link to their sections."""
    table, line = list(_cells(results)), training_line(results)
    unlinked = {*results["controls"], *SUGGESTED}
    linked = [[c[0] if c[0] in unlinked else f"[{c[0]}](#{c[0]})", *c[1:]] for c in table[1:]]
    return _markdown([table[0], *linked]), _markdown(line)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], ruler, *lines[1:])) + "\n"
