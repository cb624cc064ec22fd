"""`adapterswap evaluate`: a base, an adapter or a composition → lm-evaluation-harness → a table, JSON, a folder.

With torchrun or `accelerate launch`, every process runs this, and one of them writes and prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from adapterswap.cli.composition_options import composition_options, plan_from_options
from adapterswap.cli.options import (
    EXPERT,
    FOLDER,
    RecipePath,
    device_option,
    dtype_option,
    engine_options,
    one_voice,
    together,
)
from adapterswap.cli.printing import count_bar, echo, note, note_dry_run, note_output, print_json, print_table, working
from adapterswap.processes import is_first

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from adapterswap.evaluation import EvaluationResult, Settings, TaskResult
    from adapterswap.evaluation.subjects import Evaluation
    from adapterswap.planning.plan import Plan

# Options that `evaluate` has under the same names; the rest of **options says what to compose.
_SETTINGS = ("num_fewshot", "limit", "batch_size", "max_gen_toks", "gen_kwargs", "apply_chat_template",
             "system_instruction", "truncate", "include_path", "trust_task_code",
             "confirm_run_unsafe_code", "language_fidelity", "engine", "engine_args")  # fmt: skip


class _TaskList(click.ParamType[str]):
    """Names of tasks, separated by commas."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from adapterswap.evaluation.tasks import task_names

        before, comma, typed = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in task_names(typed)]


