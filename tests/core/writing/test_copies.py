"""Copies of the base's embedding and head in experts: copies of one base compose, copies of two are refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import Result
from crafting import NUMPY, PREFIX, adapter, config, snapshot, tensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from refusals import refused

import adapterswap
from adapterswap import Composition
from adapterswap.core.writing import copies
from adapterswap.core.writing.copies import Comparable
from adapterswap.kit.errors import ExpertError

VOCABULARY, WIDTH = 12, 4
HEAD = f"{PREFIX}lm_head.base_layer.weight"
EMBEDDING = f"{PREFIX}model.embed_tokens.base_layer.weight"
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Run = Callable[..., Result]


def weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)


def carrying(folder: Path, seed: int, **held: tuple[str, np.ndarray]) -> Path:
    """A LoRA on the layers, the embedding and the head; `embedding` and `head` are copies saved with the last two."""
    content = tensors(seed=seed)
    random = np.random.default_rng(seed)
    for key, shape in (
        ("model.embed_tokens.lora_embedding_A", (2, VOCABULARY)),
        ("model.embed_tokens.lora_embedding_B", (WIDTH, 2)),
        ("lm_head.lora_A.weight", (2, WIDTH)),
        ("lm_head.lora_B.weight", (VOCABULARY, 2)),
    ):
        content[PREFIX + key] = ("F32", shape, random.standard_normal(shape).astype(np.float32).tobytes())
    for name, key in (("embedding", EMBEDDING), ("head", HEAD)):
        if name in held:
            dtype, values = held[name]
            content[key] = (dtype, values.shape, values.astype(NUMPY[dtype]).tobytes())
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    return adapter(folder, content, config(target_modules=targets))


def copy_in(folder: Path, key: str) -> bytes:
    raw = (folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + length])[key]["data_offsets"]
    return raw[8 + length :][start:stop]


@pytest.mark.parametrize("options", [["--method", "soup"], ["--bottom", 1, "--top", 1], ["--max-rank", 1]], ids=str)
def test_experts_of_two_bases_are_refused(options: list[Any], run: Run, tmp_path: Path) -> None:
    carrying(tmp_path / "math", 1, embedding=("F32", weight()), head=("BF16", weight(1)))
    carrying(tmp_path / "swahili", 2, embedding=("F32", weight()), head=("BF16", weight(2)))
    before = snapshot(tmp_path)
    command = ["-t", tmp_path / "math", "-l", tmp_path / "swahili", "--num-layers", 4, "-o", tmp_path / "out", *options]
    for more in (["--dry-run"], ["--json"], []):
        refused = run("compose", *command, *more)
        assert (refused.exit_code, refused.stdout) == (3, "")
        assert "experts 'math' and 'swahili' were trained on different bases" in refused.stderr
        assert HEAD in refused.stderr
        assert EMBEDDING not in refused.stderr
        assert "Compose experts of one base" in refused.stderr
    assert snapshot(tmp_path) == before


def test_a_conflicting_copy_is_refused_even_if_it_would_not_be_written(tmp_path: Path) -> None:
    """The layers of one expert would run on the other's embedding."""
    math = carrying(tmp_path / "math", 1, embedding=("F32", weight()), head=("F32", weight()))
    swahili = carrying(tmp_path / "swahili", 2, embedding=("F32", weight(2)), head=("F32", weight(3)))
    rules: Any = [{"layers": "0-1", "expert": "swahili"}, {"expert": "math"}]
    plan = adapterswap.compose(Composition(allocation=rules, num_layers=4), {"math": math, "swahili": swahili})
    with refused(ExpertError) as caught:
        adapterswap.write_adapter(plan, tmp_path / "out")
    problems = caught.value.problems
    assert [EMBEDDING in problem.message or HEAD in problem.message for problem in problems] == [True, True]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtypes", sorted(set(itertools.permutations(["F32", "F32", "BF16"]))), ids="-".join)
def test_two_copies_that_round_to_a_third_are_refused(dtypes: tuple[str, ...], tmp_path: Path) -> None:
    """In any order: the bfloat16 copy may come from either base, but the float32 copies differ."""
    values = weight().astype(ml_dtypes.bfloat16).astype(np.float32)
    exact = iter((values, np.nextafter(values, np.float32(9))))
    experts = {
        name: carrying(tmp_path / name, seed, head=(dtype, next(exact) if dtype == "F32" else values))
        for seed, (name, dtype) in enumerate(zip("abc", dtypes, strict=True))
    }
    rules: Any = [{"blend": dict.fromkeys(experts, 1)}]
    plan = adapterswap.compose(Composition(allocation=rules, num_layers=4), experts)
    with refused(ExpertError, match="different bases"):
        adapterswap.write_adapter(plan, tmp_path / "out")


@pytest.mark.parametrize("other", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_experts_of_one_base_compose(dtype: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base may have been stored in either dtype; the first expert's copy is written unchanged."""
    monkeypatch.setattr(copies, "_ELEMENTS", 10)
    for stored in {dtype, other}:
        values = weight().astype(NUMPY[stored]).astype(np.float32)
        math = carrying(tmp_path / stored / "math", 1, embedding=(dtype, values), head=(dtype, values))
        swahili = carrying(tmp_path / stored / "swahili", 2, embedding=(other, values))
        plan = adapterswap.layer_swap(math, swahili, bottom=1, top=1, num_layers=4)
        written = adapterswap.write_adapter(plan, tmp_path / stored / "out")
        assert [copy_in(written, key) for key in (EMBEDDING, HEAD)] == [copy_in(math, key) for key in (EMBEDDING, HEAD)]


def test_one_differing_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_ELEMENTS", 10)
    math = carrying(tmp_path / "math", 1, head=("F32", weight()))
    for place in range(VOCABULARY * WIDTH):
        values = weight()
        values.reshape(-1)[place] += 1e-3
        swahili = carrying(tmp_path / "swahili", 2, head=("F32", values))
        plan = adapterswap.layer_swap(math, swahili, bottom=1, top=1, num_layers=4)
        with refused(ExpertError):
            adapterswap.write_adapter(plan, tmp_path / "out")


numbers = st.floats(-4, 4, width=32).map(np.float32)


@given(
    arrays(np.float32, 7, elements=numbers),
    st.sampled_from(list(TORCH)),
    st.sampled_from(list(TORCH)),
    st.integers(0, 7),
    numbers,
)
def test_weights_are_compared_as_torch_rounds_them(
    values: np.ndarray, dtype: str, other: str, changed: int, by: np.float32
) -> None:
    """Compared with casts by torch; the last number may differ between the two."""
    one = torch.from_numpy(values).to(TORCH[dtype])
    two = torch.from_numpy(np.where(np.arange(7) == changed, by, values)).to(TORCH[other])
    expected = torch.equal(one.to(two.dtype), two) or torch.equal(two.to(one.dtype), one)
    left, right = (
        Comparable(name, (7,), lambda start, stop, held=held: held[start:stop].float().numpy())
        for name, held in ((dtype, one), (other, two))
    )
    assert left.is_one_with(right) is right.is_one_with(left) is expected
    assert not left.is_one_with(right._replace(shape=(1, 7)))
