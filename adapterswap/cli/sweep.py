"""`adapterswap sweep`: a recipe → many compositions evaluated on one loaded base → a folder, and a table.

With torchrun or `accelerate launch`, every process runs this, and one of them writes and prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import click

from adapterswap.cli.composition_options import RuleText, named_experts, parsed_rules
from adapterswap.cli.options import (
    BaseDtype,
    Count,
    Device,
    Engine,
    Expert,
    Json,
    NamedExpert,
    Output,
    RecipePath,
    Setting,
    one_voice,
    only_with,
    parsed_arguments,
    together,
    with_short,
)
from adapterswap.cli.output import (
    echo,
    is_quiet,
    note,
    note_dry_run,
    note_output,
    number_text,
    print_json,
    print_line,
    print_rows,
    resumable,
    working,
)
from adapterswap.cli.signature import declare
from adapterswap.kit.processes import Processes
from adapterswap.kit.progress import Progress, ProgressRow, duration

if TYPE_CHECKING:
    from adapterswap.experiments.sweeps import Run, SweepProgress
    from adapterswap.experiments.sweeps.run import Estimate


@declare("sweep")
@one_voice()
def sweep_command(
    recipe: Annotated[str, RecipePath("sweep")],
    *,
    overrides: Annotated[tuple[Setting, ...], "--set"] = (),
    base_model: Expert | None = None,
    experts: tuple[NamedExpert, ...] = (),
    rules: tuple[RuleText, ...] = (),
    limit: Annotated[float, "N"] | None = None,
    batch_size: int | None = None,
    engine: Engine | None = None,
    engine_args: tuple[Setting, ...] = (),
    in_flight: Count | None = None,
    device: Device = "auto",
    dtype: BaseDtype = "auto",
    ray: Annotated[str, "ADDRESS"] | None = None,
    workers: Count | None = None,
    trust_task_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    freeze: bool = False,
    reference: Annotated[str, "METHOD"] | None = None,
    methods: Annotated[tuple[str, ...], "METHOD"] = (),
    out_path: Annotated[Output, "RUN"],
    overwrite: bool = False,
    dry_run: bool = False,
    tokens_per_second: Annotated[float, click.FloatRange(0, min_open=True), "N"] | None = None,
    as_json: Json = False,
) -> None:
    """Evaluate many compositions on one loaded base.

    RECIPE is a YAML file, or the name of a shipped recipe such as sweep/llama-3.1-8b/swahili. It names a base, task and
    language experts, grids of compositions, and the tasks of evaluate. The base and the experts are loaded once, and
    every result is saved at once: if a sweep is stopped or killed, run the same command again to resume it. On several
    devices: accelerate launch --multi_gpu -m adapterswap sweep …

    Args:
        overrides: Change a value, such as settings.num_fewshot=2.
        base_model: The base model, instead of the recipe's.
        experts: Add an expert, which rules can name; repeatable.
        rules: Add a composition: 'swahili: 0-4', 'math*0.5 + swahili*0.5: 5', math (the rest). Names are experts, or
            roles such as task and language, which stand for every expert of the role. Repeatable; the first match wins.
        limit: Short for --set settings.limit=N.
        batch_size: Short for --set settings.batch_size=N.
        in_flight: Short for --set settings.in_flight=N.
        ray: Evaluate on a Ray cluster; `local` starts one on this machine.
        workers: With --ray: number of processes.  [default: one per GPU]
        trust_task_code: Let the files in include_path run their own Python code.
        freeze: Evaluate nothing; register what will be compared and chosen, with a hash.
        reference: With --freeze: method to compare the others with.  [default: as in a report]
        methods: With --freeze: methods to test.  [default: all]
        out_path: Folder to write, or to resume.
        overwrite: Replace the sweep in the folder.
        dry_run: Check and count everything, without loading weights or writing files.
        tokens_per_second: With --dry-run: how fast your engine generates, to estimate the time.

    Examples:
        adapterswap sweep sweep.yaml -o runs/swahili --dry-run
        adapterswap sweep sweep.yaml -o runs/swahili
    """
    from adapterswap.core import choose_device
    from adapterswap.experiments.sweeps import SweepRecipe, prepare, summarize, sweep
    from adapterswap.experiments.sweeps.run import Estimate
    from adapterswap.kit.files.yaml import find_recipe

    only_with("--ray", ray, "workers")
    only_with("--dry-run", dry_run, "tokens_per_second")
    only_with("--freeze, or with `adapterswap report`", freeze, "reference", "methods")
    if freeze and overwrite:
        raise click.UsageError("--freeze cannot be combined with --overwrite: register before you run the sweep.")

    # The recipe, with what the options change
    short: dict[str, Any] = {
        "base_model": base_model,
        "settings.limit": limit,
        "settings.batch_size": batch_size,
        "settings.engine": engine,
        "settings.in_flight": in_flight,
    }
    for key, value in parsed_arguments(engine_args).items():
        short[f"settings.engine_args.{key}"] = json.dumps(value)
    settings = with_short(overrides, short)
    sweep_recipe = SweepRecipe.read(find_recipe(recipe, "sweep"), settings)
    if experts or rules:
        sweep_recipe = sweep_recipe.with_rules(named_experts(experts), parsed_rules(rules))

    # A registration writes one file, and no results.
    results_path: str | None = out_path
    if freeze:
        results_path = None
    with working("reading experts and tasks", shown=Processes.is_first()):
        prepared = prepare(
            sweep_recipe,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            trust_task_code=trust_task_code,
            out_path=results_path,
            overwrite=overwrite,
        )
    if Processes.is_first():
        for line in prepared.notes:
            note(line)

    if freeze:
        from adapterswap.experiments.sweeps.recording import Preregistration

        if Processes.is_first():
            content = Preregistration.freeze(
                prepared, out_path, reference=reference, methods=list(methods) or None, dry_run=dry_run
            )
            sha256 = content["sha256"]
            if as_json:
                cells = len(content["sweep"]["cells"])
                print_json({"dry_run": dry_run, **content["comparison"], "cells": cells, "sha256": sha256})
            else:
                echo(sha256)
            note_output(out_path, "preregistration.json; publish its hash before you run the sweep", dry_run=dry_run)
        return

    if dry_run:
        choose_device(device)  # is it there?
        expected = Estimate.of(prepared, out_path, overwrite=overwrite, tokens_per_second=tokens_per_second)
        if Processes.is_first():
            # The compositions that are rules are shown by their strips.
            strips = [(name, plan.strip) for name, plan in prepared.by_rules]
            if as_json:
                print_json({"dry_run": True, **expected.as_json(), "strips": dict(strips)})
            else:
                _print_estimate(expected)
                for name, strip in strips:
                    echo("", name, *strip.splitlines())
            note_dry_run("evaluated")
        return

    with (
        together(device) as processes,
        resumable(overwrite=overwrite, shown=processes.main),
        _progress(shown=processes.main) as tell,
    ):
        run = sweep(
            prepared, out_path, device=device, dtype=dtype, overwrite=overwrite, ray=ray, workers=workers,
            processes=processes, tell=tell,
        )  # fmt: skip
    if not processes.main:
        return

    if as_json:
        content = {
            "dry_run": False,
            "cells": len(run.results),
            "given_up": len(run.given_up),
            "families": [row.as_json() for row in summarize(run)],
            "remarks": run.remarks,
            "out_path": out_path,
        }
        print_json(content)
    else:
        _print(run)
    for remark in run.remarks:
        note(remark)
    if run.given_up:
        note(f"{len(run.given_up)} cells were given up before all their documents were evaluated")
    note_output(out_path, f"to see the results, run adapterswap report {out_path}")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[SweepProgress], None]]:
    """Show the cells with the best so far, and the current cell's requests; in a log, a line for every tenth."""
    with Progress(shown=shown and not is_quiet()) as bars:
        cells = bars.row("preparing")
        requests: ProgressRow | None = None
        current_cell = ""
        tenths = 0  # of the cells, that a line was printed for

        def update(progress: SweepProgress) -> None:
            nonlocal requests, current_cell, tenths
            best, part = "", 0.0
            if progress.best is not None:
                best = f"best {progress.value:.3f} {progress.best.short}"
            if progress.requests_total:
                part = progress.requests / progress.requests_total

            # The rows appear with the first news.
            if cells.total is None:
                cells.begin("cells", progress.total, done=progress.done)
                requests = bars.row(progress.cell)
            cells.update(progress.done, progress.total, note=best, part=part)
            assert requests is not None
            if progress.cell != current_cell:
                current_cell = progress.cell
                requests.begin(current_cell, progress.requests_total or None)
            requests.update(progress.requests, progress.requests_total or None)

            if shown and not sys.stderr.isatty() and progress.done * 10 // progress.total > tenths:
                tenths = progress.done * 10 // progress.total
                line = f"{progress.done} of {progress.total} cells"
                if best:
                    line += f", {best}"
                note(line)

        yield update


