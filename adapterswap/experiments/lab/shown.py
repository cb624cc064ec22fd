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

_MOST = 2**24  # bytes of a record


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
        draw: the first so many problems.
        asked: problems in a language, in tokens.
        shown: how many can be chosen on the page, and are scored when layers move.
        step: how many are scored at once; others may use the model in between.
        zones: bottom and top layers of the swap that the lab makes; None for the paper's.
    """

    languages: tuple[str, ...]
    draw: Callable[[int], Sequence[Problem]]
    asked: Callable[[Sequence[Any], str], Questions]
    shown: int
    step: int
    zones: tuple[int, int] | None = None

    @cached_property
    def questions(self) -> dict[str, list[Questions]]:
        """By language, in batches."""
        starts = range(0, len(self.problems), self.step)
        return {
            language: [self.asked(self.problems[start : start + self.step], language) for start in starts]
            for language in self.languages
        }

    @cached_property
    def problems(self) -> Sequence[Problem]:
        return self.draw(self.shown)

    @cached_property
    def known(self) -> dict[str, tuple[str, int]]:
        """Prompt → its language and its place among the problems."""
        places = enumerate(self.problems)
        return {each.prompt(language): (language, place) for place, each in places for language in self.languages}


def _constructed_problems(scene: Scene) -> LabProblems:
    """Those of a scene on pico models."""
    return LabProblems(
        tuple(reversed(LANGUAGES)), partial(draw_problems, scene, "development"), Questions, shown=100, step=25
    )


def _french_problems(tokenizer: Any) -> LabProblems:
    """Those of the scene on the pretrained model; an answer takes the model some seconds, so few are scored."""

    def draw(number: int) -> Sequence[Problem]:
        problems = word_problems.draw_problems("development")
        each = word_problems.EACH["development"]
        return [problem for first in range(each) for problem in problems[first::each]][:number]  # every template first

    def asked(problems: Sequence[Problem], language: str) -> Questions:
        prompts = [tokenizer(problem.prompt(language))["input_ids"] for problem in problems]
        whole = [tokenizer(f"{problem.prompt(language)} {problem.answer}")["input_ids"] for problem in problems]
        answers = [[*ids[len(prompt) :], tokenizer.eos_token_id] for prompt, ids in zip(prompts, whole, strict=True)]
        return Questions.of_tokens(prompts, answers)

    return LabProblems(("fr", "en"), draw, asked, shown=24, step=12, zones=(BOTTOM, TOP))


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
    place = expand(folder)
    record = place / "results.json"
    if not os.path.exists(record):
        whole = place.absolute().parent
        above = os.path.exists(whole / "results.json")
        remedy = "Run `adapterswap lab` with this `--out-path` to its end. It resumes a stopped French scene"
        if above:
            remedy = f"Pass the folder above it: `lab={whole}`"
        raise NotFoundError(
            f"{place} contains no results.json, which `adapterswap lab` writes at its end", remedy, parameter="lab"
        )
    try:
        content = json.loads(read_inside(place, record.name, limit=_MOST, kind=DataError) or b"")
        if content["format"] == FRENCH_FORMAT:
            named = {name: str(place / str(content["experts"][name])) for name in EXPERTS}
            if missing := [path for path in named.values() if not os.path.isdir(path)]:  # nothing is downloaded
                raise NotFoundError(
                    f"{record} says that an expert is in {missing[0]}, which is not a local folder",
                    f"Run `adapterswap lab --out-path {place}` again",
                    parameter="lab",
                )
            return LabModels(str(place / "base"), named, _french_problems)
        scene = SCENES[content["scene"]["name"]] if content["format"] == LAB_FORMAT else None
    except (ValueError, KeyError, TypeError):
        scene = None
    if scene is None:
        raise DataError(
            f"{record} was not written by `adapterswap lab`", "Pass a folder that it wrote", parameter="lab"
        )
    models = place / f"seed-{seed}"
    if not os.path.isdir(models):
        there = sorted(path.name.removeprefix("seed-") for path in place.glob("seed-*"))
        raise NotFoundError(
            f"{place} has no seed {seed}", f"Choose among {', '.join(there) or 'none'}", parameter="lab_seed"
        )
    named = {name: str(models / name) for name in ("math", "language")}
    return LabModels(str(models / "base"), named, lambda tokenizer: _constructed_problems(scene))
