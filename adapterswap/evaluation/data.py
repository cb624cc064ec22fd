"""Data sets that tasks read from files: TyDi QA's gold passages, XCOPA in Swahili, and FLORES.

Reads the development questions shipped in `data/tydiqa/` (Clark et al. 2020, arXiv 2003.05002; Apache 2.0, see the
LICENSE there), in four languages; makes prompts of them and scores answers. Task names, prompts and the stock score are
those of lm-evaluation-harness's `tydiqa_goldp_*` tasks. Knows nothing of the harness's code or of models.

Reads the questions shipped in `data/xcopa/` (Ponti et al. 2020, "XCOPA: A Multilingual Dataset for Causal Commonsense
Reasoning"; CC BY 4.0, see the LICENSE there) and makes a sentence with two possible ends of each. Task name and wording
are those of lm-evaluation-harness's `xcopa_sw`. Knows nothing of the harness's code or of models.

Reads the folders of FLORES-200 (NLLB Team 2022, arXiv 2207.04672) and FLORES+: `dev/` and `devtest/`, with a file per
language. Scores are sacrebleu's, over the whole corpus, with a tokenizer for the target's script. Only the languages'
English names are shipped. Knows nothing of lm-evaluation-harness or of models.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adapterswap.errors import ArgumentError, DataError, Problems
from adapterswap.evaluation.answers import normalize_text

TYDIQA_SHOTS = 8
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


XCOPA_SHOTS = 100
"""The number of questions in val."""

_SPLITS = {"xcopa_sw": "test", "xcopa_val_sw": "val"}
_BECAUSE, _SO = "kwa sababu", "kwa hiyo"


def xcopa_task_names() -> list[str]:
    """`xcopa_sw`, the 500 questions of test, and `xcopa_val_sw`, the 100 of val, on which to choose compositions."""
    return list(_SPLITS)


@lru_cache
def read_xcopa(name: str) -> list[dict[str, Any]]:
    """The questions of the task of that name, in their published order.

    Returns:
        Rows with `premise`, `choice1`, `choice2`, `question` (cause or effect) and `label`: 0 for the first choice.
    """
    path = files("adapterswap.evaluation") / "data" / "xcopa" / f"sw.{_SPLITS[name]}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def xcopa_prompt(row: dict[str, Any]) -> str:
    """The premise without its full stop, and a conjunction: because, or so."""
    return f"{row['premise'].strip()[:-1]} {_BECAUSE if row['question'] == 'cause' else _SO}"


def xcopa_choices(row: dict[str, Any]) -> list[str]:
    """The two ends that the sentence may have."""
    return [choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]


FLORES_PATH = "FLORES_PATH"
"""The environment variable that names the folder with `dev/` and `devtest/`."""

_NAME = re.compile(r"flores_(dev_)?([a-z]{3}_[A-Z][a-z]{3})-([a-z]{3}_[A-Z][a-z]{3})")
# Scripts without spaces between words: sacrebleu's default, 13a, would take a whole sentence for one word.
_TOKENIZERS = {"Hans": "zh", "Hant": "zh", **dict.fromkeys(("Jpan", "Thai", "Laoo", "Khmr", "Mymr", "Tibt"), "char")}


@dataclass(frozen=True)
class FloresTask:
    """One direction of translation.

    Attributes:
        source, target: FLORES codes, such as eng_Latn.
        split: devtest, or dev, on which to choose checkpoints so that devtest stays unseen.
    """

    source: str
    target: str
    split: str

    @property
    def name(self) -> str:
        return f"flores_{'dev_' if self.split == 'dev' else ''}{self.source}-{self.target}"

    def prompt(self, sentence: str) -> str:
        """The prompt, worded as in lm-evaluation-harness's FLORES tasks for Iberian languages."""
        names = language_names()
        return f"{names[self.source]} sentence: {sentence}\n{names[self.target]} sentence:"


@lru_cache
def language_names() -> dict[str, str]:
    """Code → English name, for FLORES-200's 204 languages (and FLORES+'s codes for Mandarin)."""
    text = (files("adapterswap.evaluation") / "data" / "flores" / "languages.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t") for line in text.splitlines())


def is_flores(name: str) -> bool:
    """Whether a task has this form of name: `flores_eng_Latn-swh_Latn`, `flores_dev_eng_Latn-swh_Latn`."""
    return _NAME.fullmatch(name) is not None


def flores_task(name: str) -> FloresTask:
    """The task of that name, which `is_flores`."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    problems = Problems(ArgumentError)
    for code in match.group(2, 3):
        if code not in language_names():
            problems.add(
                f"{name}: {code} is not a FLORES-200 language code",
                "Use a code such as swh_Latn",
                parameter="tasks",
            )
    problems.raise_if_any()
    return FloresTask(match[2], match[3], "dev" if match[1] else "devtest")


def read_sentences(folder: Path, split: str, code: str) -> list[str]:
    """The sentences of one language, in order.

    Reads the first of `devtest/swh_Latn.devtest` (FLORES-200: a sentence per line), `devtest/swh_Latn.parquet` and
    `devtest/swh_Latn.jsonl` (FLORES+: the column `text`, in the order of `id`).
    """
    stem = folder / split / code
    candidates = [stem.with_name(f"{code}.{ending}") for ending in (split, "parquet", "jsonl")]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise DataError(
            f"{folder / split} has no {code}.{split}, {code}.parquet or {code}.jsonl",
            f"Set {FLORES_PATH} to a folder with the layout of FLORES-200 or FLORES+",
        )
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "Download the file again") from None


def _read(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        rows = parquet.read_table(path, columns=["id", "text"]).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    else:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    return [str(row["text"]) for row in sorted(rows, key=lambda row: int(row["id"]))]


def flores_metrics(target: str) -> dict[str, Any]:
    """The metrics of translations into `target`, by name: sacrebleu's chrF++ first, then its BLEU.

    BLEU depends on how words are separated, so its name includes the tokenizer: `bleu_13a`; `bleu_zh` for Chinese;
    `bleu_ja-mecab` for Japanese if MeCab is installed; `bleu_char` for Japanese otherwise, and for Thai, Lao, Khmer,
    Burmese and Tibetan. chrF++ (Popović 2017: character 6-grams and word bigrams) needs none. Both range from 0 to 100.
    """
    from sacrebleu.metrics import BLEU, CHRF

    tokenizer = _TOKENIZERS.get(target.partition("_")[2], "13a")
    if target == "jpn_Jpan" and find_spec("MeCab") and find_spec("ipadic"):
        tokenizer = "ja-mecab"
    # `force` silences sacrebleu's warning about references that look tokenised.
    return {"chrf++": CHRF(word_order=2), f"bleu_{tokenizer}": BLEU(tokenize=tokenizer, force=True)}


def corpus_score(metric: Any, pairs: Sequence[tuple[str, str]]) -> float:
    """A metric of (reference, translation) pairs, over all of them together."""
    references, translations = zip(*pairs, strict=True)
    return float(metric.corpus_score(list(translations), [list(references)]).score)


def signature(metric: Any) -> str:
    """sacrebleu's signature: the settings of a metric in one line."""
    metric.corpus_score(["a"], [["a"]])  # the signature has the number of references
    return str(metric.get_signature())
