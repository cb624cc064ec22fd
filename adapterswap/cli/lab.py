"""`adapterswap lab`: the whole experiment on pico models → a table, a report, pictures and results.json."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.options import FOLDER
from adapterswap.cli.printing import echo, is_quiet, note, note_dry_run, note_output, print_json, print_table
from adapterswap.progress import Progress, ProgressRow

if TYPE_CHECKING:
    from rich.table import Table

    from adapterswap.lab import ComparisonPlan, LabPlan
    from adapterswap.lab.study import SeedReporter

_SCENES = ("gap", "no-gap")
_PARTS = 100  # of a seed, for its progress bar


@click.command("lab")
@click.option(
    "--seeds", type=click.IntRange(1), default=5, show_default=True, help="Number of bases, each with two experts."
)
@click.option(
    "--scene",
    type=click.Choice(_SCENES),
    default="gap",
    show_default=True,
    help="Experiment to run (see above).",
)
@click.option(
    "--methods",
    metavar="all|M,…",
    help="Compare merge methods instead: all, or for instance ties,dominance. Resumes an unfinished run in the folder.",
)
@click.option(
    "--first-seed",
    type=click.IntRange(0),
    help="With --methods: the first seed. Default: 5, as 0 to 4 were used for design.",
)
@click.option("--rebuild-base", is_flag=True, help="Pretrain the bases instead of using the shipped ones.")
@click.option("-o", "--out-path", type=FOLDER, default="lab-run", show_default=True, help="Folder to write.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Seeds to run at the same time, one thread each. Default: one per core."
)
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
    if methods is None and first_seed is not None:
        raise click.UsageError("--first-seed can only be used with --methods.")
    from adapterswap.lab import SCENES, plan_comparison, plan_lab

    plan: LabPlan | ComparisonPlan
    if methods is None:
        plan = plan_lab(SCENES[scene], seeds, out_path, rebuild_base=rebuild_base, overwrite=overwrite)
    else:
        plan = plan_comparison(
            SCENES[scene], methods, seeds, out_path,
            first_seed=first_seed, rebuild_base=rebuild_base, overwrite=overwrite,
        )  # fmt: skip
    if dry_run:
        print_json({"dry_run": True, **plan.to_json()}) if as_json else _print_plan(plan)
        return
    with _progress(seeds) as tell:
        content, tables = _run(plan, jobs, tell)
    if as_json:
        print_json({"dry_run": False, **content})
    else:
        from adapterswap.lab.run import CAVEAT

        print_table(*tables)
        echo(CAVEAT)
    if methods is None:
        note_output(out_path, "report.html, results.json, answers.jsonl, pictures, each seed's models")
        note(f"to move layers and watch the answers change: adapterswap studio --lab {shlex.quote(out_path)}")
    else:
        note_output(out_path, "results.json, each seed's answers and models")


def _run(
    plan: LabPlan | ComparisonPlan, jobs: int | None, tell: SeedReporter
) -> tuple[Mapping[str, Any], Iterator[Table]]:
    """Run a plan, and return what results.json says with its tables."""
    from adapterswap.lab import LabPlan, run_comparison, run_lab

    if isinstance(plan, LabPlan):
        from adapterswap.lab.run import results, tables

        study = run_lab(plan, jobs=jobs, tell=tell)
        return results(study), tables(study)
    from adapterswap.lab.comparison import comparison_tables

    content = run_comparison(plan, jobs=jobs, tell=tell)
    return content, comparison_tables(content)


def _print_plan(plan: LabPlan | ComparisonPlan) -> None:
    from adapterswap.lab import LabPlan

    number = len(plan.pretrained)
    if isinstance(plan, LabPlan):
        scene, sizes = plan.scene, plan.sizes
        bases = f"{number} pretrained, about two minutes each" if number else "shipped"
        lines = {
            "scene": scene.name,
            "seeds": f"{plan.seeds}; bases: {bases}",
            "training": f"{scene.math_rows:,} rows for math, {scene.language_rows:,} for the language",
            "problems": f"{sizes.development:,} for choosing, {sizes.test:,} for testing",
            "methods": ", ".join(plan.to_json()["methods"]),
        }
    else:
        expected = plan.to_json()
        few = ", ".join(map(str, expected["few"]))
        lines = {
            "scene": plan.scene.name,
            "seeds": f"{plan.seeds[0]} to {plan.seeds[-1]}; bases: {f'{number} to pretrain' if number else 'shipped'}",
            "problems": f"{plan.sizes.development:,} for choosing, or {few}; {plan.sizes.test:,} for testing",
            "methods": f"{', '.join(plan.methods)}; at most {expected['budget']} configurations of each",
            "controls": ", ".join(expected["controls"]),
        }
    for label, text in lines.items():
        echo(f"{label:<12}{text}")
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
