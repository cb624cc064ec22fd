"""Weights stored in×out: the base's modules decide, not an adapter's `fan_in_fan_out`.

All sizes in these models are equal, vocabulary and positions included, so that shapes give no hint.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import weights
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from pico_models import in_peft, trained
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap.core.model.checkpoints import Checkpoint, StoredTensor, read_shards
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.model.sources import Source
from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import BaseModelError
from core.merging.conftest import loaded

WIDTH, LAYERS = 32, 4
EVERYTHING = ["c_attn", "c_proj", "c_fc", "wte", "lm_head"]
MIXTURES = [
    ["c_attn"], ["c_proj"], ["attn.c_proj", "lm_head"], ["c_fc", "lm_head"], ["mlp.c_proj", "wte"], ["lm_head"],
    EVERYTHING,
]  # fmt: skip


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`square(tied=…, n_inner=…)` is the folder of a pico GPT-2 with a vocabulary as large as its width."""
    made: dict[tuple[bool, int], Path] = {}

    def make(*, tied: bool = False, n_inner: int = 4 * WIDTH) -> Path:
        if (tied, n_inner) not in made:
            torch.manual_seed(0)
            config = transformers.GPT2Config(
                vocab_size=96 if tied else WIDTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=WIDTH,
                n_inner=n_inner, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
            )  # fmt: skip
            model = transformers.GPT2LMHeadModel(config)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
            made[tied, n_inner] = tmp_path_factory.mktemp("square")
            model.save_pretrained(made[tied, n_inner])
        return made[tied, n_inner]

    return make


@pytest.fixture
def lora(tmp_path: Path) -> Callable[..., Path]:
    """`lora(base, targets, seed=1)` is a random adapter of that base, as PEFT saves it by default."""

    def make(base: Path, targets: list[str], *, seed: int, **options: Any) -> Path:
        settings = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": targets, **options}
        folder = tmp_path / f"expert-{seed}"
        return trained(base, LoraConfig(**settings), folder, seed=seed, scale=0.1, save_embedding_layers=False)

    return make


