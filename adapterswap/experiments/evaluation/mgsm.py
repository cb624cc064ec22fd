"""MGSM and AfriMGSM: grade-school math questions in many languages, with worked exemplars as published.

Reads the data shipped in `data/mgsm/` (Shi et al. 2022, "Language Models are Multilingual Chain-of-Thought Reasoners",
arXiv 2210.03057; CC BY 4.0, see the LICENSE there) and makes prompts of the questions. Task names, prompt words and
answer patterns are those of lm-evaluation-harness's `mgsm_*` tasks, so that scores are comparable;
docs/evaluate.md lists the exceptions, where the harness's prompts contradict the exemplars.

AfriMGSM (Adelani et al. 2024, IrokoBench, arXiv 2406.03368; Apache 2.0) is `masakhane/afrimgsm` on the Hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from adapterswap.kit.errors import DataError

LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
MODES = ("direct", "native_cot", "en_cot")
"""The number alone; a worked solution in the question's language; a worked solution in English."""
MGSM_REV2_PATH = "MGSM_REV2_PATH"
MGSM_SYMBOLIC_PATH = "MGSM_SYMBOLIC_PATH"


@dataclass(frozen=True)
class MgsmVariant:
    """Other questions in MGSM's form, asked with MGSM's prompts and exemplars: `mgsm_bn.tsv` … `mgsm_zh.tsv`.

    Attributes:
        prefix: what the names of its tasks begin with.
        variable: the environment variable that names the folder.
        title: its name.
        remedy: how to get the files.
        same_number: whether it has as many questions as MGSM.
    """

    prefix: str
    variable: str
    title: str
    remedy: str
    same_number: bool


VARIANTS = (
    # Peter et al. 2025, arXiv 2511.05162; CC BY-SA 4.0.
    MgsmVariant("mgsm_rev2_", MGSM_REV2_PATH, "MGSM-Rev2", "Download the file again", True),
    # Multilingual GSM-Symbolic, arXiv 2610.03367; MIT. For choosing: MGSM has no development set.
    MgsmVariant(
        "mgsm_symbolic_", MGSM_SYMBOLIC_PATH, "MGSM-Symbolic", "Write it again with scripts/mgsm_symbolic.py", False
    ),
)


def variant_of(name: str) -> MgsmVariant | None:
    """The variant that a task's name, or the beginning of a pattern, belongs to."""
    return next((variant for variant in VARIANTS if name.startswith(variant.prefix)), None)


_DIRECT_WORD = {"de": "Antwort:", "es": "Respuesta:", "fr": "Réponse :"}  # elsewhere lm-eval writes "Answer:"
_STRICT = {  # the stock strict-match filter's phrases; Bengali questions have an English one
    "bn": "The answer is {}",
    "de": "Die Antwort lautet {}",
    "en": "The answer is {}",
    "es": "La respuesta es {}",
    "fr": "La réponse est {}",
    "ja": "答えは{}です。",
    "ru": "Ответ — {}",
    "sw": "Jibu ni {}",
    "te": "సమాధానం {}",
    "th": "คำตอบคือ {}",
    "zh": "答案是 {}。",
}


@dataclass(frozen=True)
class Exemplar:
    """A worked example, without the "Question:" and the "Step-by-Step Answer:" before its parts."""

    question: str
    solution: str
    number: int


@dataclass(frozen=True)
class MgsmLanguage:
    """One language's share of MGSM.

    Attributes:
        question_word: the words before every question: `Swali:`.
        solution_word: the words before every worked solution: `Jibu la Hatua kwa Hatua:`.
        space: the space after these words, which Japanese and Chinese do not have.
        questions: 250 pairs of a question and its answer.
        exemplars: the 8 worked examples, in their published order and wording, slips included.
    """

    code: str
    question_word: str
    solution_word: str
    space: str
    questions: tuple[tuple[str, int], ...]
    exemplars: tuple[Exemplar, ...]


