"""Ask a base, its experts and a composition the same question, side by side on one loaded base.

Nothing is written: the composition is switched on in the running model. Only one that needs tensors of its own (TIES,
say) goes through a temporary folder. Prompts have the tokenizer and the chat template that the merged model would have,
for every subject, so that the answers differ by weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapterswap.core import (
    BASE,
    Adapter,
    Checkpoint,
    ExpertName,
    OpenedBase,
    Plan,
    choose_device,
    open_adapter,
    open_expert,
    write_adapter,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.engines.live import LiveComposer, stream, why_not_live
from adapterswap.experiments.chat import ChatTemplate
from adapterswap.experiments.evaluation.prompts import Vocabulary
from adapterswap.experiments.evaluation.subjects import Subject
from adapterswap.kit.errors import (
    ArgumentError,
    BaseModelError,
    Problems,
    UnsupportedError,
    check_type,
    did_you_mean,
)
from adapterswap.kit.files.folders import scratch_folder

Message = Mapping[str, str]
Prompt = str | Sequence[Message]

_COMPOSITION = "composition"  # what the composition is called among the subjects
_MERGE = "Merge it with `adapterswap merge`, and ask the result as `base_model`"


@dataclass(frozen=True)
class Answer:
    """What one subject answered.

    Attributes:
        text: the answer so far, without special tokens.
        tokens: its number of tokens, without the end-of-sequence token.
        ended: whether the model ended it; otherwise it was cut at the most tokens.
    """

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class Reply:
    """One prompt and its answers.

    Attributes:
        prompt: the text, or the messages of a conversation.
        answers: by subject, in the order in which they are shown.
    """

    prompt: Prompt
    answers: Mapping[str, Answer]

    def __repr__(self) -> str:
        width = max(map(len, self.answers), default=0)
        return "\n".join(f"{name:{width}}  {answer.text}" for name, answer in self.answers.items())

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        prompt: Any = self.prompt
        if not isinstance(prompt, str):
            prompt = [dict(message) for message in prompt]
        return {"prompt": prompt, "answers": {name: asdict(answer) for name, answer in self.answers.items()}}


@dataclass(frozen=True)
class AskSettings:
    """Who answers, and how prompts are rendered and answered; see `ask`."""

    only: Sequence[str] | None = None
    max_rank: int | None = None
    max_error: float | None = None
    chat_template_from: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    sampling_seed: int = 0
    plain: bool = False
    system_instruction: str | None = None
    enable_thinking: bool | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """What transformers gets for sampling; empty for greedy answers."""
        if not self.temperature:
            return {}
        return {"temperature": self.temperature, "top_p": self.top_p}

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds of a composition that is reduced; empty if it is not."""
        bounds = {"max_rank": self.max_rank, "max_error": self.max_error}
        return {name: value for name, value in bounds.items() if value is not None}

    def check(self, tokenizer: Any) -> None:
        """Raise an `ArgumentError` with all settings that are out of range, or that this tokenizer cannot follow."""
        problems = Problems(ArgumentError)
        if self.max_new_tokens < 1:
            problems.add(f"`max_new_tokens` is {self.max_new_tokens}", "Pass 1 or more", parameter="max_new_tokens")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.add(
                f"`temperature` is {self.temperature:g}",
                "Pass 0 for greedy answers, or a number above it",
                parameter="temperature",
            )
        if not 0 < self.top_p <= 1:
            problems.add(f"`top_p` is {self.top_p:g}", "Pass a number above 0, and at most 1", parameter="top_p")
        elif self.top_p < 1 and not self.temperature:
            problems.add("`top_p` has no effect on greedy answers", "Pass `temperature` as well", parameter="top_p")
        if not self.has_template(tokenizer):
            self._check_plain(problems)
        elif self.enable_thinking is not None and not ChatTemplate(tokenizer).reads("enable_thinking"):
            problems.add(
                "`enable_thinking` has no effect: the chat template does not read it",
                "Leave it out",
                parameter="enable_thinking",
            )
        problems.raise_if_any()

    def _check_plain(self, problems: Problems) -> None:
        """Report what only a chat template can say."""
        if self.plain:
            why, remedy = "is passed, but `plain` leaves out the chat template", "Pass one of them"
        else:
            why, remedy = "needs a chat template", "Leave it out: the tokenizer has no chat template"
        for name in ("system_instruction", "enable_thinking"):
            if getattr(self, name) is not None:
                problems.add(f"`{name}` {why}", remedy, parameter=name)

    def has_template(self, tokenizer: Any) -> bool:
        """Whether prompts are put into a chat template."""
        return not self.plain and bool(getattr(tokenizer, "chat_template", None))


