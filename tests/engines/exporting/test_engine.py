"""llama.cpp with exported adapters answers as PEFT does: same greedy tokens, same log-probabilities."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adapterswap as asw

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from adapterswap.engines.serving import Cache, Manifest
from adapterswap.engines.serving.pieces import PieceComposer
from engines.exporting.bases import PICOS, adapted, load
from engines.exporting.conftest import Bases, Experts
from engines.exporting.engine import Answer, Engine, reference

PROMPTS = ([1, 140, 150, 5, 160, 170, 180, 40], [1, 33, 34, 35, 36, 180])

NAMES = ("math", "swahili")

# ggml's CPU kernels look up GELU in a half-precision table, with and without adapters; they compute SiLU.
GELU = ("gemma2", "gemma3", "falcon-7b", "falcon-40b", "gpt2", "neox")


def same(actual: Answer, expected: Answer, name: str = "llama") -> None:
    __tracebackhide__ = True
    assert actual.tokens == expected.tokens[: len(actual.tokens)]
    apart = np.abs(actual.logprobs - expected.logprobs[: len(actual.tokens)]).max()
    assert apart <= (3e-3 if name in GELU else 5e-5), apart


def apart(actual: Answer, expected: Answer) -> float:
    """The root mean square of the differences of log-probabilities."""
    return float(np.sqrt(np.square(actual.logprobs - expected.logprobs[: len(actual.tokens)]).mean()))


def differ(actual: Answer, expected: Answer) -> float:
    """The difference of the first token's log-probabilities, where the prompts are still the same."""
    return float(np.abs(actual.logprobs[0] - expected.logprobs[0]).max())


@pytest.mark.parametrize("name", PICOS)
def test_an_expert_of_each_architecture(name: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    base, gguf = bases(name)
    expert = experts(name)
    exported = asw.export(expert, tmp_path / "math.gguf", base_model=base)
    assert len(exported.files) == 1
    engine, plain, model = Engine(gguf, [exported.path]), Engine(gguf), adapted(base, expert)
    for prompt in PROMPTS:
        expected = reference(model, prompt)
        same(plain.answer(prompt), reference(load(base), prompt), name)  # the base alone is right
        same(engine.answer(prompt), expected, name)
        assert differ(plain.answer(prompt), expected) > 0.1


class TableGelu(torch.nn.Module):
    """GELU as ggml's CPU kernels compute it: the tanh formula of x in float16, rounded to float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GELU)
def test_the_remaining_difference_with_gelu_is_ggmls_table(
    name: str, bases: Bases, experts: Experts, tmp_path: Path
) -> None:
    """With the same GELU in transformers, most of the difference disappears."""
    base, gguf = bases(name)
    expert = experts(name)
    exported = asw.export(expert, tmp_path / "math.gguf", base_model=base)
    found, model = Engine(gguf, [exported.path]).answer(PROMPTS[0]), adapted(base, expert)
    exact = apart(found, reference(model, PROMPTS[0]))
    for module in list(model.modules()):
        for called in [name for name, _ in module.named_children()]:
            if called in ("act", "act_fn"):
                setattr(module, called, TableGelu())
    # The rest is numbers at a rounding boundary, which the last bits of earlier results push to either side.
    assert apart(found, reference(model, PROMPTS[0])) < 0.5 * exact


def composed(plan: asw.Plan, base: Path, folder: Path, **form: Any) -> torch.nn.Module:
    """The composition as PEFT runs it from an adapter's folder."""
    return adapted(base, plan.write(folder, **form))


# rsLoRA with plain LoRA, other ranks, other scales, patterns that differ between modules.
MIXED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rsLoRA": ({}, {"seed": 2}),
    "ranks": ({"r": 4}, {"seed": 2, "r": 16, "lora_alpha": 8}),
    "plain beside rsLoRA": ({"use_rslora": False, "lora_alpha": 24}, {"seed": 2}),
    "patterns": (
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 16}, "alpha_pattern": {"v_proj": 40}},
        {"seed": 2, "use_rslora": False, "alpha_pattern": {"down_proj": 3}},
    ),
    "some modules": ({"target_modules": ["q_proj", "v_proj"]}, {"seed": 2}),
}


