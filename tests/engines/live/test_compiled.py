"""Pinned experts: a compiled model is not compiled again when the composition changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import LAYERS, logits
from refusals import refused
from tolerances import close
from torch._dynamo.testing import CompileCounter

from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import ArgumentError, CompositionError, UnsupportedError
from engines.live.conftest import assert_same_tensors, state_of, tensors_of

Composers = Callable[..., LiveComposer]

NAMES = [
    "math+swahili@bottom=2,top=1",
    "math+telugu",
    "base",
    "math+swahili@bottom=1,bottom_transition=2,task_weight=3",
    "telugu",
    "swahili+math@method=soup",
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_switching_compiles_nothing(composer: Composers) -> None:
    composing, plain = composer(), composer()
    counter = CompileCounter()
    before, tensors = state_of(composing.model), tensors_of(composing.model)
    with composing.pinned():
        forward = torch.compile(composing.model.get_base_model(), backend=counter)
        logits(forward)
        compiled = counter.frame_count
        assert compiled > 0
        for name in [*NAMES, *NAMES[::-1]]:
            with composing.use(name), plain.use(name):
                close(logits(forward), logits(plain.model), depth=LAYERS)
            assert counter.frame_count == compiled, name
    assert state_of(composing.model) == before
    assert_same_tensors(tensors_of(composing.model), tensors)


@pytest.mark.full
def test_without_pins_every_composition_is_compiled(composer: Composers) -> None:
    """What pinning is for."""
    composing, counter = composer(), CompileCounter()
    forward = torch.compile(composing.model.get_base_model(), backend=counter)
    counts = []
    for name in NAMES[:3]:
        with composing.use(name):
            logits(forward)
        counts.append(counter.frame_count)
    assert counts == sorted(set(counts))


def test_pins_and_the_rest(composer: Composers, folders: Callable[..., dict[str, Path]]) -> None:
    composing, plain = composer(), composer()
    before = state_of(composing.model)
    with composing.pinned(["math", "swahili"]):
        with refused(CompositionError, "composition", match="telugu"):
            composing.set("math+telugu")
        with refused(UnsupportedError), composing.use_rows(["math", "swahili"]):
            pass
        with composing.use(NAMES[0]), plain.use(NAMES[0]):
            composing.model.load_adapter(folders()["telugu"], adapter_name="other")
            close(logits(composing.model), logits(plain.model), depth=LAYERS)
    composing.model.delete_adapter("other")
    assert state_of(composing.model) == before
    with refused(ArgumentError, "experts", match="nobody"), composing.pinned(["nobody"]):
        pass
    with composing.use("math"), refused(UnsupportedError), composing.pinned():
        pass