@dataclass(frozen=True)
class Panel:
    """A base and what answers on it: everything that needs no weights has been checked.

    Attributes:
        base: its config, and the tokenizer and chat template that prompts have.
        subjects: who answers: `base`, experts by name, the composition.
        adapters: the adapters that the subjects need, by name.
        plan: the composition, if there is one.
        composition: the name of the composition among the subjects.
        companions: whose tokenizer and chat template prompts have.
        settings: who answers, and how prompts are rendered and answered.
    """

    base: OpenedBase
    subjects: tuple[str, ...]
    adapters: Mapping[str, Adapter]
    plan: Plan | None
    composition: str
    companions: CompanionPlan
    settings: AskSettings

    @staticmethod
    def prepare(
        composition: Plan | Adapter | str | Path | None,
        settings: AskSettings,
        *,
        base_model: str | Path | None = None,
        experts: Mapping[str, Adapter | str | Path] | None = None,
    ) -> Panel:
        """Open and check all that `ask` needs, except the weights; the arguments and errors are those of `ask`."""
        check_type(
            composition,
            (Plan, Adapter, str, Path, type(None)),
            "composition",
            "Pass a plan, an adapter, its folder or Hub id, or None for the base",
        )
        plan, adapters = _opened(composition, experts or {})
        if settings.bounds and plan is None:
            name = next(iter(settings.bounds))
            raise ArgumentError(f"`{name}` can only be used with a composition", "Leave it out", parameter=name)

        # The base: the one that was passed, or that the composition or the first adapter names.
        named = [adapter.config.base_reference for adapter in adapters.values()]
        if plan is not None:
            named.insert(0, plan.base.reference)
        reference = next(filter(None, named), None)
        if base_model is not None:
            reference = str(base_model)
        if reference is None:
            raise BaseModelError(
                "The base model is not known", "Pass its folder or Hub id as `base_model`", parameter="base_model"
            )
        base = OpenedBase.open(reference)
        subjects = [Subject(base, adapter=adapter.source) for adapter in adapters.values()]
        tokenizer = None
        if plan is not None:
            subjects.insert(0, Subject(base, plan=plan))
            tokenizer = plan.composition.tokenizer
        for subject in subjects:
            subject.check()
        _check_live(Subject(base), adapters)

        companions = CompanionPlan.decide_prompts(
            {name: adapter.source.folder for name, adapter in adapters.items()},
            base.source.folder,
            rows=getattr(base.config.get_text_config(), "vocab_size", None),
            tokenizer=tokenizer,
            template=settings.chat_template_from,
        )
        base = base.with_companions(companions)
        settings.check(base.tokenizer)

        name = _COMPOSITION
        while name in adapters:
            name += "_"
        known = [BASE, *adapters]
        if plan is not None:
            known.append(name)

        if settings.only is not None:
            asked = _chosen(settings.only, known)
        else:
            # A slice says nothing on its own: it lacks the layers that were cut away.
            slices = {name for name, adapter in adapters.items() if adapter.kept_layers is not None}
            asked = [one for one in known if one not in slices]
        return Panel(base, tuple(asked), adapters, plan, name, companions, settings)

    @contextmanager
    def seated(self, *, device: str = "auto", dtype: str = "auto") -> Iterator[Seated]:
        """Load the base with the adapters that the subjects need, and yield what answers.

        Args:
            device: torch's device, or `auto`.
            dtype: dtype of the base's weights, or `auto`.
        """
        target = choose_device(device)
        plan = self.plan if self.composition in self.subjects else None
        needed = {name: adapter for name, adapter in self.adapters.items() if name in self.subjects}
        with ExitStack() as stack:
            answering: dict[str, Any] = {name: name for name in needed}
            if plan is not None and (self.settings.bounds or why_not_live(plan) is not None):
                folder = stack.enter_context(scratch_folder("ask")) / "composed"
                needed[self.composition] = open_adapter(write_adapter(plan, folder, **self.settings.bounds))
                answering[self.composition] = self.composition
            elif plan is not None:
                needed |= plan.adapters
                answering[self.composition] = plan

            model = self.base.load_weights(dtype=dtype).to(target).eval()
            speaker = model
            if needed:
                # PEFT cannot hold an adapter under every name that a composition may use.
                safe: dict[str, str] = {}
                for name in needed:
                    safe[name] = name
                    if not ExpertName(name).fits_peft:
                        safe[name] = _safe(name, {*needed, *safe.values()})
                speaker = LiveComposer.from_experts(model, {safe[name]: adapter for name, adapter in needed.items()})
                for name, subject in answering.items():
                    if isinstance(subject, str):
                        answering[name] = safe.get(subject, subject)
            yield Seated(self, speaker, {name: answering.get(name) for name in self.subjects})


