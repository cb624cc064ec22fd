"""TyDi QA's gold passages: a passage, a question, and the words of the passage that answer it, as published.

Reads the development questions shipped in `data/tydiqa/` (Clark et al. 2020, arXiv 2003.05002; Apache 2.0, see the
LICENSE there), in four languages; makes prompts of them and scores answers. Task names, prompts and the stock score are
those of lm-evaluation-harness's `tydiqa_goldp_*` tasks. Knows nothing of the harness's code or of models.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from adapterswap.evaluation.numbers import normalize_text

__all__ = ["MAX_SHOTS", "LooseAnswer", "read_tydiqa", "score_answer", "tydiqa_prompt", "tydiqa_task_names"]

MAX_SHOTS = 8
"""As many as MGSM's; shots are questions about other passages of the same file."""

_PREFIX = "tydiqa_goldp_"
# The words before the passage, the question and the answer.
_WORDS = {
    "bn": ("প্রসঙ্গ:", "প্রশ্ন:", "উত্তর:"),
    "en": ("Context:", "Question:", "Answer:"),
    "sw": ("Muktadha:", "Swali:", "Jibu:"),
    "te": ("సందర్భం:", "ప్రశ్న:", "సమాధానం:"),
}
_ENGLISH_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_SYMBOLS = frozenset("$+<=>^`|~")  # SQuAD strips all ASCII marks; Unicode calls these symbols


class LooseAnswer(str):
    """An answer to compare loosely: see `score_answer`."""


def tydiqa_task_names() -> list[str]:
    """Every task of this module: `tydiqa_goldp_bn` … `tydiqa_goldp_te`."""
    return [_PREFIX + code for code in _WORDS]


@lru_cache
def read_tydiqa(name: str) -> list[dict[str, Any]]:
    """The questions of the task of that name, in their published order.

    Returns:
        Rows with `id`, `title`, `context`, `question` and `answers`, one or two right texts.
    """
    path = files("adapterswap.evaluation") / "data" / "tydiqa" / f"{name.removeprefix(_PREFIX)}.json.gz"
    return [
        {
            "id": question["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": [answer["text"] for answer in question["answers"]],
        }
        for article in json.loads(gzip.decompress(path.read_bytes()))["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def tydiqa_prompt(name: str, row: dict[str, Any]) -> str:
    """The prompt: the passage, the question, and the word before the answer."""
    passage, question, answer = _WORDS[name.removeprefix(_PREFIX)]
    return f"{passage} {row['context']}\n\n{question} {row['question']}\n\n{answer}"


def score_answer(name: str, answer: str, golds: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 of an answer, from 0 to 1; each is the best over the right answers.

    The scores are SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250): texts are compared in lower case, without
    punctuation of any script and, in English, without articles. F1 is the harmonic mean of precision and recall over
    the bag of words, 2·shared / (words of the answer + words of the gold).

    A `LooseAnswer` is also compared in NFKC, with ASCII digits and without zero-width marks: ১৯৯৯ is 1999.
    """
    loose, code = isinstance(answer, LooseAnswer), name.removeprefix(_PREFIX)
    answer_words = _words(answer, code, loose=loose)
    expected = [_words(gold, code, loose=loose) for gold in golds]
    return {
        "exact_match": float(answer_words in expected),
        "f1": max(_f1(answer_words, words) for words in expected),
    }


def _words(text: str, code: str, *, loose: bool) -> list[str]:
    text = (normalize_text(text) if loose else text).lower()
    text = "".join(char for char in text if char not in _ASCII_SYMBOLS and unicodedata.category(char)[0] != "P")
    return (_ENGLISH_ARTICLES.sub(" ", text) if code == "en" else text).split()


def _f1(answer_words: list[str], gold: list[str]) -> float:
    shared = sum((Counter(answer_words) & Counter(gold)).values())
    return 2 * shared / (len(answer_words) + len(gold)) if shared else 0.0
