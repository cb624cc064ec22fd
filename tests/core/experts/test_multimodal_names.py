"""Adapters of multimodal models under the names of three generations of transformers, in every pair and order.

Before 4.52 the language model was `language_model.model`, until 4.57 a CLIP tower was `vision_tower.vision_model`, and
transformers 5 has neither. The reference is PEFT's ΔW of each expert under today's names, composed module by module.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from pico_models import in_peft, trained
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap import LiveComposer
from adapterswap.kit.errors import BaseModelError
from core.matrix.architectures import ARCHITECTURES, LAYERS, build

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
NAMES = ("llava", "gemma3", "qwen2_vl", "mistral3", "smolvlm")
TOWER = (r"vision_tower\.encoder\.", "vision_tower.vision_model.encoder.")  # CLIP and SigLIP until 4.57
# The rules that turn a name of today into an older one, in order.
BEFORE_4_52: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2_vl": ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    "smolvlm": (),
} | dict.fromkeys(
    ("llava", "gemma3", "mistral3"),
    ((r"^model\.language_model\.", "language_model.model."), (r"^model\.(?=vision|multi)", ""), TOWER),
)
UNTIL_4_57 = dict.fromkeys(("llava", "gemma3"), (TOWER,))
GENERATIONS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "4.51": BEFORE_4_52, "4.57": UNTIL_4_57, "5": {}
}  # fmt: skip


def under_names(source: Path, out: Path, rename: Callable[[str], str]) -> Path:
    """A copy of an adapter with other keys. Its config targets the last parts of names, as most adapters' does."""
    shutil.copytree(source, out)
    tensors = load_file(source / WEIGHTS)
    save_file({PREFIX + rename(key.removeprefix(PREFIX)): tensor for key, tensor in tensors.items()}, out / WEIGHTS)
    return out


class World:
    """A base, and two experts on all its linear layers under the names of each generation."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.architecture, self.folder = name, ARCHITECTURES[name], folder
        build(self.architecture).save_pretrained(folder / "base")
        self.base = folder / "base"
        self.experts: dict[tuple[str, str], Path] = {}
        self.deltas = {}
        for seed, role in enumerate(("task", "language")):
            config = LoraConfig(r=2, use_rslora=True, target_modules="all-linear")
            trained(self.load(), config, folder / role, seed=seed, scale=0.1)
            self.deltas[role] = self.deltas_of(folder / role)
            for version, rules in GENERATIONS.items():
                new = folder / f"{role}-{version}"
                self.experts[role, version] = under_names(folder / role, new, renaming(rules.get(name, ())))

    def load(self) -> Any:
        return self.architecture.model_class.from_pretrained(self.base, dtype=torch.float32).eval()

    def deltas_of(self, adapter: Path) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(PREFIX): module.get_delta_weight("default").detach()
            for name, module in in_peft(self.load(), adapter).named_modules()
            if hasattr(module, "get_delta_weight")
        }

    def expected(self) -> dict[str, torch.Tensor]:
        """The swap whose bottom layer is the language expert's."""
        task, language = self.deltas["task"], self.deltas["language"]
        result = {}
        for name, delta in task.items():
            layer = self.architecture.layer_of(name)
            outside = (delta + language[name]) / 2
            result[name] = outside if layer is None else language[name] if layer == 0 else delta
        return result


