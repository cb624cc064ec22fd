"""`adapterswap lab`: the whole experiment on pico models → a table, a report, pictures and results.json."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from adapterswap.cli.paths import FOLDER
from adapterswap.cli.printing import is_quiet, note, note_dry_run, note_output, print_json, print_table
from adapterswap.progress import Progress, ProgressRow

if TYPE_CHECKING:
    from adapterswap.lab import LabPlan
    from adapterswap.lab.comparison import ComparisonPlan

_SCENES = ("gap", "no-gap")
_PARTS = 1000  # of a seed, for its progress bar


@click.command("lab")
@click.option(
    "--seeds", type=click.IntRange(1), default=5, show_default=True, help="Number of bases, each with two experts."
)
@click.option(
    "--scene", type=click.Choice(_SCENES), default="gap", show_default=True, help="What the base does not know."
)
@click.option(
    "--methods",
    metavar="all|M,…",
    help="Compare merge methods instead: all of them, or these. An unfinished run in the folder is resumed.",
)
@click.option(
    "--first-seed", type=click.IntRange(0), help="With --methods: the first seed. Default: 5, the first fresh one."
)
@click.option("--rebuild-base", is_flag=True, help="Pretrain the bases instead of using the shipped ones.")
@click.option("-o", "--out-path", type=FOLDER, default="lab-run", show_default=True, help="Folder to write.")
@click.option("--jobs", type=click.IntRange(1), help="Seeds to run at once, one thread each. Default: one per core.")
@click.option("--overwrite", is_flag=True, help="Replace what this command wrote there before.")
@click.option("--dry-run", is_flag=True, help="Print what would be done and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    seeds: int,
    scene: str,
    methods: str | None,
    first_seed: int | None,
    rebuild_base: bool,
    out_path: str,
    jobs: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the whole experiment on a tiny built-in model, offline.

    A pico Llama knows English and a constructed language, `xx`. A math expert is trained on English word problems, a
    language expert on xx without word problems. Both are composed in several ways and answer new word problems in xx.
    The command writes a report, pictures and results.json, and keeps bases, experts and compositions for you to try.

    Scenes: in `gap` the base hardly knows some words of xx; in `no-gap` it knows them all.

    With --methods, every method chooses among eight configurations on a development set. The chosen ones are compared
    on a test set, with controls: random experts, reset, inverse, plain training on a few problems in xx. See
    docs/methods.md for the table of such a run.

    This is a constructed demonstration of a mechanism, not evidence for the papers' numbers.
    """
    if methods is not None:
        _compare(methods, seeds, scene, first_seed, rebuild_base, out_path, jobs, overwrite, dry_run, as_json)
        return
    if first_seed is not None:
        raise click.UsageError("--first-seed can only be used with --methods.")
    from adapterswap.files.folders import check_target
    from adapterswap.lab import SCENES, plan_lab, run_lab
    from adapterswap.lab.run import LAB

    chosen = SCENES[scene]
    if dry_run:
        check_target(out_path, kind=LAB, overwrite=overwrite)
        expected = plan_lab(chosen, seeds, rebuild_base=rebuild_base)
        print_json({"dry_run": True, **expected.to_json()}) if as_json else _print_plan(expected)
        return
    with _progress() as tell:
        study = run_lab(
            chosen, seeds, out_path, rebuild_base=rebuild_base, jobs=jobs, overwrite=overwrite, tell=tell
        )  # fmt: skip
    from adapterswap.lab.report import CAVEAT, results, tables

    if as_json:
        print_json({"dry_run": False, **results(study)})
    else:
        print_table(*tables(study))
        click.echo(CAVEAT)
    note_output(out_path, "report.html, results.json, answers.jsonl, pictures, each seed's models")
    note(f"to move layers and watch the answers change: adapterswap studio --lab {shlex.quote(out_path)}")


def _compare(
    methods: str,
    seeds: int,
    scene: str,
    first_seed: int | None,
    rebuild_base: bool,
    out_path: str,
    jobs: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from adapterswap.lab import SCENES, plan_comparison, run_comparison
    from adapterswap.lab.comparison import FRESH_SEED

    chosen, first = SCENES[scene], FRESH_SEED if first_seed is None else first_seed
    if dry_run:
        expected = plan_comparison(
            chosen, methods, seeds, out_path, first_seed=first, rebuild_base=rebuild_base, overwrite=overwrite
        )  # fmt: skip
        print_json({"dry_run": True, **expected.to_json()}) if as_json else _print_comparison(expected)
        return
    with _progress() as tell:
        results = run_comparison(
            chosen, methods, seeds, out_path,
            first_seed=first, rebuild_base=rebuild_base, jobs=jobs, overwrite=overwrite, tell=tell,
        )  # fmt: skip
    from adapterswap.lab.comparison_table import comparison_tables
    from adapterswap.lab.report import CAVEAT

    if as_json:
        print_json({"dry_run": False, **results})
    else:
        print_table(*comparison_tables(results))
        click.echo(CAVEAT)
    note_output(out_path, "results.json, each seed's answers and models")


def _print_comparison(expected: ComparisonPlan) -> None:
    few = ", ".join(map(str, expected.few))
    pretrained = f"{len(expected.pretrained)} to pretrain" if expected.pretrained else "shipped"
    sizes = expected.sizes
    lines = {
        "scene": expected.scene,
        "seeds": f"{expected.seeds[0]} to {expected.seeds[-1]}; bases: {pretrained}",
        "problems": f"{sizes.development:,} to choose on, or {few}; {sizes.test:,} to test on",
        "methods": f"{', '.join(expected.methods)}; of each at most {expected.budget} configurations",
        "controls": ", ".join(expected.controls),
    }
    for label, text in lines.items():
        click.echo(f"{label:<12}{text}")
    note_dry_run("trained")


def _print_plan(expected: LabPlan) -> None:
    pretrained = f"{len(expected.pretrained)} pretrained, about two minutes each" if expected.pretrained else "shipped"
    lines = {
        "scene": expected.scene,
        "seeds": f"{expected.seeds}; bases: {pretrained}",
        "training": f"{expected.math_rows:,} rows for math, {expected.language_rows:,} for the language",
        "problems": f"{expected.development:,} to choose on, {expected.test:,} to test on",
        "methods": ", ".join(expected.methods),
    }
    for label, text in lines.items():
        click.echo(f"{label:<12}{text}")
    note_dry_run("trained")


@contextmanager
def _progress() -> Iterator[Callable[[int, str, float], None]]:
    """A bar per seed on stderr; without a terminal, a line whenever a seed starts something else."""
    with Progress(shown=not is_quiet()) as bars:
        rows: dict[int, ProgressRow] = {}
        current: dict[int, str] = {}

        def update(seed: int, what: str, share: float) -> None:
            if seed not in rows:
                rows[seed] = bars.row(f"seed {seed}", _PARTS)
            rows[seed].update(round(share * _PARTS), name=f"seed {seed}: {what}")
            if current.get(seed) != what:
                current[seed] = what
                if not sys.stderr.isatty():
                    note(f"seed {seed}: {what}")

        yield update