def _print_estimate(expected: Estimate) -> None:
    """Print a labeled line for each number of the estimate."""
    families = ", ".join(f"{count} {name}" for name, count in expected.families.items())
    documents = ", ".join(f"{name} {count}" for name, count in expected.documents.items())
    remaining = expected.cells - expected.finished - expected.given_up
    finished = f"{expected.finished:,}"
    if expected.given_up:
        finished += f" and {expected.given_up:,} given up"

    # How the model changes from one composition to the next
    if expected.engine is None:
        switches = f"{expected.switched:,} live; {expected.reduced:,} reduced to an adapter first"
        merged = f"{expected.merged:,} merged into full weights first"
    else:
        switches = f"{expected.reduced:,} written as adapters"
        merged = f"{expected.merged:,} merged into full weights, last"
    if expected.merged:
        switches += f"; {merged}"

    lines = {
        "cells": f"{expected.cells:,}: {families}",
        "left out": f"{expected.left_out:,} whose zones overlap",
        "finished": f"{finished}; {remaining:,} to evaluate",
        "documents": documents,
        "requests": f"{expected.requests:,}",
        "switches": switches,
        "time": _time_text(expected),
    }
    if expected.tokens:
        lines["answers"] = f"up to {expected.tokens:,} tokens"
    if expected.engine is not None:
        lines["vllm"] = _engine_text(expected.engine)
    if expected.copied:
        lines["equal"] = f"{expected.copied:,} shared with another row, evaluated once"
    if expected.repeated:
        lines["repeated"] = f"{expected.repeated:,} compositions that occur twice in a family, evaluated once"
    for label, text in lines.items():
        print_line(label, text)


