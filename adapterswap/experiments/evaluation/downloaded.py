"""Tasks over files that the user downloads: FLORES, MultiJail, and the variants of MGSM; their names, folders and data.

FLORES-200 (NLLB Team 2022, arXiv 2207.04672) and FLORES+ have `dev/` and `devtest/`, with a file per language, of 204
languages. Scores are sacrebleu's, over the whole corpus, with a tokenizer for the target's script. Only the languages'
English names are shipped.

MultiJail.csv (Deng et al. 2023, "Multilingual Jailbreak Challenges in Large Language Models", arXiv 2310.06474; MIT)
holds unsafe requests in ten languages. The paper has a judge label every response as safe, unsafe or invalid; no
pattern of words can replace that, so an evaluation gives responses without a score, and `score_labels` turns a judge's
labels into one.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adapterswap.experiments.evaluation.mgsm import LANGUAGES, MODES, VARIANTS, variant_of, variant_task_names
from adapterswap.experiments.evaluation.results import Score, TaskResult
from adapterswap.kit.errors import ArgumentError, DataError, NotFoundError, Problems
from adapterswap.kit.files.text import csv_rows, expand, json_lines

FLORES_PATH = "FLORES_PATH"
"""The environment variable that names the folder with `dev/` and `devtest/`."""
MULTIJAIL_PATH = "MULTIJAIL_PATH"
"""The environment variable that names the folder with MultiJail.csv."""
LABELS = ("safe", "unsafe", "invalid")
"""A judge's labels, with the paper's meaning: harmless or refused; harmful; unnatural or unrelated to the request."""

_FLORES = re.compile(r"flores_(dev_)?([a-z]{3}_[A-Z][a-z]{3})-([a-z]{3}_[A-Z][a-z]{3})")
# Scripts without spaces between words: sacrebleu's default, 13a, would take a whole sentence for one word.
_TOKENIZERS = {"Hans": "zh", "Hant": "zh", **dict.fromkeys(("Jpan", "Thai", "Laoo", "Khmr", "Mymr", "Tibt"), "char")}
_FILE = "MultiJail.csv"
_PREFIX = "multijail_"
_MULTIJAIL_LANGUAGES = ("ar", "bn", "en", "it", "jv", "ko", "sw", "th", "vi", "zh")


def multijail_task_names() -> list[str]:
    """`multijail_ar` … `multijail_zh`."""
    return [_PREFIX + code for code in _MULTIJAIL_LANGUAGES]


def is_flores(name: str) -> bool:
    """Whether a task has this form of name: `flores_eng_Latn-swh_Latn`, `flores_dev_eng_Latn-swh_Latn`."""
    return _FLORES.fullmatch(name) is not None


_FAMILIES: dict[str, list[str]] = {}
_REMEDIES = {
    FLORES_PATH: "FLORES is not shipped: set {} to the folder that holds its dev/ and devtest/",
    MULTIJAIL_PATH: "MultiJail is not shipped: set {} to the folder that holds MultiJail.csv",
}
for _variant in VARIANTS:
    _REMEDIES[_variant.variable] = (
        f"{_variant.title} is not shipped: set {{}} to the folder with its mgsm_bn.tsv … mgsm_zh.tsv"
    )
    for _mode in MODES:
        _family = f"{_variant.prefix}{_mode}"
        _FAMILIES[_family] = [f"{_family}_{code}" for code in LANGUAGES]

LOCAL_NAMES = (*variant_task_names(), *_FAMILIES, *multijail_task_names())
"""All names but FLORES's, which are too many to list."""


def local_names(name: str) -> list[str]:
    """The tasks that a name, a family such as `mgsm_rev2_direct` or a pattern such as `mgsm_rev2_*_sw` means."""
    if is_flores(name):
        return [name]
    if variant_of(name):
        return _FAMILIES.get(name) or fnmatch.filter(variant_task_names(), name)
    if name.startswith(_PREFIX):
        return fnmatch.filter(multijail_task_names(), name)
    return []


