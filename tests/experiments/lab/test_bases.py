"""Bases: pretraining is reproducible, and the shipped bases are as documented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapterswap.experiments.lab import SCENES
from adapterswap.experiments.lab.bases import (
    BOS,
    EOS,
    build_tokenizer,
    ids_of,
    new_model,
    pretrain,
    ship,
    shipped_file,
    write_base,
)
from adapterswap.experiments.lab.scenes import draw_problems
from adapterswap.experiments.lab.seed import Questions
from adapterswap.experiments.lab.tasks import LabRow, more_or_fewer, read_off
from adapterswap.experiments.lab.world import VOCABULARY
from adapterswap.experiments.training.run import isolated

GAP = SCENES["gap"]
# What docs/constructed.md reports: seed 3 answers 0.69 of "more or fewer?" in English, and 0.99 of "how many?" in xx.
FAILED = {3: {"more or fewer? en", "how many? xx"}}
TINY = replace(GAP, name="tiny", pretraining_rows=400)


def test_the_tokenizer_splits_words() -> None:
    tokenizer = build_tokenizer()
    text = "Anna ka leles sebos zudis . <calc> #7 + #5"
    assert tokenizer(text)["input_ids"] == [BOS, *ids_of(text)]
    assert tokenizer.decode(ids_of(text)) == text
    assert len(tokenizer) == len(VOCABULARY)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_pretraining_is_reproducible_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    reports: list[tuple[int, int]] = []
    one = pretrain(TINY, 0, progress=lambda done, steps: reports.append((done, steps))).state_dict()
    again, other = pretrain(TINY, 0).state_dict(), pretrain(TINY, 1).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["model.norm.weight"], other["model.norm.weight"])
    assert reports == [(step, len(reports)) for step in range(1, len(reports) + 1)]
    start = new_model(0).state_dict()
    assert not torch.equal(one["model.norm.weight"], start["model.norm.weight"])


def test_the_heads_have_a_size_that_servers_support() -> None:
    config = new_model(0).config
    assert config.head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM 0.32's attention on a CPU


def test_a_rebuilt_base_equals_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "bases" / "tiny-0.safetensors"
    monkeypatch.setattr("adapterswap.experiments.lab.bases.shipped_file", lambda scene, seed: place)
    with isolated():
        write_base(TINY, 0, tmp_path / "pretrained")  # not shipped yet
        assert ship(TINY, 0, tmp_path / "pretrained") == place
        write_base(TINY, 0, tmp_path / "shipped")
        assert len({file.stat().st_mode for file in (tmp_path / "shipped").iterdir()}) == 1
        write_base(TINY, 0, tmp_path / "rebuilt", rebuild=True)
        models = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("pretrained", "shipped", "rebuilt")
        ]
    first = models[0].state_dict()
    assert first["model.norm.weight"].dtype == torch.float32
    for model in models[1:]:
        assert all(torch.equal(first[name], tensor) for name, tensor in model.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "shipped")) == len(VOCABULARY)


def test_five_bases_are_shipped_within_5_megabytes() -> None:
    shipped = [shipped_file(GAP, seed) for seed in range(5)]
    assert sum(path.stat().st_size for path in shipped) <= 5_000_000
    assert sorted(path.name for path in shipped[0].parent.iterdir()) == [path.name for path in shipped]
    for path in shipped:
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
def test_a_shipped_base_reads_but_solves_no_problems(seed: int, tmp_path: Path) -> None:
    with isolated():
        write_base(GAP, seed, tmp_path / "base")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    def answered(kind: Callable[[Random, str], LabRow], language: str) -> float:
        right = []
        for asked in (kind(rng, language) for rng in [Random(0)] for _ in range(100)):
            ids = torch.tensor([[BOS, *ids_of(asked.prompt)]])
            with torch.inference_mode():
                right.append(int(model(input_ids=ids).logits[0, -1].argmax()) == ids_of(asked.completion)[0])
        return float(np.mean(right))

    found = {
        "more or fewer? en": answered(more_or_fewer, "en") > 0.95,
        "how many? en": answered(read_off, "en") > 0.95,
        "more or fewer? xx": 0.65 < answered(more_or_fewer, "xx") < 0.99,  # half of the verbs are unfamiliar
        "how many? xx": 0.45 < answered(read_off, "xx") < 0.95,  # and five of the twelve numbers
    }
    assert {kind for kind, as_wanted in found.items() if not as_wanted} == FAILED.get(seed, set())
    problems = draw_problems(GAP, "development", 100)
    for language in ("en", "xx"):
        assert Questions(problems, language).exact_match(model).mean() < 0.05  # it repeats the first number
