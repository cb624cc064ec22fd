"""`adapterswap evaluate`: a base, an adapter or a composition → lm-evaluation-harness → a table, JSON, a folder.

With torchrun or `accelerate launch`, every process runs this, and one of them writes and prints.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import click

from adapterswap.cli.composition_options import Requested, plan_from_options
from adapterswap.cli.options import (
    BaseDtype,
    Count,
    Device,
    Engine,
    Expert,
    Folder,
    Json,
    Output,
    RecipePath,
    Setting,
    Share,
    Text,
    one_voice,
    only_with,
    parsed_arguments,
    together,
)
from adapterswap.cli.output import (
    count_bar,
    echo,
    note,
    note_dry_run,
    note_output,
    number_text,
    print_json,
    print_rows,
    working,
)
from adapterswap.cli.signature import Options, declare
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from adapterswap.experiments.evaluation import EvaluationResult
    from adapterswap.experiments.evaluation.subjects import Evaluation


class _TaskList(click.ParamType[str]):
    """Names of tasks, separated by commas."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from adapterswap.experiments.evaluation.tasks import LoadedTasks

        before, comma, typed = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in LoadedTasks.known_names(typed)]


def _settings(
    *,
    num_fewshot: int | None = None,
    limit: Annotated[float, "N"] | None = None,
    batch_size: int = 8,
    max_gen_toks: int = 512,
    max_length: Annotated[Count, "N"] | None = None,
    gen_kwargs: Annotated[str, "K=V,…"] | None = None,
    apply_chat_template: bool = False,
    system_instruction: Text | None = None,
    enable_thinking: Annotated[bool, "--enable-thinking/--disable-thinking"] | None = None,
    think_end_token: Text | None = None,
    date: Annotated[str, "YYYY-MM-DD"] | None = None,
    truncate: bool = False,
    language_fidelity: bool = False,
    include_path: Folder | None = None,
    trust_task_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    engine: Engine | None = None,
    engine_args: tuple[Setting, ...] = (),
    sampling_seed: Annotated[int, click.IntRange(min=0), "N"] = 1234,
) -> Any:
    """The `Settings` of all tasks.

    Args:
        num_fewshot: Number of shots.  [default: each task's own; MGSM: 8]
        limit: Evaluate only the first N documents of each task, or a fraction of them.
        batch_size: Sequences per batch.
        max_gen_toks: Maximum length of an output, in tokens.
        max_length: Maximum length of a prompt with its output, in tokens.  [default: what the model can read]
        gen_kwargs: Override the tasks' generation settings, as in temperature=0.6,do_sample=true.
        apply_chat_template: Format prompts as a chat, with a turn per shot.
        system_instruction: System message at the start of every prompt.
        enable_thinking: Have the chat template turn reasoning on or off.  [default: as the template does]
        think_end_token: What ends the reasoning, such as </think> or a token's id: only the rest is scored.
        date: What the chat template takes for today.  [default: today]
        truncate: Cut the beginning of prompts that do not fit.
        language_fidelity: Also score how much of each answer is in the task's language.
        include_path: A folder with your own lm-eval task files.
        trust_task_code: Let the files in --include-path run their own Python code.
        sampling_seed: Seed for shots and sampling.
    """
    settings = dict(locals())
    from adapterswap.experiments.evaluation import Settings

    settings |= {"engine": engine or "transformers", "engine_args": parsed_arguments(engine_args), "gen_kwargs": {}}
    if gen_kwargs:
        from lm_eval.utils import simple_parse_args_string

        if not all(item.partition("=")[2] for item in gen_kwargs.split(",")):
            raise click.UsageError(f"--gen-kwargs must be key=value,key=value, not {gen_kwargs!r}.")
        settings["gen_kwargs"] = simple_parse_args_string(gen_kwargs)
    return Settings(seed=settings.pop("sampling_seed"), **settings)


