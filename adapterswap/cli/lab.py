"""`adapterswap lab`: the whole experiment on pico models → a table, a report, pictures and results.json."""

from __future__ import annotations

import shlex
import sys
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
    from adapterswap.experiments.lab.study import SeedReporter

_PARTS = 100  # of a seed, for its progress bar


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
    with _progress(seeds) as tell:
        study = run_lab(plan, jobs=jobs, tell=tell)
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
def _progress(seeds: int) -> Iterator[SeedReporter]:
    """A bar per seed on stderr; without a terminal, a line for each new step of a seed.

    The report after the last seed has a bar too.
    """
    with Progress(shown=not is_quiet()) as bars:
        rows: dict[int, ProgressRow] = {}
        current: dict[int, str] = {}

        def update(seed: int, step: str, share: float) -> None:
            if seed not in rows:
                rows[seed] = bars.row(f"seed {seed}", _PARTS, steady=False)
            rows[seed].update(round(share * _PARTS), name=f"seed {seed}: {step}")
            if current.get(seed) != step:
                current[seed] = step
                if not sys.stderr.isatty():
                    note(f"seed {seed}: {step}")
                if list(current.values()) == ["done"] * seeds:
                    bars.row("the report")

        yield update