@click.command("evaluate")
@click.option("--base-model", type=EXPERT, required=True, metavar="PATH|ID", help="The base model.")
@click.option("--adapter", type=EXPERT, metavar="PATH|ID", help="An adapter to load on top of it.")
@composition_options
@click.option(
    "--recipe", type=RecipePath("compose"), metavar="PATH", help="A recipe (YAML) of a composition, as for compose."
)
@click.option("--max-rank", type=click.IntRange(min=1), metavar="R", help="Truncate the composition, as compose does.")
@click.option("--max-error", type=float, metavar="E", help="Truncate the composition up to this relative error of ΔW.")
@click.option(
    "--tasks",
    type=_TaskList(),
    required=True,
    metavar="TASKS",
    help="Comma-separated tasks, such as mgsm_native_cot_sw or mgsm_*_te.",
)
@click.option("--num-fewshot", type=int, metavar="N", help="Number of shots.  [default: each task's own; MGSM: 8]")
@click.option(
    "--limit", type=float, metavar="N", help="Evaluate only the first N documents of each task, or a fraction of them."
)
@click.option("--batch-size", type=int, default=8, show_default=True, metavar="N", help="Sequences per batch.")
@click.option(
    "--max-gen-toks",
    type=int,
    default=512,
    show_default=True,
    metavar="N",
    help="Maximum length of an output, in tokens.",
)
@click.option(
    "--gen-kwargs",
    metavar="K=V,…",
    help="Override the tasks' generation settings, as in temperature=0.6,do_sample=true.",
)
@click.option("--apply-chat-template", is_flag=True, help="Format prompts as a chat, with a turn per shot.")
@click.option("--system-instruction", metavar="TEXT", help="System message at the start of every prompt.")
@click.option("--truncate", is_flag=True, help="Cut the beginning of prompts that do not fit.")
@click.option("--language-fidelity", is_flag=True, help="Also score how much of each answer is in the task's language.")
@click.option("--include-path", type=FOLDER, metavar="DIR", help="A folder with your own lm-eval task files.")
@click.option("--trust-task-code", is_flag=True, help="Let the files in --include-path run their own Python code.")
@click.option("--confirm-run-unsafe-code", is_flag=True, help="Let tasks (MBPP) run the code that the model writes.")
@engine_options
@device_option()
@dtype_option("Dtype of the base; auto: as stored.", auto=True)
@click.option(
    "--sampling-seed",
    type=click.IntRange(min=0),
    default=1234,
    show_default=True,
    metavar="N",
    help="Seed for shots and sampling.",
)
@click.option("-o", "--out-path", type=FOLDER, metavar="O", help="Folder to write: results.json and samples.jsonl.")
@click.option("--overwrite", is_flag=True, help="Replace what this command wrote there before.")
@click.option(
    "--compare-engines", is_flag=True, help="Evaluate in transformers and in vLLM, and print how they differ."
)
@click.option("--dry-run", is_flag=True, help="Check everything and print the first prompt, without loading weights.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@one_voice()
def command(
    base_model: str,
    adapter: str | None,
    recipe: str | None,
    max_rank: int | None,
    max_error: float | None,
    tasks: str,
    device: str,
    dtype: str,
    out_path: str | None,
    overwrite: bool,
    compare_engines: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate a base, an adapter or a composition with lm-evaluation-harness.

    Pass --adapter, or --task-expert and --language-expert with the options of compose, or none of them to evaluate the
    base. MGSM (mgsm_direct_*, mgsm_native_cot_*, mgsm_en_cot_* in bn de en es fr ja ru sw te th zh) works offline and
    is scored three ways: by lm-eval's two stock filters, and `normalized`, which compares numbers as numbers. All
    tasks of lm-eval work, such as tydiqa_goldp_sw and xcopa_sw. On several devices: accelerate launch --multi_gpu -m
    adapterswap evaluate …
    """
    from adapterswap.evaluation.subjects import prepare_evaluation
    from adapterswap.model.loading import choose_device

    plan = _plan(base_model, adapter, recipe, options)
    if plan is None and (max_rank is not None or max_error is not None):
        raise click.UsageError("--max-rank and --max-error can only be used with a composition.")
    settings = _settings({**options, "engine": "vllm"} if compare_engines else options)
    if compare_engines and out_path is not None:
        raise click.UsageError("--compare-engines writes no folder: leave out --out-path.")
    _phase("reading the tasks")
    with working("reading the tasks", shown=is_first()):
        prepared = prepare_evaluation(
            base_model, tasks, adapter=adapter, plan=plan, max_rank=max_rank, max_error=max_error, settings=settings,
            out_path=out_path, overwrite=overwrite,
        )  # fmt: skip
    unscored = [name for name in prepared.tasks if name.startswith("multijail_")]
    if unscored and out_path is None and not dry_run:
        raise click.UsageError(f"{unscored[0]} has no score: pass --out-path to keep the responses for a judge.")
    if dry_run:
        choose_device(device)
        if is_first():
            _dry_run(prepared, as_json)
        return
    if compare_engines:
        _compare(prepared, device, dtype, as_json)
        return
    _phase(f"loading {base_model}")
    with (
        together(device) as processes,
        count_bar("requests", shown=processes.main, first_line="answering {total} requests") as advance,
    ):
        result = prepared.run(
            device=device, dtype=dtype, out_path=out_path, overwrite=overwrite, processes=processes,
            on_loaded=lambda: _phase("building the prompts"), on_progress=advance,
        )  # fmt: skip
    if not processes.main:
        return
    if as_json:
        print_json({**result.as_json(), "subject": prepared.subject, "out_path": out_path})
    else:
        _print(result)
    _remarks(result, settings.max_gen_toks)
    if out_path is not None:
        note_output(out_path)


def _plan(base_model: str, adapter: str | None, recipe: str | None, options: dict[str, Any]) -> Plan | None:
    """The requested composition, or None."""
    composition_settings = {name: value for name, value in options.items() if name not in (*_SETTINGS, "sampling_seed")}
    if not recipe and all(value in (None, ()) or value is False for value in composition_settings.values()):
        return None
    if adapter:
        raise click.UsageError("Pass either --adapter or a composition, not both.")
    return plan_from_options(options, recipe=recipe, base_model=base_model)


def _settings(options: dict[str, Any]) -> Settings:
    """The options that are settings, under the same names."""
    from adapterswap.evaluation import Settings
    from adapterswap.evaluation.settings import parsed_arguments

    values = {name: options[name] for name in _SETTINGS} | {"seed": options["sampling_seed"], "gen_kwargs": {}}
    values |= {"engine": options["engine"] or "transformers", "engine_args": parsed_arguments(options["engine_args"])}
    if text := options["gen_kwargs"]:
        from lm_eval.utils import simple_parse_args_string

        if not all(item.partition("=")[2] for item in text.split(",")):
            raise click.UsageError(f"--gen-kwargs must be key=value,key=value, not {text!r}.")
        values["gen_kwargs"] = simple_parse_args_string(text)
    return Settings(**values)


def _phase(step: str) -> None:
    """Print the step that begins, in one process only."""
    if is_first():
        note(step)


def _dry_run(prepared: Evaluation, as_json: bool) -> None:
    """Print what would be evaluated: the composition, the tasks, the first prompt."""
    from dataclasses import asdict

    previews = prepared.preview()
    if as_json:
        print_json({"subject": prepared.subject, "tasks": [asdict(task) for task in previews], "evaluated": False})
        return
    if prepared.plan is not None:
        from adapterswap.planning.describe import strip

        echo(*strip(prepared.plan).splitlines())
    table = _table("task", "shots", "documents", "requests", "longest prompt", "room for output")
    for task in previews:
        numbers = (task.num_fewshot, task.num_docs, task.num_requests, task.longest)
        table.add_row(task.name, *map(str, numbers), "" if task.room is None else str(task.room))
    print_table(table)
    echo("", f"The first prompt of {previews[0].name}:", "", *previews[0].prompt.split("\n"))
    for task in previews:
        if task.room is not None and task.max_gen_toks is not None and task.room < task.max_gen_toks:
            note(f"{task.name}: the longest prompt leaves room for {task.room} of {task.max_gen_toks} output tokens")
    note_dry_run("evaluated")


def _compare(prepared: Evaluation, device: str, dtype: str, as_json: bool) -> None:
    """Evaluate in both engines, and print a row for each score."""
    from adapterswap.evaluation.comparing import compare_engines

    def tell(engine: str) -> None:
        _phase(f"evaluating with {engine}")

    rows = compare_engines(prepared, device=device, dtype=dtype, tell=tell)
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    table = _table("score", "n", "equal answers", "transformers", "vllm", "difference")
    for row in rows:
        difference = f"{row.difference:+.3f}" + ("" if row.stderr is None else f" ± {row.stderr:.3f}")
        means = f"{row.transformers:.3f}", f"{row.vllm:.3f}", difference
        table.add_row(f"{row.task} {row.metric},{row.filter}", str(row.documents), str(row.equal), *means)
    print_table(table)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _print(result: EvaluationResult) -> None:
    """Print a table for each set of tasks with the same scores, with a row per task."""
    tasks_by_scores: dict[tuple[tuple[str, str], ...], list[TaskResult]] = {}
    for task in [*result.tasks.values(), *result.groups.values()]:
        tasks_by_scores.setdefault(tuple((score.metric, score.filter) for score in task.scores), []).append(task)
    for columns, tasks in tasks_by_scores.items():
        heads = [metric if name == "none" else f"{metric}\n{name}" for metric, name in columns]
        table = _table("task", "shots", "n", *heads)
        for task in tasks:
            shots = "differ" if task.num_fewshot is None else str(task.num_fewshot)
            table.add_row(task.name, shots, str(task.num_docs), *map(_score_text, task.scores))
        print_table(table)


def _score_text(score: Any) -> str:
    return f"{score.value:.3f}" + ("" if score.stderr is None else f" ± {score.stderr:.3f}")


def _remarks(result: EvaluationResult, max_gen_toks: int) -> None:
    """Print what a reader of the scores should know, to stderr."""
    requested_shots = result.settings["num_fewshot"]
    for task in result.tasks.values():
        if not task.scores:
            note(f"{task.name} has no score: let a judge label the responses in samples.jsonl")
        if task.cut:
            limit = f"--max-gen-toks {task.max_gen_toks}"
            if task.max_gen_toks != max_gen_toks:
                limit = f"{task.max_gen_toks} tokens, the limit of the task or of --gen-kwargs"
            note(f"{task.name}: {task.cut} of {task.num_docs} outputs were cut at {limit}")
        if task.truncated:
            note(f"{task.name}: {task.truncated} of {task.num_docs} prompts were cut at the start")
        if requested_shots is not None and task.num_fewshot != requested_shots:
            note(f"{task.name} always uses {task.num_fewshot} shots")
