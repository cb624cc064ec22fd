"""FLORES: sentences in 204 languages to translate, from files that the user downloads.

Reads the folders of FLORES-200 (NLLB Team 2022, arXiv 2207.04672) and FLORES+: `dev/` and `devtest/`, with a file per
language. Scores are sacrebleu's, over the whole corpus, with a tokenizer for the target's script. Only the languages'
English names are shipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adapterswap.errors import ArgumentError, DataError, Problems

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
