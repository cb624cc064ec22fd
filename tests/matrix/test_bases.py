"""Forms of bases on disk × adapters × operations: what transformers and PEFT make of that very folder, or refused."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from refusals import refused
from tolerances import close
from transformers import AutoModelForCausalLM, PreTrainedModel

import adapterswap
from adapterswap.errors import UnsupportedError
from matrix.adapters import Pair, save_expert
from matrix.architectures import ARCHITECTURES
from matrix.bases import FORMS, write_base
from matrix.operations import OPERATIONS, SWAP, Subject
from matrix.reference import SHARES, Changes, expected, expert_changes, recorded_warnings, untied
from matrix.test_matrix import Prepared, differences

LLAMA = ARCHITECTURES["llama"]
# The report of unexpected keys names the folder; the keys are compared. Copies are composed one by one, without a tie.
HARMLESS = re.compile("LOAD REPORT|ensure_weight_tying")
ALL = os.environ.get("MATRIX") == "all"

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "both": {"target_modules": ["lm_head", "embed_tokens", "q_proj"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tied LoRA": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "tied copies": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
}

# Where a head may be taken for the embedding; in the other forms, two kinds of adapters show which file was read.
_HEADS = ("no head", "own head", "no embedding")
CASES = [
    (form, kind, operation)
    for form in FORMS
    for kind in KINDS
    for operation in ("merge", "swap", "live")
    if ALL or (form == "own head" if operation != "merge" else form in _HEADS or kind in ("attention", "both"))
]


class Base(NamedTuple):
    """A base's folder, the model that transformers makes of it, what it says meanwhile, and the stored dtypes."""

    folder: Path
    model: PreTrainedModel
    said: set[str]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    made = {}
    for form in FORMS:
        folder = write_base(form, tmp_path_factory.mktemp("base") / "base")
        with recorded_warnings() as said:
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        said |= {f"{what}: {sorted(map(str, keys))}" for what, keys in info.items() if keys}
        made[form] = Base(folder, model.eval(), said)
    return made


def rounded(base: Base, changes: Changes) -> Changes:
    """W + ΔW rounded to the dtype in which W is stored, as a ΔW."""
    stored = adapterswap.open_checkpoint(base.folder).parameters
    weights = {name: weight.detach().double() for name, weight in untied(base.model).named_parameters()}
    short = {name for name, parameter in stored.items() if parameter.tensor.dtype == "BF16"}
    return {
        name: (weights[name] + change).bfloat16().double() - weights[name] if name in short else change
        for name, change in changes.items()
    }


@pytest.mark.parametrize(("form", "kind", "operation"), CASES)
def test_adapters(bases: dict[str, Base], form: str, kind: str, operation: str, tmp_path: Path) -> None:
    base = bases[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = Pair(
            save_expert(base.model, tmp_path / "task", seed=1, **KINDS[kind]),
            save_expert(base.model, tmp_path / "language", seed=2, **KINDS[kind]),
        )
        (task, said), (language, more) = (expert_changes(base.model, one) for one in (pair.task, pair.language))
        subject = Subject(LLAMA, base.model, pair, tmp_path / "out")
        if operation == "live" and kind in ("tied copies", "tokens"):
            with refused(UnsupportedError, match="the live composer cannot switch"):
                OPERATIONS[operation].run(subject)
            return
        result = OPERATIONS[operation].run(subject)
    changes = expected(LLAMA, OPERATIONS[operation].composition, task, language, base.model)
    others = [rounded(base, changes)] if operation == "merge" else []
    wrong = differences(Prepared(base.model, pair, task, language, base.said | said | more), changes, result, others)
    assert not [difference for difference in wrong if not HARMLESS.search(difference)]


@pytest.mark.parametrize("form", FORMS)
def test_full_checkpoints(form: str, tmp_path: Path) -> None:
    experts = {name: write_base(form, tmp_path / name, seed=seed) for seed, name in ((1, "task"), (2, "language"))}
    composition = adapterswap.Composition(task="task", language="language", norms="layer", **SWAP)
    out = adapterswap.merge(adapterswap.compose(composition, experts), out_path=tmp_path / "out")
    task, language, merged = (
        dict(untied(AutoModelForCausalLM.from_pretrained(folder)).named_parameters())
        for folder in (*experts.values(), out)
    )
    for name, tensor in merged.items():
        shares = SHARES["swap"](LLAMA.layer_of(name), LLAMA.is_attention(name))
        mean = shares[0] * task[name].double() + shares[1] * language[name].double()
        short = (form.endswith("bfloat16") and name == "lm_head.weight") or (form == "mixed dtypes" and ".1." in name)
        close(tensor, mean.float(), dtype=torch.bfloat16 if short else None, name=name)
