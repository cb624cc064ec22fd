"""Experts of PEFT's type TRAINABLE_TOKENS, which hold rows of embeddings and heads without LoRA.

Beside LoRA they are tested in `test_token_rows`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pico_models as pico
import pytest
import torch
from conftest import load_base
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.plan import Plan
from adapterswap.kit.errors import BaseModelError, ExpertError, UnsupportedError

from .vocabularies import LAYERS, SIZE, in_peft, merged_by_peft, pico_llama, resized

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KEY = "base_model.model.model.embed_tokens.trainable_tokens_delta"
TIED = "base_model.model.lm_head.trainable_tokens_delta"
EXPERTS: dict[str, PeftConfig] = {
    "default": TrainableTokensConfig(token_indices=[3, 1, 7], task_type="CAUSAL_LM"),
    "listed": TrainableTokensConfig(token_indices=[3, 1, 7], target_modules=["embed_tokens"], task_type="CAUSAL_LM"),
    "regex": TrainableTokensConfig(token_indices=[7, 20], target_modules=r".*embed_tokens", task_type="CAUSAL_LM"),
    "head": TrainableTokensConfig(token_indices=[3, 1], target_modules=["lm_head"], task_type="CAUSAL_LM"),
    "both": TrainableTokensConfig(
        token_indices=[8, 3, 1], target_modules=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    ),
    "layers": TrainableTokensConfig(token_indices=[3, 1], target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "new": TrainableTokensConfig(token_indices=[SIZE + 1, 3, SIZE], task_type="CAUSAL_LM"),
    "lora": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "saved": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "loha": LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
}
TIED_OR_NOT = pytest.mark.parametrize("tied", [False, True])
ALL: Any = [{"blend": {"t": 1, "l": 1}}]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A pico Llama whose head is tied to its embedding, and one whose head is not."""
    return {tied: pico_llama(tmp_path_factory.mktemp("base"), tied=tied) for tied in (False, True)}


def trained(model: Any, config: PeftConfig, folder: Path, seed: int) -> Path:
    return pico.trained(model, config, folder, seed=seed, scale=0.2, save_embedding_layers=False)


