r"""Find rows that must not be trained on: math in a language's mixture, and texts of the evaluations.

A row is math if it writes arithmetic out (`3 + 4`, `12 - 5 = 7`, `x^2 = 9`, `\frac`, GSM8K's `<<3+4=7>>`), or if its
prompt contains a number and its completion is just a number that is not in the prompt. The rule uses no words, so it
works in every language but misses math written in words alone. docs/recipes.md has its measured precision and recall.

A row overlaps with an evaluation if they share a gram. MGSM is shipped in full, GSM8K's test questions only as hashes;
other texts come from your own files. Tokens are lower-case words without accents and vowel signs, with the digits of
any script as 0-9. In scripts without spaces (Japanese, Chinese, Thai, …) each character starts a token of up to 12
characters. A gram is 13 tokens in a row: 13 words, as for GPT-3 (arXiv:2005.14165, appendix C), or 24 characters of
such a script. A line of 8 to 12 tokens is a gram as a whole; shorter lines have none. Hashes are 48 bits of a
polynomial over the tokens' CRC-32.
"""

from __future__ import annotations

import re
import sys
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapterswap.experiments.training.recipe import Hygiene
from adapterswap.experiments.training.texts import SEPARATORS
from adapterswap.kit.errors import DataError, NotFoundError, Problems, reason_of
from adapterswap.kit.files.text import csv_rows, expand, json_lines, loads

_SIZE = 13  # tokens of a gram
_LEAST = 8  # tokens of a line that is one gram
_SPAN = 12  # characters of a token in scripts without spaces
_BYTES = 6  # of a hash, little-endian

_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"([{_SPACELESS}]+)|[^\W_{_SPACELESS}]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)  # odd, from the golden ratio


@cache
def _folding() -> dict[int, str | None]:
    """A translation that removes marks and invisible characters, and maps the digits of all scripts to 0-9."""
    folding: dict[int, str | None] = {}
    for point in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(point))
        if category in ("Mn", "Mc", "Me", "Cf"):
            folding[point] = None
        elif category == "Nd":
            folding[point] = str(unicodedata.digit(chr(point)))
    return folding


