"""Models with an encoder and a decoder: layers are counted in each stack, and results equal a transplant of PEFT's.

The reference takes each expert's full weights from PEFT's own merge_and_unload, and each module from its owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from pico_models import edit_json, in_peft, merged_by_peft, noisy, trained
from refusals import refused
from tolerances import close

import adapterswap
from adapterswap import Composition, LiveComposer, layer_swap
from adapterswap.kit.errors import (
    ArgumentError,
    BaseModelError,
    CompositionError,
    ExpertError,
    FieldError,
    UnsupportedError,
)

DEPTH = {"encoder": 4, "decoder": 6}
SIZES = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 4, "decoder_layers": 6, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 6, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
PROJECTIONS = ["q_proj", "out_proj", "fc2"]

# The model, its config, the modules that experts adapt.
MODELS: dict[str, tuple[type, transformers.PretrainedConfig, list[str]]] = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**T5), ["q", "o", "wi"]),
    "mt5": (transformers.MT5ForConditionalGeneration, transformers.MT5Config(**T5), ["q", "wi_0"]),
    "m2m100": (transformers.M2M100ForConditionalGeneration, transformers.M2M100Config(**SIZES), PROJECTIONS),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig(**SIZES), PROJECTIONS),
    "whisper": (
        transformers.WhisperForConditionalGeneration,
        transformers.WhisperConfig(**SIZES, num_mel_bins=8, max_source_positions=16, max_target_positions=32),
        PROJECTIONS,
    ),
}
NAMES = sorted(MODELS)
STATE = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`stacked("t5")` is a folder with a base, and the experts math and swahili."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, config, targets = MODELS[name]
            folder = made[name] = tmp_path_factory.mktemp(f"stacked-{name}")
            torch.manual_seed(0)
            model: Any = kind(config)
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
            model.save_pretrained(folder / "base")
            train(folder, "math", 1, targets, name)
            train(folder, "swahili", 2, targets, name)
        return made[name]

    return make


def loaded(folder: Path, name: str) -> Any:
    kind: Any = MODELS[name][0]
    return kind.from_pretrained(folder / "base", dtype=torch.float32).eval()


def train(folder: Path, expert: str, seed: int, targets: Any, name: str, **options: Any) -> Path:
    task = None if name == "whisper" else "SEQ_2_SEQ_LM"
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": targets, "task_type": task, **options}
    base, config = loaded(folder, name), LoraConfig(**settings)
    return trained(base, config, folder / expert, seed=seed, scale=0.1, save_embedding_layers=False)


def answers(model: Any, name: str) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 96
    inputs = {"input_ids": tokens}
    if name == "whisper":
        inputs = {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs, decoder_input_ids=tokens + 1, use_cache=False).logits
    return logits


@cache
def merged(folder: Path, name: str, expert: str) -> STATE:
    return merged_by_peft(loaded(folder, name), folder / expert)


def place(key: str) -> tuple[str, int] | None:
    """The stack and the layer, written out for these models."""
    result = re.search(r"(?:^|\.)(encoder|decoder)\.(?:block|layers)\.(\d+)\.", key)
    return (result[1], int(result[2])) if result else None


def transplant(folder: Path, name: str, owner: Callable[[str, int], str]) -> STATE:
    """Full weights, each module in a layer from `owner(stack, layer)`; a blend is written math+swahili."""
    experts = {expert: merged(folder, name, expert) for expert in ("math", "swahili")}
    experts["base"] = loaded(folder, name).state_dict()
    experts["math+swahili"] = {key: (experts["math"][key] + experts["swahili"][key]) / 2 for key in experts["math"]}
    return {key: experts[owner(*at) if (at := place(key)) else "math+swahili"][key].clone() for key in experts["base"]}


def expected(folder: Path, name: str, owner: Callable[[str, int], str]) -> torch.Tensor:
    model = loaded(folder, name)
    model.load_state_dict(transplant(folder, name, owner))
    return answers(model, name)


def composed(folder: Path, name: str, adapter: Path) -> torch.Tensor:
    return answers(in_peft(loaded(folder, name), adapter), name)


def swap(stack: str = "both", bottom: int = 1, top: int = 1, blended: int = 0) -> Callable[[str, int], str]:
    """Whose a layer is in a layer swap, by the formula."""

    def owner(of: str, layer: int) -> str:
        if stack not in ("both", of):
            return "math"
        if layer < bottom or layer > DEPTH[of] - 1 - top:
            return "swahili"
        return "math+swahili" if layer < bottom + blended else "math"

    return owner


def near_logits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    close(actual, wanted, depth=sum(DEPTH.values()))
    assert (actual - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())  # mT5's random head gives large logits


class TestCompose:
    @pytest.mark.parametrize(
        ("name", "stack"), [*((name, "both") for name in NAMES), ("t5", "encoder"), ("t5", "decoder")]
    )
    def test_a_swap_is_a_transplant(
        self, name: str, stack: Any, stacked: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = stacked(name)
        experts = {"math": str(folder / "math"), "swahili": str(folder / "swahili")}
        composition = Composition(
            experts=experts, task="math", language="swahili", bottom=1, top=1, bottom_transition=1, stack=stack
        )
        plan = adapterswap.compose(composition)
        assert plan.num_layers == DEPTH
        out = plan.write(tmp_path / "out")
        near_logits(composed(folder, name, out), expected(folder, name, swap(stack, blended=1)))

    def test_the_default_zones_are_scaled_in_each_stack(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("t5")
        config = json.loads((folder / "base" / "config.json").read_text()) | {
            "num_layers": 32,
            "num_decoder_layers": 16,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = layer_swap(folder / "math", folder / "swahili", base_model=str(tmp_path))
        zones = {(rule.stack, rule.layers) for rule in plan.rules if rule.expert == "swahili"}
        assert zones == {("encoder", "0-4,30-31"), ("decoder", "0-2,15")}

    def test_partitions_and_rules(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("m2m100")
        experts = {"math": str(folder / "math"), "swahili": str(folder / "swahili")}
        rules = [
            {"stack": "decoder", "layers": "0-1,5", "expert": "swahili"},
            {"stack": "encoder", "expert": "base"},
            {"expert": "math"},
        ]
        plan = adapterswap.compose(Composition.model_validate({"experts": experts, "allocation": rules}))

        def owner(stack: str, layer: int) -> str:
            return "base" if stack == "encoder" else "swahili" if layer in (0, 1, 5) else "math"

        near_logits(composed(folder, "m2m100", plan.write(tmp_path / "rules")), expected(folder, "m2m100", owner))
        partition = Composition(experts=experts, task="math", language="swahili", partition="Z", stack="decoder")
        plan = adapterswap.compose(partition)  # B's outer layers, 8 and 4 of 28, are 2 and 1 of 6; Z turns them round

        def inverse(stack: str, layer: int) -> str:
            return "math" if stack == "encoder" or layer in (0, 1, 5) else "swahili"

        near_logits(composed(folder, "m2m100", plan.write(tmp_path / "Z")), expected(folder, "m2m100", inverse))

    def test_experts_of_one_stack(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        """The rules for the other stack match nothing, and the same module of both stacks is two modules."""
        folder = stacked("t5")
        train(folder, "decoder-only", 3, r"decoder.*\.(q|v)", "t5")
        train(folder, "encoder-only", 4, r"encoder.*\.(q|v)", "t5")
        plan = layer_swap(folder / "decoder-only", folder / "decoder-only", bottom=1, top=0)
        assert {slot.layer for slot in plan} == set(range(6))
        plan = layer_swap(folder / "encoder-only", folder / "decoder-only", bottom=1, top=1)
        kept = {place(slot.name): slot.coefficients for slot in plan}
        assert {at for at, what in kept.items() if what == "decoder-only"} == {("decoder", 0), ("decoder", 5)}
        assert {at for at, what in kept.items() if what == "encoder-only"} == {("encoder", 1), ("encoder", 2)}

    def test_a_short_name_has_the_stack(self, stacked: Callable[[str], Path]) -> None:
        composition = adapterswap.parse_composition("math+swahili@bottom=2,top=1,stack=decoder")
        assert (composition.stack, composition.bottom) == ("decoder", 2)


class TestFullWeights:
    @pytest.mark.sampled(2)  # as adapters all of them are compared above
    @pytest.mark.parametrize("name", NAMES)
    def test_merging(self, name: str, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked(name)
        plan = layer_swap(folder / "math", folder / "swahili", bottom=1, top=1, bottom_transition=1)
        kind: Any = MODELS[name][0]
        result = kind.from_pretrained(plan.merge(tmp_path / "out"), dtype=torch.float32).eval()
        near_logits(answers(result, name), expected(folder, name, swap(blended=1)))
        assert adapterswap.verify(tmp_path / "out", _experts(folder), base_model=folder / "base").equal

    @pytest.mark.parametrize(("targets", "saved"), [(["shared"], []), (["embed_tokens"], []), (["q"], ["shared"])])
    def test_an_embedding_of_both_stacks_is_not_changed_alone(
        self, targets: list[str], saved: list[str], stacked: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """PEFT's running model changes one of the modules that share the weight, and stored weights cannot."""
        folder = stacked("t5")
        expert = train(folder, f"ends-{targets[0]}", 5, targets, "t5", modules_to_save=saved or None)
        plan = adapterswap.compose(Composition(allocation=({"expert": "math"},)), {"math": expert})  # type: ignore[arg-type]
        with refused(UnsupportedError):
            plan.merge(tmp_path / "out")

    @pytest.mark.parametrize("norms", ["average", "layer"])
    def test_full_checkpoints(self, norms: Any, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder, full = stacked("t5"), {}
        for seed, name in enumerate(("math", "swahili")):
            model = noisy(loaded(folder, "t5"), seed, scale=0.01)
            model.save_pretrained(tmp_path / name)
            full[name] = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        composition = Composition(task="math", language="swahili", bottom=1, top=1, stack="decoder", norms=norms)
        plan = adapterswap.compose(composition, {name: tmp_path / name for name in full})
        kind: Any = MODELS["t5"][0]
        result = kind.from_pretrained(plan.merge(tmp_path / "out"), dtype=torch.float32)
        for key, tensor in result.state_dict().items():
            at, mean = place(key), (full["math"][key] + full["swahili"][key]) / 2
            wanted = mean if at is None else full[swap("decoder")(*at)][key]
            if norms == "average" and at is not None and at[0] == "decoder" and "layer_norm" in key:
                wanted = mean
            close(tensor, wanted, name=key)

    def test_a_config_of_another_depth_is_refused(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        loaded(stacked("t5"), "t5").save_pretrained(tmp_path / "base")
        edit_json(tmp_path / "base" / "config.json", num_decoder_layers=5)
        with refused(BaseModelError, "base_model"):
            adapterswap.open_checkpoint(tmp_path / "base")


def _experts(folder: Path) -> dict[str, str | Path]:
    return {"math": folder / "math", "swahili": folder / "swahili"}


class TestOtherCommands:
    def test_verify_and_inspect(self, stacked: Callable[[str], Path], tmp_path: Path, run: Any) -> None:
        folder = stacked("whisper")
        options = ["-t", folder / "math", "-l", folder / "swahili", "--bottom", 1, "--top", 2, "--stack", "decoder"]
        run("compose", *options, "-o", tmp_path / "out", exit_code=0)
        assert adapterswap.verify(tmp_path / "out", _experts(folder)).equal
        outcome = adapterswap.inspect(tmp_path / "out")
        assert outcome.strip[1:3] == ["encoder  mmmm", "decoder  smmmss"]
        assert outcome.as_json()["composed_of"]["num_layers"] == DEPTH
        assert adapterswap.inspect(folder / "base").as_json()["num_layers"] == DEPTH
        shown = run("inspect", tmp_path / "out").output
        assert re.search(r"encoder self_attn\.q_proj +attention +0-3 ", shown)
        assert re.search(r"decoder encoder_attn\.q_proj +attention +0-5 ", shown)
        record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())
        record["num_layers"]["decoder"] = 7
        (tmp_path / "out" / "adapterswap.json").write_text(json.dumps(record))
        with refused(CompositionError, "num_layers"):  # the base is at hand, and has six
            adapterswap.verify(tmp_path / "out", _experts(folder))

    def test_diff_counts_in_each_stack(self, stacked: Callable[[str], Path]) -> None:
        folder = stacked("t5")
        result = adapterswap.diff(folder / "math", folder / "swahili")
        names = [row.name for row in result.layers]
        assert names == [f"{stack} {layer}" for stack, count in DEPTH.items() for layer in range(count)]
        near_all = sum(row.norms[0] ** 2 for row in result.layers) ** 0.5
        close(near_all, result.total.norms[0])

    @pytest.mark.parametrize("stack", [None, "decoder"])
    def test_slices_compose_as_whole_experts(self, stack: Any, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("t5")
        layers = "0,3,5" if stack is None else "0,5"
        shell = adapterswap.slice_layers(folder / "swahili", layers, stack=stack).write(tmp_path / "swahili")
        kept = {place(name) for name in adapterswap.open_adapter(shell).modules}
        both = {("encoder", 0), ("encoder", 3), ("decoder", 0), ("decoder", 3), ("decoder", 5)}
        assert kept == (both if stack is None else {("decoder", 0), ("decoder", 5)})
        options = {"task": "math", "language": "swahili", "bottom": 1, "top": 1, "stack": stack or "both"}
        whole = adapterswap.compose(Composition(**options), _experts(folder)).write(tmp_path / "whole")
        sliced = {"math": folder / "math", "swahili": shell}
        part = adapterswap.compose(Composition(**options), sliced).write(tmp_path / "part")
        files = [(place / "adapter_model.safetensors").read_bytes() for place in (whole, part)]
        assert files[0] == files[1]
        with refused(CompositionError):  # a layer that the slice lacks
            adapterswap.compose(Composition(**options | {"bottom": 2}), sliced)
        if stack is not None:
            with refused(CompositionError):
                adapterswap.compose(Composition(**options | {"stack": "encoder"}), sliced)

    def test_what_was_cut_away_is_remembered_by_stack(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("t5")
        one = adapterswap.slice_layers(folder / "math", "0-1", stack="encoder").write(tmp_path / "one")
        other = adapterswap.slice_layers(folder / "swahili", "2-3", stack="decoder").write(tmp_path / "other")
        rules = [
            {"layers": "0-1", "stack": "encoder", "expert": "one"},
            {"layers": "2-3", "stack": "decoder", "expert": "other"},
            {"expert": "base", "optional": True},
        ]
        composition = Composition.model_validate({"allocation": rules})
        both = adapterswap.compose(composition, {"one": one, "other": other}).write(tmp_path / "both")
        adapterswap.convert(both, tmp_path / "converted", layout="portable")
        for place in (both, tmp_path / "converted"):
            record = json.loads((place / "adapterswap.json").read_text())
            assert record["slice"] == {"layers": {"encoder": "0-1", "decoder": "2-3"}}
            experts = {"math": folder / "math", "both": place}
            rule = {"layers": "2", "stack": "decoder", "expert": "both"}
            adapterswap.compose(Composition.model_validate({"allocation": [rule, {"expert": "math"}]}), experts)
            for layers, stack in (("2", "encoder"), ("0", "decoder"), ("2-4", "decoder"), ("0", None)):
                rule = {"layers": layers, "stack": stack, "expert": "both"}
                with refused(CompositionError, "allocation"):
                    adapterswap.compose(Composition.model_validate({"allocation": [rule, {"expert": "math"}]}), experts)

    @pytest.mark.parametrize("name", ["t5", "whisper"])
    def test_live(self, name: str, stacked: Callable[[str], Path]) -> None:
        folder = stacked(name)
        composer = LiveComposer.from_experts(loaded(folder, name), _experts(folder))
        for stack in ("both", "encoder", "decoder"):
            with composer.use(f"math+swahili@bottom=1,top=1,bottom_transition=1,stack={stack}"):
                near_logits(answers(composer.model, name), expected(folder, name, swap(stack, blended=1)))
        with composer.use("base"):
            near_logits(answers(composer.model, name), answers(loaded(folder, name), name))

    def test_live_slices(self, stacked: Callable[[str], Path]) -> None:
        folder = stacked("t5")
        composer = LiveComposer.from_experts(loaded(folder, "t5"), {"math": folder / "math"})
        composer.load_expert(folder / "swahili", compositions=["math+swahili@bottom=1,top=1"])
        with composer.use("math+swahili@bottom=1,top=1"):
            near_logits(answers(composer.model, "t5"), expected(folder, "t5", swap()))
        with refused(CompositionError), composer.use("math+swahili@bottom=2,top=1"):
            pass

    def test_converting_keeps_both_stacks(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("m2m100")
        adapterswap.convert(folder / "math", tmp_path / "out", dtype="bfloat16")
        names = adapterswap.open_adapter(tmp_path / "out").modules.keys()
        assert names == adapterswap.open_adapter(folder / "math").modules.keys()


class TestRefused:
    def test_a_stack_of_a_decoder_only_model(self, math: Path, swahili: Path) -> None:
        experts = {"math": math, "swahili": swahili}
        with refused(CompositionError, "stack"):
            adapterswap.compose(Composition(task="math", language="swahili", stack="decoder"), experts)
        rules = [{"stack": "decoder", "layers": 0, "expert": "swahili"}, {"expert": "math"}]
        with refused(CompositionError, "allocation"):
            adapterswap.compose(Composition.model_validate({"allocation": rules}), experts)
        with refused(ArgumentError, "layers"):
            adapterswap.slice_layers(math, "0-1", stack="decoder")

    def test_what_a_stack_does_not_belong_to(self) -> None:
        for content in ({"method": "soup", "stack": "decoder"}, {"stack": "middle"}, {"num_layers": {"encoder": 4}}):
            with pytest.raises((FieldError, ValueError)):
                Composition.model_validate(content)

    def test_depths(self, stacked: Callable[[str], Path], tmp_path: Path) -> None:
        folder = stacked("bart")
        experts = _experts(folder)
        layers: Any
        for layers in (4, {"encoder": 6, "decoder": 4}):
            with refused(CompositionError, "num_layers"):
                adapterswap.compose(Composition(task="math", language="swahili", num_layers=layers), experts)
        rules = [{"stack": "encoder", "layers": 4, "expert": "swahili"}, {"expert": "math"}]
        with refused(CompositionError, "allocation"):
            adapterswap.compose(Composition.model_validate({"allocation": rules}), experts)
        with refused(CompositionError, "bottom"):  # fits the decoder, and not the encoder
            layer_swap(folder / "math", folder / "swahili", bottom=4, top=1)
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
        with refused(ExpertError):
            layer_swap(folder / "math", folder / "swahili", base_model=str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps({"is_encoder_decoder": True}))
        with refused(BaseModelError, "num_layers"):
            layer_swap(folder / "math", folder / "swahili", base_model=str(tmp_path))

    def test_a_slice_of_no_such_stack(self, stacked: Callable[[str], Path]) -> None:
        odd: Any = "middle"
        with refused(ArgumentError, "stack"):
            adapterswap.slice_layers(stacked("t5") / "math", "0", stack=odd)
        with refused(ArgumentError, "layers"):
            adapterswap.slice_layers(stacked("t5") / "math", "5", stack="encoder")

    def test_commands_that_support_only_one_list_of_layers(
        self, stacked: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = stacked("t5")
        plan = layer_swap(folder / "math", folder / "swahili", bottom=1, top=1)
        with refused(UnsupportedError):
            adapterswap.suggest(folder / "math", folder / "swahili")
        with refused(UnsupportedError):
            adapterswap.analyze({"math": folder / "math"})
        with pytest.raises((UnsupportedError, BaseModelError)):
            plan.export(tmp_path / "out.gguf")
        with refused(UnsupportedError, "base_model"):
            adapterswap.extract(folder / "base", folder / "base", out_path=tmp_path / "out", rank=4)
