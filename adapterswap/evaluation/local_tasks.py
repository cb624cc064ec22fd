"""Tasks of lm-evaluation-harness over files that the user downloads: FLORES, MGSM-Rev2, MultiJail.

Importing this module imports the harness.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lm_eval.api.task import ConfigurableTask

from adapterswap.errors import ArgumentError, DataError, Problems
from adapterswap.evaluation.flores import (
    corpus_score,
    flores_metrics,
    flores_task,
    is_flores,
    read_sentences,
    signature,
)
from adapterswap.evaluation.harness import OfflineTask, build_mgsm_task
from adapterswap.evaluation.multijail import multijail_task_names, read_multijail


def build_flores_task(name: str, folder: Path, num_fewshot: int = 0) -> ConfigurableTask:
    """The FLORES task of that name, over the files in `folder`; its version includes sacrebleu's signatures.

    Args:
        name: see `is_flores`.
        folder: holds `dev/` and `devtest/`.
        num_fewshot: how many of dev's first sentences the prompts show; a task over dev itself shows none.
    """
    spec = flores_task(name)
    rows = _rows(folder, spec.split, spec.source, spec.target)
    shots: list[dict[str, str]] = []
    if num_fewshot and spec.split != "dev":
        shots = _rows(folder, "dev", spec.source, spec.target)[:num_fewshot]
        if len(shots) < num_fewshot:
            raise ArgumentError(
                f"`num_fewshot` is {num_fewshot}, but {folder}/dev has only {len(shots)} sentences",
                f"Use 0 to {len(shots)}",
                parameter="num_fewshot",
            )
    metrics = flores_metrics(spec.target)

    def score(doc: dict[str, str], results: list[str]) -> dict[str, tuple[str, str]]:
        return dict.fromkeys(metrics, (doc["target"], results[0].strip()))

    config = {
        "task": name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda doc: spec.prompt(doc["source"]),
        "doc_to_target": lambda doc: doc["target"],
        "target_delimiter": " ",
        "fewshot_config": {"sampler": "first_n", "samples": shots},
        "num_fewshot": 0 if spec.split == "dev" else None,
        "generation_kwargs": {"until": ["\n"], "do_sample": False},
        "process_results": score,
        "metric_list": [
            {"metric": key, "aggregation": partial(corpus_score, metric), "higher_is_better": True}
            for key, metric in metrics.items()
        ],
        "metadata": {"version": " ".join(["1", *(f"{key}|{signature(metric)}" for key, metric in metrics.items())])},
    }
    return OfflineTask({"test": rows}, config)


def _rows(folder: Path, split: str, source: str, target: str) -> list[dict[str, str]]:
    """Parallel sentences."""
    read = {code: read_sentences(folder, split, code) for code in (source, target)}
    problems = Problems(DataError)
    for code, sentences in read.items():
        if empty := [number for number, sentence in enumerate(sentences, 1) if not sentence.strip()]:
            problems.add(f"{folder / split}: sentence {empty[0]} of {code} is empty", "Download FLORES again")
    if len(read[source]) != len(read[target]):
        counts = ", ".join(f"{code} has {len(sentences)}" for code, sentences in read.items())
        problems.add(
            f"{folder / split}: the languages differ in their number of sentences: {counts}",
            "Take both languages from the same release of FLORES",
        )
    problems.raise_if_any()
    return [{"source": a, "target": b} for a, b in zip(read[source], read[target], strict=True)]


def build_local_task(name: str, folder: Path, num_fewshot: int = 0) -> ConfigurableTask:
    """The task of that name, over the files in `folder`.

    Args:
        name: one that `local_names` gives.
        folder: see `local_folders`.
        num_fewshot: see `build_flores_task`.
    """
    if is_flores(name):
        return build_flores_task(name, folder, num_fewshot)
    return _build_multijail(name, folder) if name in multijail_task_names() else build_mgsm_task(name, folder)


def _build_multijail(name: str, folder: Path) -> ConfigurableTask:
    """The request is the whole prompt, and there is no score: see `multijail.score_labels`."""
    config = {
        "task": name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda row: row["request"],
        "doc_to_target": lambda row: "",
        "num_fewshot": 0,
        "generation_kwargs": {"until": [], "do_sample": False},
        "process_results": lambda row, results: {},
        "metric_list": [],
        "metadata": {"version": "1.0"},
    }
    return OfflineTask({"test": read_multijail(folder, name)}, config)
