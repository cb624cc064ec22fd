"""The settings of an evaluation, which `evaluate` and `preview` share, and those that recipes can set."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from adapterswap.experiments.chat import ChatTemplate, as_date
from adapterswap.experiments.evaluation.results import broken_texts
from adapterswap.kit.errors import ArgumentError, BaseModelError, Problems
from adapterswap.kit.files.declared import Declared
from adapterswap.kit.files.hashes import fingerprint
from adapterswap.kit.files.readers import field
from adapterswap.kit.files.text import expand

ENGINES = ("transformers", "vllm")
_MOST_DOCUMENTS = 2**53  # beyond it a float is no exact count
_PASSING = ("__pycache__", ".")  # prefixes of caches and hidden files


def files_in(folder: Path) -> list[Path]:
    """All files in a folder, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Settings:
    """How tasks are evaluated.

    Attributes:
        num_fewshot: shots before each question; by default each task's own, which is 8 for MGSM.
        limit: only the first documents of each task: their number, or a fraction below 1.
        batch_size: sequences at once. Padding changes the last bits of sums, so compare runs of one batch size. A model
            whose answers it would change further is asked one sequence at a time.
        max_gen_toks: the longest output in tokens, for tasks without a limit of their own, such as MGSM.
        max_length: the most tokens of a prompt with its output; by default what the model can read by its config.
        gen_kwargs: generation settings that override the tasks' own (`do_sample`, `temperature`, `max_gen_toks`, …).
        apply_chat_template: format the prompt as a chat, with a turn per shot.
        system_instruction: a text before everything else.
        enable_thinking: have the chat template turn reasoning on or off; by default as the template does.
        think_end_token: what ends the reasoning in an answer, as text or a token's id; only what follows is scored.
        date: what the chat template takes for today, as 2026-11-27; by default the real date.
        truncate: cut the beginning of prompts that do not fit, and count them; without it they are refused.
        include_path: a folder with the user's own task files.
        trust_task_code: let task files in `include_path` run their Python code; without it such files are refused, and
            templates are rendered in a sandbox.
        confirm_run_unsafe_code: let tasks run the code that the model writes; without it they are refused.
        engine: what computes the answers: transformers or vllm.
        engine_args: vLLM's own settings by their names in Python, such as `gpu_memory_utilization`.
        language_fidelity: also score the share of each answer that is written in its task's language
            (`language_share`), for tasks that generate and whose names end in a language: mgsm_native_cot_sw.
        seed: for the harness's choice of shots (MGSM's are fixed) and for sampling.
    """

    num_fewshot: int | None = None
    limit: float | None = None
    batch_size: int = 8
    max_gen_toks: int = 512
    max_length: int | None = None
    gen_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    enable_thinking: bool | None = None
    think_end_token: str | int | None = None
    date: str | None = None
    truncate: bool = False
    include_path: str | Path | None = None
    trust_task_code: bool = False
    confirm_run_unsafe_code: bool = False
    seed: int = 1234  # lm-evaluation-harness's
    language_fidelity: bool = False
    engine: str = "transformers"
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    WHERE_SET: ClassVar[frozenset[str]] = frozenset(
        {"engine", "enable_thinking", "think_end_token", "date", "max_length"}
    )
    """The settings that `described` leaves out where they have their defaults."""

    @property
    def sandboxed(self) -> bool:
        """Whether templates are rendered in a sandbox, because they are the user's and not trusted."""
        return self.include_path is not None and not self.trust_task_code

    @property
    def day(self) -> datetime.date | None:
        """`date` as a date."""
        if self.date is None:
            return None
        return datetime.date.fromisoformat(self.date)

    @property
    def task_files(self) -> dict[str, str]:
        """Path below `include_path` → fingerprint, of all files in it but caches and hidden ones."""
        if self.include_path is None:
            return {}

        folder = expand(self.include_path)
        prints = {}
        for path in files_in(folder):
            name = path.relative_to(folder)
            if not any(part.startswith(_PASSING) for part in name.parts):
                prints[name.as_posix()] = fingerprint(path)
        return prints

    def check_processes(self, count: int) -> None:
        """Refuse several processes that would each start an engine."""
        if count > 1 and self.engine != ENGINES[0]:
            raise ArgumentError(
                f"{count} processes were started, and each would start an engine",
                "Start one process; vLLM uses several devices with `engine_args.tensor_parallel_size`",
                parameter="engine",
            )

    def chat(self, tokenizer: Any) -> ChatTemplate:
        """The tokenizer's chat template with these variables and this date."""
        variables = {}
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return ChatTemplate(tokenizer, variables, date=self.day)

    def dated(self, tokenizer: Any) -> Settings:
        """With today's date if the chat template asks for it and there is none, so that results record it."""
        if not (self.apply_chat_template and tokenizer.chat_template) or self.date is not None:
            return self
        from jinja2 import TemplateError

        template = self.chat(tokenizer)
        messages = [{"role": "user", "content": "?"}]
        if self.system_instruction:
            messages.insert(0, {"role": "system", "content": self.system_instruction})
        try:
            template(messages, add_generation_prompt=True)
        except TemplateError:
            return self  # the first prompt reports it
        if not template.asked_date:
            return self
        return replace(self, date=template.today.isoformat())

    def check(self, tokenizer: Any) -> None:
        """Check the settings against the base's tokenizer, and report all problems together.

        Raises:
            ArgumentError: a setting is out of its range, is not UTF-8 text, or asks for a chat template that the
                tokenizer lacks.
            BaseModelError: the tokenizer has no end-of-sequence token.
        """
        problems = Problems(ArgumentError)

        # Numbers. The harness would take 0 as no limit at all, and 2.5 as 2.
        limit = self.limit
        if limit is not None and not (0 < limit < 1 or (1 <= limit < _MOST_DOCUMENTS and limit == int(limit))):
            problems.add(
                f"`limit` is {limit:g}, which is neither a whole number of documents nor a fraction of them",
                "Pass a whole number from 1 to 2⁵³, or a fraction between 0 and 1",
                parameter="limit",
            )
        for name, value in (("batch_size", self.batch_size), ("max_gen_toks", self.max_gen_toks)):
            if value < 1:
                problems.add(f"`{name}` is {value}", "Pass 1 or more", parameter=name)
        if self.max_length is not None and self.max_length < 2:
            problems.add(
                f"`max_length` is {self.max_length}", "Pass 2 or more: a prompt and its output", parameter="max_length"
            )

        # Texts and choices
        for name, content in (("system_instruction", self.system_instruction), ("gen_kwargs", self.gen_kwargs)):
            for text in broken_texts(content):
                problems.add(
                    f"`{name}` contains an unpaired surrogate, which is not a character: {text!r}",
                    "Pass text that can be encoded as UTF-8",
                    parameter=name,
                )
        if self.engine not in ENGINES:
            problems.add(f"`engine` is {self.engine!r}", f"Choose from {', '.join(ENGINES)}", parameter="engine")
        if self.engine_args and self.engine == ENGINES[0]:
            problems.add(
                "`engine_args` are settings of vLLM, but the engine is transformers",
                "Pass `engine=vllm` too, or leave them out",
                parameter="engine_args",
            )

        # What the tokenizer must have, and dates for its chat template
        if tokenizer.eos_token_id is None:
            problems.add(
                "The tokenizer has no end-of-sequence token",
                "Set eos_token in its tokenizer_config.json",
                parameter="base_model",
                kind=BaseModelError,
            )
        if self.apply_chat_template and not tokenizer.chat_template:
            problems.add(
                "`apply_chat_template` is set, but the tokenizer has no chat template",
                "Leave out `apply_chat_template`, or save a chat template with the base's tokenizer",
                parameter="apply_chat_template",
            )
        self._check_thinking(tokenizer, problems)
        try:
            as_date(self.date)
        except ValueError as error:
            problems.add(f"`date`: {error}", "Write it as year, month and day: 2026-11-27", parameter="date")
        problems.raise_if_any()

    def _check_thinking(self, tokenizer: Any, problems: Problems) -> None:
        """Refuse settings of reasoning that the chat template would ignore, or without what ends the reasoning."""
        if self.enable_thinking and self.think_end_token is None:
            problems.add(
                "`enable_thinking` is set, but not what ends the reasoning",
                "Pass `think_end_token` too, such as </think>",
                parameter="think_end_token",
            )
        if self.enable_thinking is None or not tokenizer.chat_template:
            return
        if not self.apply_chat_template:
            problems.add(
                "`enable_thinking` is a variable of the chat template, which is not used",
                "Pass `apply_chat_template` too",
                parameter="enable_thinking",
            )
        elif not ChatTemplate(tokenizer).reads("enable_thinking"):
            problems.add(
                "`enable_thinking` has no effect: the chat template does not read it",
                "Leave it out",
                parameter="enable_thinking",
            )

    def described(self) -> dict[str, Any]:
        """As plain data for publication, without paths and without trust, which changes no result."""
        content = asdict(self) | {"gen_kwargs": dict(self.gen_kwargs)}
        del content["include_path"], content["trust_task_code"], content["engine"], content["engine_args"]
        for name in self.WHERE_SET & content.keys():
            if content[name] is None:
                del content[name]
        if self.engine != ENGINES[0]:  # whose results stay as they were before there was a choice
            content["engine"] = {"name": self.engine, "arguments": dict(self.engine_args)}
        if self.limit is not None and self.limit >= 1:
            content["limit"] = int(self.limit)
        return content


