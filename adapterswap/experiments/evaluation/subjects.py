"""Evaluate a base, an adapter or a composition by path or Hub id: check everything first, then load it.

Loads it from folders or the Hub, as safetensors and without running code of a repository, and describes it without
local paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterswap.core import (
    Adapter,
    Composition,
    OpenedBase,
    Plan,
    SourceRecord,
    check_base_weights,
    choose_device,
    make_plan,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.core.model.sources import CONFIG, WEIGHTS, Source
from adapterswap.core.writing.records import CompositionRecord
from adapterswap.engines.live import find_adapter
from adapterswap.experiments.evaluation.engine_differences import EngineDifference, differences
from adapterswap.experiments.evaluation.exam import Exam
from adapterswap.experiments.evaluation.prompts import Vocabulary
from adapterswap.experiments.evaluation.results import EVALUATION, EvaluationResult, write_result
from adapterswap.experiments.evaluation.settings import ENGINES, Settings
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import AdapterswapError, ArgumentError, BaseModelError, ExpertError, check_type
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.hashes import sha256_of
from adapterswap.kit.files.text import read_json
from adapterswap.kit.processes import Processes

_MADE_OF = ("num_layers", "composition", "experts", "rules", "output")  # fields of a record


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a base alone, with an adapter, or with a composition.

    Attributes:
        base: its config and tokenizer.
        adapter: the adapter on the base, if any.
        plan: the composition on the base, if any.
        max_rank, max_error: see `write_adapter`.
    """

    base: OpenedBase
    adapter: Source | None = None
    plan: Plan | None = None
    max_rank: int | None = None
    max_error: float | None = None

    @property
    def output(self) -> dict[str, Any]:
        """How the composition is reduced; empty if it is not."""
        bounds = {"max_rank": self.max_rank, "max_error": self.max_error}
        return {name: value for name, value in bounds.items() if value is not None}

    @contextmanager
    def loaded(self, *, device: str = "auto", dtype: str = "auto") -> Iterator[Any]:
        """Yield the model.

        If possible, a composition is made live: its experts are loaded side by side and no adapter is written. One that
        needs tensors of its own (see `why_not_live`) or a bound on its rank is written to a temporary folder first.
        """
        from adapterswap.core import write_adapter
        from adapterswap.engines.live import LiveComposer, load_experts, why_not_live, with_adapter

        target = choose_device(device)
        self.check()
        adapter, plan = self.adapter, self.plan
        with ExitStack() as stack:
            if plan is not None and (self.output or why_not_live(plan) is not None):
                folder = stack.enter_context(scratch_folder("evaluation")) / "composed"
                adapter, plan = Source(write_adapter(plan, folder, **self.output), folder.name), None

            model = self.base.load_weights(dtype=dtype).to(target)
            if adapter is not None:
                model = with_adapter(model, adapter)
            if plan is not None:
                model = load_experts(model, plan)
                stack.enter_context(LiveComposer(model).use(plan))
            yield model.eval()

    def check(self) -> None:
        """Check whether the adapter or the composition fits the base, as far as files without weights tell."""
        base, adapter, plan = self.base, self.adapter, self.plan
        if plan is not None:
            base.check_depth(plan.num_layers, "Leave out `num_layers`")
            check_base_weights(plan.base.recorded, base.source, plan.base.named)
        if adapter is None:
            return

        own = read_json(adapter.folder / CONFIG).get("base_model_name_or_path")
        if not isinstance(own, str):
            own = None
        check_base_weights({str(adapter): adapter.recorded_base}, base.source, {str(adapter): own})

        # A plan shows more, of the kinds that can be opened here; PEFT loads others too.
        try:
            opened = Adapter.read(adapter)
        except AdapterswapError:
            return
        try:
            self.alone(opened)
        except AdapterswapError as error:
            if any(issubclass(problem.kind, BaseModelError | ExpertError) for problem in error.found):
                raise

    def alone(self, adapter: Adapter) -> Plan:
        """The plan of one adapter on the base."""
        rules = {"rules": [{"expert": "adapter"}], "base_model": self.base.reference}
        return make_plan(Composition.model_validate(rules), {"adapter": adapter}, num_layers=self.base.num_layers)

    def companions(self, chat_template_from: str | None) -> CompanionPlan:
        """Whose tokenizer and chat template the merged model would have."""
        folders: dict[str, Path] = {}
        tokenizer = None
        if self.plan is not None:
            folders = {name: expert.source.folder for name, expert in self.plan.experts.items()}
            tokenizer = self.plan.composition.tokenizer
        if self.adapter is not None:
            folders["adapter"] = self.adapter.folder
        return CompanionPlan.decide_prompts(
            folders,
            self.base.source.folder,
            rows=getattr(self.base.config.get_text_config(), "vocab_size", None),
            tokenizer=tokenizer,
            template=chat_template_from,
        )

    def described(self) -> dict[str, Any]:
        """As plain data without local paths; adapters by their SHA-256."""
        source, adapter, plan = self.base.source, self.adapter, self.plan
        base: dict[str, Any] = {"source": source.name, "revision": source.revision}
        if source.identity:  # another local base may have the same name
            base["fingerprints"] = source.identity
        subject: dict[str, Any] = {"base_model": base}

        if adapter is not None:
            hashes = {name: sha256_of(adapter.folder / name) for name in (WEIGHTS, CONFIG)}
            subject["adapter"] = {"source": adapter.name, "revision": adapter.revision, "sha256": hashes}
            made = CompositionRecord.read(adapter.folder)
            if made is not None:
                subject["composition"] = _made_of(made)
        if plan is not None:
            hashes = {name: sha256_of(expert.file.path) for name, expert in plan.adapters.items()}
            experts = {name: SourceRecord.of_adapter(expert, hashes[name]) for name, expert in plan.adapters.items()}
            output = {"max_rank": self.max_rank, "max_error": self.max_error}
            record = CompositionRecord.of(plan, experts, None, output=output, measured={})
            subject["composition"] = _made_of(record)
        return subject


