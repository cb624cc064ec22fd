"""Folders of sweeps as `adapterswap sweep` writes them: real cells, with scores drawn around a known truth."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from adapterswap.experiments.sweeps.grid import Cell, make_cells
from adapterswap.experiments.sweeps.recipe import DocumentSplit, SweepRecipe, SweepTasks
from adapterswap.experiments.sweeps.results import CellResult, TaskInfo, TaskValue

HOSTILE = (
    '</pre></script><script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted" \u202e{{ 7*7 }}'
)
TASKS = {
    "mgsm_native_cot_sw": "sw",
    "mgsm_native_cot_en": "en",
    "mgsm_native_cot_te": "te",
    "belebele_swh_Latn": "swh_Latn",
}
QUESTIONS = {
    "sw": "Swali: Duka lina vitabu {} na linauza nusu yake. Vinabaki vingapi?\nJibu la Hatua kwa Hatua:",
    "en": "Question: A shop has {} books and sells half of them. How many are left?\nStep-by-Step Answer:",
    "te": "ప్రశ్న: దుకాణంలో {} పుస్తకాలు ఉన్నాయి, సగం అమ్ముతారు. ఎన్ని మిగిలాయి?\nదశలవారీగా సమాధానం:",
}

Skill = Callable[[Cell, str], float]


def recipe(**changes: Any) -> SweepRecipe:
    content: dict[str, Any] = {
        "base_model": "meta-llama/Llama-3.1-8B-Instruct",
        "task_experts": {f"math{i}": f"experts/math{i}" for i in (1, 2, 3)},
        "language_experts": {f"sw{i}": f"experts/sw{i}" for i in (1, 2, 3)},
        "baselines": ["base", "task", "language", "soup"],
        "compositions": [{"bottom": [3, 4, 5], "top": [0, 1, 2]}],
        "tasks": ["mgsm_native_cot_sw"],
        "retention": ["mgsm_native_cot_en", "mgsm_native_cot_te"],
        "settings": {"num_fewshot": 8, "batch_size": 4},
    } | changes
    return SweepRecipe.model_validate(content)


def skill(cell: Cell, task: str) -> float:
    """A made-up truth: language layers help the target language and cost a little English."""
    start = {"mgsm_native_cot_sw": 0.25, "mgsm_native_cot_te": 0.12}.get(task, 0.55)
    gain = {"base": 0.0, "task expert": 0.05, "language expert": 0.0, "soup": 0.05, "joint SFT": 0.07}.get(
        cell.family, 0.08
    )
    expert = sum(int(name[-1]) for name in (*cell.task_expert, *cell.language_expert)) * 0.01
    zones = 0.01 * cell.composition.get("bottom", 5) - 0.01 * cell.composition.get("top", 2)
    return start + gain + expert + (zones if "bottom" in cell.composition else 0.0)


def craft(
    folder: Path, requested: SweepRecipe | None = None, *, documents: int = 40, skill: Skill = skill,
    finished: Callable[[Cell], bool] = lambda cell: True, split: bool = True, corpus: tuple[str, ...] = (),
    values: Callable[[Cell, str], list[float]] | None = None, errors: Callable[[Cell], float] = lambda cell: 0.0,
    changed: Mapping[str, Mapping[str, Any]] | None = None, text: str = "Jibu ni",
    shares: Callable[[Cell, str], float] | None = None, codes: Mapping[str, str] = TASKS, groups: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write a sweep's folder.

    Args:
        skill: the probability of a right answer.
        finished: which cells exist.
        split: whether there are select documents.
        corpus: tasks with one score for the whole corpus.
        values: the documents' scores, instead of random ones.
        errors: the relative error of cells that were reduced to a rank.
        text: the outputs.
        changed: changes to sweep.json: `{"settings": {"num_fewshot": 2}}`.
        codes: task → the code of its language.
        groups: the template of each document.
        shares: the share of the answers that is in the task's language; not recorded by default.
    """
    requested = requested or recipe()
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "samples").mkdir(parents=True)
    (folder / "prompts").mkdir()
    languages = {name: tuple(tasks) for name, tasks in requested.target_groups().items()}
    target = tuple(dict.fromkeys(task for tasks in languages.values() for task in tasks))
    cells = make_cells(requested, SweepTasks(languages, tuple(requested.retention)), 32).cells
    select, report = DocumentSplit().split(documents, groups) if split else ((), tuple(range(documents)))
    tasks = {
        name: TaskInfo(
            name, "target" if name in target else "retention", codes.get(name, "swh_Latn"),
            ("exact_match", "normalized") if name not in corpus else ("chrf", "none"), True, documents, select, report,
            "cd" * 32, "template" if groups else None, tuple(groups),
        )
        for name in (*target, *requested.retention)
    }  # fmt: skip
    experts = {
        name: {"side": side, "source": f"you/{name}", "revision": "0" * 7 + name[-1], "sha256": "ab" * 32}
        for side, names in (("task", requested.task_experts), ("language", requested.language_experts))
        for name in names
    }
    described: dict[str, Any] = {
        "format": 1, "adapterswap_version": "0.0", "recipe": requested.model_dump(mode="json", exclude_defaults=True),
        "base_model": {"source": requested.base_model, "revision": "abc1234"}, "experts": experts, "num_layers": 32,
        "tasks": {name: info.as_json() for name, info in tasks.items()},
        "settings": {"num_fewshot": 8, "batch_size": 4},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "cells": [cell.as_json() for cell in cells],
    }  # fmt: skip
    for key, content in (changed or {}).items():
        described[key] = {**described[key], **content}
    (folder / "sweep.json").write_text(json.dumps(described))
    lines = []
    hard = np.random.default_rng(0).normal(size=documents)
    for cell in filter(finished, cells):
        results, samples = {}, []
        for task in cell.tasks:
            drawn = np.random.default_rng([int(cell.cell, 16), len(task)]).normal(size=documents)
            chance = 1 / (1 + np.exp(-(2 * drawn * 0.4 + 2 * hard)))  # the same documents are hard for all
            scores = values(cell, task) if values else [float(c > 1 - skill(cell, task)) for c in chance]
            mean = sum(scores) / len(scores)
            docs = {} if task in corpus else dict(enumerate(scores))
            name = ",".join(tasks[task].primary)
            share = {"language_share,language": shares(cell, task)} if shares is not None else {}
            results[task] = TaskValue(mean, None, {name: mean, **share}, docs)
            samples += [
                {"task": task, "doc_id": doc, "target": str(doc), "output": f"{text} {doc if score else doc + 1}",
                 "answers": {"normalized": str(doc if score else doc + 1)}, "scores": {name: score}}
                for doc, score in enumerate(scores)
            ]  # fmt: skip
        error = errors(cell) if cell.is_reduced else None
        line = CellResult(cell, results, {"switch": 0.1, "evaluate": 1.0}, error).as_json()
        lines.append(json.dumps(line))
        (folder / "samples" / f"{cell.cell}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (folder / "cells.jsonl").write_text("".join(line + "\n" for line in lines))
    for name, info in tasks.items():
        question = QUESTIONS.get(info.language or "", QUESTIONS["sw"])
        rows = [{"doc_id": doc, "prompt": f"shot\n\nshot\n\n{question.format(2 * doc)}"} for doc in range(documents)]
        path = folder / "prompts" / f"{quote(name, safe='')}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
