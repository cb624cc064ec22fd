"""Find rows that must not be trained on: maths in a language's mixture, and texts of the evaluations.

A row is maths if it writes arithmetic out (`3 + 4`, `12 - 5 = 7`, `x^2 = 9`, `\\frac`, GSM8K's `<<3+4=7>>`), or if its
prompt contains a number and its completion is just a number that is not in the prompt. The rule uses no words, so it
works in every language but misses maths written in words alone. docs/recipes.md has its measured precision and recall.

A row overlaps with an evaluation if they share a gram (see `training.grams`). MGSM is shipped in full, GSM8K's test
questions only as hashes; other texts come from your own files. Knows nothing of how rows are loaded or rendered.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from adapterswap.errors import DataError, NotFoundError, Problems
from adapterswap.files.smallfiles import expand
from adapterswap.training.grams import Grams, hash_grams
from adapterswap.training.recipe import Hygiene

__all__ = ["MATH", "Screen", "looks_like_math"]

MATH = "math"
"""What `Screen.judge` returns for maths."""

Turn = tuple[str, str]
"""A prompt and its completion; plain text is a completion without a prompt."""

# Repetition is bounded and a number starts at its first digit, so the time is linear in the text's length.
_NUMBER = r"[$€£¥₹]?(?<![\d.,])\d[\d.,]{0,20}(?:/\d{1,9})?\s?%?"
_UNIT = r"(?:\s?[^\W\d_]{1,12}\.?){0,2}"  # 3 cups, 12 sq. metres
_ARITHMETIC = re.compile(
    "|".join(
        (
            rf"{_NUMBER}{_UNIT}\s{{0,3}}[+×÷*=✕·]\s{{0,3}}\(?{_NUMBER}",
            # Dates, ranges and scores also contain hyphens, slashes and colons, so these need a result.
            rf"{_NUMBER}{_UNIT}\s{{0,3}}[-−–/:x]\s{{0,3}}{_NUMBER}{_UNIT}\s{{0,3}}=\s{{0,3}}{_NUMBER}",
            r"\b\d{0,9}[a-z]\s{0,3}[+\-*/^=]\s{0,3}\d{1,20}\s{0,3}[=<>]",
            r"[a-z]\s{0,3}=\s{0,3}-?\d",
            r"\d\s{0,3}[a-z]\s{0,3}[+\-=]\s{0,3}\d",
            r"\\(?:frac|sqrt|boxed|times|cdot|sum|int)\b",
            r"<<[^<>]{0,200}=|####",
        )
    )
)
_NUMERAL = re.compile(r"\d+(?:[.,]\d+)*")
_BARE = re.compile(r"\W{0,9}\d[\d.,]{0,20}\W{0,9}")


def looks_like_math(turns: Sequence[Turn]) -> bool:
    """Whether a row is maths, by the rule above."""
    wide = ((unicodedata.normalize("NFKC", text) for text in turn) for turn in turns)  # ＋ and ＝, as Japanese has them
    return any(
        _ARITHMETIC.search(prompt) or _ARITHMETIC.search(completion) or _is_computed(prompt, completion)
        for prompt, completion in wide
    )


def _is_computed(prompt: str, completion: str) -> bool:
    """Whether the prompt has numbers and the completion is just a number, but none of the prompt's."""
    prompt_numbers = _numbers(prompt)
    return bool(prompt_numbers and _BARE.fullmatch(completion) and _numbers(completion) - prompt_numbers)


def _numbers(text: str) -> set[str]:
    """The numbers in `text`, digits of any script as 0-9, without thousands separators."""
    numerals = (numeral.replace(",", "") for numeral in _NUMERAL.findall(text))
    return {"".join(str(int(sign)) if sign.isdecimal() else sign for sign in numeral) for numeral in numerals}


class Screen:
    """Checks rows by a recipe's `hygiene`.

    Args:
        options: the recipe's `hygiene`.
        folder: the folder that text files are relative to.

    Raises:
        NotFoundError: `overlap` names neither a known evaluation nor a file.
        DataError: a file that it names is not text, or too short. All such files are reported together.
    """

    def __init__(self, options: Hygiene, folder: Path) -> None:
        self.refuses = options.on_overlap == "refuse"
        self._exclude_math = options.exclude_math
        self._evaluations: list[tuple[str, Grams]] = []
        problems = Problems(DataError)
        for name in dict.fromkeys(options.overlap):
            with problems.collect():
                # Only the file's name is kept, because reports must not contain local paths.
                grams = _SHIPPED[name]() if name in _SHIPPED else _file(folder / expand(name))
                self._evaluations.append((Path(name).name, grams))
        problems.raise_if_any()

    def judge(self, turns: Sequence[Turn], *, is_task: bool) -> str | None:
        """The reason not to train on a row: the name of an evaluation, or `MATH`; None if there is none.

        Args:
            turns: the row's text.
            is_task: whether the row belongs to the task, where maths is allowed.
        """
        if self._evaluations:
            hashes = np.concatenate([hash_grams(text) for turn in turns for text in turn])
            for name, grams in self._evaluations:
                if grams.meet(hashes):
                    return name
        return MATH if self._exclude_math and not is_task and looks_like_math(turns) else None


def _file(path: Path) -> Grams:
    remedy = "Use mgsm, gsm8k_test, or a text file with one text per line, relative to the recipe's folder"
    try:
        grams = Grams.of(path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        raise NotFoundError(f"hygiene.overlap: {path} does not exist", remedy, parameter="hygiene.overlap") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"hygiene.overlap: {path} cannot be read: {reason}", remedy, parameter="hygiene.overlap"
        ) from None
    if not len(grams):
        raise DataError(f"hygiene.overlap: {path} has no line of 8 words or more", remedy, parameter="hygiene.overlap")
    return grams


@cache
def _mgsm() -> Grams:
    from adapterswap.evaluation.mgsm import LANGUAGES, read_mgsm

    return Grams.of(question for language in LANGUAGES for question, _ in read_mgsm(language).questions)


@cache
def _gsm8k_test() -> Grams:
    return Grams.from_bytes(files("adapterswap.training").joinpath("gsm8k_test.grams").read_bytes())


_SHIPPED = {"mgsm": _mgsm, "gsm8k_test": _gsm8k_test}