def _made_of(record: CompositionRecord) -> dict[str, Any]:
    """The part of a record that results include."""
    content = record.content()
    return {key: content[key] for key in _MADE_OF if key in content}


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to run: everything that needs no weights has been checked.

    Attributes:
        subject: what is evaluated.
        exam: the tasks, and how they are evaluated.
        described: the subject as plain data.
        companions: whose tokenizer and chat template the prompts have: as those of the merged model.
        inputs: paths that the output may not overlap.
    """

    subject: Subject
    exam: Exam
    described: Mapping[str, Any]
    companions: CompanionPlan
    inputs: tuple[str | Path | None, ...] = ()

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
        """
        settings = self.exam.settings
        settings.check_processes(1 if processes is None else processes.count)
        if settings.engine == "vllm":
            result = self._in_vllm(device, dtype, on_loaded, on_progress)
        else:
            with self.subject.loaded(device=device, dtype=dtype) as model:
                on_loaded()
                result = self.exam.evaluate(model, processes=processes, on_progress=on_progress)
        if out_path is not None and (processes is None or processes.main):
            write_result(result, out_path, subject=self.described, overwrite=overwrite, inputs=self.inputs)
        return result

    def _in_vllm(
        self, device: str, dtype: str, on_loaded: Callable[[], None], on_progress: Callable[[int, int], None] | None
    ) -> EvaluationResult:
        """The result by vLLM; an adapter is composed with nothing, so that vLLM gets a layout that it reads."""
        from adapterswap.experiments.evaluation.engine import Job
        from adapterswap.experiments.evaluation.vllm_engine import Needs, VLLMEngine

        require("vllm")
        exam, base, settings = self.exam, self.exam.base, self.exam.settings
        plan, output, name = self.subject.plan, self.subject.output, "the composition"
        if self.subject.adapter is not None:
            plan, name = self.subject.alone(Adapter.read(self.subject.adapter)), "the adapter"

        # What vLLM cannot hold as LoRA is merged into full weights.
        full = plan is not None and bool(VLLMEngine.cannot_hold(plan.adapters, base))
        adapters = {}
        if plan is not None and not full:
            adapters[name] = (plan, output)
        needs = Needs.of(adapters, exam.requests, 1, base)
        with VLLMEngine(base, needs, settings.engine_args, device=device, dtype=dtype, seed=settings.seed) as engine:
            on_loaded()
            job = Job.of_plan(name, plan, output, exam, full=full, base_model=base.reference)
            ((result, _),) = engine.evaluate([job], on_progress=on_progress)
        return result

    def compare_engines(
        self, *, device: str = "auto", dtype: str = "auto", tell: Callable[[str], None] = lambda engine: None
    ) -> list[EngineDifference]:
        """Evaluate in transformers, then in vLLM, and compare each score of each task over the documents."""
        results = []
        for engine in ENGINES:
            tell(engine)
            arguments = self.exam.settings.engine_args if engine == "vllm" else {}
            settings = replace(self.exam.settings, engine=engine, engine_args=arguments)
            exam = replace(self.exam, settings=settings)
            results.append(replace(self, exam=exam).run(device=device, dtype=dtype))
        return differences(*results)

    @staticmethod
    def prepare(
        base_model: str | Path,
        tasks: str | Sequence[str],
        *,
        adapter: Adapter | str | Path | None = None,
        plan: Plan | None = None,
        chat_template_from: str | None = None,
        max_rank: int | None = None,
        max_error: float | None = None,
        settings: Settings | None = None,
        out_path: str | Path | None = None,
        overwrite: bool = False,
    ) -> Evaluation:
        """Open and check everything that `evaluate` needs, except the weights; the arguments are `evaluate`'s."""
        check_type(base_model, (str, Path), "base_model", "Pass a local folder or a Hub id such as org/name")
        check_type(plan, (Plan, type(None)), "plan", "Pass a plan, as `compose` or `layer_swap` returns it")
        check_type(
            adapter, (Adapter, str, Path, type(None)), "adapter", "Pass a local folder, a Hub id or an opened adapter"
        )
        settings = settings or Settings()
        if isinstance(tasks, str):
            tasks = [name for name in tasks.split(",") if name]
        names = list(tasks)
        LoadedTasks.check_names(names, settings.include_path)

        # What is evaluated, and where the result goes
        if adapter is not None and plan is not None:
            raise ArgumentError(
                "`adapter` cannot be combined with a composition", "Pass either `adapter` or `plan`", parameter="plan"
            )
        if plan is None and (max_rank is not None or max_error is not None):
            name = "max_rank" if max_rank is not None else "max_error"
            raise ArgumentError(f"`{name}` can only be used with a composition", "Pass `plan` as well", parameter=name)
        if plan is not None:
            plan.check_adapter()
        source: Source | None = None
        if isinstance(adapter, Adapter):
            source = adapter.source
        elif adapter:
            source = find_adapter(str(adapter))
        inputs: list[str | Path | None] = [base_model, source.folder if source else None, settings.include_path]
        if plan:
            inputs += plan.inputs
        if out_path is not None:
            EVALUATION.check(out_path, overwrite=overwrite, inputs=inputs)

        # The subject, and the tokenizer and chat template that prompts have
        base = OpenedBase.open(str(base_model), tokenizer_of_experts=True)
        subject = Subject(base, source, plan, max_rank, max_error)
        subject.check()
        companions = subject.companions(chat_template_from)
        base = base.with_companions(companions)
        settings.check(base.tokenizer)

        # The tasks, so that their mistakes are reported before weights are loaded
        exam = Exam.load(names, settings, base)
        if settings.language_fidelity:
            exam.tasks.check_languages()
        if Vocabulary(base.config, base.tokenizer).may_lack_rows:
            exam.preview()  # refuses prompts with such tokens
        described = subject.described() | described_companions(companions)
        return Evaluation(replace(subject, base=base), exam, described, companions, (*inputs, base.source.folder))