class Seated:
    """The subjects of a panel on a loaded model.

    Args:
        panel: the panel.
        speaker: the live composer, or the base alone.
        answering: what the composer computes for each subject; None is the base.
    """

    def __init__(self, panel: Panel, speaker: Any, answering: Mapping[str, Any]) -> None:
        self.panel = panel
        self._speaker, self._answering = speaker, answering
        self._together = not panel.settings.sampling

    def reply(self, prompt: Prompt) -> Reply:
        """Every subject's whole answer."""
        *_, answers = self.stream(prompt)
        return Reply(prompt, answers)

    def stream(self, prompt: Prompt | Mapping[str, Prompt]) -> Iterator[Mapping[str, Answer]]:
        """The answers so far, after every token; subjects that have not begun are missing.

        Subjects with the same prompt answer in one batch, where the model allows it; drawn answers come one after the
        other, each from the same seed, so that they do not depend on who else is asked.

        Args:
            prompt: a text, the messages of a conversation, or one of them for each subject.

        Raises:
            ArgumentError: the prompt is empty or does not fit, or the chat template refuses it.
            BaseModelError: it has a token that the model has no row for.
            RunError: the device runs out of memory.
        """
        if isinstance(prompt, Mapping):
            prompts = {name: tuple(self._tokens(prompt[name])) for name in self._answering}
        else:
            prompts = dict.fromkeys(self._answering, tuple(self._tokens(prompt)))

        names_of: dict[tuple[int, ...], list[str]] = {}
        for name, tokens in prompts.items():
            names_of.setdefault(tokens, []).append(name)

        finished: dict[str, Answer] = {}
        for tokens, names in names_of.items():
            for answers in self._answers(names, tokens):
                so_far = {**finished, **answers}
                yield {name: so_far[name] for name in self._answering if name in so_far}
            finished |= answers

    def _answers(self, names: Sequence[str], tokens: Sequence[int]) -> Iterator[Mapping[str, Answer]]:
        """The answers of subjects with one prompt, in one batch or one after the other."""
        if self._together and len(names) > 1:
            try:
                yield from self._generated(names, tokens)
                return
            except UnsupportedError:  # DoRA or a mixture of experts, say: no batch can hold several compositions
                self._together = False
        finished: dict[str, Answer] = {}
        for name in names:
            for answers in self._generated([name], tokens):
                yield {**finished, **answers}
            finished |= answers

    def _generated(self, names: Sequence[str], tokens: Sequence[int]) -> Iterator[Mapping[str, Answer]]:
        """The answers of subjects with one prompt, in one batch."""
        settings = self.panel.settings
        running = stream(
            self._speaker,
            self.panel.base.tokenizer,
            tokens,
            [self._answering[name] for name in names],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            seed=settings.sampling_seed,
        )
        for so_far in running:
            rows = zip(names, so_far.texts, so_far.tokens, so_far.ended, strict=True)
            yield {name: Answer(text, number, ended) for name, text, number, ended in rows}

    def _tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, rendered by the chat template unless there is none."""
        settings, tokenizer = self.panel.settings, self.panel.base.tokenizer
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = list(prompt)
        _check_messages(messages)
        if settings.has_template(tokenizer):
            # A chat template writes the special tokens itself.
            ids = tokenizer(self._rendered(messages), add_special_tokens=False)["input_ids"]
        elif len(messages) > 1:
            raise ArgumentError(
                "A conversation needs a chat template, and these prompts have none",
                "Ask single prompts",
                parameter="prompts",
            )
        else:
            ids = tokenizer(messages[0]["content"])["input_ids"]
        Vocabulary(self.panel.base.config, tokenizer).check(ids)
        return list(ids)

    def _rendered(self, messages: Sequence[Message]) -> str:
        """A conversation as text, by the chat template."""
        from jinja2 import TemplateError

        settings = self.panel.settings
        if settings.system_instruction is not None:
            messages = [{"role": "system", "content": settings.system_instruction}, *messages]
        variables = {}
        if settings.enable_thinking is not None:
            variables["enable_thinking"] = settings.enable_thinking
        try:
            return ChatTemplate(self.panel.base.tokenizer, variables)(messages, add_generation_prompt=True)
        except TemplateError as error:
            raise ArgumentError(
                f"The chat template refuses the prompt: {error}",
                "Change the messages, or pass `plain=True` to ask without the template",
                parameter="prompts",
            ) from None


def _opened(
    composition: Plan | Adapter | str | Path | None, experts: Mapping[str, Adapter | str | Path]
) -> tuple[Plan | None, dict[str, Adapter]]:
    """The plan, and all adapters by name: the plan's experts or the adapter itself, and further ones."""
    plan: Plan | None = None
    adapters: dict[str, Adapter] = {}
    if isinstance(composition, Plan):
        plan = composition
        plan.check_adapter()
        adapters |= plan.adapters
    elif composition is not None:
        opened = composition if isinstance(composition, Adapter) else open_expert(composition)
        if isinstance(opened, Checkpoint):
            raise UnsupportedError(
                f"{composition} is a full checkpoint", "Pass it as `base_model`", parameter="composition"
            )
        adapters[ExpertName.choose(opened, {}, "adapter")] = opened

    for name, reference in experts.items():
        fault = ExpertName(name).fault
        if fault is not None:
            raise ArgumentError(fault, "Choose another name", parameter="experts")
        if name in adapters:
            raise ArgumentError(f"There are two experts {name!r}", "Choose another name", parameter="experts")
        adapters[name] = reference if isinstance(reference, Adapter) else open_adapter(reference)
    return plan, adapters