@declare("evaluate")
@one_voice()
def evaluate_command(
    *,
    base_model: Expert,
    adapter: Expert | None = None,
    request: Requested,
    recipe: Annotated[str, RecipePath("compose"), "PATH"] | None = None,
    tasks: Annotated[str, _TaskList(), "TASKS"],
    settings: Annotated[Any, Options(_settings)],
    chat_template_from: Annotated[str, "NAME"] | None = None,
    compare_engines: bool = False,
    device: Device = "auto",
    dtype: BaseDtype = "auto",
    out_path: Output | None = None,
    max_rank: Annotated[Count, "R"] | None = None,
    max_error: Share | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Evaluate a base, an adapter or a composition with lm-evaluation-harness.

    Pass --adapter, or --task-expert and --language-expert with the options of compose, or none of them to evaluate the
    base. MGSM (mgsm_direct_*, mgsm_native_cot_*, mgsm_en_cot_* in bn de en es fr ja ru sw te th zh) works offline and
    is scored three ways: by lm-eval's two stock filters, and `normalized`, which compares numbers as numbers. All
    tasks of lm-eval work, such as tydiqa_goldp_sw and xcopa_sw. On several devices: accelerate launch --multi_gpu -m
    adapterswap evaluate …

    Args:
        base_model: The base model.
        adapter: An adapter to load on top of it.
        recipe: A recipe (YAML) of a composition, as for compose.
        tasks: Comma-separated tasks, such as mgsm_native_cot_sw or mgsm_*_te.
        chat_template_from: Whose chat template prompts have: an expert's name, `adapter` or `base`.  [default: the
            experts' where they agree, else the task expert's]
        compare_engines: Evaluate in transformers and in vLLM, and print how they differ.
        out_path: Folder to write: results.json and samples.jsonl.
        dry_run: Check everything and print the first prompt, without loading weights.

    Examples:
        adapterswap evaluate --base-model org/base --tasks mgsm_direct_sw --limit 20
        adapterswap evaluate --base-model org/base -t experts/math -l experts/swahili --tasks mgsm_direct_sw -o results
    """
    from adapterswap.core import choose_device
    from adapterswap.experiments.evaluation.subjects import Evaluation

    plan = None
    is_composition = recipe or not all(value in (None, ()) or value is False for value in request.values())
    if is_composition:
        if adapter:
            raise click.UsageError("Pass either --adapter or a composition, not both.")
        plan = plan_from_options(request, recipe=recipe, base_model=base_model)
    only_with("a composition", plan, "max_rank", "max_error")
    if compare_engines:
        settings = replace(settings, engine="vllm")
        if out_path is not None:
            raise click.UsageError("--compare-engines writes no folder: leave out --out-path.")

    _phase("reading the tasks")
    with working("reading the tasks", shown=Processes.is_first()):
        prepared = Evaluation.prepare(
            base_model,
            tasks,
            adapter=adapter,
            plan=plan,
            chat_template_from=chat_template_from,
            max_rank=max_rank,
            max_error=max_error,
            settings=settings,
            out_path=out_path,
            overwrite=overwrite,
        )
    if Processes.is_first():
        for line in prepared.companions.prompt_lines:
            note(line)
        date = prepared.exam.settings.date
        if date != settings.date:
            note(f"the chat template prints today's date: pass --date {date} to get the same prompts again")
    unscored = [name for name in prepared.exam.tasks.tasks if name.startswith("multijail_")]
    if unscored and out_path is None and not dry_run:
        raise click.UsageError(f"{unscored[0]} has no score: pass --out-path to keep the responses for a judge.")

    if dry_run:
        choose_device(device)  # is it there?
        if Processes.is_first():
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
            device=device,
            dtype=dtype,
            out_path=out_path,
            overwrite=overwrite,
            processes=processes,
            on_loaded=lambda: _phase("building the prompts"),
            on_progress=advance,
        )
    if not processes.main:
        return

    if as_json:
        print_json({**result.as_json(), "subject": prepared.described, "out_path": out_path})
    else:
        _print(result)
    _remarks(result, settings.max_gen_toks)
    if out_path is not None:
        note_output(out_path)


def _phase(step: str) -> None:
    """Print the step that begins, in one process only."""
    if Processes.is_first():
        note(step)


def _dry_run(prepared: Evaluation, as_json: bool) -> None:
    """Print what would be evaluated: the composition, the tasks, the first prompt."""
    previews = prepared.exam.preview()
    if as_json:
        print_json({"subject": prepared.described, "tasks": [asdict(task) for task in previews], "evaluated": False})
        return
    if prepared.subject.plan is not None:
        echo(*prepared.subject.plan.strip.splitlines())

    heads = ("task", "shots", "documents", "requests", "longest prompt", "room for output")
    rows: list[list[Any]] = []
    for task in previews:
        room = number_text(task.room, "d", missing="")
        rows.append([task.name, task.num_fewshot, task.num_docs, task.num_requests, task.longest, room])
    print_rows(*heads, rows=rows)

    echo("", f"The first prompt of {previews[0].name}:", "", *previews[0].prompt.split("\n"))
    for task in previews:
        if task.room is not None and task.max_gen_toks is not None and task.room < task.max_gen_toks:
            note(f"{task.name}: the longest prompt leaves room for {task.room} of {task.max_gen_toks} output tokens")
        if task.overlong:
            note(f"{task.name}: {task.overlong} prompts with their continuations do not fit in the model's context")
    note_dry_run("evaluated")


def _compare(prepared: Evaluation, device: str, dtype: str, as_json: bool) -> None:
    """Evaluate in both engines, and print a row for each score."""
    rows = prepared.compare_engines(device=device, dtype=dtype, tell=lambda engine: _phase(f"evaluating with {engine}"))
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    cells: list[list[Any]] = []
    for row in rows:
        score = f"{row.task} {row.metric},{row.filter}"
        difference = _with_error(row.difference, row.stderr, "+")
        means = [f"{row.transformers:.3f}", f"{row.vllm:.3f}", difference]
        cells.append([score, row.documents, row.equal, *means])
    print_rows("score", "n", "equal answers", "transformers", "vllm", "difference", rows=cells)


def _print(result: EvaluationResult) -> None:
    """Print a table for each set of tasks with the same scores, with a row per task."""
    for tasks in result.by_scores():
        heads = [f"{score.metric}\n{score.filter}".removesuffix("\nnone") for score in tasks[0].scores]
        rows: list[list[Any]] = []
        for task in tasks:
            shots = number_text(task.num_fewshot, "d", missing="differ")
            scores = [_with_error(score.value, score.stderr) for score in task.scores]
            rows.append([task.name, shots, task.num_docs, *scores])
        print_rows("task", "shots", "n", *heads, rows=rows)


def _with_error(value: float, stderr: float | None, sign: str = "") -> str:
    """A score, and its standard error if there is one: `0.240 ± 0.043`."""
    text = f"{value:{sign}.3f}"
    if stderr is not None:
        text += f" ± {stderr:.3f}"
    return text


def _remarks(result: EvaluationResult, max_gen_toks: int) -> None:
    """Print what a reader of the scores should know, to stderr."""
    requested_shots = result.settings["num_fewshot"]
    if "one_by_one" in result.settings:
        note("requests were answered one by one: beside longer ones in a batch, this model answers them differently")

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