def evaluate(
    base_model: str | Path,
    tasks: str | Sequence[str],
    *,
    adapter: Adapter | str | Path | None = None,
    plan: Plan | None = None,
    chat_template_from: str | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    max_gen_toks: int = 512,
    max_length: int | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    enable_thinking: bool | None = None,
    think_end_token: str | int | None = None,
    date: str | None = None,
    truncate: bool = False,
    include_path: str | Path | None = None,
    trust_task_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    language_fidelity: bool = False,
    engine: str = "transformers",
    engine_args: Mapping[str, Any] | None = None,
    sampling_seed: int = Settings.seed,
    device: str = "auto",
    dtype: str = "auto",
    out_path: str | Path | None = None,
    overwrite: bool = False,
    processes: Processes | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a base, an adapter on it or a composition on it with lm-evaluation-harness.

    For a model in memory see `adapterswap.experiments.evaluation.evaluate_model`.

    Args:
        base_model: the base: a folder or Hub id.
        tasks: names of tasks, as a list or separated by commas.
        adapter: an adapter of any kind that PEFT can load: opened, a folder or a Hub id.
        plan: a composition of adapters, instead of `adapter`. With neither, the base alone is evaluated.
        chat_template_from: whose chat template prompts are rendered with: an expert's name, `adapter` or `base`. By
            default as of the merged model: the experts' where they agree, else the task expert's.
        max_rank, max_error: truncate the composition; see `write_adapter`.
        num_fewshot, limit, batch_size, max_gen_toks, max_length, gen_kwargs, apply_chat_template, system_instruction,
            enable_thinking, think_end_token, date, truncate, include_path, trust_task_code, confirm_run_unsafe_code,
            language_fidelity, engine, engine_args: see `Settings` in `adapterswap.experiments.evaluation`.
        sampling_seed: for shots and for sampling.
        device: where torch computes: auto, cpu, cuda, cuda:N or mps.
        dtype: of the base's weights: float32, bfloat16, float16, or auto for the one they are stored in.
        out_path: a folder to write results.json and samples.jsonl to; nothing is written by default.
        overwrite: replace that folder if an evaluation wrote it.
        processes: the processes that evaluate together, from `Processes.joined`; by default only
            this one.
        on_progress: called with the number of finished requests and the total.

    Returns:
        Scores with standard errors, and every sample.

    Raises:
        ArgumentError: both an adapter and a plan; bounds without a plan; unknown tasks; settings out of their range.
        BaseModelError, ExpertError, NotFoundError: the base or the adapter cannot be opened, or they do not fit each
            other.
        OutputError: the folder exists (without `overwrite`), holds other files, overlaps an input, or cannot be
            written.
        DependencyError: the `eval` extra is not installed, or vLLM for `engine="vllm"`.
        RunError: vLLM does not start, or fails.
        AdapterswapError: a plan of full weights; see also `Subject.loaded` and `evaluation.evaluate_model`.
    """
    settings = Settings(
        num_fewshot=num_fewshot, limit=limit, batch_size=batch_size, max_gen_toks=max_gen_toks, max_length=max_length,
        gen_kwargs=gen_kwargs or {}, apply_chat_template=apply_chat_template, system_instruction=system_instruction,
        enable_thinking=enable_thinking, think_end_token=think_end_token, date=date, truncate=truncate,
        include_path=include_path, trust_task_code=trust_task_code, confirm_run_unsafe_code=confirm_run_unsafe_code,
        seed=sampling_seed, language_fidelity=language_fidelity, engine=engine, engine_args=engine_args or {},
    )  # fmt: skip
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
    return prepared.run(
        device=device, dtype=dtype, out_path=out_path, overwrite=overwrite, processes=processes, on_progress=on_progress
    )


def described_companions(companions: CompanionPlan) -> dict[str, Any]:
    """Whose tokenizer and chat template prompts have, as plain data; nothing if they are the base's."""
    if not companions.prompts_of_experts:
        return {}
    return {"companions": companions.prompts_of_experts}
