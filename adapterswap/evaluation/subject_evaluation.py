"""Evaluate a base, an adapter or a composition by path or Hub id: check everything, load, evaluate, write.

Combines `subjects`, `evaluating`, `preview` and `results`. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.bases import Base, open_base
from adapterswap.errors import ArgumentError, check_type
from adapterswap.evaluation import evaluating
from adapterswap.evaluation.languages import check_languages
from adapterswap.evaluation.results import EVALUATION, EvaluationResult, write_result
from adapterswap.evaluation.settings import SEED, Settings
from adapterswap.evaluation.subjects import describe_subject, find_adapter, load_subject
from adapterswap.evaluation.tasks import check_task_names, load_tasks
from adapterswap.experts.adapters import Adapter
from adapterswap.experts.sources import Source
from adapterswap.files.folders import check_target
from adapterswap.planning.plan import Plan
from adapterswap.processes import Processes

if TYPE_CHECKING:
    from adapterswap.evaluation.preview import TaskPreview

__all__ = ["Evaluation", "evaluate", "prepare_evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to run: everything that needs no weights has been checked.

    Attributes:
        base: its config and tokenizer.
        tasks: their names.
        settings: how they are evaluated.
        subject: a description of what is evaluated, as plain data.
        adapter: the adapter on the base, if any.
        plan: the composition on the base, if any.
        max_rank, max_error: see `write_adapter`.
        inputs: paths that the output may not overlap.
    """

    base: Base
    tasks: tuple[str, ...]
    settings: Settings
    subject: Mapping[str, Any]
    adapter: Source | None = None
    plan: Plan | None = None
    max_rank: int | None = None
    max_error: float | None = None
    inputs: tuple[str | Path | None, ...] = ()

    def preview(self) -> list[TaskPreview]:
        """The documents, the requests and the first prompt of each task; see `preview.preview`."""
        from adapterswap.evaluation.preview import preview

        return preview(self.base.tokenizer, self.base.config, self.tasks, self.settings)

    def run(
        self,
        *,
        device: str = "auto",
        dtype: str = "auto",
        out_path: str | Path | None = None,
        overwrite: bool = False,
        processes: Processes | None = None,
        on_loaded: Callable[[], None] = lambda: None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> EvaluationResult:
        """Load the model, evaluate it, and write the result to `out_path` if set.

        Args:
            device, dtype, out_path, overwrite, processes, on_progress: see `adapterswap.evaluate`.
            on_loaded: called when the weights are loaded.

        Raises:
            AdapterswapError: see `load_subject`, `evaluating.evaluate` and `write_result`.
        """
        with load_subject(
            self.base, adapter=self.adapter, plan=self.plan, max_rank=self.max_rank, max_error=self.max_error,
            device=device, dtype=dtype,
        ) as model:  # fmt: skip
            on_loaded()
            result = evaluating.evaluate(
                model, self.base.tokenizer, self.tasks, self.settings, processes=processes, on_progress=on_progress
            )
        if out_path is not None and (processes is None or processes.main):
            write_result(result, out_path, subject=self.subject, overwrite=overwrite, inputs=self.inputs)
        return result


def evaluate(
    base_model: str | Path,
    tasks: str | Sequence[str],
    *,
    adapter: Adapter | str | Path | None = None,
    plan: Plan | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    max_gen_toks: int = 512,
    gen_kwargs: Mapping[str, Any] | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    truncate: bool = False,
    include_path: str | Path | None = None,
    trust_task_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    language_fidelity: bool = False,
    sampling_seed: int = SEED,
    device: str = "auto",
    dtype: str = "auto",
    out_path: str | Path | None = None,
    overwrite: bool = False,
    processes: Processes | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a base, an adapter on it or a composition on it with lm-evaluation-harness.

    For a model in memory see `adapterswap.evaluation.evaluate`.

    Args:
        base_model: the base: a folder or Hub id.
        tasks: names of tasks, as a list or separated by commas.
        adapter: an adapter of any kind that PEFT can load: opened, a folder or a Hub id.
        plan: a composition of adapters, instead of `adapter`. With neither, the base alone is evaluated.
        max_rank, max_error: truncate the composition; see `write_adapter`.
        num_fewshot, limit, batch_size, max_gen_toks, gen_kwargs, apply_chat_template, system_instruction, truncate,
            include_path, trust_task_code, confirm_run_unsafe_code, language_fidelity: see `Settings` in
            `adapterswap.evaluation`.
        sampling_seed: for shots and for sampling.
        device: where torch computes: auto, cpu, cuda, cuda:N or mps.
        dtype: of the base's weights: float32, bfloat16, float16, or auto for the one they are stored in.
        out_path: a folder to write results.json and samples.jsonl to; nothing is written by default.
        overwrite: replace that folder if an evaluation wrote it.
        processes: the processes that evaluate together, from `adapterswap.processes.joined`; by default this one alone.
        on_progress: called with the number of finished requests and the total.

    Returns:
        Scores with standard errors, and every sample.

    Raises:
        ArgumentError: both an adapter and a plan; bounds without a plan; unknown tasks; settings out of their range.
        BaseModelError, ExpertError, NotFoundError: the base or the adapter cannot be opened, or they do not fit each
            other.
        OutputError: the folder exists (without `overwrite`), holds other files, overlaps an input, or cannot be
            written.
        DependencyError: the `eval` extra is not installed.
        AdapterswapError: a plan of full weights; see also `load_subject` and `evaluation.evaluate`.
    """
    settings = Settings(
        num_fewshot=num_fewshot, limit=limit, batch_size=batch_size, max_gen_toks=max_gen_toks,
        gen_kwargs=gen_kwargs or {}, apply_chat_template=apply_chat_template, system_instruction=system_instruction,
        truncate=truncate, include_path=include_path, trust_task_code=trust_task_code,
        confirm_run_unsafe_code=confirm_run_unsafe_code, seed=sampling_seed, language_fidelity=language_fidelity,
    )  # fmt: skip
    prepared = prepare_evaluation(
        base_model, tasks, adapter=adapter, plan=plan, max_rank=max_rank, max_error=max_error, settings=settings,
        out_path=out_path, overwrite=overwrite,
    )  # fmt: skip
    return prepared.run(
        device=device, dtype=dtype, out_path=out_path, overwrite=overwrite, processes=processes, on_progress=on_progress
    )


def prepare_evaluation(
    base_model: str | Path,
    tasks: str | Sequence[str],
    *,
    adapter: Adapter | str | Path | None = None,
    plan: Plan | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    settings: Settings | None = None,
    out_path: str | Path | None = None,
    overwrite: bool = False,
) -> Evaluation:
    """Open and check everything that `evaluate` needs, except the weights; the arguments are those of `evaluate`.

    Raises:
        AdapterswapError: see `evaluate`.
    """
    check_type(base_model, (str, Path), "base_model", "Pass a local folder or a Hub id such as org/name")
    check_type(plan, (Plan, type(None)), "plan", "Pass a plan, as `compose` or `layer_swap` returns it")
    check_type(
        adapter, (Adapter, str, Path, type(None)), "adapter", "Pass a local folder, a Hub id or an opened adapter"
    )
    settings = settings or Settings()
    names = [name for name in tasks.split(",") if name] if isinstance(tasks, str) else list(tasks)
    check_task_names(names, settings.include_path)
    if adapter is not None and plan is not None:
        raise ArgumentError(
            "`adapter` cannot be combined with a composition", "Pass either `adapter` or `plan`", parameter="plan"
        )
    if plan is None and (max_rank is not None or max_error is not None):
        name = "max_rank" if max_rank is not None else "max_error"
        raise ArgumentError(f"`{name}` can only be used with a composition", "Pass `plan` as well", parameter=name)
    if plan is not None:
        plan.check_adapter()
    source = adapter.source if isinstance(adapter, Adapter) else find_adapter(str(adapter)) if adapter else None
    inputs: list[str | Path | None] = [base_model, source.folder if source else None, settings.include_path]
    inputs += plan.inputs if plan else []
    if out_path is not None:
        check_target(out_path, kind=EVALUATION, overwrite=overwrite, inputs=inputs)
    base = open_base(str(base_model))
    settings.check(base.tokenizer)
    loaded = load_tasks(names, settings)  # so that mistakes are reported before weights are loaded
    if settings.language_fidelity:
        check_languages(loaded["tasks"])
    subject = describe_subject(base, adapter=source, plan=plan, max_rank=max_rank, max_error=max_error)
    return Evaluation(
        base, tuple(names), settings, subject, source, plan, max_rank, max_error, (*inputs, base.source.folder)
    )