def _check_live(base: Subject, adapters: Mapping[str, Adapter]) -> None:
    """Refuse adapters that cannot be switched on and off in a running model."""
    problems = Problems(UnsupportedError)
    for name, adapter in adapters.items():
        if adapter.kept_layers is not None:  # a slice answers only within a composition
            continue
        reason = why_not_live(base.alone(adapter))
        if reason is not None:
            problems.add(f"{name}: {reason}", _MERGE, parameter="experts")
    problems.raise_if_any()


def _chosen(only: Sequence[str], known: Sequence[str]) -> list[str]:
    """The requested subjects, in the order of the request."""
    if not only:
        raise ArgumentError("`only` is empty", f"Choose from {', '.join(known)}", parameter="only")
    for name in only:
        if name not in known:
            remedy = did_you_mean(name, known, f"Choose from {', '.join(known)}")
            raise ArgumentError(f"Nothing here is called {name!r}", remedy, parameter="only")
    return list(dict.fromkeys(only))


def _safe(name: str, taken: Collection[str]) -> str:
    """A name for PEFT in place of one that it cannot hold."""
    safe = "expert_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    while safe in taken:
        safe += "_"
    return safe


def _check_messages(messages: Sequence[Any]) -> None:
    """Refuse what is no conversation, or one that does not end with a question."""
    for message in messages:
        is_mapping = isinstance(message, Mapping)
        if not (is_mapping and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise ArgumentError(
                f"{message!r} is not a message",
                "Write messages as {'role': 'user', 'content': 'text'}",
                parameter="prompts",
            )

    if not messages or not messages[-1]["content"].strip():
        raise ArgumentError("The prompt is empty", "Pass some text", parameter="prompts")
    if messages[-1]["role"] == "assistant":
        raise ArgumentError(
            "The conversation ends with the assistant's own message",
            "End it with what the assistant should answer",
            parameter="prompts",
        )


def ask(
    composition: Plan | Adapter | str | Path | None,
    prompts: str | Sequence[Prompt],
    *,
    base_model: str | Path | None = None,
    experts: Mapping[str, Adapter | str | Path] | None = None,
    only: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    sampling_seed: int = 0,
    plain: bool = False,
    system_instruction: str | None = None,
    enable_thinking: bool | None = None,
    chat_template_from: str | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> list[Reply]:
    """Ask a base, its experts and a composition the same questions. Nothing is written.

    Args:
        composition: a plan of adapters, as `layer_swap` or `compose` returns it; or an adapter: opened, a folder or a
            Hub id; None for the base and `experts` alone.
        prompts: a text, or several prompts: texts, or conversations as lists of messages
            `{"role": "user", "content": "…"}`, whose last one is answered.
        base_model: the base: a folder or Hub id. By default the one that the experts name.
        experts: further adapters to ask, by name.
        only: who answers: `base`, names of experts, `composition`. An adapter without a plan has its folder's name. By
            default all of them, except slices, which lack layers.
        max_new_tokens: the most tokens of an answer.
        temperature: 0 takes the most likely token each time; above it, tokens are drawn.
        top_p: draw from the most likely tokens whose probabilities add up to this.
        sampling_seed: of the draws; every subject draws from the same seed.
        plain: send the text unchanged. By default it is put into the chat template, if the tokenizer has one.
        system_instruction: the system message of every conversation.
        enable_thinking: have the chat template turn reasoning on or off.
        chat_template_from: whose chat template prompts have: an expert's name, or `base`. By default as of the merged
            model: the experts' where they agree, else the task expert's.
        max_rank, max_error: truncate the composition; see `write_adapter`.
        device: where torch computes: auto, cpu, cuda, cuda:N or mps.
        dtype: of the base's weights: float32, bfloat16, float16, or auto for the one they are stored in.

    Returns:
        A reply for each prompt, with the answers by subject.

    Raises:
        ArgumentError: a setting is out of its range or has no effect; a prompt is empty, too long, no conversation, or
            refused by the chat template; `only` names nobody; two experts have one name.
        BaseModelError, ExpertError, NotFoundError: the base or an adapter cannot be opened, or they do not fit each
            other; a prompt has a token that the model has no row for.
        UnsupportedError: an adapter is a full checkpoint, or of a kind that cannot be switched in a running model.
        DependencyError: the `models` extra is not installed.
        RunError: the device runs out of memory.
        AdapterswapError: a plan of full weights; see also `write_adapter` for a composition with a bound on its rank.
    """
    settings = AskSettings(
        only=only,
        max_rank=max_rank,
        max_error=max_error,
        chat_template_from=chat_template_from,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        sampling_seed=sampling_seed,
        plain=plain,
        system_instruction=system_instruction,
        enable_thinking=enable_thinking,
    )
    panel = Panel.prepare(composition, settings, base_model=base_model, experts=experts)
    asked = [prompts] if isinstance(prompts, str) else list(prompts)
    with panel.seated(device=device, dtype=dtype) as seated:
        return [seated.reply(prompt) for prompt in asked]