def tokenize_words(text: str) -> list[str]:
    """The tokens of `text`; see the module."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text).translate(_folding())

    tokens: list[str] = []
    run = ""  # characters of a script without spaces; punctuation does not end it
    for match in _TOKEN.finditer(text.casefold()):
        if match[1]:
            run += match[1]
            continue
        tokens += _spans(run)
        tokens.append(match[0])
        run = ""
    return tokens + _spans(run)


def _spans(run: str) -> list[str]:
    """The tokens of characters without spaces: one begins at each of them."""
    return [run[start : start + _SPAN] for start in range(len(run))]


def hash_grams(text: str) -> NDArray[np.uint64]:
    """The hashes of the grams of `text`, (grams,): of all 13 tokens in a row, and of its lines of 8 to 12."""
    codes: list[int] = []
    short_lines = []
    for line in text.splitlines():
        own = [zlib.crc32(token.encode()) + 1 for token in tokenize_words(line)]
        codes += own
        if _LEAST <= len(own) < _SIZE:
            short_lines.append(_hash(np.array(own, np.uint64), len(own)))
    return np.concatenate([_hash(np.array(codes, np.uint64), _SIZE), *short_lines])


def _hash(codes: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """The upper 48 bits of Σ code_j · prime^(size−1−j) mod 2⁶⁴, for every `size` codes in a row."""
    count = max(0, len(codes) - size + 1)
    total = np.zeros(count, np.uint64)
    for step in range(size):
        total = total * _PRIME + codes[step : step + count]
    return total >> np.uint64(64 - 8 * _BYTES)


class Grams:
    """A set of grams.

    Args:
        hashes: the result of `hash_grams`, in any order, (grams,).
    """

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._hashes = np.unique(hashes)

    def __len__(self) -> int:
        return len(self._hashes)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Grams:
        """The grams of all `texts`."""
        return cls(np.concatenate([np.zeros(0, np.uint64), *map(hash_grams, texts)]))

    @classmethod
    def from_bytes(cls, content: bytes) -> Grams:
        """The set from the result of `to_bytes`."""
        packed = np.frombuffer(content, np.uint8).reshape(-1, _BYTES)
        wide = np.zeros((len(packed), 8), np.uint8)
        wide[:, :_BYTES] = packed
        return cls(wide.view("<u8")[:, 0].astype(np.uint64))

    def to_bytes(self) -> bytes:
        """Six bytes for each gram, in ascending order."""
        return self._hashes.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :_BYTES].tobytes()

    def meet(self, hashes: NDArray[np.uint64]) -> bool:
        """Whether one of `hashes` is in the set."""
        if not len(self):
            return False
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        return bool((self._hashes[places] == hashes).any())


MATH = "math"
"""What `Screen.judge` returns for math."""

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
    """Whether a row is math, by the rule above."""
    for turn in turns:
        # Japanese has ＋ and ＝ of its own.
        prompt, completion = (unicodedata.normalize("NFKC", text) for text in turn)
        if _ARITHMETIC.search(prompt) or _ARITHMETIC.search(completion):
            return True

        # A bare number that the prompt does not have, where it has others.
        given_numbers = _numbers(prompt)
        if given_numbers and _BARE.fullmatch(completion) and _numbers(completion) - given_numbers:
            return True
    return False


def _numbers(text: str) -> set[str]:
    """The numbers in `text`, digits of any script as 0-9, without thousands separators."""
    numbers = set()
    for numeral in _NUMERAL.findall(text):
        number = ""
        for sign in numeral.replace(",", ""):
            if sign.isdecimal():
                sign = str(int(sign))
            number += sign
        numbers.add(number)
    return numbers


class Screen:
    """Checks rows by a recipe's `hygiene`.

    Args:
        options: the recipe's `hygiene`.
        folder: the folder that text files are relative to.
    """

    def __init__(self, options: Hygiene, folder: Path) -> None:
        self.refuses = options.on_overlap == "refuse"
        self._exclude_math = options.exclude_math
        self._evaluations: list[tuple[str, Grams]] = []
        problems = Problems(DataError)
        for name in dict.fromkeys(options.overlap):
            with problems.collect():
                # Only the file's name is kept, because reports must not contain local paths.
                read_shipped = _SHIPPED.get(name)
                grams = read_shipped() if read_shipped else _file(folder / expand(name))
                self._evaluations.append((Path(name).name, grams))
        problems.raise_if_any()

    def judge(self, turns: Sequence[Turn], *, is_task: bool) -> str | None:
        """The reason not to train on a row: the name of an evaluation, or `MATH`; None if there is none."""
        if self._evaluations:
            hashes = []
            for prompt, completion in turns:
                hashes += [hash_grams(prompt), hash_grams(completion)]
            of_row = np.concatenate(hashes)
            for name, grams in self._evaluations:
                if grams.meet(of_row):
                    return name

        if self._exclude_math and not is_task and looks_like_math(turns):
            return MATH
        return None


def _strings(content: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from _strings(item)


def _texts(path: Path) -> Iterator[str]:
    """The lines of a file, or every text in JSON and in tables, whose escapes hide letters and ends of lines."""
    content = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        yield from _strings(loads(content))
    elif path.suffix == ".jsonl":
        for texts in json_lines(content.split("\n"), _strings, any_value=True):
            yield from texts
    elif path.suffix in SEPARATORS:
        for number, row in enumerate(csv_rows(StringIO(content), SEPARATORS[path.suffix])):
            if number == 0:
                yield from row  # its names of columns: a table may have no header
            yield from row.values()
    else:
        yield from content.splitlines()


def _file(path: Path) -> Grams:
    """The grams of a user's file."""
    remedy = "Use mgsm, gsm8k_test, or a text file with one text per line, relative to the recipe's folder"
    try:
        grams = Grams.of(_texts(path))
    except FileNotFoundError:
        raise NotFoundError(f"hygiene.overlap: {path} does not exist", remedy, parameter="hygiene.overlap") from None
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        if isinstance(error, OSError):
            reason = f"{error.strerror}"

        raise DataError(
            f"hygiene.overlap: {path} cannot be read: {reason}", remedy, parameter="hygiene.overlap"
        ) from None
    if not len(grams):
        raise DataError(f"hygiene.overlap: {path} has no line of 8 words or more", remedy, parameter="hygiene.overlap")
    return grams


@cache
def _mgsm() -> Grams:
    from adapterswap.experiments.evaluation.mgsm import mgsm_questions

    return Grams.of(mgsm_questions())


@cache
def _gsm8k_test() -> Grams:
    return Grams.from_bytes(files("adapterswap.experiments.training").joinpath("gsm8k_test.grams").read_bytes())


_SHIPPED = {"mgsm": _mgsm, "gsm8k_test": _gsm8k_test}
