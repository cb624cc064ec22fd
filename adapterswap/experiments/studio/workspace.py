"""A studio's workspace: a base in memory, experts by name, their live composer, and one queue for the model.

An expert that cannot be opened or loaded is kept with its error, and the others still work.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterswap.core import (
    BASE,
    Adapter,
    Composition,
    Depth,
    ExpertName,
    ModelConfig,
    OpenedBase,
    Plan,
    Rule,
    choose_device,
    compose,
    open_adapter,
)
from adapterswap.core.companions.companions import CompanionPlan
from adapterswap.engines.live import LiveComposer, stream
from adapterswap.engines.serving import Manifest
from adapterswap.experiments.analysis.analysis import Analysis, analyze
from adapterswap.experiments.analysis.suggestion import Suggestion, suggest
from adapterswap.experiments.lab.shown import LabProblems, find_models
from adapterswap.experiments.studio.choice import Choice
from adapterswap.kit.errors import AdapterswapError, ArgumentError, UnsupportedError
from adapterswap.kit.files.text import expand

if TYPE_CHECKING:
    from adapterswap.engines.live.catalogue import Composable
    from adapterswap.engines.live.streaming import Answers


Scores = dict[str, tuple[int, int]]
"""Language → the number of problems answered correctly, and of all."""


def alone(name: str) -> Composition:
    """One expert as a composition."""
    return Composition(allocation=(Rule(expert=name),))


class Turns:
    """A lock that is acquired in the order of requests.

    A long task that holds it can let others go first between its steps with `step_aside`.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    @property
    def waiting(self) -> int:
        """The number of waiting threads."""
        return len(self._waiting)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the lock and hold it inside the block."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def step_aside(self) -> None:
        """Let everyone who is waiting now go first; call it only while holding the lock."""
        if self._waiting:
            self._release()
            self._acquire()

    def _acquire(self) -> None:
        """Take the lock after all threads that began to wait before this one."""
        with self._guard:
            if not self._held and not self._waiting:
                self._held = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _release(self) -> None:
        """Pass the lock on."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()  # the lock passes to the next thread
            else:
                self._held = False


class Visitors:
    """For each visitor, the event that stops what is running for them."""

    def __init__(self) -> None:
        self._ends: dict[str, threading.Event] = {}
        self._guard = threading.Lock()

    @contextmanager
    def work(self, visitor: str) -> Iterator[threading.Event]:
        """Stop what is running for the visitor, and yield the event that stops the work inside the block."""
        self.leave(visitor)
        self._ends[visitor] = mine = threading.Event()
        try:
            yield mine
        finally:
            mine.set()
            with self._guard:
                if self._ends.get(visitor) is mine:
                    del self._ends[visitor]

    def leave(self, visitor: str) -> None:
        """Stop what is running for the visitor."""
        with self._guard:
            before = self._ends.pop(visitor, None)
            if before is not None:
                before.set()


@dataclass
class Workspace:
    """A base with its experts, open and loaded.

    Attributes:
        base_model: folder or Hub id of the base.
        base: its config and tokenizer.
        num_layers: L.
        references: expert → its folder or Hub id.
        experts: the experts that could be opened.
        faults: expert → why it could not be opened; it cannot be used at all.
        not_live: expert → why it could not be loaded into the model; it can be composed but cannot answer.
        composer: the model's live composer; None if no expert could be loaded.
        lab: word problems, if the models are the lab's.
        allow_paths: whether visitors may open more experts by folder or Hub id.
        notes: whose tokenizer and chat template prompts have, where experts or the base differ.
        turns: the queue for the model.
    """

    base_model: str
    base: OpenedBase
    num_layers: int
    references: dict[str, str]
    experts: dict[str, Adapter]
    faults: dict[str, AdapterswapError]
    not_live: dict[str, AdapterswapError]
    composer: LiveComposer | None
    lab: LabProblems | None = None
    allow_paths: bool = False
    notes: Sequence[str] = ()
    turns: Turns = field(default_factory=Turns)
    _analysis: dict[tuple[str, ...], Analysis] = field(default_factory=dict)
    _scores_alone: dict[str, Scores] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        return self.base.tokenizer

    def composition(self, choice: Choice) -> Composition:
        """The composition of a choice, with the folders or Hub ids of its experts and the base, as in a recipe."""
        named = {*choice.task, *choice.language, *choice.painted.values()}
        places = {name: reference for name, reference in self.references.items() if name in named}
        return choice.composition(self.num_layers, experts=places, base_model=self.base_model)

    def plan(self, composition: Composition) -> Plan:
        """The plan, by `adapterswap.compose` with the opened experts."""
        for name in composition.expert_names:
            if name in self.faults:
                raise self.faults[name]
        return compose(composition, self.experts)

    def answers(
        self,
        prompt: str,
        compositions: Sequence[Composable],
        *,
        max_new_tokens: int,
        chat: bool,
        stopped: threading.Event | None = None,
    ) -> Iterator[Answers]:
        """Stream answers by `adapterswap.engines.live.stream`, in turn with all other visitors."""
        for composition in compositions:
            if isinstance(composition, Composition):
                for name in composition.expert_names:
                    self.check_live(name)
        return stream(
            self.live, self.tokenizer, prompt, compositions, max_new_tokens=max_new_tokens, chat=chat,
            turn=self.turns.turn, stopped=stopped,
        )  # fmt: skip

    @contextmanager
    def holding(self, composition: Composition | None) -> Iterator[Callable[[], None]]:
        """Hold the turn with the model set to a composition; yields a function that lets others go first."""
        if composition is not None:
            for name in composition.expert_names:
                self.check_live(name)
        with self.turns.turn(), ExitStack() as using:
            using.enter_context(self.live.use(composition))

            def step_aside() -> None:
                if self.turns.waiting:  # the next visitor sets another composition
                    using.close()
                    self.turns.step_aside()
                    using.enter_context(self.live.use(composition))

            yield step_aside

    @property
    def is_chat(self) -> bool:
        """Whether prompts get the chat template by default. A lab's experts were trained on texts without one."""
        return self.lab is None and bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def changes_outside(self) -> bool:
        """Whether an expert changes an embedding, a head or another module outside the layers."""
        layers: set[int | None] = set()
        for expert in self.experts.values():
            layers |= {part.layer for part in expert.parts.values()}
        return None in layers

    def first_problem(self, composition: Composition) -> int:
        """The place of the first of the lab's problems that the composition solves, but no expert and not the base.

        The problem is in the first of the languages; the place is 0 if there is none.
        """
        assert self.lab is not None
        for batch, questions in enumerate(self.lab.questions[self.lab.languages[0]]):
            with self.holding(composition):
                only = questions.exact_match(self.live.model)
            for other in (None, *map(alone, composition.expert_names)):
                if only.any():
                    with self.holding(other):
                        only &= ~questions.exact_match(self.live.model)
            if only.any():
                return batch * self.lab.batch_size + int(only.argmax())
        return 0

    def scores_alone(self, name: str, *, stopped: threading.Event | None = None) -> Scores | None:
        """`scores` of one expert, or of `base`, computed once."""
        if name not in self._scores_alone:
            scores = self.scores(None if name == BASE else alone(name), stopped=stopped)
            if scores is None:
                return None
            self._scores_alone[name] = scores
        return self._scores_alone[name]

    def scores(self, composition: Composition | None, *, stopped: threading.Event | None = None) -> Scores | None:
        """(correct, all) of the lab's problems for a composition, by language; None if `stopped` was set."""
        assert self.lab is not None
        scores = {}
        with self.holding(composition) as step_aside:
            for language, batches in self.lab.questions.items():
                right = 0
                for questions in batches:
                    if stopped is not None and stopped.is_set():
                        return None
                    right += int(questions.exact_match(self.live.model).sum())
                    step_aside()
                scores[language] = (right, len(self.lab.problems))
        return scores

    def check_live(self, name: str) -> None:
        """Raise the error that kept an expert from being loaded into the model, if any."""
        fault = self.faults.get(name) or self.not_live.get(name)
        if fault is not None:
            raise fault

    @property
    def live(self) -> LiveComposer:
        """The composer. If no expert could be loaded, the first error is raised."""
        if self.composer is None:
            raise next(iter([*self.not_live.values(), *self.faults.values()]))
        return self.composer

    def analysis(self, names: Sequence[str]) -> Analysis:
        """The result of `adapterswap.analyze` for these experts; recent results are cached."""
        key = tuple(names)
        if key not in self._analysis:
            if len(self._analysis) > 16:
                self._analysis.pop(next(iter(self._analysis)))
            self._analysis[key] = analyze({name: self.experts[name] for name in names})
        return self._analysis[key]

    def suggestion(self, task: str, language: str) -> Suggestion:
        """The result of `adapterswap.suggest` for two experts, by their weights."""
        return suggest(self.experts[task], self.experts[language], num_layers=self.num_layers)

    def add(self, reference: str) -> str:
        """Open and load another expert by its folder or Hub id, and return its name."""
        if not self.allow_paths:
            raise ArgumentError("This studio does not open further experts", "Start it with `allow_paths=True`")
        name = ExpertName.of(reference)
        Manifest.check_name(name)
        if name in self.references:
            raise ArgumentError(f"An expert named {name!r} is already open", "Rename its folder", parameter="reference")
        place = expand(reference)
        adapter = open_adapter(place if os.path.isdir(place) else reference)
        with self.turns.turn():
            self.live.load_expert(adapter, name)
        self.references[name], self.experts[name] = _short(reference), adapter
        return name

    @staticmethod
    def open(
        base_model: str,
        experts: str | Path | Mapping[str, str],
        *,
        lab: Callable[[Any], LabProblems] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        allow_paths: bool = False,
    ) -> Workspace:
        """Open a base and experts, and load the experts into one model.

        Args:
            base_model: folder or Hub id of the base.
            experts: a folder of adapter folders, a file experts.yaml, or folders and Hub ids by name.
            lab: makes word problems with the base's tokenizer, if the models are the lab's.
            device: torch's device, or `auto`.
            dtype: dtype of the base's weights, or `auto`.
            allow_paths: let visitors open more experts by folder or Hub id.

        Raises:
            BaseModelError: the base cannot be opened or loaded, or does not say how many layers it has.
            ArgumentError, FieldError, NotFoundError: see `Manifest.read`.
            ExpertError: no expert can be opened.
            UnsupportedError: the base has an encoder and a decoder.
        """
        target = choose_device(device)
        if isinstance(experts, Mapping):
            named = dict(experts)
        else:
            manifest = Manifest.read(experts)
            if manifest.chains:
                raise UnsupportedError(
                    f"{', '.join(manifest.chains)} is a chain of adapters, but the studio shows single ones",
                    "Write the chain as one adapter with `compose`",
                    parameter="experts",
                )
            named = manifest.adapters

        base = OpenedBase.open(base_model, tokenizer_of_experts=True)
        num_layers = Depth.known(ModelConfig(base.config.to_dict()).stacked_layers, base_model, "Use another base")
        if not isinstance(num_layers, int):
            raise UnsupportedError(
                f"{base_model} has an encoder and a decoder, but the studio shows a single stack of layers",
                "Use `compose` with `stack`",
                parameter="base_model",
            )

        # Experts that cannot be opened are shown with the reason, as long as one can.
        opened: dict[str, Adapter] = {}
        faults: dict[str, AdapterswapError] = {}
        for name, reference in named.items():
            try:
                opened[name] = open_adapter(reference)
            except AdapterswapError as error:
                faults[name] = error.within(name)
        if not opened:
            raise next(iter(faults.values()))

        folders = {name: adapter.source.folder for name, adapter in opened.items()}
        companions = CompanionPlan.decide_prompts(folders, base.source.folder)
        base = base.with_companions(companions)
        composer, not_live = _load(base.load_weights(dtype=dtype).to(target).eval(), opened)
        references = {name: _short(reference) for name, reference in named.items()}
        problems = lab(base.tokenizer) if lab else None
        return Workspace(
            _short(base_model), base, num_layers, references, opened, faults, not_live, composer,
            problems, allow_paths, companions.prompt_lines,
        )  # fmt: skip

    @staticmethod
    def of_lab(folder: str | Path, seed: int = 0, **options: Any) -> Workspace:
        """Open the models of a run of `adapterswap lab`."""
        models = find_models(folder, seed)
        return Workspace.open(models.base_model, models.experts, lab=models.problems, **options)


def _load(model: Any, experts: Mapping[str, Adapter]) -> tuple[LiveComposer | None, dict[str, AdapterswapError]]:
    """A composer with the experts that fit the model, and the errors of the others."""
    composer: LiveComposer | None = None
    not_live: dict[str, AdapterswapError] = {}
    for name, adapter in experts.items():
        try:
            if composer is None:
                composer = LiveComposer.from_experts(model, {name: adapter})
            else:
                composer.load_expert(adapter, name)
        except AdapterswapError as error:
            not_live[name] = error
    return composer, not_live


def _short(reference: str) -> str:
    """A reference for commands: a folder below the current one as a relative path, other folders as absolute."""
    path = expand(reference)
    if not os.path.isdir(path):
        return reference
    place, here = os.path.abspath(path), os.getcwd()
    if place.startswith(here + os.sep):
        return os.path.relpath(place, here)
    return place
