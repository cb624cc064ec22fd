"""Which language an answer is written in: the share of it that is in the language of its task.

A model may reason in English about a question in Swahili and still get the number right. Languages are recognised by
lingua, whose models are part of its package, so nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError

if TYPE_CHECKING:
    from lingua import Language, LanguageDetector


METRIC = ("language_share", "language")
"""Metric and filter of the share among a task's scores."""

_NAME = re.compile(r"[_-]([a-z]{3}_[A-Z][a-z]{3}|[a-z]{2})(?=@|$)")
_AFRIMGSM = re.compile(r"afrimgsm(?:_cot)?_([a-z]{3})_prompt_\d(?=@|$)")
# Codes of FLORES and Belebele for one member of a language that ISO 639-1 has a code for.
_MEMBERS = {
    "swh": "swa", "arb": "ara", "ary": "ara", "arz": "ara", "pes": "fas", "zsm": "msa", "lvs": "lav", "ekk": "est",
    "azj": "aze", "khk": "mon", "als": "sqi", "cmn": "zho",
}  # fmt: skip
_OTHERS = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")  # MGSM's
_PIECE = re.compile(r"(?:[^.!?。！？।\n]|(?<=\d)\.(?=\d))+")  # a point between digits ends no sentence
# Thai sentences have no full stop, so a switch to another script is the end: four words without Thai letters.
_AFTER_THAI = re.compile(r"(?<=[\u0e00-\u0e7f])\s+(?=(?:[^\s\u0e00-\u0e7f]+\s+){4})")
_FEWEST = 3  # letters of a piece; shorter ones, such as units and variables, belong to no language


def language_of(task: str) -> str | None:
    """The language at the end of a task's name: mgsm_direct_sw → sw, belebele_swh_Latn → swh_Latn; else None.

    FLORES's names end in the target language: flores_eng_Latn-swh_Latn → swh_Latn. AfriMGSM's have the language before
    the prompt: afrimgsm_cot_swa_prompt_1 → swa. A number of shots may follow: @2.
    """
    match = _AFRIMGSM.match(task) or _NAME.search(task)
    if match is None:
        return None
    return match[1]


def is_same_language(one: str, other: str) -> bool:
    """Whether two codes name the same language, as sw and swh_Latn do."""
    if one == other:
        return True
    codes = [_known(code) for code in (one, other)]
    return codes[0] is not None and codes[0] == codes[1]


def check_languages(tasks: Mapping[str, Any]) -> None:
    """Check that lingua is installed, and that the answers of some task are in a language that it knows."""
    require("languages")
    if not any(writes_language(name, task) for name, task in tasks.items()):
        raise ArgumentError(
            f"None of these tasks has answers in a language that lingua can detect: {', '.join(tasks)}",
            "Add a task such as mgsm_native_cot_sw, or leave out `language_fidelity`",
            parameter="language_fidelity",
        )


def writes_language(name: str, task: Any) -> bool:
    """Whether a task generates its answers, and its name ends in a language that lingua knows."""
    language = language_of(name)
    return task.OUTPUT_TYPE == "generate_until" and language is not None and _known(language) is not None


def language_share(text: str, language: str) -> float | None:
    """The share of a text's letters in sentences of one language; None for a text without words.

    Each sentence or line is recognised as one of MGSM's eleven languages or this one. Numbers and formulas do not
    count, and an answer that changes its language halfway has a share of one half.

    Args:
        text: an answer.
        language: a code of ISO 639 (`sw`, `swa`) or FLORES (`swh_Latn`).
    """
    require("languages")
    wanted = _known(language)
    if wanted is None:
        raise ArgumentError(
            f"Lingua cannot detect the language {language!r}", "Use an ISO 639 code such as sw", parameter="language"
        )

    pieces: list[str] = []
    for sentence in _PIECE.findall(text):
        pieces += _AFTER_THAI.split(sentence)

    detector = _detector(wanted)
    right = total = 0
    for piece in pieces:
        letters = sum(character.isalpha() for character in piece)
        if letters < _FEWEST:
            continue
        total += letters
        detected = detector.detect_language_of(piece)
        if detected is not None and detected == wanted:
            right += letters
    return right / total if total else None


@cache
def _known(code: str) -> Language | None:
    """Lingua's language of a code, with or without a script."""
    if find_spec("lingua") is None:
        return None
    from lingua import Language

    plain = code.replace("-", "_").split("_")[0]
    plain = _MEMBERS.get(plain, plain)
    for language in Language.all():
        if plain in (language.iso_code_639_1.name.lower(), language.iso_code_639_3.name.lower()):
            return language
    return None


@cache
def _detector(language: Language) -> LanguageDetector:
    """A detector for this language and those of MGSM."""
    from lingua import LanguageDetectorBuilder

    candidates = {language}
    for code in _OTHERS:
        known = _known(code)
        if known is not None:
            candidates.add(known)
    return LanguageDetectorBuilder.from_languages(*sorted(candidates, key=lambda candidate: candidate.name)).build()
