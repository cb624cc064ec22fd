"""Sets of hashed n-grams, which find what two texts share in any language without storing the texts.

Tokens are lower-case words without accents and vowel signs, with the digits of any script as 0-9. In scripts without
spaces (Japanese, Chinese, Thai, …) each character starts a token of up to 12 characters. A gram is 13 tokens in a row:
13 words, as for GPT-3 (arXiv:2005.14165, appendix C), or 24 characters of such a script. A line of 8 to 12 tokens is a
gram as a whole; shorter lines have none. Hashes are 48 bits of a polynomial over the tokens' CRC-32. Knows nothing of
datasets.
"""

from __future__ import annotations

import re
import sys
import unicodedata
import zlib
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grams", "hash_grams", "tokenize_words"]

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
    tokens: list[str] = []
    run = ""  # characters of a script without spaces; punctuation does not end it
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text).translate(_folding())
    for match in _TOKEN.finditer(text.casefold()):
        if match[1]:
            run += match[1]
            continue
        tokens += _spans(run)
        tokens.append(match[0])
        run = ""
    return tokens + _spans(run)


def _spans(run: str) -> list[str]:
    return [run[start : start + _SPAN] for start in range(len(run))]


def hash_grams(text: str) -> NDArray[np.uint64]:
    """The hashes of the grams of `text`, (grams,): of all 13 tokens in a row, and of its lines of 8 to 12."""
    lines = [_codes(tokenize_words(line)) for line in text.splitlines()]
    long_grams = _hash(np.concatenate([_codes([]), *lines]), _SIZE)
    return np.concatenate([long_grams, *(_hash(line, len(line)) for line in lines if _LEAST <= len(line) < _SIZE)])


def _codes(tokens: list[str]) -> NDArray[np.uint64]:
    return np.fromiter((zlib.crc32(token.encode()) + 1 for token in tokens), np.uint64, len(tokens))


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
