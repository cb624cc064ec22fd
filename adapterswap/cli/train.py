"""`adapterswap train`: a recipe → rows and a base → an expert's folder.

With torchrun or `accelerate launch`, every process runs this, and one of them prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from adapterswap.cli.options import Expert, Json, Output, Pushed, RecipePath, Setting, one_voice, with_short
from adapterswap.cli.output import (
    human_bytes,
    is_quiet,
    note,
    note_dry_run,
    note_output,
    print_json,
    print_line,
    working,
)
from adapterswap.cli.signature import declare
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from adapterswap.experiments.training import TrainEstimate, TrainReport


@declare("train")
@one_voice()
def train_command(
    recipe: Annotated[str, RecipePath("train")],
    *,
    overrides: Annotated[tuple[Setting, ...], "--set"] = (),
    base_model: Expert | None = None,
    start: Expert | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] | None = None,
    resume: bool = False,
    trust_task_code: bool = False,
    out_path: Output | None = None,
    push: Pushed,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Train an expert from a recipe.

    RECIPE is a YAML file, or the name of a shipped recipe such as train/llama-3.1-8b-instruct/math. It names the base,
    the datasets and the training options. The expert is a PEFT LoRA folder (or, with adapter: none, a full model), with
    training.json next to the weights. On several devices: accelerate launch -m adapterswap train RECIPE.

    Args:
        overrides: Change a value, such as training.seed=1.
        base_model: Base to train on, instead of the recipe's.
        start: Adapter to start from, or the recipe (.yaml) of a composition.
        seed: Short for --set training.seed=N --set training.data_seed=N.
        device: Short for --set training.device=…
        dtype: Short for --set training.dtype=…
        resume: Resume from the last checkpoint of an unfinished run.
        trust_task_code: Let the files in selection.include_path run their own Python code.
        out_path: Folder to write, instead of the recipe's.
        overwrite: Replace an earlier output, and the checkpoints of an unfinished run.
        dry_run: Print the rows, steps and memory of the run, and train nothing.

    Examples:
        adapterswap train recipe.yaml -o trained
        adapterswap train recipe.yaml --set training.learning_rate=1e-4 --dry-run
    """
    from adapterswap.experiments.training import TrainRecipe, estimate, train
    from adapterswap.kit.files.yaml import find_recipe

    short = {"base_model": base_model, "start": start, "training.device": device, "training.dtype": dtype}
    seeds = {"training.seed": seed, "training.data_seed": seed}
    run_recipe = TrainRecipe.read(find_recipe(recipe, "train"), with_short(overrides, {**short, **seeds}))
    if run_recipe.selection and Processes.is_first():
        for line in run_recipe.selection.notes():
            note(line)
    how: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "trust_task_code": trust_task_code}
    if dry_run:
        with working("reading rows", shown=Processes.is_first()):
            expected = estimate(run_recipe, out_path=out_path or run_recipe.out_path or None, **how)
        content = expected.to_json
        if Processes.is_first():
            push.announce()
    else:
        report = train(run_recipe, out_path=out_path, progress=not is_quiet(), **how)
        Processes.leave()
        content = report.to_json
        if Processes.is_first():
            push.upload(report.path)
    if not Processes.is_first():
        return
    if as_json:
        print_json({"dry_run": dry_run, **content()})
    elif dry_run:
        _print_estimate(expected)
    else:
        _print_report(report)


def _print_estimate(expected: TrainEstimate) -> None:
    """Print what would be trained, on which rows, and how much memory it takes."""
    # The models
    share = expected.trainable_parameters / expected.base_parameters
    print_line("base", f"{expected.base_model}, {expected.base_parameters:,} parameters")
    if expected.start:
        print_line("start", expected.start)
    print_line("trainable", f"{expected.trainable_parameters:,} parameters ({share:.2%})")
    print_line("modules", f"{expected.trained_modules}: {', '.join(expected.target_modules)}")

    # The rows
    rows = expected.rows
    for source in rows.sources:
        print_line(
            "source", f"{source['source']}: {source['read']:,} rows, {source['kept']:,} after filtering and sampling"
        )
    print_line("rows", f"{rows.train:,} for training, {rows.validation:,} held out, {rows.dropped:,} dropped")
    print_line("steps", f"{expected.steps:,}, about {expected.tokens:,} tokens; the longest row has {rows.longest:,}")
    selection = expected.selection
    if selection:
        work_per_checkpoint = f"{selection['documents']:,} documents in {selection['requests']:,} requests each"
        print_line("selection", f"{selection['checkpoints']:,} checkpoints to evaluate, {work_per_checkpoint}")

    # The machine
    memory = {part: human_bytes(size) for part, size in expected.memory.items()}
    total = memory.pop("total")
    parts = [f"{part} {size}" for part, size in memory.items()]
    print_line("memory", f"about {total}: {', '.join(parts)}")
    print_line("device", f"{expected.device}, {expected.dtype}{_processes_text(expected.processes)}")

    for line in (*rows.notes(), *expected.notes()):
        note(line)
    note_dry_run("trained")


def _print_report(report: TrainReport) -> None:
    """Print what was trained, the losses, and the checkpoints that were chosen."""
    rows = report.rows
    steps, tokens = f"{report.steps:,}", f"{report.tokens:,}"
    if report.resumed_from is None:
        tokens += f", {report.tokens / report.seconds:,.0f} per second"
    else:  # the clock ran in this process only, so a resumed run has no rate
        steps += f", resumed from {report.resumed_from:,}"
    print_line("steps", f"{steps}{_processes_text(report.processes)}")
    print_line("rows", f"{rows.train:,} trained on, {rows.validation:,} held out, {rows.dropped:,} dropped")
    print_line("tokens", tokens)
    print_line("loss", report.losses_text(4))
    if report.selection:
        for line in report.selection.lines():
            print_line("checkpoint", line)
    elif report.eval_losses:
        print_line("validation", f"{report.eval_losses[-1][1]:.4f}")
    if report.ladder:
        rungs = [f"checkpoint-{step}" for step in report.ladder]
        print_line("ladder", ", ".join(rungs))

    for line in rows.notes():
        note(line)
    if report.selection:
        for line in report.selection.notes():
            note(line)
    note_output(report.path)


def _processes_text(processes: int) -> str:
    if processes == 1:
        return ""
    return f", {processes} processes"
