"""The comparison of all methods on several seeds: a folder written seed by seed, and its table.

Numbers in, numbers and text out; `scripts/methods_page.py` uses it to make docs/methods.md from a stored result. Knows
nothing of models.

A seed with a seed-N.json is finished; existing bases and experts are used again. Knows the files; knows nothing of the
terminal.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.errors import OutputError, RunError
from adapterswap.files.folders import OutputKind, check_place, locked, refuse_strangers, replacing, strangers
from adapterswap.files.text import exists, expand, read_json, write_json
from adapterswap.lab.bases import pretrained_seeds
from adapterswap.lab.comparing import (
    BUDGET,
    CONTROLS,
    DEFAULT_SIZES,
    FEW,
    SUGGESTED,
    ComparisonSizes,
    chosen_methods,
    compare_seed,
)
from adapterswap.lab.run import require_libraries
from adapterswap.lab.scenes import Scene
from adapterswap.lab.study import SeedReporter, run_seeds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

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
        "training": {str(n): _training_rows(n, rows, seeds, described["controls"]) for n in described["few"]},
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


def _training_rows(
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
    from adapterswap.lab.study import summarize

    summary = summarize(values)
    return {"mean": round(summary.mean, 6), "spread": None if summary.spread is None else round(summary.spread, 6)}


def _difference(right: NDArray[np.bool_], reference: NDArray[np.bool_]) -> dict[str, float | int | None]:
    from adapterswap.lab.study import difference
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
    yield ["method", "tried", "xx math", "English", *minus, *(f"on {n}" for n in few)]
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


FRESH_SEED = 5
"""The first seed that was not used to design scenes and training; the bases of 0 to 4 are shipped."""

_RECORD, _RESULTS, _LOCK, _BUILDING = "comparison.json", "results.json", "lab.lock", "lab.tmp"

COMPARISON = OutputKind(
    _RECORD,
    lambda record: record.get("format") == COMPARISON_FORMAT,
    lambda: (_RECORD, _RESULTS, _LOCK, _BUILDING, "seed-*.json", "seed-*.part", "seed-*/**"),
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
    plan: ComparisonPlan, *, jobs: int | None = None, tell: SeedReporter = lambda seed, step, share: None
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