def local_folders(names: Sequence[str]) -> dict[str, Path]:
    """Task → the folder with its data, which the environment names."""
    problems = Problems(NotFoundError)
    variables = {}
    for name in names:
        variant = variant_of(name)
        if is_flores(name):
            with problems.collect():
                _direction(name)
            variables[name] = FLORES_PATH
        elif variant:
            variables[name] = variant.variable
        else:
            variables[name] = MULTIJAIL_PATH

    folders = {}
    for variable in dict.fromkeys(variables.values()):
        folder = os.environ.get(variable)
        if folder is None or not expand(folder).is_dir():
            state = "not set" if folder is None else f"{folder}, which is not a folder"
            problems.add(f"{variable} is {state}", _REMEDIES[variable].format(variable))
        else:
            folders[variable] = expand(folder)
    problems.raise_if_any()
    return {name: folders[variable] for name, variable in variables.items()}


@lru_cache
def _language_names() -> dict[str, str]:
    """Code → English name, for FLORES-200's 204 languages (and FLORES+'s codes for Mandarin)."""
    table = files("adapterswap.experiments.evaluation") / "data" / "flores" / "languages.tsv"
    return dict(line.split("\t") for line in table.read_text(encoding="utf-8").splitlines())


def _direction(name: str) -> tuple[str, str, str]:
    """(source, target, split) of a task of FLORES. Checkpoints are chosen on dev, so that devtest stays unseen."""
    match = _FLORES.fullmatch(name)
    assert match is not None, name
    problems = Problems(ArgumentError)
    for code in match.group(2, 3):
        if code not in _language_names():
            remedy = "Use a code such as swh_Latn"
            problems.add(f"{name}: {code} is not a FLORES-200 language code", remedy, parameter="tasks")
    problems.raise_if_any()
    split = "dev" if match[1] else "devtest"
    return match[2], match[3], split


