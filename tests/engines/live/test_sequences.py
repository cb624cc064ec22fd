"""Random sequences of operations on a composer and PEFT leave the experts and the base unchanged.

All weights are small multiples of powers of two, so that sums are exact in float32: merging and unmerging gives back
the base bit for bit, and one wrong scale would show. `SEQUENCES` in the environment sets how many are tried.
"""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close
from transformers import LlamaConfig, LlamaForCausalLM

from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import AdapterswapError, CompositionError
from engines.live.conftest import state_of

LAYERS = 4
TOKENS = torch.arange(6).reshape(2, 3)
# Bottom, top and transition layers of the language, and the task expert's share where both are blended.
NAMES: dict[str, tuple[str | None, str | None, int, int, int, float]] = {
    "one+two@bottom=1,top=1": ("one", "two", 1, 1, 0, 0.5),
    "one+two@bottom=1,top=0,bottom_transition=2,task_weight=3": ("one", "two", 1, 0, 2, 0.75),
    "two+one@bottom=2,top=1": ("two", "one", 2, 1, 0, 0.5),
    "one+three@bottom=0,top=2": ("one", "three", 0, 2, 0, 0.5),
    "three": ("three", None, 0, 0, 0, 0.5),
    "base": (None, None, 0, 0, 0, 0.5),
}
SCALES = {"one": 2.0, "two": 1.0, "three": 0.5}
LORA = {
    "one": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "two": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    "three": {"r": 4, "lora_alpha": 2, "target_modules": ["v_proj", "o_proj"]},
}


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randint(-32, 33, parameter.shape) / 64
    return model


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for seed, (name, options) in enumerate(LORA.items()):
        model = get_peft_model(make_base(), LoraConfig(**options, task_type="CAUSAL_LM"))
        torch.manual_seed(seed + 1)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data = torch.randint(-4, 5, parameter.shape) / 8
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def expected_outputs(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The logits of every name, from full weights that are composed by a plain loop."""
    from safetensors.torch import load_file

    deltas: dict[str, dict[str, torch.Tensor]] = {}
    for name, folder in folders.items():
        tensors = load_file(folder / "adapter_model.safetensors")
        deltas[name] = {
            key.removeprefix("base_model.model.").replace(".lora_A", ""): SCALES[name]
            * tensors[key.replace("lora_A", "lora_B")]
            @ tensors[key]
            for key in tensors
            if "lora_A" in key
        }
    outputs = {}
    for name, (task, language, bottom, top, transition, share) in NAMES.items():
        model = make_base()
        weights = model.state_dict()
        for key, weight in weights.items():
            layer = int(key.split(".")[2]) if ".layers." in key else -1
            if layer < 0:
                continue
            parts = {task: 1.0}
            if layer < bottom or layer >= LAYERS - top:
                parts = {language: 1.0}
            elif layer < bottom + transition:
                parts = {task: share, language: 1 - share}
            for expert, part in parts.items():
                if expert is not None and key in deltas[expert]:
                    weight += part * deltas[expert][key]
        with torch.no_grad():
            outputs[name] = model(TOKENS).logits
    for alone in ("one", "two"):
        model = PeftModel.from_pretrained(make_base(), folders[alone])
        with torch.no_grad():
            outputs[alone] = model(TOKENS).logits
    return outputs


def raised_in(block: Any, error: Exception) -> None:
    """Let a block that is open end with an exception."""
    with ExitStack() as stack:
        stack.push(block)
        raise error


class Session(RuleBasedStateMachine):
    """A user, and what the model should compute at every moment."""

    folders: dict[str, Path]
    outputs: dict[str, torch.Tensor]

    @initialize()
    def start(self) -> None:
        model = PeftModel.from_pretrained(make_base(), self.folders["one"], adapter_name="one")
        model.load_adapter(self.folders["two"], adapter_name="two")
        self.model: Any = model
        self.composer = LiveComposer(model)
        self.blocks: list[tuple[Any, Any]] = []  # open blocks, and what was computed before each
        self.now: Any = "one"  # what the model computes: a name, or one name per row
        self.composing = False
        self.disabled = 0
        self.before = state_of(model)
        self.tensors = {name: tensor.clone() for name, tensor in self.state().items()}

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors, by names that do not depend on which layers are wrapped for an adapter."""
        return {name.replace(".base_layer", ""): tensor for name, tensor in self.model.state_dict().items()}

    @property
    def merged(self) -> bool:
        return any(layer.merged for layer in self.composer._catalogue.inventory.layers.values())

    def all_known(self, names: Any) -> bool:
        """Whether the experts of a composition, or of one for each row, are loaded."""
        return "three" in self.model.peft_config or "three" not in str(names)

    def enter(self, block: Any, now: Any) -> None:
        """Open a composition's block, if possible."""
        if self.merged or not self.all_known(now):
            with pytest.raises(AdapterswapError), block:
                pass
            return
        block.__enter__()
        self.blocks.append((block, (self.now, self.composing)))
        self.now, self.composing = now, True

    @rule(name=st.sampled_from(list(NAMES)))
    def use(self, name: str) -> None:
        self.enter(self.composer.use(name), name)

    @rule(names=st.lists(st.sampled_from(list(NAMES)), min_size=2, max_size=2))
    def use_rows(self, names: list[str]) -> None:
        self.enter(self.composer.use_rows(names), tuple(names))

    @precondition(lambda self: not self.merged)
    @rule(name=st.sampled_from(list(NAMES)))
    def set(self, name: str) -> None:
        if self.all_known(name):
            self.composer.set(name)
            self.now, self.composing = name, True
        else:
            with pytest.raises(AdapterswapError):
                self.composer.set(name)

    @rule()
    def reset(self) -> None:
        self.composer.reset()
        if self.composing:
            self.now, self.composing = self.active(), False

    @precondition(lambda self: self.blocks)
    @rule(failing=st.booleans())
    def leave(self, failing: bool) -> None:
        block, before = self.blocks.pop()
        if before is not None and before[1] and not self.all_known(before[0]):  # deleted after a reset in the block
            with refused(CompositionError, "composition"):
                block.__exit__(None, None, None)
            self.now, self.composing = self.active(), False
            return
        if failing:
            error = RuntimeError("a failure in the block")
            with pytest.raises(RuntimeError, match="a failure in the block"):
                raised_in(block, error)
        else:
            block.__exit__(None, None, None)
        if before is None:
            self.disabled -= 1
        else:
            self.now, self.composing = before
            if not self.composing:
                self.now = self.active()

    @rule()
    def disable(self) -> None:
        block = self.model.disable_adapter()
        block.__enter__()
        self.blocks.append((block, None))
        self.disabled += 1

    # PEFT itself leaves an adapter that is loaded while the others are disabled enabled, and warns of it later.
    @precondition(lambda self: "three" not in self.model.peft_config and not self.merged and not self.disabled)
    @rule(through_composer=st.booleans(), layers=st.sampled_from([None, "0-3"]))
    def load(self, through_composer: bool, layers: str | None) -> None:
        if through_composer:
            self.composer.load_expert(self.folders["three"], "three", layers=layers)
            if layers is not None:  # a slice cannot be used alone; loaded whole it can
                with refused(CompositionError, "composition"):
                    self.composer.set("three")
                self.composer._catalogue._origins.clear()
                self.composer._catalogue._look()
        else:
            self.model.load_adapter(self.folders["three"], adapter_name="three")

    @precondition(lambda self: "three" in self.model.peft_config and not self.merged)
    @rule()
    def delete(self) -> None:
        if self.composing:
            with pytest.raises(AdapterswapError):
                self.model.delete_adapter("three")
        else:
            self.model.delete_adapter("three")

    @precondition(lambda self: not self.merged and not self.disabled)
    @rule()
    def merge(self) -> None:
        self.model.merge_adapter()

    @precondition(lambda self: self.merged)
    @rule()
    def unmerge(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already unmerged")  # PEFT warns about every layer that was not merged
            self.model.unmerge_adapter()

    def active(self) -> str:
        return str(self.model.active_adapter)

    @invariant()
    def computes_what_is_asked(self) -> None:
        with torch.no_grad():
            result = self.model(TOKENS).logits
        now = "base" if self.disabled else self.now
        names = now if isinstance(now, tuple) else (now, now)
        expected = torch.stack([self.outputs[name][row] for row, name in enumerate(names)])
        close(result, expected, depth=LAYERS)

    @invariant()
    def changes_no_tensor(self) -> None:
        if self.merged:
            return
        state = self.state()
        for name, tensor in self.tensors.items():
            assert torch.equal(state[name], tensor), name

    @invariant()
    def makes_nothing_trainable(self) -> None:
        if self.composing:
            assert not any(parameter.requires_grad for parameter in self.model.parameters())

    def teardown(self) -> None:
        while getattr(self, "blocks", None):
            self.leave(failing=False)
        if not hasattr(self, "composer"):
            return
        self.composer.reset()
        if self.merged:
            self.unmerge()
        self.changes_no_tensor()
        if "three" in self.model.peft_config:
            self.model.delete_adapter("three")
        after = state_of(self.model)
        for name, state in self.before.items():
            if name != "trainable":  # PEFT's own disable_adapter makes the active adapter trainable
                assert after[name] == state, name


def test_random_sequences(experts: dict[str, Path]) -> None:
    Session.folders, Session.outputs = experts, expected_outputs(experts)
    count = int(os.environ.get("SEQUENCES", "40" if tiers.ALL else "10"))
    run_state_machine_as_test(
        Session,
        settings=settings(
            max_examples=count,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],  # 25 steps are short enough; shrinking takes minutes
            report_multiple_bugs=False,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
