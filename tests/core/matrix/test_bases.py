"""Forms of bases on disk × adapters × operations: what transformers and PEFT make of that very folder, or refused."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from refusals import refused
from safetensors.torch import save_file
from tiers import ALL
from tolerances import close
from transformers import AutoModelForCausalLM, PreTrainedModel

import adapterswap
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.core.model.sources import base_fingerprints
from adapterswap.kit.errors import BaseModelError, ExpertError, UnsupportedError
from core.matrix.adapters import Pair, save_expert
from core.matrix.architectures import ARCHITECTURES
from core.matrix.bases import FORMS, write_base
from core.matrix.operations import OPERATIONS, SWAP, Subject
from core.matrix.reference import (
    SHARES,
    Changes,
    expected,
    expert_changes,
    logits,
    parameters,
    recorded_warnings,
    untied,
)  # fmt: skip
from core.matrix.test_matrix import Prepared, differences

LLAMA = ARCHITECTURES["llama"]
# The report of unexpected keys names the folder; the keys are compared. Copies are composed one by one, without a tie.
HARMLESS = re.compile("LOAD REPORT|ensure_weight_tying")

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

# Where a head may be taken for the embedding; in the other forms, one kind of adapters shows which file was read.
_HEADS = ("no head", "own head", "no embedding")
CASES = [
    (form, kind, operation)
    for number, form in enumerate(FORMS)
    for kind in KINDS
    for operation in ("merge", "swap", "live")
    if ALL
    or (form == "own head" if operation != "merge" else form in _HEADS or kind == ("both", "attention")[number % 2])
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
    weights = {name: weight.detach().double() for name, weight in parameters(base.model).items()}
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
            with refused(UnsupportedError, match="the live composer"):
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
        parameters(AutoModelForCausalLM.from_pretrained(folder)) for folder in (*experts.values(), out)
    )
    for name, tensor in merged.items():
        shares = SHARES["swap"](LLAMA.layer_of(name), LLAMA.is_attention(name))
        mean = shares[0] * task[name].double() + shares[1] * language[name].double()
        short = (form.endswith("bfloat16") and name == "lm_head.weight") or (form == "mixed dtypes" and ".1." in name)
        close(tensor, mean.float(), dtype=torch.bfloat16 if short else None, name=name)


@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings=|no longer tied):UserWarning")
@pytest.mark.parametrize("form", [form for form in FORMS if "head" in form or form in ("sharded", "no embedding")])
def test_extract(form: str, tmp_path: Path) -> None:
    """A head of its own is extracted apart from the embedding, and a tied one with it."""
    base, full = write_base(form, tmp_path / "base"), write_base(form, tmp_path / "full", seed=1)
    adapterswap.extract(full, base, out_path=tmp_path / "adapter", rank=32, embeddings=True)
    models = [untied(AutoModelForCausalLM.from_pretrained(folder)) for folder in (base, full)]
    tuned = dict(models[1].named_parameters())
    for name, tensor in (
        PeftModel.from_pretrained(models[0], tmp_path / "adapter").merge_and_unload().named_parameters()
    ):
        if "norm" not in name:  # which an adapter does not hold
            close(tensor, tuned[name], dtype=torch.bfloat16 if "bfloat16" in form else None, name=name)


def test_extract_from_a_head_of_its_own_and_a_tied_base(tmp_path: Path) -> None:
    base, own, equal = (
        write_base(form, tmp_path / form, seed=seed) for seed, form in enumerate(("no head", "own head", "equal head"))
    )
    with refused(BaseModelError, "base_model"):
        adapterswap.extract(own, base, out_path=tmp_path / "adapter", rank=32)
    adapterswap.extract(equal, base, out_path=tmp_path / "adapter", rank=32)


def test_an_adapter_in_the_folder(tmp_path: Path) -> None:
    """transformers would add it to the base, or to the expert, without a word."""
    base = write_base("sharded", tmp_path / "base")
    before = AutoModelForCausalLM.from_pretrained(base).eval()
    adapter, inside = (
        save_expert(before, tmp_path / name, seed=seed, target_modules=["q_proj"]).folder
        for seed, name in enumerate(("adapter", "inside"))
    )
    for path in inside.iterdir():
        shutil.copy(path, base)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base)), logits(before))
    with refused(BaseModelError, "base_model"):
        adapterswap.merge(adapter, base, out_path=tmp_path / "out")
    with refused(BaseModelError, "base_model"):
        OpenedBase.open(str(base))
    with refused(ExpertError, "reference"):
        adapterswap.open_expert(base)
    with refused(BaseModelError, "base_model"):
        OpenedBase.open(str(adapter))


def test_another_file_named_by_the_config(tmp_path: Path) -> None:
    base = write_base("single", tmp_path / "base")
    before = AutoModelForCausalLM.from_pretrained(base).eval()
    other = {name: tensor + 0.05 for name, tensor in before.state_dict().items()}
    save_file(other, base / "other.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base)), logits(before))
    with refused(UnsupportedError, None, match="transformers_weights"):
        adapterswap.open_checkpoint(base)


def test_a_base_is_known_by_the_weights_that_are_loaded(tmp_path: Path) -> None:
    single, both = (write_base(form, tmp_path / form) for form in ("single", "single beside shards"))
    assert base_fingerprints(both) == base_fingerprints(single) != {}
