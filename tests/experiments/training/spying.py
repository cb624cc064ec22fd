"""Observe a training run: the input of each step, and the weights and moments before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import adapterswap.experiments.training.trainer as training

Weights = dict[str, torch.Tensor]
Moments = dict[str, dict[str, torch.Tensor]]


class Spy(TrainerCallback):
    """After each step passes to `seen` the weights and AdamW's state before and after."""

    def __init__(self, model: torch.nn.Module, seen: Callable[..., None]) -> None:
        self._model, self._seen = model, seen
        self.tokens: list[torch.Tensor] = []

    def state(self, optimizer: Any) -> tuple[Weights, Moments]:
        weights = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        moments = {
            name: {key: value.clone() for key, value in optimizer.state[p].items()}
            for name, p in self._model.named_parameters()
            if p in optimizer.state
        }
        return weights, moments

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self.state(_plain(kwargs["optimizer"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        after = self.state(_plain(kwargs["optimizer"]))
        self._seen(state.global_step - 1, self._before, after, self.tokens)
        self.tokens.clear()


def _plain(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]) -> Iterator[list[Any]]:
    """Have `seen(step, before, after, tokens)` called after each step of runs in the block; yields their trainers."""
    build, trainers = training.build_trainer, []

    def build_and_look(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        spy = Spy(trainer.model, seen)
        trainer.add_callback(spy)
        step = trainer.training_step

        def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
            spy.tokens.append(inputs["input_ids"].clone())
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        trainers.append(trainer)
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(training, "build_trainer", build_and_look)
        yield trainers