@pytest.fixture(scope="module")
def expert(bases: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[tuple[str, bool], Path] = {}

    def make(name: str, *, tied: bool = False) -> Path:
        if (name, tied) not in made:
            model = resized(bases[tied], SIZE + 2 * (name == "new"))
            made[name, tied] = trained(model, EXPERTS[name], tmp_path_factory.mktemp("expert"), 1 + len(made))
        return made[name, tied]

    return make


def composed(rules: Any, base: Path | None = None, **experts: Path) -> Plan:
    fields: dict[str, Any] = {"base_model": str(base)} if base else {}
    return adapterswap.compose(Composition(allocation=rules, **fields), experts)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def edited(expert: Path, out: Path, config: dict[str, Any], stored: dict[str, torch.Tensor] | None = None) -> Path:
    """The expert with other entries in its config, and with other tensors."""
    pico.copied(expert, out, **config)
    save_file(tensors(expert) | (stored or {}), out / WEIGHTS)
    return out


@TIED_OR_NOT
@pytest.mark.parametrize("name", ["default", "listed", "regex"])
def test_a_copy_is_as_peft_saved_it(
    name: str, tied: bool, expert: Make, bases: dict[bool, Path], tmp_path: Path
) -> None:
    folder, base = expert(name, tied=tied), bases[tied]
    plan = composed([{"expert": "t"}], t=folder)
    out = plan.write(tmp_path / "out")
    own, written = tensors(folder), tensors(out)
    assert own.keys() == written.keys() == ({KEY, TIED} if tied else {KEY})
    assert all(torch.equal(own[key], written[key]) for key in own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load_base(base), out)
    assert not [str(w.message) for w in caught if "missing" in str(w.message) or "tie_word" in str(w.message)]
    close(model.merge_and_unload().state_dict(), merged_by_peft(base, folder))
    merged = load_base(plan.merge(tmp_path / "merged", base_model=base))
    close(merged.state_dict(), merged_by_peft(base, folder))
    assert merged.config.tie_word_embeddings == tied
    for result in (out, tmp_path / "merged"):
        assert adapterswap.verify(result, {"t": folder}, base_model=base).equal


@TIED_OR_NOT
def test_rows_of_two_experts(tied: bool, expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    base, one, two = bases[tied], expert("default", tied=tied), expert("regex", tied=tied)
    plan = composed(ALL, t=one, l=two)
    expected = load_base(base).state_dict()
    theirs = [merged_by_peft(base, folder)[EMBEDDING] for folder in (one, two)]
    for row, weight in {
        3: theirs[0][3],
        1: theirs[0][1],
        20: theirs[1][20],
        7: (theirs[0][7] + theirs[1][7]) / 2,
    }.items():
        for key in (EMBEDDING, HEAD) if tied else (EMBEDDING,):
            expected[key][row] = weight
    out = plan.write(tmp_path / "out")
    config = json.loads((out / CONFIG).read_text())
    assert (config["peft_type"], config["token_indices"]) == ("TRAINABLE_TOKENS", [1, 3, 7, 20])
    close(merged_by_peft(base, out), expected)
    close(load_base(plan.merge(tmp_path / "merged", base_model=base)).state_dict(), expected)


def test_tokens_of_the_embedding_and_the_head(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    base, both, head = bases[False], expert("both"), expert("head")
    plan = composed([{"expert": "t"}], t=both)
    close(merged_by_peft(base, plan.write(tmp_path / "out")), merged_by_peft(base, both))
    rules = [{"modules": ["lm_head"], "expert": "l"}, {"expert": "t"}]
    plan = composed(rules, t=both, l=head)
    with refused(UnsupportedError):  # the config has one list of tokens
        plan.write(tmp_path / "apart")
    expected = merged_by_peft(base, both) | {HEAD: merged_by_peft(base, head)[HEAD]}
    close(load_base(plan.merge(tmp_path / "merged", base_model=base)).state_dict(), expected)


def test_a_lora_of_which_only_the_tokens_are_used(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    """With zones of 0 layers the language's LoRA takes no part, so the result is TRAINABLE_TOKENS."""
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 2], task_type="CAUSAL_LM")
    folder = trained(load_base(bases[False]), config, tmp_path / "lora", 5)
    out = adapterswap.layer_swap(expert("default"), folder, bottom=0, top=0).write(tmp_path / "out")
    expected = merged_by_peft(bases[False], expert("default"))
    expected[EMBEDDING][[5, 2]] = merged_by_peft(bases[False], folder)[EMBEDDING][[5, 2]]
    assert json.loads((out / CONFIG).read_text())["token_indices"] == [1, 2, 3, 5, 7]
    close(merged_by_peft(bases[False], out), expected)


@pytest.mark.parametrize("targets", [None, ["wpe"]])
def test_gpt2(targets: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = {"vocab_size": SIZE, "bos_token_id": 0, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=24, **ids)).save_pretrained(
        tmp_path / "base"
    )
    settings = TrainableTokensConfig(token_indices=[3, 1], target_modules=targets, task_type="CAUSAL_LM")
    base, one = tmp_path / "base", trained(load_base(tmp_path / "base"), settings, tmp_path / "tokens", 1)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    plan = composed(ALL, t=one, l=trained(load_base(base), lora, tmp_path / "lora", 2))
    expected = merged_by_peft(base, plan.write(tmp_path / "out"))
    close(load_base(plan.merge(tmp_path / "merged", base_model=base)).state_dict(), expected)
    (key,) = (key for key in expected if key.endswith("wpe.weight" if targets else "wte.weight"))
    close(expected[key], merged_by_peft(base, one)[key])


def test_the_shared_embedding_of_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": SIZE, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "base")
    base = T5ForConditionalGeneration.from_pretrained
    for name, targets in (("all", None), ("encoder", ["encoder.embed_tokens"])):
        settings = TrainableTokensConfig(token_indices=[3, 1], target_modules=targets, task_type="SEQ_2_SEQ_LM")
        trained(base(tmp_path / "base"), settings, tmp_path / name, 1)
    plan = composed([{"expert": "t"}], t=tmp_path / "all")
    out = plan.write(tmp_path / "out")
    assert tensors(out).keys() == tensors(tmp_path / "all").keys()
    expected = pico.merged_by_peft(base(tmp_path / "base"), tmp_path / "all")
    close(pico.merged_by_peft(base(tmp_path / "base"), out), expected)
    close(base(plan.merge(tmp_path / "merged", base_model=tmp_path / "base")).state_dict(), expected)
    with refused(UnsupportedError):  # PEFT would change it for the encoder alone
        composed([{"expert": "t"}], t=tmp_path / "encoder").merge(tmp_path / "apart", base_model=tmp_path / "base")


@TIED_OR_NOT
def test_a_head_with_a_bias(tied: bool, tmp_path: Path) -> None:
    """PEFT's running model leaves the bias out and its merge does not, so only an adapter can be exact."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(vocab_size=SIZE, tie_word_embeddings=tied, **sizes))
    model.lm_head.bias.data = torch.randn(SIZE)
    model.save_pretrained(tmp_path / "base")
    base, tokens = tmp_path / "base", torch.arange(SIZE)[None]
    targets = None if tied else ["lm_head"]
    settings = TrainableTokensConfig(token_indices=[3, 1], target_modules=targets, task_type="CAUSAL_LM")
    folder = trained(load_base(base), settings, tmp_path / "tokens", 1)
    plan = composed([{"expert": "t"}], t=folder)
    written = in_peft(base, plan.write(tmp_path / "out"))
    close(written(tokens).logits.detach(), in_peft(base, folder)(tokens).logits.detach(), depth=2)
    with refused(UnsupportedError):
        plan.merge(tmp_path / "merged", base_model=base)


def test_tokens_beyond_the_base(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    base, folder = bases[True], expert("new", tied=True)
    plan = composed([{"expert": "t"}], base, t=folder)
    assert f"model.resize_token_embeddings({SIZE + 2})" in plan.notes[-1]
    merged = load_base(plan.merge(tmp_path / "merged"))
    assert merged.config.vocab_size == SIZE + 2
    close(merged.state_dict(), merged_by_peft(base, plan.write(tmp_path / "out"), SIZE + 2))
    close(merged.state_dict(), merged_by_peft(base, folder, SIZE + 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_copied_exactly(
    dtype: torch.dtype, expert: Make, bases: dict[bool, Path], tmp_path: Path
) -> None:
    """Rows of one owner have its bits, in an adapter and in full weights of the same dtype."""
    load_base(bases[True]).to(dtype).save_pretrained(tmp_path / "base")
    base, folders = tmp_path / "base", {}
    for name in ("t", "l"):
        own = expert({"t": "default", "l": "lora"}[name], tied=True)
        folders[name] = shutil.copytree(own, tmp_path / name)
        save_file({key: tensor.to(dtype) for key, tensor in tensors(own).items()}, folders[name] / WEIGHTS)
    plan = composed(ALL, base, **folders)
    rows, out = tensors(folders["t"])[KEY], plan.write(tmp_path / "out")
    written = tensors(out)["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert written.dtype == dtype
    assert torch.equal(written, rows)
    alone = composed([{"expert": "t"}], base, t=folders["t"])
    assert torch.equal(tensors(alone.write(tmp_path / "alone"))[KEY], rows)
    for name, kind in (("merged", plan), ("merged alone", alone)):
        stored = load_file(kind.merge(tmp_path / name) / "model.safetensors")[EMBEDDING]
        expected = load_file(base / "model.safetensors")[EMBEDDING]
        expected[[3, 1, 7]] = rows
        assert stored.dtype == dtype
        assert torch.equal(stored, expected)


def test_an_older_config(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    """PEFT 0.15 wrote the same keys without its version."""
    folder = edited(expert("default"), tmp_path / "older", {"peft_version": None, "target_modules": None})
    plan = composed([{"expert": "t"}], t=folder)
    close(merged_by_peft(bases[False], plan.write(tmp_path / "out")), merged_by_peft(bases[False], expert("default")))


WRONG: dict[str, tuple[str, dict[str, Any], type[Exception]]] = {
    "no tokens": ("default", {"token_indices": None}, ExpertError),
    "an empty list": ("default", {"token_indices": []}, ExpertError),
    "texts": ("default", {"token_indices": ["3"]}, ExpertError),
    "a mapping": ("default", {"token_indices": {"embed_tokens": [3, 1, 7]}}, ExpertError),
    "fewer tokens than rows": ("default", {"token_indices": [3, 1]}, ExpertError),
    "a token twice": ("default", {"token_indices": [3, 3, 1]}, UnsupportedError),
    "another target": ("default", {"target_modules": ["wte"]}, ExpertError),
    "no target for two modules": ("both", {"target_modules": None}, ExpertError),
    "rows of a layer": ("layers", {}, UnsupportedError),
    "a later key": ("default", {"peft_version": "0.99.0", "shift_rows": 1}, UnsupportedError),
    "a LoRA": ("lora", {"peft_type": "TRAINABLE_TOKENS", "token_indices": [1]}, ExpertError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_adapters_that_cannot_be_opened(wrong: str, expert: Make, tmp_path: Path) -> None:
    name, config, kind = WRONG[wrong]
    with pytest.raises(kind):
        adapterswap.open_adapter(edited(expert(name), tmp_path / "wrong", config))


def test_rows_beside_whole_weights(expert: Make, tmp_path: Path) -> None:
    whole = {"base_model.model.model.embed_tokens.weight": torch.zeros(SIZE, 16)}
    with refused(ExpertError):
        adapterswap.open_adapter(edited(expert("default"), tmp_path / "wrong", {}, whole))


def test_rows_of_a_tied_head_that_differ(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    own = expert("default", tied=True)
    plan = composed([{"expert": "t"}], t=edited(own, tmp_path / "odd", {}, {TIED: tensors(own)[TIED] + 1}))
    with refused(ExpertError):
        plan.write(tmp_path / "out")
    with refused(ExpertError):
        plan.merge(tmp_path / "merged", base_model=bases[True])


def test_what_one_adapter_cannot_hold(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    tokens, rules = expert("default"), [{"modules": ["q_proj"], "expert": "l"}, {"expert": "t"}]
    plan = composed(rules, t=tokens, l=expert("loha"))
    with refused(UnsupportedError):
        plan.write(tmp_path / "beside")
    expected = merged_by_peft(bases[False], expert("loha"))
    expected[EMBEDDING] = merged_by_peft(bases[False], tokens)[EMBEDDING]
    close(load_base(plan.merge(tmp_path / "merged", base_model=bases[False])).state_dict(), expected)
    full = adapterswap.layer_swap(tokens, expert("saved"), bottom=0, top=0, base_model=str(bases[False]))
    with refused(UnsupportedError):
        full.write(tmp_path / "in full")
    with refused(UnsupportedError, "layout"):
        composed([{"expert": "t"}], t=tokens).write(tmp_path / "portable", layout="portable")
    with refused(UnsupportedError):
        adapterswap.ties(tokens, expert("regex"), density=0.5)


def test_a_head_that_may_be_tied(expert: Make, tmp_path: Path) -> None:
    with refused(UnsupportedError, "base_model"):
        composed([{"expert": "t"}], t=expert("head", tied=True))
    away = edited(expert("head"), tmp_path / "away", {"base_model_name_or_path": "org/away"})
    with refused(BaseModelError, "base_model"):
        adapterswap.compose(Composition(allocation=[{"expert": "t"}], num_layers=LAYERS), {"t": away})  # type: ignore[list-item]


def test_other_operations_name_the_reason(expert: Make, bases: dict[bool, Path], tmp_path: Path) -> None:
    one, two, base = expert("default"), expert("regex"), bases[False]
    with refused(UnsupportedError, "adapter"):
        adapterswap.convert(one, tmp_path / "converted", rank=2)
    with refused(UnsupportedError, match="trained tokens"):
        adapterswap.LiveComposer.from_experts(load_base(base), {"t": one})
    with refused(UnsupportedError, match="tokens"):
        composed([{"expert": "t"}], t=one).export(tmp_path / "out.gguf")
    with refused(UnsupportedError, "other"):
        adapterswap.diff(one, two)
    assert adapterswap.diff(one, one).saved[0].apart == 0
    with refused(ExpertError):
        adapterswap.analyze({"t": one, "l": two})


def test_inspect(expert: Make, run: Callable[..., Any], tmp_path: Path) -> None:
    shown = run("inspect", expert("default"))
    assert "trained tokens in 1 module with 48 parameters" in shown.stdout
    assert "trained in full" not in shown.stdout
    content = json.loads(run("inspect", expert("default"), "--json").stdout)
    assert content["peft_type"] == "TRAINABLE_TOKENS"
    (saved,) = content["saved"]
    assert (saved["name"], saved["tokens"]) == ("model.embed_tokens", [3, 1, 7])
    out = composed(ALL, t=expert("default"), l=expert("regex")).write(tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "1, 3 from t; 7 from 0.5·t + 0.5·l; 20 from l" in card
    assert in_peft(Path(content["base_model"]), out).peft_config["default"].token_indices == [1, 3, 7, 20]
