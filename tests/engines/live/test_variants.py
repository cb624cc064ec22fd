"""DoRA, biases of B and modules trained in full, switched live: equal to the composed adapter that PEFT loads."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import CONFIGS, LAYERS, load_base, logits
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap import Composition
from adapterswap.engines.live import LiveComposer, load_expert
from adapterswap.kit.errors import CompositionError, UnsupportedError
from engines.live.conftest import assert_same_tensors, state_of, tensors_of, written_files

Bases = Callable[[str], Path]
Make = Callable[..., dict[str, Path]]

SWAP = "math+swahili@bottom=2,top=1"
BLEND = "math+swahili@bottom=1,top=1,bottom_transition=2,task_weight=3"
NORMS = {"llama": ["lm_head", "norm", "embed_tokens"], "gpt2": ["ln_f", "wpe"], "qwen2": ["lm_head", "mlp"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "in full": {},
}


@pytest.fixture(scope="module")
def made(base: Bases, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made("llama", "DoRA", seed)` is an expert with random numbers in all parameters that PEFT trains."""
    folders: dict[str, Path] = {}

    def make(architecture: str, variant: str, seed: int, **options: Any) -> Path:
        key = repr((architecture, variant, seed, sorted(options.items())))
        if key not in folders:
            targets = CONFIGS[architecture][2] if variant != "lora_bias" else BIASED[architecture]
            if architecture == "qwen2" and variant == "in full":
                targets = ["q_proj", "v_proj"]
            settings = {"r": 2 + seed, "lora_alpha": 6, "use_rslora": seed == 1, "target_modules": targets}
            settings |= {"fan_in_fan_out": architecture == "gpt2", "task_type": "CAUSAL_LM", **VARIANTS[variant]}
            if variant == "in full":
                settings["modules_to_save"] = NORMS[architecture]
            model = get_peft_model(load_base(base(architecture)), LoraConfig(**(settings | options)))
            generator = torch.Generator().manual_seed(seed)
            for _, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.05
            folders[key] = tmp_path_factory.mktemp("expert")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT mistakes the biases of `lora_bias` for empty factors
                model.save_pretrained(folders[key], save_embedding_layers=False)
        return folders[key]

    return make


BIASED = {"gpt2": ["c_attn", "c_fc"], "qwen2": ["q_proj", "v_proj"]}  # PEFT has lora_bias where the base has biases


def loaded(base: Path, adapter: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it may not merge lora_bias
        return logits(PeftModel.from_pretrained(load_base(base), adapter).eval())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("architecture", "variant", "name"),
    [
        ("llama", "DoRA", SWAP),
        ("gpt2", "DoRA", SWAP),
        ("llama", "in full", SWAP),
        ("gpt2", "lora_bias", SWAP),
        ("qwen2", "in full", SWAP),
        ("gpt2", "in full", BLEND),
        ("llama", "in full", BLEND),
    ],
)  # fmt: skip
def test_a_switch_computes_what_the_written_adapter_computes(
    architecture: str, variant: str, name: str, made: Callable[..., Path], base: Bases, tmp_path: Path
) -> None:
    """Loaded by the composer or by PEFT; everything is restored afterwards; saving gives the written bytes."""
    experts = {"math": made(architecture, variant, 1), "swahili": made(architecture, variant, 2)}
    plan = adapterswap.compose(adapterswap.parse_composition(name), experts)
    written = plan.write(tmp_path / "out")
    expected = loaded(base(architecture), written)
    by_peft = PeftModel.from_pretrained(load_base(base(architecture)), experts["math"], adapter_name="math").eval()
    by_peft.load_adapter(experts["swahili"], adapter_name="swahili")
    for composing in (LiveComposer.from_experts(load_base(base(architecture)), experts), LiveComposer(by_peft)):
        model = composing.model
        before, tensors = state_of(model), tensors_of(model)
        for wanted in (name, plan):
            with composing.use(wanted):
                close(logits(model), expected, depth=LAYERS)
                with model.disable_adapter():
                    assert torch.equal(logits(model), logits(load_base(base(architecture))))
                assert not any(parameter.requires_grad for parameter in model.parameters())
                close(logits(model), expected, depth=LAYERS)
        for expert in ("math", "swahili"):
            with composing.use(expert):
                close(logits(model), loaded(base(architecture), experts[expert]), depth=LAYERS)
        assert state_of(model) == before
        assert_same_tensors(tensors_of(model), tensors)
        with composing.use(name):
            saved = composing.save(tmp_path / "saved", overwrite=True)
        if model is not by_peft:
            assert written_files(saved) == written_files(written)
        close(loaded(base(architecture), saved), expected, depth=LAYERS)


