"""The queue for the model: first come, first served, and a long task lets others go first between its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from adapterswap.experiments.studio.workspace import Turns


@pytest.fixture
def started() -> Callable[..., threading.Thread]:
    """Start a thread. It is a daemon, so one that waits for ever fails a test instead of stopping it."""

    def start(body: Callable[..., object], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        thread.start()
        return thread

    return start


def test_who_waits_goes_before_a_task_that_steps_aside(started: Callable[..., threading.Thread]) -> None:
    turns = Turns()
    order: list[str] = []
    holds, everyone_waits = threading.Event(), threading.Event()

    def visit(name: str) -> None:
        with turns.turn():
            order.append(name)

    def work() -> None:
        with turns.turn():
            turns.step_aside()  # nobody waits, so it goes on at once
            order.append("work")
            holds.set()
            everyone_waits.wait()
            turns.step_aside()
            order.append("more work")

    task = started(work)
    assert holds.wait(60)
    visitors = []
    for number, name in enumerate(("second", "third"), 1):
        visitors.append(started(visit, name))
        while turns.waiting < number:
            visitors[-1].join(0.001)
    everyone_waits.set()

    for thread in (task, *visitors):
        thread.join(60)
        assert not thread.is_alive()
    assert order == ["work", "second", "third", "more work"]
    assert turns.waiting == 0


def test_a_turn_ends_with_an_error(started: Callable[..., threading.Thread]) -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.turn():
        raise KeyError

    def visit() -> None:
        with turns.turn():
            pass

    visitor = started(visit)
    visitor.join(60)
    assert not visitor.is_alive()