@pytest.mark.parametrize("case", MIXED)
def test_compositions(case: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    base, gguf = bases("llama")
    math, swahili = (experts("llama", name, **options) for name, options in zip(NAMES, MIXED[case], strict=True))
    plan = asw.layer_swap(math, swahili, bottom=2, top=1, bottom_transition=1, language_weight=2)
    engine = Engine(gguf, [plan.export(tmp_path / "swap.gguf").path])
    model = composed(plan, base, tmp_path / "swap")
    for prompt in PROMPTS:
        same(engine.answer(prompt), reference(model, prompt))


@pytest.mark.parametrize("name", ["llama", "falcon-40b", "gpt2", "gemma3"])
def test_a_shell_and_a_core_are_a_swap_at_request_time(
    name: str, bases: Bases, experts: Experts, tmp_path: Path
) -> None:
    base, gguf = bases(name)
    math, swahili = experts(name), experts(name, "swahili", seed=2, r=4)
    shell = asw.slice_layers(swahili, "0-1,5").export(tmp_path / "shell.gguf")
    core = asw.slice_layers(math, "2-4").write(tmp_path / "core")
    files = [shell.path, asw.export(core, tmp_path / "core.gguf").path]  # a slice that was written before
    model = composed(asw.layer_swap(math, swahili, bottom=2, top=1), base, tmp_path / "swap")
    same(Engine(gguf, files).answer(PROMPTS[0]), reference(model, PROMPTS[0]), name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PICOS)
def test_pieces_are_any_layer_swap_or_blend_at_request_time(
    name: str, bases: Bases, experts: Experts, tmp_path: Path
) -> None:
    base, gguf = bases(name)
    math, swahili = experts(name), experts(name, "swahili", seed=2, r=4, lora_alpha=3)
    exported = [asw.export(expert, tmp_path / expert.name, pieces=True) for expert in (math, swahili)]
    assert all([file.layer for file in one.files] == list(range(6)) for one in exported)
    engine = Engine(gguf, [(file.path, 0.0) for one in exported for file in one.files])
    plans = {
        "swap": asw.layer_swap(math, swahili, bottom=2, top=1),
        "transition": asw.layer_swap(math, swahili, bottom=1, top=1, top_transition=1, task_weight=3),
        "soup": asw.soup(math, swahili),
    }
    for called, plan in plans.items():
        scales: dict[int, float] = {}
        for slot in plan:
            assert slot.layer is not None
            for term in slot.terms:
                scales[slot.layer + 6 * (term.expert == "swahili")] = term.coefficient
        model = composed(plan, base, tmp_path / f"{called}-composed")
        for prompt in PROMPTS:
            same(engine.answer(prompt, scales=scales), reference(model, prompt), name)
    same(engine.answer(PROMPTS[0]), reference(load(base), PROMPTS[0]), name)  # the scales at the start


def test_a_chain_is_served_by_name(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """Both adapters of the chain count in its layers; the reference is PEFT's merge of one after the other."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base, gguf = bases("llama")
    first, swahili = experts("llama"), experts("llama", "swahili", seed=2, r=4)
    merged = PeftModel.from_pretrained(load(base), first).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    model = get_peft_model(load(tmp_path / "merged"), LoraConfig(r=2, target_modules=PICOS["llama"].targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "top", save_embedding_layers=False)
    chain = {"chain": (str(first), str(tmp_path / "top"))}
    manifest = Manifest(experts={"math": chain, "swahili": str(swahili)})
    composer = PieceComposer(manifest, str(base), Cache(tmp_path / "cache"))
    composer.write()
    engine = Engine(gguf, [(piece.path, 0.0) for piece in composer.pieces])
    both = model.merge_and_unload()
    same(engine.answer(PROMPTS[0], scales=dict(composer.scales("math"))), reference(both, PROMPTS[0]))
    swap, outer = both.state_dict(), adapted(base, swahili).merge_and_unload().state_dict()
    both.load_state_dict({name: outer[name] if re.search(r"layers\.[015]\.", name) else swap[name] for name in swap})
    scales = composer.scales("math+swahili@bottom=2,top=1")
    same(engine.answer(PROMPTS[0], scales=dict(scales)), reference(both, PROMPTS[0]))


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-7b"])
def test_attention_and_mlp_are_separate_pieces(name: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """A partition: attention from one expert, the middle layers' MLPs from the other."""
    base, gguf = bases(name)
    math, swahili = experts(name), experts(name, "swahili", seed=2, r=4)
    exported = [asw.export(expert, tmp_path / expert.name, pieces="kind") for expert in (math, swahili)]
    files = [file for one in exported for file in one.files]
    assert {(file.layer, file.kind) for file in files} == {(i, kind) for i in range(6) for kind in ("attention", "mlp")}
    plan = asw.compose("math+swahili@partition=A", {"math": math, "swahili": swahili})
    owners = {(slot.layer, slot.kind): slot.owner for slot in plan}
    places = enumerate((expert, file) for expert, one in zip(NAMES, exported, strict=True) for file in one.files)
    scales = {place: float(owners[file.layer, file.kind] == expert) for place, (expert, file) in places}
    model = composed(plan, base, tmp_path / "composed")
    engine = Engine(gguf, [(file.path, 0.0) for file in files])
    same(engine.answer(PROMPTS[0], scales=scales), reference(model, PROMPTS[0]), name)


def test_zones_of_a_composition_are_files(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """All files at scale 1 give the composition; if one zone is left out, its layers equal the base."""
    base, gguf = bases("llama")
    math, swahili = experts("llama"), experts("llama", "swahili", seed=2, r=4)
    plan = asw.layer_swap(math, swahili, bottom=1, top=2, bottom_transition=2)
    exported = plan.export(tmp_path / "zones", pieces="zone")
    assert [file.path.name for file in exported.files] == [
        "zone-00-swahili.gguf", "zone-01-02-math+swahili.gguf", "zone-03-math.gguf", "zone-04-05-swahili.gguf",
    ]  # fmt: skip
    engine = Engine(gguf, [(file.path, 0.0) for file in exported.files])
    same(
        engine.answer(PROMPTS[0], scales=dict.fromkeys(range(4), 1.0)),
        reference(composed(plan, base, tmp_path / "all"), PROMPTS[0]),
    )
    without = asw.slice_layers(tmp_path / "all", "0-2,4-5").write(tmp_path / "some")
    expected = reference(adapted(base, without), PROMPTS[0])
    same(engine.answer(PROMPTS[0], scales={0: 1.0, 1: 1.0, 3: 1.0}), expected)


def test_a_portable_composition_and_a_truncated_one(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    base, gguf = bases("llama")
    math, swahili = experts("llama"), experts("llama", "swahili", seed=2, r=4)
    portable = asw.soup(math, swahili).write(tmp_path / "portable", layout="portable")
    ties = asw.ties(math, swahili, density=0.5)
    cases = {
        portable: asw.export(portable, tmp_path / "portable.gguf"),
        ties.write(tmp_path / "ties", max_rank=6): ties.export(tmp_path / "ties.gguf", max_rank=6),
    }
    for folder, exported in cases.items():
        same(Engine(gguf, [exported.path]).answer(PROMPTS[0]), reference(adapted(base, folder), PROMPTS[0]))


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "neox", "phi3", "falcon-40b"]
)
def test_an_embedding_and_a_head(name: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    untied = {"tie_word_embeddings": False}
    base, gguf = bases(name, **untied)
    embedding = {"neox": "embed_in", "falcon-40b": "word_embeddings"}.get(name, "embed_tokens")
    expert = experts(name, target_modules=[*PICOS[name].targets, embedding, "lm_head"], r=4, base_options=untied)
    exported = asw.export(expert, tmp_path / "math.gguf")
    pieces = asw.export(expert, tmp_path / "pieces", pieces=True)
    assert [file.path.name for file in pieces.files] == [
        *(f"layer-0{layer}.gguf" for layer in range(6)),
        "outside.gguf",
    ]
    for files in ([exported.path], [file.path for file in pieces.files]):
        same(Engine(gguf, files).answer(PROMPTS[0]), reference(adapted(base, expert), PROMPTS[0]), name)


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_a_mixture(name: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """An expert, a swap with a transition (concatenated ranks, other scales), and pieces at request time."""
    base, gguf = bases(name)
    math = experts(name, target_parameters=FUSED, r=4)
    swahili = experts(name, "swahili", seed=2, target_parameters=FUSED, r=2, lora_alpha=3)
    exported = asw.export(math, tmp_path / "math.gguf")
    expected = reference(adapted(base, math), PROMPTS[0])
    same(Engine(gguf, [exported.path]).answer(PROMPTS[0]), expected, name)
    attention = experts(name, r=4)  # the same without the experts' modules, to show that these matter
    assert differ(Engine(gguf, [asw.export(attention, tmp_path / "a.gguf").path]).answer(PROMPTS[0]), expected) > 0.05
    plan = asw.layer_swap(math, swahili, bottom=2, top=1, bottom_transition=1, language_weight=2)
    model = composed(plan, base, tmp_path / "swap", layout="portable")  # PEFT warns of patterns for parameters
    swap = reference(model, PROMPTS[0])
    same(Engine(gguf, [plan.export(tmp_path / "swap.gguf").path]).answer(PROMPTS[0]), swap, name)
    files = [
        (one, file) for one in (math, swahili) for file in asw.export(one, tmp_path / one.name, pieces="kind").files
    ]
    shares = {(slot.layer, slot.kind, term.expert): term.coefficient for slot in plan for term in slot.terms}
    scales = {
        place: shares.get((file.layer, file.kind, one.name), 0.0)  # type: ignore[arg-type]
        for place, (one, file) in enumerate(files)
    }
    engine = Engine(gguf, [(file.path, 0.0) for _, file in files])
    same(engine.answer(PROMPTS[0], scales=scales), swap, name)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_shorter_numbers(outtype: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """The factors are rounded once: the answers move by about the size of that rounding."""
    base, gguf = bases("llama")
    expert = experts("llama", r=32)
    exported = asw.export(expert, tmp_path / "math.gguf", outtype=outtype)
    found, expected = (
        Engine(gguf, [exported.path]).answer(PROMPTS[0], 1),
        reference(adapted(base, expert), PROMPTS[0], 1),
    )
    largest = {"f16": 0.01, "bf16": 0.06, "q8_0": 0.1}[outtype]
    assert 0 < np.abs(found.logprobs - expected.logprobs).max() < largest


def test_the_stock_converter_is_off_by_the_root_of_the_rank(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """llama.cpp's own converter writes lora_alpha, which its engine divides by r; rsLoRA divides by √r."""
    base, gguf = bases("llama")
    expert = experts("llama", r=16)
    ours = asw.export(expert, tmp_path / "ours.gguf")
    content = ours.path.read_bytes()
    place = content.index(b"adapter.lora.alpha") + len("adapter.lora.alpha") + 4
    assert struct.unpack_from("<f", content, place)[0] == np.float32(16 * 16**0.5)  # α·√r
    stock = tmp_path / "stock.gguf"
    stock.write_bytes(content[:place] + struct.pack("<f", 16.0) + content[place + 4 :])
    expected = reference(adapted(base, expert), PROMPTS[0])
    same(Engine(gguf, [ours.path]).answer(PROMPTS[0]), expected)
    same(Engine(gguf, [(stock, 4.0)]).answer(PROMPTS[0]), expected)  # √16 times as much
    assert differ(Engine(gguf, [stock]).answer(PROMPTS[0]), expected) > 0.1


@pytest.mark.parametrize("damage", ["architecture", "depth", "truncated"])
def test_llama_cpp_refuses_what_does_not_fit(damage: str, bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """A LoRA of another architecture, of a deeper base, or cut off in the middle never loads."""
    gguf = bases("qwen2" if damage == "architecture" else "llama")[1]
    deeper = {"base_options": {"num_hidden_layers": 8}} if damage == "depth" else {}
    path = asw.export(experts("llama", **deeper), tmp_path / "math.gguf").path
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)load|fail|lora|model"):
        Engine(gguf, [path])