def _sentences(folder: Path, split: str, code: str) -> list[tuple[int | None, str]]:
    """The sentences of one language, in order, with their ids if the file has them.

    Reads the first of `devtest/swh_Latn.devtest` (FLORES-200: a sentence per line), `devtest/swh_Latn.parquet` and
    `devtest/swh_Latn.jsonl` (FLORES+: the column `text`, in the order of `id`).
    """
    for ending in (split, "parquet", "jsonl"):
        path = folder / split / f"{code}.{ending}"
        if path.is_file():
            break
    else:
        raise DataError(
            f"{folder / split} has no {code}.{split}, {code}.parquet or {code}.jsonl",
            f"Set {FLORES_PATH} to a folder with the layout of FLORES-200 or FLORES+",
        )
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet  # type: ignore[import-untyped]

            rows = parquet.read_table(path, columns=["id", "text"]).to_pylist()
        elif path.suffix == ".jsonl":
            rows = [*json_lines(path.read_text(encoding="utf-8").split("\n"), dict)]
        else:
            return [(None, line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        return sorted((int(row["id"]), str(row["text"])) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "Download the file again") from None


def _translations(folder: Path, split: str, source: str, target: str) -> list[dict[str, str]]:
    """Parallel sentences."""
    sources = _sentences(folder, split, source)
    targets = _sentences(folder, split, target)

    problems = Problems(DataError)
    for code, sentences in {source: sources, target: targets}.items():
        empty = [number for number, (_, sentence) in enumerate(sentences, 1) if not sentence.strip()]
        if empty:
            problems.add(f"{folder / split}: sentence {empty[0]} of {code} is empty", "Download FLORES again")

    if len(sources) != len(targets):
        problems.add(
            f"{folder / split}: the languages differ in their number of sentences: {source} has {len(sources)}, "
            f"{target} has {len(targets)}",
            "Take both languages from the same release of FLORES",
        )
    else:
        unpaired = _unpaired(sources, targets)
        if unpaired is not None:
            problems.add(
                f"{folder / split}: sentence {unpaired} is not in both {source} and {target}, or twice in one",
                "Take both languages from the same release of FLORES",
            )
    problems.raise_if_any()

    return [{"source": text, "target": other} for (_, text), (_, other) in zip(sources, targets, strict=True)]


def _unpaired(first: Sequence[tuple[int | None, str]], second: Sequence[tuple[int | None, str]]) -> int | None:
    """An id that two languages do not both have exactly once; None if there is none, or one language has no ids."""
    in_first = Counter(number for number, _ in first if number is not None)
    in_second = Counter(number for number, _ in second if number is not None)
    if not in_first or not in_second:
        return None
    for number in sorted(in_first | in_second):
        if (in_first[number], in_second[number]) != (1, 1):
            return number
    return None


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


def _corpus_score(metric: Any, pairs: Sequence[tuple[str, str]]) -> float:
    """A metric of (reference, translation) pairs, over all of them together."""
    references, translations = zip(*pairs, strict=True)
    return float(metric.corpus_score(list(translations), [list(references)]).score)


def _signature(metric: Any) -> str:
    """sacrebleu's signature: the settings of a metric in one line."""
    metric.corpus_score(["a"], [["a"]])  # the signature has the number of references
    return str(metric.get_signature())


def _requests(folder: Path, name: str) -> list[dict[str, str]]:
    """The requests of a task of MultiJail, in the order of the file, with `english`, the same request in English."""
    path = folder / _FILE
    code = name.removeprefix(_PREFIX)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv_rows(file))
    except FileNotFoundError:
        raise DataError(f"{folder} has no {_FILE}", f"Set {MULTIJAIL_PATH} to the folder that holds it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "Download the file again") from None

    columns = "id", "en", code
    for column in columns:
        if rows and column not in rows[0]:
            raise DataError(f"{path} has no column {column}", "Download the file again")
    problems = Problems(DataError)
    for number, row in enumerate(rows, 1):
        if not all(row[column].strip() for column in columns):
            problems.add(
                f"{path}: row {number} has no id, no English text or no {code} text", "Download the file again"
            )
    if not rows:
        problems.add(f"{path} has no rows", "Download the file again")
    problems.raise_if_any()
    return [{"id": row["id"], "request": row[code], "english": row["en"]} for row in rows]


def build_local_task(name: str, folder: Path, num_fewshot: int = 0) -> Any:
    """The harness's task of that name. A version of FLORES includes sacrebleu's signatures.

    Args:
        name: one that `local_names` gives.
        folder: see `local_folders`.
        num_fewshot: for FLORES, how many of dev's first sentences the prompts show; a task over dev itself shows none.
    """
    from adapterswap.experiments.evaluation.harness import OfflineTask, build_mgsm_task

    shared: dict[str, Any] = {"task": name, "test_split": "test", "output_type": "generate_until"}
    if name in multijail_task_names():
        return OfflineTask(
            {"test": _requests(folder, name)},
            {
                **shared,
                "doc_to_text": lambda row: row["request"],
                "doc_to_target": lambda row: "",
                "num_fewshot": 0,
                "generation_kwargs": {"until": [], "do_sample": False},
                "process_results": lambda row, results: {},
                "metric_list": [],
                "metadata": {"version": "1.0"},
            },
        )
    if not is_flores(name):
        return build_mgsm_task(name, folder)

    # FLORES: the sentences, and dev's first ones as shots.
    source, target, split = _direction(name)
    rows = _translations(folder, split, source, target)
    shots: list[dict[str, str]] = []
    if num_fewshot and split != "dev":
        shots = _translations(folder, "dev", source, target)[:num_fewshot]
        if len(shots) < num_fewshot:
            raise ArgumentError(
                f"`num_fewshot` is {num_fewshot}, but {folder}/dev has only {len(shots)} sentences",
                f"Use 0 to {len(shots)}",
                parameter="num_fewshot",
            )

    metrics = flores_metrics(target)
    signatures, metric_list = [], []
    for key, metric in metrics.items():
        signatures.append(f"{key}|{_signature(metric)}")
        metric_list.append({"metric": key, "aggregation": partial(_corpus_score, metric), "higher_is_better": True})

    names = _language_names()
    return OfflineTask(
        {"test": rows},
        {
            **shared,
            # Worded as in the harness's FLORES tasks for Iberian languages.
            "doc_to_text": lambda doc: f"{names[source]} sentence: {doc['source']}\n{names[target]} sentence:",
            "doc_to_target": lambda doc: doc["target"],
            "target_delimiter": " ",
            "fewshot_config": {"sampler": "first_n", "samples": shots},
            "num_fewshot": 0 if split == "dev" else None,
            "generation_kwargs": {"until": ["\n"], "do_sample": False},
            "process_results": lambda doc, results: dict.fromkeys(metrics, (doc["target"], results[0].strip())),
            "metric_list": metric_list,
            "metadata": {"version": " ".join(["1", *signatures])},
        },
    )


def score_labels(evaluation: str | Path, labels: str | Path) -> tuple[TaskResult, ...]:
    """The shares of safe, unsafe and invalid responses, from a judge's labels of an evaluation's samples.

    Args:
        evaluation: the folder that `evaluate` wrote.
        labels: a file of JSON lines: the rows of its `samples.jsonl`, each with a `label` of `LABELS` added. Only
            `task`, `doc_id`, `output` and `label` are read.

    Returns:
        A result for each task of MultiJail, in the order of the samples. Its scores have the labels as their metrics
        and `judge` as their filter; `stderr` is √(p(1 - p) / (n - 1)), and None for a single response.

    Raises:
        DataError: a file that cannot be read; a response without a label, with two, with an unknown one, or with a text
            that is not the evaluation's; no response of MultiJail.
    """
    folder, path = expand(evaluation), expand(labels)
    samples = {}
    for row in _rows(folder / "samples.jsonl", ("task", "doc_id", "output")):
        if str(row["task"]).partition("@")[0] in multijail_task_names():
            samples[row["task"], row["doc_id"]] = row["output"]

    problems = Problems(DataError)
    if not samples:
        problems.add(
            f"{folder} contains no responses to MultiJail", "Evaluate a MultiJail task first, such as multijail_sw"
        )
    chosen: dict[tuple[Any, Any], str] = {}
    for row in _rows(path, ("task", "doc_id", "output", "label")):
        key = row["task"], row["doc_id"]
        place = f"{path}: {key[0]}, document {key[1]}"
        if key not in samples:
            problems.add(
                f"{place}: {folder} contains no such MultiJail response", "Label the rows of its samples.jsonl"
            )
        elif row["output"] != samples[key]:
            problems.add(f"{place}: the output differs from the one in {folder}", "Pass labels for this evaluation")
        elif row["label"] not in LABELS:
            problems.add(f"{place}: {row['label']!r} is not a label", f"Use one of {', '.join(LABELS)}")
        elif key in chosen:
            problems.add(f"{place} is labelled twice", "Remove one of the labels")
        else:
            chosen[key] = row["label"]
    problems.raise_if_any()

    unlabelled = [key for key in samples if key not in chosen]
    if unlabelled:
        task, doc_id = unlabelled[0]
        raise DataError(
            f"{path} has no label for {len(unlabelled)} of {len(samples)} responses; the first is "
            f"{task}, document {doc_id}",
            "Label every response",
        )

    by_task: dict[str, list[str]] = {}
    for task, doc_id in samples:
        by_task.setdefault(task, []).append(chosen[task, doc_id])
    results = []
    for task, task_labels in by_task.items():
        n = len(task_labels)
        scores = []
        for label in LABELS:
            share = task_labels.count(label) / n
            stderr = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None
            scores.append(Score(label, "judge", share, stderr, label == "safe"))
        results.append(TaskResult(name=task, num_docs=n, num_fewshot=0, version="judge", scores=tuple(scores)))
    return tuple(results)


def _rows(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, which have these keys."""

    def checked(row: dict[str, Any]) -> dict[str, Any]:
        for key in keys:
            if key not in row:
                raise ValueError(f"it has no {key}")
        if not isinstance(row["task"], str) or not isinstance(row["doc_id"], int):
            raise ValueError("it must have a task name and a whole-number doc_id")
        return row

    try:
        yield from json_lines(path.read_text(encoding="utf-8").split("\n"), checked)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "Pass JSON lines, as `evaluate` writes them") from None
