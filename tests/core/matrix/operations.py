"""The operations of the matrix: the library composes a pair of experts, and the result is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel

import adapterswap
from adapterswap import LiveComposer
from core.matrix.adapters import Pair
from core.matrix.architectures import LAYERS, Architecture
from core.matrix.methods import METHODS, VALUES
from core.matrix.reference import Changes, changes_in, load_with_peft, logits, parameters, recorded_warnings

__all__ = ["OPERATIONS", "Operation", "Result", "Subject"]

SWAP = {"bottom": 1, "top": 1, "bottom_transition": 1, "task_weight": 1, "language_weight": 3}
SETTINGS = ",".join(f"{key}={value}" for key, value in SWAP.items())


class Subject(NamedTuple):
    """The inputs of an operation: a pair of experts, their base as a folder and as a model, a folder to write to."""

    architecture: Architecture
    base: PreTrainedModel
    pair: Pair
    out: Path


class Result(NamedTuple):
    """The changes of the base's parameters, the logits, and the warnings while the result was loaded."""

    changes: Changes
    logits: torch.Tensor
    said: set[str]


class Operation(NamedTuple):
    """Runs the library; `composition` is the entry of `reference.SHARES` with the expected result."""

    composition: str
    run: Callable[[Subject], Result]


def _swap(pair: Pair) -> adapterswap.Plan:
    return adapterswap.layer_swap(pair.task.folder, pair.language.folder, **SWAP)


def _soup(pair: Pair) -> adapterswap.Plan:
    return adapterswap.soup(pair.task.folder, pair.language.folder, task_weight=1, language_weight=3)


def _copied(pair: Pair) -> adapterswap.Plan:
    rules: Any = [
        {"layers": "none", "expert": "language", "optional": True},
        {"layers": f"0,{LAYERS - 1}", "expert": "language"},
        {"expert": "task"},
    ]
    composition = adapterswap.Composition(allocation=rules)
    return adapterswap.compose(composition, {"task": pair.task.folder, "language": pair.language.folder})


def _partition_a(pair: Pair) -> adapterswap.Plan:
    composition = adapterswap.Composition(task="task", language="language", partition="A")
    return adapterswap.compose(composition, {"task": pair.task.folder, "language": pair.language.folder})


def _written(
    plan: Callable[[Pair], adapterswap.Plan], layout: Literal["exact", "portable"] = "exact"
) -> Callable[[Subject], Result]:
    """An adapter's folder, loaded by PEFT."""

    def run(subject: Subject) -> Result:
        folder = adapterswap.write_adapter(plan(subject.pair), subject.out, layout=layout)
        model, said = load_with_peft(subject.base, folder)
        output = logits(model)
        return Result(changes_in(model, subject.base, keep=False), output, said)

    return run


def _by_method(method: str) -> Callable[[Pair], adapterswap.Plan]:
    def plan(pair: Pair) -> adapterswap.Plan:
        composition = adapterswap.Composition(method=method, task="task", language="language", **VALUES[method])
        return adapterswap.compose(composition, {"task": pair.task.folder, "language": pair.language.folder})

    return plan


def _merged(subject: Subject, plan: Callable[[Pair], adapterswap.Plan] = _swap) -> Result:
    """Full weights, loaded by transformers."""
    folder = adapterswap.merge(plan(subject.pair), out_path=subject.out)
    with recorded_warnings() as said:
        model, info = subject.architecture.model_class.from_pretrained(folder, output_loading_info=True)
    said |= {f"{what}: {sorted(map(str, keys))}" for what, keys in info.items() if keys}
    weights = parameters(subject.base)
    changes = {name: (new.double() - weights[name].double()).detach() for name, new in parameters(model).items()}
    return Result(changes, logits(model.eval()), said)


def _live(subject: Subject) -> Result:
    """The base with both experts loaded, and a composition active in it."""
    folders = {"task": subject.pair.task.folder, "language": subject.pair.language.folder}
    with recorded_warnings() as said:
        composer = LiveComposer.from_experts(copy.deepcopy(subject.base), folders)
    with composer.use(f"task+language@{SETTINGS}"):
        return Result(changes_in(composer.model, subject.base), logits(composer.model), said)


def _live_copied(subject: Subject) -> Result:
    """The same for a composition in which every module has one owner."""
    folders = {"task": subject.pair.task.folder, "language": subject.pair.language.folder}
    with recorded_warnings() as said:
        composer = LiveComposer.from_experts(copy.deepcopy(subject.base), folders)
    with composer.use(_copied(subject.pair)):
        return Result(changes_in(composer.model, subject.base), logits(composer.model), said)


OPERATIONS: dict[str, Operation] = {
    "swap": Operation("swap", _written(_swap)),
    "soup": Operation("soup", _written(_soup)),
    "copied": Operation("copied", _written(_copied)),
    "partition_a": Operation("partition_a", _written(_partition_a)),
    "portable": Operation("swap", _written(_swap, "portable")),
    "merge": Operation("swap", _merged),
    "live": Operation("swap", _live),
    "live_copied": Operation("copied", _live_copied),
    **{method: Operation(method, partial(_merged, plan=_by_method(method))) for method in METHODS},
}
"""Methods are merged into full weights, which all of them make exactly."""
