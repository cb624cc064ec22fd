"""What sharing prefixes would save in a sweep: cells with equal lower layers have equal hidden states up to there.

    OMP_NUM_THREADS=1 python benchmarks/prefixes.py [--turns 3]

Layer evaluations are counted for the papers' grids at 32 layers. Then 9 layer swaps (b 3-5, u 0-2) are judged on a
random 32-layer model of 0.1 billion parameters and a multiple-choice task of 50 documents, both ways in turn: each cell
whole, as `adapterswap sweep` does it, and from the layer at which it parts from the cell before. For that the cells are
ordered as a trie over layers, depth first, and hidden states are kept only where they part. Log-likelihoods must agree
to the last bit. Likelihood tasks only: generation needs every layer's keys and values for every token that it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise, product
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from shapes import llama_projections, random_adapter, random_llama
from sweep import DOCUMENTS, TASK, byte_tokenizer

from adapterswap import Composition, LiveComposer

LAYERS = 32
SHAPE = {"hidden": 512, "intermediate": 1408, "layers": LAYERS, "heads": 8, "vocab": 8192}
PAIR = ("math", "swahili")
PAIRS = tuple(product(("math", "math2", "math3"), ("bengali", "swahili", "telugu")))
Trail = tuple[tuple[Any, ...], ...]  # for each layer: the experts and factors of its attention and of its MLP


class Step(NamedTuple):
    """One cell in the order of the trie: the layer it starts from, and the depths whose states later cells need."""

    cell: Composition
    start: int
    keep: frozenset[int]


def trail_of(cell: Composition) -> Trail:
    """A cell as a trail through the trie."""
    rules = cell.rules(LAYERS)
    parts = [[(layer, kind) for kind in ("attention", "mlp")] for layer in range(LAYERS)]
    owners = [[next(rule for rule in rules if rule.matches("", *part)) for part in layer] for layer in parts]
    return tuple(tuple(tuple(sorted(rule.coefficients().items())) for rule in layer) for layer in owners)


def in_order(cells: Sequence[Composition]) -> list[Step]:
    """The cells depth first; depth d is the hidden states after d layers."""
    trails = sorted(((trail_of(cell), index) for index, cell in enumerate(cells)))
    shared = [common(one, other) for (one, _), (other, _) in pairwise(trails)]
    return [
        Step(cells[index], start, frozenset(accumulate(shared[place:], min)) - {0})
        for place, (start, (_, index)) in enumerate(zip([0, *shared], trails, strict=True))
    ]


def common(one: Trail, other: Trail) -> int:
    """The number of layers, from the bottom, in which two cells agree."""
    return next((depth for depth, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), LAYERS)


def grid(transitions: Sequence[int] = (0,), pairs: Sequence[tuple[str, str]] = (PAIR,)) -> list[Composition]:
    """The first paper's b and u, with transitions of these lengths."""
    ranges = product(pairs, (3, 4, 5), (0, 1, 2), transitions, transitions)
    return [
        Composition(task=(task,), language=(language,), bottom=b, top=u, bottom_transition=tb, top_transition=tu)
        for (task, language), b, u, tb, tu in ranges
    ]


def counted(cells: Sequence[Composition]) -> dict[str, Any]:
    """Layer evaluations a document, and the most depths that are held at once."""
    steps = in_order(cells)
    whole, shared = LAYERS * len(cells), sum(LAYERS - step.start for step in steps)
    held = max(len((step.keep | {step.start}) - {0}) for step in steps)
    return {"cells": len(cells), "whole": whole, "shared": shared, "ratio": round(whole / shared, 2), "held": held}