class EvaluationOptions(Declared, finite=True):
    """How a recipe has tasks evaluated; the names and their meaning are those of `adapterswap evaluate`."""

    num_fewshot: int | None = field(
        default=None, ge=0, description="Number of shots. Default: each task's own; 8 for MGSM."
    )
    limit: float | None = field(
        default=None, gt=0, description="Evaluate only the first N documents of each task, or a fraction of them."
    )
    batch_size: int = field(default=8, ge=1, description="Sequences per batch.")
    max_gen_toks: int = field(default=512, ge=1, description="Maximum length of an output, in tokens.")
    max_length: int | None = field(
        default=None, ge=2, description="Maximum length of a prompt with its output. Default: what the model can read."
    )
    apply_chat_template: bool = field(default=False, description="Format prompts as a chat, with a turn per shot.")
    system_instruction: str | None = field(default=None, description="System message at the start of every prompt.")
    enable_thinking: bool | None = field(
        default=None, description="Have the chat template turn reasoning on or off. Default: as the template does."
    )
    think_end_token: str | int | None = field(
        default=None, description="What ends the reasoning, such as </think>, or a token's id: only the rest is scored."
    )
    date: str | None = field(
        default=None,
        before=as_date,
        description="What the chat template takes for today, such as '2026-11-27'. Default: today.",
    )
    truncate: bool = field(default=False, description="Cut the beginning of prompts that do not fit.")
    language_fidelity: bool = field(
        default=False, description="Also score how much of each answer is in the task's language."
    )
    include_path: str | None = field(default=None, description="A folder with your own lm-eval task files.")

    def as_settings(self, folder: Path | None = None, **more: Any) -> Settings:
        """As `Settings`.

        Args:
            folder: the folder that `include_path` is relative to; None for the current folder.
            more: settings that are not for recipes: only the user can allow a model's or a task's code to run.
        """
        names = type(self).model_fields.keys() & Settings.__dataclass_fields__.keys()
        content = {name: getattr(self, name) for name in names}
        if folder is not None and self.include_path is not None:
            content["include_path"] = folder / expand(self.include_path)
        return Settings(**content, **more)
