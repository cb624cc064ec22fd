"""The command lines that write a run's compositions and evaluate them again.

Knows a run's experts and settings, and the options of `compose` and `evaluate`; runs nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from adapterswap.evaluation.settings import SEED
from adapterswap.planning.rule_text import write_rule
from adapterswap.reporting.including import is_single
from adapterswap.sweeps import Cell, Run

__all__ = ["compose_command", "evaluate_command"]

_NOT_OPTIONS = {"task", "language", "allocation", "allow_negative"}
_SETTINGS = ("num_fewshot", "limit", "batch_size", "max_gen_toks", "system_instruction")
_FLAGS = ("apply_chat_template", "truncate", "confirm_run_unsafe_code")


def compose_command(run: Run, cell: Cell) -> str | None:
    """The `adapterswap compose` that writes a cell's adapter, or the `adapterswap merge` that writes its full weights.

    None if the cell composes nothing or is a reset.
    """
    content = cell.composition
    experts = run.described.get("experts", {})
    expert_names = dict.fromkeys((*cell.task_expert, *cell.language_expert, *cell.other_experts))
    if is_single(cell) or not experts.keys() >= expert_names.keys():
        return None
    words = ["adapterswap", "merge" if _is_merged(run, cell) else "compose"]
    if "allocation" in content:
        for name in expert_names:
            words += ["--expert", f"{name}={_source(experts[name])}"]
        for rule in content["allocation"]:
            words += ["--rule", write_rule(rule)]
    elif not cell.task_expert or not cell.language_expert:
        return None
    else:
        for option, names in (("-t", cell.task_expert), ("-l", cell.language_expert)):
            for name in names:
                words += [option, _source(experts[name])]
    words += ["--base-model", _source(run.described["base_model"])]
    for key, value in {**content, **cell.output}.items():
        if key not in _NOT_OPTIONS | {"full_rank"} and (key, value) != ("method", "layer_swap"):
            words += [f"--{key.replace('_', '-')}", str(value)]
    words += ["--allow-negative"] if content.get("allow_negative") else []
    return shlex.join([*words, "--out-path", cell.cell])


def evaluate_command(run: Run, cell: Cell) -> str:
    """The `adapterswap evaluate` that evaluates the output of `compose_command` on the cell's tasks."""
    settings: Mapping[str, Any] = run.described.get("settings", {})
    base_model = ["--base-model", _source(run.described["base_model"]), "--adapter", cell.cell]
    words = ["adapterswap", "evaluate", *(["--base-model", cell.cell] if _is_merged(run, cell) else base_model)]
    words += ["--tasks", ",".join(cell.tasks)]
    for key in _SETTINGS:
        if settings.get(key) is not None:
            words += [f"--{key.replace('_', '-')}", str(settings[key])]
    words += [f"--{key.replace('_', '-')}" for key in _FLAGS if settings.get(key)]
    if own_tasks := run.described["recipe"].get("settings", {}).get("include_path"):
        words += ["--include-path", str(own_tasks)]
    if settings.get("seed", SEED) != SEED:
        words += ["--sampling-seed", str(settings["seed"])]
    if generation := settings.get("gen_kwargs"):
        words += ["--gen-kwargs", ",".join(f"{key}={value}" for key, value in generation.items())]
    return shlex.join(words)


def _is_merged(run: Run, cell: Cell) -> bool:
    """Whether a cell was evaluated as full weights: at full rank, or because an expert is a full checkpoint."""
    experts = run.described.get("experts", {})
    expert_names = (*cell.task_expert, *cell.language_expert, *cell.other_experts)
    return bool(cell.output.get("full_rank")) or any("files" in experts.get(name, {}) for name in expert_names)


def _source(described: Mapping[str, Any]) -> str:
    revision = described.get("revision")
    return f"{described['source']}@{revision}" if revision else str(described["source"])