def renaming(rules: tuple[tuple[str, str], ...]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        return name

    return rename


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_generations(name: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """The written adapter does not depend on which comes first, and PEFT loads all of it."""
    world = worlds(name)
    written = set()
    for task, language in itertools.product(GENERATIONS, repeat=2):
        experts = world.experts["task", task], world.experts["language", language]
        out = adapterswap.layer_swap(*experts, bottom=1, top=0).write(tmp_path / f"{task}-{language}")
        written.add((out / WEIGHTS).read_bytes())
    assert len(written) == 1
    close(world.deltas_of(out), world.expected(), depth=2)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_live_and_merged(name: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds(name)
    reference = world.load()
    for module, delta in world.expected().items():
        reference.get_submodule(module).weight.data += delta
    token_ids = torch.arange(12).reshape(1, 12) + 3
    with torch.no_grad():
        logits = reference(input_ids=token_ids).logits
    for task, language in (("4.51", "4.57"), ("4.57", "5")):
        experts = {"mm": world.experts["task", task], "sw": world.experts["language", language]}
        live = LiveComposer.from_experts(world.load(), experts)
        with live.use("mm+sw@bottom=1,top=0"), torch.no_grad():
            close(live.model(input_ids=token_ids).logits, logits, depth=4 * LAYERS)
        plan = adapterswap.layer_swap(*experts.values(), bottom=1, top=0)
        merged = adapterswap.merge(plan, world.base, out_path=tmp_path / f"{task}-{language}")
        weights = world.architecture.model_class.from_pretrained(merged, dtype=torch.float32).state_dict()
        close(weights, reference.state_dict(), depth=2)


def test_one_expert_alone(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """A slice and a conversion rewrite full names in the config, which PEFT does not convert."""
    world = worlds("llava")
    for version in GENERATIONS:
        expert = world.experts["task", version]
        adapterswap.convert(expert, tmp_path / f"converted-{version}", layout="portable")
        close(world.deltas_of(tmp_path / f"converted-{version}"), world.deltas["task"], depth=2)
        plan = adapterswap.slice_layers(expert, "0-4", num_layers=LAYERS)
        close(world.deltas_of(plan.write(tmp_path / f"slice-{version}")), world.deltas["task"], depth=2)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["embed_tokens"]}])
def test_more_than_lora(name: str, options: dict[str, Any], worlds: Callable[[str], World], tmp_path: Path) -> None:
    """Copied, and converted to LoRA alone, from the oldest names."""
    world = worlds(name)
    trained(world.load(), LoraConfig(r=2, target_modules=["q_proj"], **options), tmp_path / "new")
    old = under_names(tmp_path / "new", tmp_path / "old", renaming(BEFORE_4_52[name]))
    token_ids = torch.arange(12).reshape(1, 12) + 3

    def answers(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = in_peft(world.load(), folder)(input_ids=token_ids).logits
        return logits

    plan = adapterswap.slice_layers(old, f"0-{LAYERS - 1}")
    close(answers(plan.write(tmp_path / "copy")), answers(tmp_path / "new"), depth=4 * LAYERS)
    adapterswap.convert(old, tmp_path / "lora", rank=64, saved_rank=64)
    assert json.loads((tmp_path / "lora" / CONFIG).read_text())["modules_to_save"] is None
    close(answers(tmp_path / "lora"), answers(tmp_path / "new"), depth=8 * LAYERS)


def test_a_module_that_the_base_lacks_is_refused(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """PEFT would drop it without a word."""
    world = worlds("llava")
    rename = renaming(((r"vision_tower\.encoder", "vision_tower.trunk.encoder"),))
    pair = [under_names(world.folder / role, tmp_path / role, rename) for role in ("task", "language")]
    with refused(BaseModelError, "base_model", match=r"vision_tower\.trunk"):
        adapterswap.soup(*pair).write(tmp_path / "out")


def test_names_that_no_class_of_the_base_has(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """If the first expert mixes names of two classes, the result has the base's."""
    world = worlds("gemma3")
    rename = renaming(((r"^model\.language_model\.", "language_model.model."),))
    odd = under_names(world.folder / "task", tmp_path / "odd", rename)
    out = adapterswap.layer_swap(odd, world.experts["language", "5"], bottom=1, top=0).write(tmp_path / "out")
    close(world.deltas_of(out), world.expected(), depth=2)
    assert not any("language_model.model" in name for name in json.loads((out / CONFIG).read_text())["target_modules"])
