"""An extracted adapter holds only what PEFT loads and uses; everything else is reported with the true error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import load_base, weights
from peft import PeftModel
from refusals import refused
from tolerances import close, near

from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.kit.errors import UnsupportedError
from adapterswap.tools.extraction import Extraction, extract
from adapterswap.tools.verification import verify

from .conftest import changed, deltas

LAYERS = 3
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": LAYERS, **TOKENS}
DENSE = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
MLP = ("gate_proj", "up_proj", "down_proj")

# What PEFT cannot adapt, by the ends of the names.
MODELS: dict[str, tuple[transformers.PretrainedConfig, set[str]]] = {
    "qwen2_moe": (
        transformers.Qwen2MoeConfig(**DENSE, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[0]),
        set(),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(**DENSE, **EXPERTS, head_dim=8, mlp_only_layers=[0]),
        {f"layers.0.mlp.{part}" for part in MLP},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config(
            **{**DENSE, "num_key_value_heads": 4}, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
            first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, n_group=1, topk_group=1, n_shared_experts=1,
        ),
        {f"layers.0.mlp.{part}" for part in MLP}
        | {f"layers.{layer}.mlp.shared_experts.{part}" for layer in (1, 2) for part in MLP},
    ),
    "phimoe": (
        transformers.PhimoeConfig(**DENSE, num_local_experts=4),
        {f"layers.{layer}.mlp.router" for layer in range(LAYERS)},
    ),
    "mamba": (
        transformers.MambaConfig(**SMALL, state_size=8),
        {f"layers.{layer}.mixer.{part}" for layer in range(LAYERS) for part in ("dt_proj", "out_proj")},
    ),
    "falcon_mamba": (
        transformers.FalconMambaConfig(**SMALL, state_size=8),
        {f"layers.{layer}.mixer.{part}" for layer in range(LAYERS) for part in ("dt_proj", "out_proj")},
    ),
    "jamba": (
        transformers.JambaConfig(
            **DENSE, num_experts=2, num_experts_per_tok=1, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=2, expert_layer_offset=1,
        ),
        {f"layers.{layer}.mamba.dt_proj" for layer in (0, 2)},
    ),
    "bamba": (transformers.BambaConfig(**DENSE, **MAMBA_2, attn_layer_indices=[1], tie_word_embeddings=False), set()),
    "opt": (
        transformers.OPTConfig(
            **SMALL, ffn_dim=48, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32
        ),
        {"embed_positions"},
    ),
    # A Linear and an embedding with a custom forward, which PEFT adapts correctly.
    "falcon": (transformers.FalconConfig(**SMALL, num_attention_heads=4), set()),
    "gemma3": (transformers.Gemma3TextConfig(**DENSE, head_dim=8), set()),
}  # fmt: skip
EMBEDDINGS = {"opt", "gemma3", "qwen3_moe"}


@pytest.fixture(scope="module", params=MODELS)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Extraction]:
    """The model's name, the folder with `base`, `full` and the adapter `out`, and the report at full rank."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[request.param][0]).save_pretrained(folder / "base")
    changed(load_base(folder / "base"), 1).save_pretrained(folder / "full")
    embeddings = request.param in EMBEDDINGS
    return (
        request.param,
        folder,
        extract(folder / "full", folder / "base", folder / "out", rank=128, embeddings=embeddings),
    )


def answers(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 96
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def test_peft_uses_the_whole_adapter(cut: tuple[str, Path, Extraction]) -> None:
    """Without a warning, it answers as the base with the fine-tune's weights in the adapter's modules."""
    _, folder, found = cut
    reference, full = load_base(folder / "base"), load_base(folder / "full").state_dict()
    for module in found.modules:
        reference.get_submodule(module.name).weight.data.copy_(full[f"{module.name}.weight"])
    with quiet_peft():
        adapted = PeftModel.from_pretrained(load_base(folder / "base"), folder / "out")
    expected = answers(reference)
    assert float((expected - answers(load_base(folder / "base"))).abs().max()) > 0.01
    close(answers(adapted), expected, depth=4 * LAYERS)  # also the factorisation of each weight


def test_modules_that_peft_cannot_adapt_are_named(cut: tuple[str, Path, Extraction]) -> None:
    name, folder, found = cut
    named = {each.name for each in found.lost if each.reason == "modules that PEFT cannot adapt"}
    wanted = MODELS[name][1]
    assert len(named) == len(wanted)
    assert all(any(each.endswith(f".{end}.weight") for end in wanted) for each in named)
    card = (folder / "out" / "README.md").read_text().replace("\\", "")  # without what escapes Markdown
    for each in named:
        assert each.replace(".0.", ".*.").replace(".1.", ".*.").replace(".2.", ".*.") in card


def test_the_error_over_everything(cut: tuple[str, Path, Extraction]) -> None:
    """‖W_full - W_base - ΔW‖ / ‖W_full - W_base‖ over all stored tensors, from the files alone."""
    _, folder, found = cut
    full, base, held = weights(folder / "full"), weights(folder / "base"), deltas(folder / "out")
    whole = missing = 0.0
    for key, tensor in full.items():
        change = tensor.double() - base[key].double()
        whole += float(change.square().sum())
        delta = held.get(key.removesuffix(".weight"), torch.zeros(()))
        rest = change - (delta.T if delta.shape != change.shape and delta.ndim == 2 else delta)
        missing += float(rest.square().sum())
    assert found.whole_error == near((missing / whole) ** 0.5, depth=2, scale=1.0)
    assert found.whole_error > found.error


def test_it_verifies(cut: tuple[str, Path, Extraction]) -> None:
    _, folder, _ = cut
    assert verify(folder / "out", {"full": folder / "full"}, base_model=str(folder / "base")).equal


def test_selecting_only_modules_that_peft_cannot_adapt_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS["mamba"][0]).save_pretrained(tmp_path / "base")
    changed(load_base(tmp_path / "base"), 1).save_pretrained(tmp_path / "full")
    with refused(UnsupportedError, "modules", match=r"mixer\.out_proj"):
        extract(tmp_path / "full", tmp_path / "base", tmp_path / "out", rank=4, modules=["out_proj"])
    assert not (tmp_path / "out").exists()


def test_the_commands_report(tmp_path: Path, run: Any) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS["mamba"][0]).save_pretrained(tmp_path / "base")
    changed(load_base(tmp_path / "base"), 1).save_pretrained(tmp_path / "full")
    arguments = ["extract", tmp_path / "full", "--base-model", tmp_path / "base", "--rank", 128, "-o", tmp_path / "out"]
    shown = run(*arguments, "--dry-run", exit_code=0)
    assert "6 modules that PEFT cannot adapt (backbone.layers.*.mixer.dt_proj.weight, backbone" in shown.stderr
    assert "over everything that the fine-tune changed" in shown.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = extract(tmp_path / "full", tmp_path / "base", tmp_path / "out", rank=128)
    assert f"relative error {result.whole_error:.4f} over everything" in shown.stderr
