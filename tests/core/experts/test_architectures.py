"""Adapters of other families, with towers, experts inside layers and tied embeddings; and hot swaps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import LAYERS, load_base, logits
from importing import loaded
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap.core.model.layers import ModuleName, layer_container
from adapterswap.core.model.sources import Source
from adapterswap.engines.live import with_adapter
from adapterswap.engines.live.loader import load_expert
from adapterswap.kit.errors import ExpertError, UnsupportedError


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.7.self_attn.q_proj", 7, "attention"),
        ("model.layers.7.mlp.experts.3.down_proj", 7, "mlp"),
        ("layers.2.mlp.up_proj", 2, "mlp"),
        ("transformer.h.11.attn.c_attn", 11, "attention"),
        ("transformer.h.0.self_attention.query_key_value", 0, "attention"),
        ("gpt_neox.layers.5.attention.dense", 5, "attention"),
        ("transformer.blocks.3.ffn.up_proj", 3, "mlp"),
        ("model.decoder.layers.1.fc1", 1, "mlp"),
        ("backbone.layers.4.mixer.in_proj", 4, "other"),
        ("lm_head", None, "other"),
        ("model.embed_tokens", None, "other"),
    ],
)
def test_layer_and_kind_follow_from_the_name(name: str, layer: int | None, kind: str) -> None:
    container = layer_container([name])
    assert (ModuleName(name).layer(container), ModuleName(name).kind) == (layer, kind)


def test_the_language_models_layers_among_several_lists() -> None:
    names = ["vision.layers.0.x", "model.language_model.layers.0.x"]
    assert layer_container(names) == "model.language_model.layers"
    assert layer_container(["a.block.0.layer.0.q", "b.block.0.layer.0.q"]) is None
    assert layer_container(["text_encoder.layers.0.q", "text_decoder.layers.0.q", "t2u.encoder.layers.0"]) == "*.layers"
    assert layer_container(["text_encoder.encoder.layer.0.q", "text_decoder.bert.encoder.layer.0.q"]) is None


EXACT = dict.fromkeys(("soup", "swap", "merge"), "exact")
LOST = {"all": "Wrong", "soup": "UnsupportedError", "swap": "UnsupportedError", "merge": "exact"}

PICO = {
    "routers as parameters with two axes": ("CAUSAL_LM", "afmoe", "lora", EXACT),
    "parameters alone, without modules": ("CAUSAL_LM", "gpt_oss", "parameters", EXACT),
    "a mixture of one expert": ("CAUSAL_LM", "hunyuan_v1_moe", "lora", EXACT),
    "q, k and v stored as one": ("SEQ_CLS", "nomic_bert", "lora", {**EXACT, "merge": "UnsupportedError"}),
    "a head trained in full, and biases": ("SEQ_CLS", "bert", "bias", EXACT),
    "a head of several modules, and biases": ("SEQ_CLS", "roberta", "bias", EXACT),
    "stored numbers without an axis": ("CAUSAL_LM", "apertus", "lora", EXACT),
    "three lists of layers": ("SEQ_CLS", "canine", "lora", {**EXACT, "swap": "UnsupportedError"}),
    "an encoder and a decoder with other names": (
        "SEQ_2_SEQ_LM", "encoder-decoder", "lora", {**EXACT, "swap": "UnsupportedError"}
    ),
    "an encoder with a vision tower": ("SEQ_2_SEQ_LM", "t5gemma2", "lora", EXACT),
    "stacks of other names": ("SEQ_2_SEQ_LM", "seamless_m4t", "lora", EXACT),
    "keys that PEFT renames twice": ("CAUSAL_LM", "laguna", "lora", LOST),
    "keys that PEFT renames twice, of weights without a module": ("CAUSAL_LM", "inkling2_text", "lora", LOST),
    "blocks that layers share": ("CAUSAL_LM", "zamba", "lora", {**EXACT, "merge": "UnsupportedError"}),
    "blocks that layers share, with adapters": ("CAUSAL_LM", "zamba2", "lora", {**EXACT, "merge": "UnsupportedError"}),
    "an unknown number of layers": ("SEQ_CLS", "funnel", "lora", {**EXACT, "swap": "BaseModelError"}),
}  # fmt: skip


@pytest.mark.parametrize("case", PICO)
def test_as_in_scripts_architectures(case: str, tmp_path: Path) -> None:
    """Whatever `make architectures` found wrong, composed and merged again and compared with PEFT's ΔW."""
    task, model_type, kind, outcomes = PICO[case]
    architectures = loaded(Path(__file__).parents[3] / "scripts" / "architectures.py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = list(architectures.examine(task, model_type, kind, tmp_path))
    results = {row["operation"]: row["reason"].partition(":")[0] or row["outcome"] for row in rows}
    assert results == outcomes, rows


def test_a_block_that_layers_share_is_not_merged_for_one_of_them(tmp_path: Path) -> None:
    """Also if the adapter changes it only in the layer that stores it."""
    architectures = loaded(Path(__file__).parents[3] / "scripts" / "architectures.py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = architectures.build("CAUSAL_LM", "zamba", tmp_path / "base")
        subject = architectures.Subject(type(base).from_pretrained(tmp_path / "base"), "CAUSAL_LM", "lora", tmp_path)
    expert = subject.experts[0]
    for layers, merges in (("0-1", False), ("2", True)):
        part = adapterswap.write_adapter(adapterswap.slice_layers(expert, layers), tmp_path / layers)
        rules = [{"layers": layers, "expert": "math"}]
        plan = adapterswap.compose(adapterswap.Composition(allocation=rules), {"math": part})
        with nullcontext() if merges else refused(UnsupportedError, match="shared_transf"):
            adapterswap.merge(plan, out_path=tmp_path / f"merged {layers}")


def test_what_peft_would_lose_is_refused_when_loaded_and_left_out_by_a_rule(tmp_path: Path) -> None:
    architectures = loaded(Path(__file__).parents[3] / "scripts" / "architectures.py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = architectures.build("CAUSAL_LM", "laguna", tmp_path / "base").eval()
        subject = architectures.Subject(type(base).from_pretrained(tmp_path / "base"), "CAUSAL_LM", "lora", tmp_path)
        with refused(UnsupportedError, "expert", match="shared_experts"):
            load_expert(type(base).from_pretrained(tmp_path / "base"), subject.experts[0], "math")
        source = Source.find(subject.experts[0], [], what="adapter")
        with refused(ExpertError, "adapter", match="missing adapter keys"):
            with_adapter(type(base).from_pretrained(tmp_path / "base"), source)
        rules = [{"modules": ["shared_experts"], "expert": "base"}, {"expert": "math"}]
        plan = adapterswap.compose(adapterswap.Composition(allocation=rules), {"math": subject.experts[0]})
        model, _ = architectures.load_with_peft(base, adapterswap.write_adapter(plan, tmp_path / "out"))
        expected = {n: 0 * delta if "shared_experts" in n else delta for n, delta in subject.changes[0].items()}
        architectures.compare(architectures.changes_in(model, base), expected)


def test_portable_adapters_are_hot_swapped_without_recompiling(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT's `hotswap_adapter` ignores rank and alpha patterns: right for the portable layout, which has none."""
    folders = [expert(seed=1, r=4), expert(seed=2, r=6, lora_alpha=5)]
    plans = [
        adapterswap.layer_swap(*folders, bottom=2, top=1, bottom_transition=1),
        adapterswap.soup(*folders, task_weight=0.2, language_weight=0.8),
    ]
    outs = [adapterswap.write_adapter(plan, tmp_path / str(i), layout="portable") for i, plan in enumerate(plans)]
    expected = [logits(PeftModel.from_pretrained(load_base(base("llama")), out)) for out in outs]
    model = PeftModel.from_pretrained(load_base(base("llama")), outs[0])
    prepare_model_for_compiled_hotswap(model, target_rank=10)
    compiled = torch.compile(model, backend="eager")
    close(logits(compiled), expected[0], depth=LAYERS)
    with torch.compiler.set_stance("fail_on_recompile"):
        for turn in (1, 0, 1):
            hotswap_adapter(model, outs[turn], adapter_name="default", torch_device="cpu")
            close(logits(compiled), expected[turn], depth=LAYERS)
