"""What the lab gives to the studio: the models of a finished run, and word problems to try them on.

The problems are those of development, on which the lab makes its choices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from adapterswap.experiments.lab import word_problems
from adapterswap.experiments.lab.french import BOTTOM, EXPERTS, FRENCH_FORMAT, TOP
from adapterswap.experiments.lab.scenes import SCENES, Scene, draw_problems
from adapterswap.experiments.lab.seed import Questions
from adapterswap.experiments.lab.study import LAB_FORMAT
from adapterswap.experiments.lab.world import LANGUAGES
from adapterswap.kit.errors import DataError, NotFoundError
from adapterswap.kit.files.inside import read_inside
from adapterswap.kit.files.text import expand

_LARGEST_RECORD = 2**24  # bytes


class Problem(Protocol):
    """A problem that exists in several languages."""

    @property
    def answer(self) -> str: ...

    def prompt(self, language: str) -> str: ...


@dataclass(frozen=True)
class LabProblems:
    """Word problems with their right answers.

    Attributes:
        languages: the first is the one that the experts are made for.
        draw_problems: the first so many problems.
        make_questions: problems in a language, in tokens.
        on_page: how many can be chosen on the page, and are scored when layers move.
        batch_size: how many are scored at once; others may use the model in between.
        zones: bottom and top layers of the swap that the lab makes; None for the paper's.
    """

    languages: tuple[str, ...]
    draw_problems: Callable[[int], Sequence[Problem]]
    make_questions: Callable[[Sequence[Any], str], Questions]
    on_page: int
    batch_size: int
    zones: tuple[int, int] | None = None

    @cached_property
    def problems(self) -> Sequence[Problem]:
        """Those on the page."""
        return self.draw_problems(self.on_page)

    @cached_property
    def questions(self) -> dict[str, list[Questions]]:
        """The problems in each language, in batches."""
        questions: dict[str, list[Questions]] = {language: [] for language in self.languages}
        for start in range(0, len(self.problems), self.batch_size):
            batch = self.problems[start : start + self.batch_size]
            for language in self.languages:
                questions[language].append(self.make_questions(batch, language))
        return questions

    @cached_property
    def place_of(self) -> dict[str, tuple[str, int]]:
        """Prompt → its language and its place among the problems, counted from 0."""
        places = {}
        for place, problem in enumerate(self.problems):
            for language in self.languages:
                places[problem.prompt(language)] = (language, place)
        return places


def _constructed_problems(scene: Scene) -> LabProblems:
    """Those of a scene on pico models."""
    languages = tuple(reversed(LANGUAGES))
    return LabProblems(languages, partial(draw_problems, scene, "development"), Questions, on_page=100, batch_size=25)


def _french_problems(tokenizer: Any) -> LabProblems:
    """Those of the scene on the pretrained model; an answer takes the model some seconds, so few are scored."""

    def draw_in_turn(number: int) -> Sequence[Problem]:
        """The first problem of every template, then the second of every template, and so on."""
        problems = word_problems.draw_problems("development")
        each = word_problems.EACH["development"]
        in_turn: list[Problem] = []
        for first in range(each):
            in_turn += problems[first::each]
        return in_turn[:number]

    def tokenized(problems: Sequence[Problem], language: str) -> Questions:
        prompts, answers = [], []
        for problem in problems:
            prompt = problem.prompt(language)
            ids = tokenizer(prompt)["input_ids"]
            with_answer = tokenizer(f"{prompt} {problem.answer}")["input_ids"]
            prompts.append(ids)
            answers.append([*with_answer[len(ids) :], tokenizer.eos_token_id])
        return Questions.of_tokens(prompts, answers)

    return LabProblems(("fr", "en"), draw_in_turn, tokenized, on_page=24, batch_size=12, zones=(BOTTOM, TOP))


@dataclass(frozen=True)
class LabModels:
    """The models of a run of the lab.

    Attributes:
        base_model: the folder of the base.
        experts: their folders, by name.
        problems: makes the problems with the base's tokenizer.
    """

    base_model: str
    experts: dict[str, str]
    problems: Callable[[Any], LabProblems]


def find_models(folder: str | Path, seed: int = 0) -> LabModels:
    """The models that `adapterswap lab` wrote to a folder, or composed there.

    Args:
        seed: of a scene on pico models.

    Raises:
        NotFoundError: there is no run, or no such seed.
        DataError: the folder's results.json is not the lab's.
    """
    run = expand(folder)
    record = run / "results.json"
    if not os.path.exists(record):
        remedy = "Run `adapterswap lab` with this `--out-path` to its end. It resumes a stopped French scene"
        parent = run.absolute().parent
        if os.path.exists(parent / "results.json"):  # it is the folder of a seed
            remedy = f"Pass the folder above it: `lab={parent}`"
        raise NotFoundError(
            f"{run} contains no results.json, which `adapterswap lab` writes at its end", remedy, parameter="lab"
        )

    try:
        content = json.loads(read_inside(run, record.name, limit=_LARGEST_RECORD, kind=DataError) or b"")
        record_format = content["format"]
        if record_format == FRENCH_FORMAT:
            experts = {name: str(run / str(content["experts"][name])) for name in EXPERTS}
        elif record_format == LAB_FORMAT:
            scene = SCENES[content["scene"]["name"]]
        else:
            raise ValueError(record_format)
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{record} was not written by `adapterswap lab`", "Pass a folder that it wrote", parameter="lab"
        ) from None

    if record_format == FRENCH_FORMAT:
        missing = [path for path in experts.values() if not os.path.isdir(path)]
        if missing:  # nothing is downloaded
            raise NotFoundError(
                f"{record} says that an expert is in {missing[0]}, which is not a local folder",
                f"Run `adapterswap lab --out-path {run}` again",
                parameter="lab",
            )
        return LabModels(str(run / "base"), experts, _french_problems)

    models = run / f"seed-{seed}"
    if not os.path.isdir(models):
        seeds = sorted(path.name.removeprefix("seed-") for path in run.glob("seed-*"))
        raise NotFoundError(
            f"{run} has no seed {seed}", f"Choose among {', '.join(seeds) or 'none'}", parameter="lab_seed"
        )
    experts = {name: str(models / name) for name in ("math", "language")}
    return LabModels(str(models / "base"), experts, lambda tokenizer: _constructed_problems(scene))