@lru_cache
def read_mgsm(code: str) -> MgsmLanguage:
    """The questions and exemplars of the language with this ISO 639-1 code, one of `LANGUAGES`."""
    folder = files("adapterswap.experiments.evaluation") / "data" / "mgsm"
    questions = _questions((folder / f"{code}.tsv").read_text(encoding="utf-8"))

    # The language's exemplars, in their order; all of them begin with the same words.
    lines = (folder / "exemplars.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = [row for row in map(json.loads, lines) if row["language"] == code]
    exemplars = []
    for row in sorted(rows, key=lambda row: int(row["index"])):
        question_word, space, question = _split_word(row["question"])
        solution_word, _, solution = _split_word(row["answer"])
        exemplars.append(Exemplar(question, solution, int(row["number"])))

    return MgsmLanguage(
        code=code,
        question_word=question_word,
        solution_word=solution_word,
        space=space,
        questions=tuple(questions),
        exemplars=tuple(exemplars),
    )


def mgsm_questions() -> Iterator[str]:
    """The questions of all languages."""
    for code in LANGUAGES:
        for question, _ in read_mgsm(code).questions:
            yield question


def _questions(text: str) -> list[tuple[str, int]]:
    """The questions and answers of a file: one pair to a line, with a tab between them."""
    questions = []
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        question, tab, answer = line.rpartition("\t")
        answer = answer.strip().replace(",", "")  # the comma is a thousands separator in every file
        if not tab or "\t" in question or not question.strip() or not re.fullmatch(r"-?[0-9]+", answer):
            raise ValueError(f"line {number} must be a question, a tab and a whole number")
        questions.append((question, int(answer)))
    return questions


def read_variant(variant: MgsmVariant, folder: Path, code: str) -> MgsmLanguage:
    """A language of MGSM with a variant's questions; the exemplars are MGSM's, because variants bring none."""
    path = folder / f"mgsm_{code}.tsv"
    try:
        questions = _questions(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {path.name}", f"Set {variant.variable} to the folder that holds {variant.title}'s files"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", variant.remedy) from None

    language = read_mgsm(code)
    if variant.same_number and len(questions) != len(language.questions):
        raise DataError(
            f"{path} has {len(questions)} questions, but MGSM has {len(language.questions)}", variant.remedy
        )
    return replace(language, questions=tuple(questions))


def _split_word(text: str) -> tuple[str, str, str]:
    """`Swali: Roger ana…` as (`Swali:`, ` `, `Roger ana…`)."""
    match = re.match(r"([^:：]*[:：])(\s*)", text)
    assert match, text
    return match[1], match[2], text[match.end() :]


@dataclass(frozen=True)
class MgsmTask:
    """One MGSM task: a language, and the kind of answer.

    A prompt is the shots, each followed by an empty line, then the question: `Swali: …\\nJibu la Hatua kwa Hatua:`.
    """

    mode: str
    language: MgsmLanguage

    @property
    def answer_word(self) -> str:
        """The words at the end of the prompt."""
        if self.mode == "direct":
            return _DIRECT_WORD.get(self.language.code, "Answer:")
        return self.solutions_from.solution_word

    @property
    def answer_space(self) -> str:
        """The space between `answer_word` and a shot's answer; lm-eval has none before a bare number."""
        return "" if self.mode == "direct" else self.solutions_from.space

    @property
    def solutions_from(self) -> MgsmLanguage:
        """The language of the worked solutions. Exemplars are parallel, so those of one language fit all others."""
        return read_mgsm("en") if self.mode == "en_cot" else self.language

    @property
    def strict_pattern(self) -> str | None:
        """The regular expression of the stock strict-match filter; None for direct tasks, which lack the filter."""
        if self.mode == "direct":
            return None
        return _STRICT[self.solutions_from.code].format(r"(\-?[0-9\.\,]+)")

    def prompt(self, question: str) -> str:
        """The prompt for a question, up to and including `answer_word`."""
        return f"{self.language.question_word}{self.language.space}{question}\n{self.answer_word}"

    def shots(self) -> list[tuple[str, str]]:
        """The eight questions with their answers, in a fixed order; n shots are the first n."""
        shots = []
        for exemplar, solved in zip(self.language.exemplars, self.solutions_from.exemplars, strict=True):
            answer = str(exemplar.number) if self.mode == "direct" else solved.solution
            shots.append((exemplar.question, answer))
        return shots


def mgsm_task_names() -> list[str]:
    """Every task of this module: `mgsm_direct_bn` … `mgsm_en_cot_zh`."""
    return _task_names("mgsm_")


def variant_task_names() -> list[str]:
    """The same over each of `VARIANTS`: `mgsm_rev2_direct_bn` … `mgsm_symbolic_en_cot_zh`."""
    names = []
    for variant in VARIANTS:
        names += _task_names(variant.prefix)
    return names


def _task_names(prefix: str) -> list[str]:
    """The names of the tasks of MGSM or of a variant."""
    names = []
    for mode in MODES:
        names += [f"{prefix}{mode}_{code}" for code in LANGUAGES]
    return names


def mgsm_task(name: str, folder: Path | None = None) -> MgsmTask:
    """The task of that name; `folder` has the questions of a variant."""
    variant = variant_of(name)
    prefix = variant.prefix if variant else "mgsm_"
    mode, _, code = name.removeprefix(prefix).rpartition("_")
    language = read_variant(variant, folder, code) if variant and folder else read_mgsm(code)
    return MgsmTask(mode, language)


AFRIMGSM = "masakhane/afrimgsm"
"""The data set that the harness's tasks name."""

_NAME = re.compile(r"afrimgsm(?:_cot)?_([a-z]{3})_prompt_\d")
# `extract_answer` knows the words of these; in another language it could take a number for an answer that it is not.
_READ = {"eng": "en", "fra": "fr", "swa": "sw"}


def normalized_language(name: str) -> str | None:
    """The ISO 639-1 code of a task whose answers `extract_answer` reads: afrimgsm_cot_swa_prompt_1 → sw; else None.

    Tasks with translated questions (`afrimgsm_translate_*`) are other data.
    """
    match = _NAME.fullmatch(name)
    return _READ.get(match[1]) if match else None
