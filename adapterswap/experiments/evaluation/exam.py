"""The requests to models on one base, and how they are answered: a preview, an evaluation in memory, or its two halves.

An evaluation cut in two lets an engine answer the requests of many compositions at once. Both halves are the harness's
own evaluation with its own model class, which here holds no weights; see `paper`. The first half stops at the model;
the second looks the answers up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from adapterswap.core import OpenedBase
from adapterswap.experiments.evaluation.evaluator import (
    TaskPreview,
    as_result,
    check_scorable,
    evaluate_model,
    harness,
    preview,
    run_harness,
    tasks_to_evaluate,
)
from adapterswap.experiments.evaluation.requests import Answer, Request
from adapterswap.experiments.evaluation.results import EvaluationResult
from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.processes import Processes

if TYPE_CHECKING:
    from adapterswap.experiments.evaluation.paper import Paper


@dataclass(frozen=True)
class Exam:
    """Tasks and documents, the same for every model on a base.

    Attributes:
        base: its config and tokenizer.
        tasks, settings, documents: see `evaluate_model`.
    """

    base: OpenedBase
    tasks: LoadedTasks
    settings: Settings
    documents: Mapping[str, Collection[int]] | None = None

    @staticmethod
    def load(names: Iterable[str], settings: Settings, base: OpenedBase) -> Exam:
        """The tasks of these names; see `LoadedTasks.load`. The settings get today's date if the prompts show one."""
        dated = settings.dated(base.tokenizer)
        loaded = LoadedTasks.load(list(names), dated)
        check_scorable(loaded, dated)
        return Exam(base, loaded, dated)

    def preview(self) -> list[TaskPreview]:
        """The documents, the requests and the first prompt of each task; see `evaluator.preview`."""
        return preview(self.base.tokenizer, self.base.config, self.tasks, self.settings)

    def evaluate(
        self,
        model: Any,
        *,
        processes: Processes | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> EvaluationResult:
        """The scores of a model in memory; see `evaluate_model`."""
        return evaluate_model(
            model,
            self.base.tokenizer,
            self.tasks,
            self.settings,
            documents=self.documents,
            processes=processes,
            on_progress=on_progress,
        )

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """What the tasks ask a model, equal requests once; raises the errors of `evaluate_model`."""
        from adapterswap.experiments.evaluation.paper import AllAsked

        with self._on_paper() as (model, loaded), suppress(AllAsked):
            run_harness(model, loaded, self.settings, self.documents)
        return tuple(model.requests)

    def scores(self, answers: Mapping[Request, Answer], around: Mapping[str, Any]) -> EvaluationResult:
        """The scores of a model that gave these answers; `around` is what they depend on besides the settings."""
        with self._on_paper(answers) as (model, loaded):
            results = run_harness(model, loaded, self.settings, self.documents)
        return as_result(results, model, loaded.tasks, self.settings, around)

    @contextmanager
    def _on_paper(self, answers: Mapping[Request, Answer] | None = None) -> Iterator[tuple[Paper, LoadedTasks]]:
        """The model without weights, and the tasks to ask it."""
        from adapterswap.experiments.evaluation.paper import Paper

        loaded = tasks_to_evaluate(self.base.tokenizer, self.tasks, self.settings)
        with harness(loaded.tasks, self.settings):
            yield Paper(self.base, loaded, self.settings, answers), loaded