def deltas(model: PeftModel) -> dict[str, torch.Tensor]:
    """PEFT's own ΔW by the name of the weight, each as the model stores it."""
    return {
        f"{name.removeprefix('base_model.model.')}.weight": module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def answers(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 7 % WIDTH
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("targets", MIXTURES, ids="+".join)
def test_merge_equals_peft(targets: list[str], square: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    base = square()
    adapter = lora(base, targets, seed=1)
    original = weights(base)
    merged = weights(adapterswap.merge(adapter, base, out_path=tmp_path / "out"))
    added = deltas(in_peft(base, adapter))
    assert added.keys() <= merged.keys() == original.keys()
    for name, tensor in original.items():
        if name not in added:
            assert torch.equal(merged[name], tensor), name
            continue
        assert float(added[name].abs().max()) > 0.01
        close(merged[name], tensor + added[name], name=name)


@pytest.mark.parametrize("targets", [["lm_head", "c_proj"], ["wte", "c_proj"], EVERYTHING], ids="+".join)
def test_a_tied_head(targets: list[str], square: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    base = square(tied=True)
    adapter = lora(base, targets, seed=1)
    merged = loaded(adapterswap.merge(adapter, base, out_path=tmp_path / "out"))
    close(answers(merged), answers(in_peft(base, adapter)), depth=LAYERS)


@pytest.mark.parametrize("n_inner", [WIDTH, 2 * WIDTH])
def test_swaps_of_unlike_experts(n_inner: int, square: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    """Their flags differ, since PEFT saves that of the last module: composed, merged and live, they give one model."""
    base = square(n_inner=n_inner)
    task, language = lora(base, ["c_attn", "c_proj", "c_fc"], seed=1), lora(base, EVERYTHING, seed=2)
    flags = [json.loads((path / "adapter_config.json").read_text())["fan_in_fan_out"] for path in (task, language)]
    assert flags == [True, False]
    plan = adapterswap.layer_swap(task, language, bottom=1, top=1)
    original, one, other = weights(base), deltas(in_peft(base, task)), deltas(in_peft(base, language))
    merged = weights(adapterswap.merge(plan, base, out_path=tmp_path / "merged"))
    composed = deltas(in_peft(base, adapterswap.write_adapter(plan, tmp_path / "composed")))
    for name, tensor in original.items():
        layer = re.search(r"\.h\.(\d)\.", name)
        nothing = torch.zeros_like(tensor)
        if layer is None:
            wanted = (one.get(name, nothing) + other.get(name, nothing)) / 2
        else:
            wanted = (other if layer[1] in "03" else one).get(name, nothing)
        close(merged[name], tensor + wanted, name=name)
        close(composed.get(name, nothing), wanted, name=name)
    assert composed.keys() == other.keys()

    with quiet_peft(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out")
        composer = LiveComposer.from_experts(loaded(base), {"task": task, "language": language})
    with composer.use("task+language@bottom=1,top=1"):
        live = answers(composer.model)
    close(live, answers(loaded(tmp_path / "merged")), depth=LAYERS)


def test_without_the_head_peft_loads_it_without_a_warning(
    square: Callable[..., Path], lora: Any, tmp_path: Path
) -> None:
    base = square()
    task, language = lora(base, ["c_attn"], seed=1), lora(base, ["c_attn", "lm_head"], seed=2)
    rules = [{"modules": ["lm_head"], "expert": "base"}, {"layers": "0", "expert": "b"}, {"expert": "a"}]
    composition = adapterswap.Composition(allocation=rules)
    plan = adapterswap.compose(composition, {"a": task, "b": language})
    out = adapterswap.write_adapter(plan, tmp_path / "out")
    with quiet_peft():
        result = deltas(PeftModel.from_pretrained(loaded(base), out))
    one, other = deltas(in_peft(base, task)), deltas(in_peft(base, language))
    for name, delta in result.items():
        close(delta, (other if ".h.0." in name else one)[name], name=name)
    assert len(result) == LAYERS


@pytest.mark.parametrize("saved", ["attn.c_proj", "lm_head", "wte"])
def test_modules_trained_in_full(saved: str, square: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    base = square()
    adapter = lora(base, ["c_attn"], seed=1, modules_to_save=[saved])
    merged = loaded(adapterswap.merge(adapter, base, out_path=tmp_path / "out"))
    close(answers(merged), answers(in_peft(base, adapter)), depth=LAYERS)
    changed = [name for name, tensor in weights(base).items() if not torch.equal(tensor, merged.state_dict()[name])]
    assert any(saved in name for name in changed)


def test_a_model_that_transformers_does_not_know(square: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    """Shapes reveal Conv1D: non-square weights are merged correctly, square ones are refused."""
    base = square()
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "model.safetensors").symlink_to(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "jais", "architectures": ["JAISLMHeadModel"], "auto_map": {"AutoConfig": "x.Y"}}
    (strange / "config.json").write_text(json.dumps(config))
    added = deltas(in_peft(base, lora(base, ["c_attn"], seed=1)))
    merged = weights(adapterswap.merge(tmp_path / "expert-1", strange, out_path=tmp_path / "out"))
    for name, delta in added.items():
        close(merged[name], weights(base)[name] + delta, name=name)
    with refused(BaseModelError, "base_model"):
        adapterswap.merge(lora(base, ["attn.c_proj"], seed=2), strange, out_path=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_model_types_with_conv1d_in_transformers() -> None:
    """Read from its source: a type that a later version adds must be added to ours."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    from adapterswap.core.model.architectures import ARCHITECTURES

    models = Path(transformers.__file__).parent / "models"
    using = [path for path in models.glob("*/modeling_*.py") if re.search(r"\bConv1D\(\w", path.read_text())]
    using = [path for path in using if "SeparableConv1D(" not in path.read_text()]
    folders = {path.parent.name for path in using}
    kinds = [kind for kind in CONFIG_MAPPING_NAMES if model_type_to_module_name(kind) in folders]
    configs = {CONFIG_MAPPING_NAMES[kind] for kind in kinds}
    known = {kind for kind, config in CONFIG_MAPPING_NAMES.items() if config in configs}  # also types that share one
    assert known - {"clvp", "clvp_encoder"} == {kind for kind, row in ARCHITECTURES.items() if row.has_conv1d}


def _opened(folder: Path) -> Checkpoint:
    """As `open_checkpoint`, which refuses models that have more than one list of layers."""
    shards = read_shards(folder)
    parameters = {
        name: StoredTensor(name, name.rpartition(".")[0], None, "other", tensor, shard.path)
        for shard in shards
        for name, tensor in shard.tensors.items()
    }
    config = json.loads((folder / "config.json").read_text())
    return Checkpoint(Source(folder, folder.name), config, shards, parameters, None)


SMALL = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 16, "n_inner": 16}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, SMALL),
    "openai-gpt": (transformers.OpenAIGPTConfig, transformers.OpenAIGPTLMHeadModel, SMALL),
    "imagegpt": (transformers.ImageGPTConfig, transformers.ImageGPTForCausalImageModeling, SMALL),
    "decision_transformer": (
        transformers.DecisionTransformerConfig,
        transformers.DecisionTransformerModel,
        {"hidden_size": 16, **SMALL},
    ),
    "clvp_decoder": (
        transformers.ClvpDecoderConfig,
        transformers.ClvpForCausalLM,
        {**{key: SMALL[key] for key in ("n_inner", "vocab_size")}, "hidden_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 16, "num_mel_attn_blocks": 1, "feature_size": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_as_transformers_builds_it(kind: str, tmp_path: Path) -> None:
    """For models saved by transformers, the orientation of every weight is known, even if all are square."""
    config, model_class, options = MODELS[kind]
    model = model_class(config(**options))
    model.save_pretrained(tmp_path)
    checkpoint = _opened(tmp_path)
    found = {key for key in checkpoint.parameters if checkpoint.is_transposed(key)}
    conv1d = [module for module in model.modules() if isinstance(module, transformers.pytorch_utils.Conv1D)]
    assert conv1d
    tensors = weights(tmp_path)
    assert len(found) == len(conv1d)
    for module in conv1d:
        assert any(torch.equal(tensors[key], module.weight) for key in found)


def test_transformers_is_imported_only_if_needed(model: Callable[..., Path], lora: Any, tmp_path: Path) -> None:
    """Qwen2 has square weights with biases; no other weight of it is a Conv1D's."""
    base = model("qwen2")
    adapter = lora(base, ["q_proj", "o_proj"], seed=1)
    code = (
        "import sys, adapterswap\n"
        f"adapterswap.merge({str(adapter)!r}, {str(base)!r}, out_path={str(tmp_path / 'out')!r})\n"
        "assert 'torch' in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
