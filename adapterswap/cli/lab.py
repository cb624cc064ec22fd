"""`adapterswap lab`: the whole experiment on pico models → a table, a report, pictures and results.json."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from adapterswap.cli.options import Count, Json, Output
from adapterswap.cli.printing import (
    echo,
    is_quiet,
    note,
    note_dry_run,
    note_output,
    print_json,
    print_line,
    print_table,
)
from adapterswap.cli.signature import declare
from adapterswap.kit.progress import Progress, ProgressRow

if TYPE_CHECKING:
    from adapterswap.experiments.lab import LabPlan
    from adapterswap.experiments.lab.seed import SeedResult

_PARTS = 100  # of a seed, for its progress bar
_LINE_EVERY_S = 60.0
_SHOWN = ("layer swap", "math expert", "language expert", "sum")  # in the line of a finished seed


@declare("lab")
def lab_command(
    *,
    seeds: Count = 5,
    scene: Literal["gap", "no-gap"] = "gap",
    rebuild_base: bool = False,
    jobs: Count | None = None,
    out_path: Output = "lab-run",
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Run the whole experiment on a tiny built-in model, offline.

    A pico Llama knows English and a constructed language, `xx`. A math expert is trained on English word problems, a
    language expert on xx without word problems. Both are composed in several ways and answer new word problems in xx.
    The command writes a report, pictures and results.json, and keeps bases, experts and compositions for you to try.

    Scenes: in `gap` the base hardly knows some words of xx; in `no-gap` it knows them all.

    This is a constructed demonstration of a mechanism, not evidence for the papers' numbers.

    Args:
        seeds: Number of bases, each with two experts.
        scene: Experiment to run (see above).
        rebuild_base: Pretrain the bases instead of using the shipped ones.
        jobs: Seeds to run at the same time, one thread each.  [default: one per core]
        dry_run: Print what would be done and do nothing.
    """
    from adapterswap.experiments.lab import SCENES, plan_lab, run_lab

    plan = plan_lab(SCENES[scene], seeds, out_path, rebuild_base=rebuild_base, overwrite=overwrite)
    if dry_run:
        print_json({"dry_run": True, **plan.to_json()}) if as_json else _print_plan(plan)
        return
    with _progress(seeds) as progress:
        study = run_lab(plan, jobs=jobs, tell=progress.tell, finished=progress.finish)
    from adapterswap.experiments.lab.run import CAVEAT, results, tables

    if as_json:
        print_json({"dry_run": False, **results(study)})
    else:
        print_table(*tables(study))
        echo(CAVEAT)
    note_output(out_path, "report.html, results.json, answers.jsonl, pictures, each seed's models")
    note(f"to move layers and watch the answers change: adapterswap studio --lab {shlex.quote(out_path)}")


def _print_plan(plan: LabPlan) -> None:
    scene, sizes, number = plan.scene, plan.sizes, len(plan.pretrained)
    bases = f"{number} pretrained, about three minutes each" if number else "shipped"
    lines = {
        "scene": scene.name,
        "seeds": f"{plan.seeds}; bases: {bases}",
        "training": f"{scene.math_rows:,} rows for math, {scene.language_rows:,} for the language",
        "problems": f"{sizes.development:,} for choosing, {sizes.test:,} for testing",
        "methods": ", ".join(plan.to_json()["methods"]),
    }
    for label, text in lines.items():
        print_line(label, text)
    note_dry_run("trained")


@contextmanager
def _progress(seeds: int) -> Iterator[_SeedRows]:
    """Show a bar for each running seed on stderr, or a line a minute without a terminal."""
    with Progress(shown=not is_quiet(), line_every=_LINE_EVERY_S) as bars:
        yield _SeedRows(bars, seeds)


class _SeedRows:
    """A row for each running seed, and a line with its scores when it has ended; then a row for the report."""

    def __init__(self, bars: Progress, seeds: int) -> None:
        self._bars, self._left = bars, seeds
        self._rows: dict[int, ProgressRow] = {}

    def tell(self, seed: int, step: str, share: float) -> None:
        if seed not in self._rows:
            self._rows[seed] = self._bars.row(f"seed {seed}: {step}", _PARTS, steady=False)
        self._rows[seed].update(int(share * _PARTS), name=f"seed {seed}: {step}")

    def finish(self, seed: int, result: SeedResult) -> None:
        row = self._rows.pop(seed, None)
        took = "" if row is None else f" ({row.elapsed})"
        if row is not None:
            self._bars.remove(row)
        scores = ", ".join(f"{name} {result.right[name]['xx'].mean():.3f}" for name in _SHOWN)
        note(f"seed {seed}: xx math: {scores}{took}")
        self._left -= 1
        if not self._left:
            self._bars.row("the report")
