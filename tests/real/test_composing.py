"""Compositions on the pretrained model, in every place, against plain torch on full weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiers import ALL
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap as asw

from .conftest import EXAMPLE, EXPERTS, deltas, layer_of, logits, with_change

LAYERS = 30
Change = dict[str, torch.Tensor]


def mixed(math: Change, french: Change, share: Any) -> Change:
    """ΔW with the share of the French expert that a layer has; the math expert has the rest."""
    zero = torch.zeros(1, dtype=torch.float64)
    return {
        name: share(layer_of(name)) * french[name] + (1 - share(layer_of(name))) * math.get(name, zero)
        for name in french
    }


MIXED = "math+french@bottom=6,top=2,bottom_transition=2"  # layers of either expert, and of both
SHARES = {
    "math+french@bottom=8,top=0": lambda layer: float(layer < 8),
    MIXED: lambda layer: 1.0 if layer < 6 or layer > 27 else 0.5 if layer < 8 else 0.0,
    "math+french@method=soup": lambda layer: 0.5,
}


@pytest.fixture(scope="module")
def expected(base: Path, prompts: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Composition → logits of full weights."""
    math, french = (deltas(path) for path in EXPERTS.values())
    result = {}
    for name, share in SHARES.items():
        model = AutoModelForCausalLM.from_pretrained(base).eval()
        result[name] = logits(with_change(model, mixed(math, french, share)), prompts)
    return result


def composed(name: str, base: Path) -> asw.Plan:
    composition = asw.parse_composition(name).model_copy(update={"base_model": str(base)})
    return asw.compose(composition, EXPERTS)


def same(actual: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(actual, right, strict=True):
        close(one, other, depth=LAYERS)


def test_live_and_in_peft(
    base: Path, model: Any, prompts: list[torch.Tensor], expected: dict[str, list[torch.Tensor]], tmp_path: Path
) -> None:
    before = logits(model, prompts)
    composer = asw.LiveComposer.from_experts(model, EXPERTS)
    for name, right in expected.items():
        with composer.use(name):
            same(logits(composer.model, prompts), right)
        assert all((one - other).abs().max() > 0.1 for one, other in zip(right, before, strict=True))
    for name in SHARES if ALL else [MIXED]:
        written = composed(name, base).write(tmp_path / "composed", overwrite=True)
        fresh = AutoModelForCausalLM.from_pretrained(base).eval()
        same(logits(PeftModel.from_pretrained(fresh, written).eval(), prompts), expected[name])


def test_merged(
    base: Path, prompts: list[torch.Tensor], expected: dict[str, list[torch.Tensor]], tokenizer: Any, tmp_path: Path
) -> None:
    name = next(iter(SHARES))
    merged = composed(name, base).merge(tmp_path / "merged", base_model=str(base))
    same(logits(AutoModelForCausalLM.from_pretrained(merged).eval(), prompts), expected[name])
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_verify_suggest_and_analyze(base: Path, tmp_path: Path) -> None:
    swap = asw.layer_swap(EXPERTS["math"], EXPERTS["french"], bottom=8, top=0, base_model=str(base))
    written = swap.write(tmp_path / "swap")
    assert asw.verify(written, experts={name: str(path) for name, path in EXPERTS.items()}, base_model=str(base)).equal
    suggestion = asw.suggest(EXPERTS["math"], EXPERTS["french"], base_model=str(base))
    assert 0 <= suggestion.composition["bottom"] + suggestion.composition["top"] <= LAYERS
    analysis = asw.analyze({name: str(path) for name, path in EXPERTS.items()})
    for change, path in zip(analysis.changes, EXPERTS.values(), strict=True):
        norms: dict[int, float] = {}
        for name, delta in deltas(path).items():
            norms[layer_of(name)] = norms.get(layer_of(name), 0.0) + float(delta.square().sum())
        assert change.layer_norms() == pytest.approx({layer: value**0.5 for layer, value in norms.items()}, rel=1e-4)


@pytest.mark.full  # tests/engines/exporting asks llama.cpp about compositions of pico models
def test_in_llama_cpp(
    prompts: list[torch.Tensor], expected: dict[str, list[torch.Tensor]], base: Path, tmp_path: Path
) -> None:
    """A composition in GGUF on the base in 32 bits: the likeliest token and its log-probability."""
    pytest.importorskip("gguf")
    xllamacpp = pytest.importorskip("xllamacpp")
    gguf = tmp_path / "base.gguf"
    command = [sys.executable, EXAMPLE / "base.py", base, "--gguf", gguf, "--outtype", "f32"]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    name = next(iter(SHARES))
    adapter = composed(name, base).export(tmp_path / "swap.gguf", base_model=str(base)).files[0].path
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(gguf), 256, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.fit_params, params.verbosity = False, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    for prompt, right in zip(prompts, expected[name], strict=True):
        request = {"prompt": prompt[0].tolist(), "n_predict": 1, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        (first,) = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        log_probabilities = right[-1].double().log_softmax(-1)
        assert first["id"] == int(log_probabilities.argmax())
        for one in first["top_logprobs"]:
            assert np.isclose(one["logprob"], log_probabilities[one["id"]], atol=5e-3)