def test_kinds_that_one_adapter_cannot_hold_are_switched(made: Callable[..., Path], base: Bases) -> None:
    """DoRA in some layers and plain LoRA in the others, against PEFT's merges of both, layer by layer."""
    experts = {"math": made("llama", "DoRA", 1), "swahili": made("llama", "in full", 2, modules_to_save=None)}
    full = {}
    for name, folder in experts.items():
        full[name] = PeftModel.from_pretrained(load_base(base("llama")), folder).merge_and_unload().state_dict()
    reference = load_base(base("llama"))
    reference.load_state_dict(
        {
            key: full["swahili" if any(f"layers.{n}." in key for n in (0, 1, 5)) else "math"][key]
            for key in reference.state_dict()
        }
    )
    composing = LiveComposer.from_experts(load_base(base("llama")), experts)
    with composing.use(SWAP):
        close(logits(composing.model), logits(reference), depth=LAYERS)
        merged = copy.deepcopy(composing.model).merge_and_unload()
        close(logits(merged), logits(reference), depth=LAYERS)
    with refused(UnsupportedError, "composition", match=r"DoRA"):
        composing.set(BLEND)


def test_a_head_that_one_expert_trained_is_averaged_with_the_base(
    made: Callable[..., Path], base: Bases, tmp_path: Path
) -> None:
    """As `compose` averages it, which needs the base; here the running model provides it."""
    experts = {
        "math": made("llama", "in full", 1, modules_to_save=["lm_head"]),
        "swahili": made("llama", "in full", 2, modules_to_save=None),
    }
    composition = Composition(task="math", language="swahili", bottom=2, top=1, base_model=str(base("llama")))
    expected = loaded(base("llama"), adapterswap.compose(composition, experts).write(tmp_path / "out"))
    composing = LiveComposer.from_experts(load_base(base("llama")), {"swahili": experts["swahili"]})
    with composing.use("swahili"):
        composing.load_expert(experts["math"], "math")
        before = logits(composing.model)
        with composing.use(SWAP):
            close(logits(composing.model), expected, depth=LAYERS)
            composing.set("swahili")
            assert torch.equal(logits(composing.model), before)
        assert torch.equal(logits(composing.model), before)
    with composing.use(SWAP):
        merged = composing.model.merge_and_unload()
        close(logits(merged), expected, depth=LAYERS)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_modules_in_full_take_the_dtype_of_the_base(
    stored: torch.dtype, dtype: torch.dtype, made: Callable[..., Path], base: Bases, tmp_path: Path
) -> None:
    """As PEFT converts them when it loads an expert into a base of another dtype."""
    names = {"math": 1, "swahili": 2}
    experts = {name: shutil.copytree(made("llama", "in full", seed), tmp_path / name) for name, seed in names.items()}
    for folder in experts.values():
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({key: value.to(stored) for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    composing = LiveComposer.from_experts(load_base(base("llama")).to(dtype), experts)
    for name, folder in experts.items():
        model = PeftModel.from_pretrained(load_base(base("llama")).to(dtype), folder)
        with composing.use(name):
            close(logits(composing.model), logits(model.eval()), depth=LAYERS)
        own = composing.model.state_dict()
        for key, tensor in model.state_dict().items():
            if ".modules_to_save." in key:
                assert torch.equal(own[key.replace(".default.", f".{name}.")], tensor)
    with composing.use(BLEND):
        assert logits(composing.model).isfinite().all()


def test_a_module_without_weights_among_those_in_full(tmp_path: Path) -> None:
    """ModernBERT's first layer has an `Identity` in place of a norm, which PEFT wraps but does not save."""
    options: Any = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    options |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    options |= {"cls_token_id": 1, "sep_token_id": 2, "num_labels": 3}
    torch.manual_seed(0)
    kind: Any = transformers.ModernBertForSequenceClassification
    kind(transformers.ModernBertConfig(**options)).save_pretrained(tmp_path / "base")
    experts = {name: tmp_path / name for name in ("math", "swahili")}
    for seed, folder in enumerate(experts.values()):
        config = LoraConfig(target_modules=["Wqkv"], modules_to_save=["attn_norm"], task_type="SEQ_CLS")
        model = get_peft_model(kind.from_pretrained(tmp_path / "base"), config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.05
        model.save_pretrained(folder)
    name = "math+swahili@bottom=1,top=1,outside=task"
    written = adapterswap.compose(adapterswap.parse_composition(name), experts).write(tmp_path / "out")
    composing = LiveComposer.from_experts(kind.from_pretrained(tmp_path / "base"), experts)
    with composing.use(name):
        saved = composing.save(tmp_path / "saved")
        expected = logits(PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), written).eval())
        close(logits(composing.model), expected, depth=3)
    assert written_files(saved) == written_files(written)


def test_rows_of_a_batch(made: Callable[..., Path], base: Bases) -> None:
    """Biases of B are added row by row; weights trained in full must be the same for all rows, and DoRA is refused."""
    experts = {name: made("gpt2", "lora_bias", seed) for name, seed in (("math", 1), ("swahili", 2))}
    composing = LiveComposer.from_experts(load_base(base("gpt2")), experts)
    names = [SWAP, "swahili", "base", "swahili+math@bottom=1,top=1,top_transition=1", "math", BLEND]
    tokens = torch.arange(6 * 5).reshape(6, 5) * 7 % 96
    with torch.no_grad():
        alone = []
        for name, row in zip(names, tokens[:, None], strict=True):
            with composing.use(name):
                alone.append(composing.model(row).logits)
        with composing.use_rows(names):
            close(composing.model(tokens).logits, torch.cat(alone), depth=LAYERS)
    whole = {name: made("llama", "in full", seed) for name, seed in (("math", 1), ("swahili", 2))}
    composing = LiveComposer.from_experts(load_base(base("llama")), whole)
    with composing.use(SWAP):
        expected = logits(composing.model)
    before = state_of(composing.model)
    with composing.use_rows([SWAP, SWAP]):
        close(logits(composing.model), expected, depth=LAYERS)
    with refused(UnsupportedError, "compositions"), composing.use_rows([SWAP, "math"]):
        pass
    assert state_of(composing.model) == before
    composing = LiveComposer.from_experts(load_base(base("llama")), {"math": made("llama", "DoRA", 1)})
    with refused(UnsupportedError), composing.use_rows(["math", "base"]):
        pass


def test_pinned_experts(made: Callable[..., Path], base: Bases) -> None:
    """With a scaling of 0 a bias of B adds nothing; DoRA would still rescale the base's weight."""
    for architecture, variant in (("gpt2", "lora_bias"), ("llama", "in full")):
        experts = {name: made(architecture, variant, seed) for name, seed in (("math", 1), ("swahili", 2))}
        composing = LiveComposer.from_experts(load_base(base(architecture)), experts)
        before, outputs = state_of(composing.model), {}
        for name in (SWAP, BLEND, "base"):
            with composing.use(name):
                outputs[name] = logits(composing.model)
        with composing.pinned():
            for name, output in outputs.items():
                with composing.use(name):
                    close(logits(composing.model), output, depth=LAYERS)
        assert state_of(composing.model) == before
    experts = {"math": made("llama", "DoRA", 1)}
    composing = LiveComposer.from_experts(load_base(base("llama")), experts)
    before = state_of(composing.model)
    with refused(UnsupportedError, "experts"), composing.pinned():
        pass
    assert state_of(composing.model) == before


def test_layers_of_an_expert(made: Callable[..., Path], base: Bases) -> None:
    for variant in ("DoRA", "in full"):
        experts = {name: made("llama", variant, seed) for name, seed in (("math", 1), ("swahili", 2))}
        whole = LiveComposer.from_experts(load_base(base("llama")), experts)
        part = LiveComposer.from_experts(load_base(base("llama")), {"math": experts["math"]})
        part.load_expert(experts["swahili"], "swahili", compositions=[SWAP])
        with part.use(SWAP), whole.use(SWAP):
            assert torch.equal(logits(part.model), logits(whole.model))
        with refused(CompositionError):
            part.set("math+swahili@bottom=3,top=1")


def test_experts_that_peft_cannot_hold_together_are_refused(made: Callable[..., Path], base: Bases) -> None:
    """A module trained in full in one expert and adapted in or inside another; and trained biases of the base."""
    head = made("llama", "in full", 1, modules_to_save=["lm_head"])
    adapted = made("llama", "in full", 2, modules_to_save=None, target_modules=["q_proj", "lm_head"])
    block = made("llama", "in full", 1, modules_to_save=["mlp"], target_modules=["q_proj"])
    inside = made("llama", "in full", 2, modules_to_save=None, target_modules=["up_proj"])
    for pair in ((head, adapted), (adapted, head), (block, inside), (inside, block)):
        composing = LiveComposer.from_experts(load_base(base("llama")), {"math": pair[0]})
        before, tensors = state_of(composing.model), tensors_of(composing.model)
        with refused(UnsupportedError, "expert"):
            composing.load_expert(pair[1], "swahili")
        assert state_of(composing.model) == before
        assert_same_tensors(tensors_of(composing.model), tensors)
    biased = made("qwen2", "in full", 1, modules_to_save=None, bias="lora_only", target_modules=["q_proj"])
    with refused(UnsupportedError, match=r"q_proj\.bias"):
        load_expert(load_base(base("qwen2")), biased, "math")