def _engine_text(engine: dict[str, Any]) -> str:
    """What vLLM reserves for adapters."""
    if not engine["highest_rank"]:
        return "no adapters"
    [(cell, rank)] = engine["highest_rank"].items()
    megabytes = 2 * engine["slots"] / 2**20  # two bytes a number
    return (
        f"max_lora_rank {engine['max_lora_rank']} (rank {rank} in {cell}), max_loras {engine['max_loras']}: slots of "
        f"{megabytes:,.0f} MB in 16 bits; max_model_len {engine['max_model_len']}"
    )


def _time_text(expected: Estimate) -> str:
    """How long the remaining cells take, and what the estimate is based on."""
    if expected.seconds is None:
        text = "not estimated: no cell is finished yet"
        if expected.tokens:
            text += "; pass --tokens-per-second"
        return text
    if expected.finished:
        return f"about {duration(expected.seconds)}, at the rate of the finished cells"
    return f"up to {duration(expected.seconds)} for the answers; reading prompts and likelihoods come on top"


def _print(run: Run) -> None:
    """Print a table of families to stdout, in full even without a terminal."""
    from adapterswap.core import error_text
    from adapterswap.experiments.sweeps import summarize

    rows = summarize(run)
    reduced = any(row.relative_error is not None for row in rows)
    heads = ["family", "n", "min", "mean", "max", "best configuration", "chosen at", "reported at"]
    if reduced:
        heads.append("ΔW error")

    lines: list[list[Any]] = []
    for row in rows:
        minimum = maximum = chosen_at = None
        best = ""
        if row.n > 1:
            minimum, maximum = row.minimum, row.maximum
        if row.best is not None:
            best, chosen_at = row.best or "(defaults)", row.chosen_at
        values = [number_text(value, missing="") for value in (minimum, row.mean, maximum)]
        halves = [number_text(value, missing="") for value in (chosen_at, row.reported_at)]
        line = [row.family, row.n, *values, best, *halves]
        if row.relative_error is not None:
            line.append(error_text(row.relative_error))
        elif reduced:
            line.append("")
        lines.append(line)
    print_rows(*heads, rows=lines)

    targets = []
    for task in run.tasks.values():
        if task.role == "target":
            targets.append(f"{task.name} ({', '.join(task.primary)})")
    echo("", f"Means over {', '.join(targets)}.")
    if any(row.best is not None for row in rows):
        echo("Configurations are chosen on one part of the documents and reported on the other.")
    elif any(row.configurations > 1 for row in rows):
        echo("No configuration is chosen, because no documents are set aside to choose on.")
    if reduced:
        echo("ΔW error: the largest relative error of a module, where compositions were reduced to a rank.")