class Prefixes:
    """A model's layers, run from kept hidden states on. Every cell must see the same batches in the same order."""

    def __init__(self, decoder: Any) -> None:
        self._layers = decoder.layers
        self._kept: dict[int, list[torch.Tensor]] = {}  # depth → one (rows, tokens, hidden) for each batch
        self.most_bytes = 0

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Inside the block the layers below `step.start` do nothing, and that layer gets its kept input."""
        needed = {depth for depth in step.keep | {step.start} if depth <= step.start}  # deeper ones: another trail's
        self._kept = {depth: self._kept[depth] for depth in needed - {0}}
        hooks: dict[int, Any] = {}
        if step.start:
            kept = iter(self._kept[step.start])
            hooks[step.start] = lambda *_: next(kept)
        for depth in step.keep - self._kept.keys():
            self._kept[depth] = []
            hooks[depth] = lambda _, given, states=self._kept[depth]: states.append(given[0])
        handles = [self._layers[depth].register_forward_pre_hook(hook) for depth, hook in hooks.items()]
        for layer in self._layers[: step.start]:
            layer.forward = lambda hidden_states, **_: hidden_states
        yield
        for handle in handles:
            handle.remove()
        for layer in self._layers[: step.start]:
            del layer.forward
        self.most_bytes = max(self.most_bytes, sum(t.nbytes for kept in self._kept.values() for t in kept))


def make_world(folder: Path) -> tuple[LiveComposer, Any]:
    """A random base with two random experts loaded, its tokenizer, and the task in folder/tasks."""
    from adapterswap.core.model.opened_base import OpenedBase

    random_llama(folder / "base", **SHAPE)
    byte_tokenizer().save_pretrained(folder / "base")
    shapes = llama_projections(SHAPE["hidden"], SHAPE["intermediate"], SHAPE["hidden"])
    alike = {"rank": 16, "layers": LAYERS, "shapes": shapes, "base_model": str(folder / "base")}
    experts = {name: random_adapter(folder / name, seed=seed, **alike) for seed, name in enumerate(PAIR)}
    random = Random(0)
    (folder / "tasks").mkdir()
    with (folder / "tasks" / "choice.jsonl").open("w") as file:
        for _ in range(DOCUMENTS):
            question, *choices = ("".join(random.choices(ascii_lowercase, k=k)) for k in (12, 2, 2))
            print(json.dumps({"question": question, "choices": choices, "label": 0}), file=file)
    (folder / "tasks" / "choice.yaml").write_text(TASK.format(file=file.name))
    base = OpenedBase.open(str(folder / "base"))
    return LiveComposer.from_experts(base.load_weights(dtype="float32"), experts), base.tokenizer


def compare(folder: Path, turns: int) -> dict[str, Any]:
    """Judge the cells both ways, in turn."""
    from adapterswap.experiments.evaluation import Settings, evaluate_model

    composer, tokenizer = make_world(folder)
    decoder = composer.model.get_base_model().model
    settings = Settings(include_path=folder / "tasks", batch_size=16)
    calls: Counter[str] = Counter()
    for layer in decoder.layers:  # a skipped layer does not call its attention
        layer.self_attn.register_forward_hook(lambda *_: calls.update(now=1))
    seconds: dict[str, list[float]] = {"whole": [], "shared": []}

    def judge(way: str) -> list[Any]:
        calls["now"], began = 0, time.process_time()
        found = evaluate_model(composer.model, tokenizer, ["choice"], settings)
        seconds[way][-1] += time.process_time() - began
        calls[way] += calls["now"]
        return [sample.output for sample in found.samples]

    differ, seen = 0, set()
    for _ in range(turns + 1):
        prefixes = Prefixes(decoder)
        calls.clear()
        for taken in seconds.values():
            taken.append(0.0)
        for step in in_order(grid()):
            with composer.use(step.cell):
                whole = judge("whole")
                with prefixes.running(step):
                    shared = judge("shared")
            differ += sum(one != other for one, other in zip(whole, shared, strict=True))
            seen.add(str(whole))
    whole_s, shared_s = (round(statistics.median(taken[1:]), 2) for taken in seconds.values())  # the first warms up
    return {
        "layer_calls": {way: calls[way] for way in seconds},
        "processor_seconds": {"whole": whole_s, "shared": shared_s, "ratio": round(whole_s / shared_s, 2)},
        "bytes_kept": prefixes.most_bytes,
        "documents_that_differ": differ,
        "cells_with_outputs_of_their_own": len(seen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns that are measured, after one to warm up")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    grids = {
        "b, u": grid(),
        "b, u, t_b, t_u": grid((0, 1, 2)),
        "b, u, t_b, t_u of 9 pairs": grid((0, 1, 2), PAIRS),
        "partitions A, B, C, Z": [Composition(task="math", language="swahili", partition=name) for name in "ABCZ"],
    }
    with tempfile.TemporaryDirectory() as place:
        found = compare(Path(place), options.turns)
    print(json.dumps({"layers": {name: counted(cells) for name, cells in grids.items()}, **found}, indent=2))


if __name__ == "__main__":
    main()
