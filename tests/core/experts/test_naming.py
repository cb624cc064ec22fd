"""Forty ways to name the modules of eight architectures: each is exact or refused by name, and none is guessed.

An expert is renamed as another tool, model class or version of transformers would name it, or to an invalid name, and
averaged with one under the base's names. The result must equal that of the expert before renaming, byte for byte;
tests/core/matrix compares such results with PEFT and plain torch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from crafting import lora
from refusals import refused
from safetensors.numpy import load_file, save_file

import adapterswap
from adapterswap.core.model.base import Base
from adapterswap.kit.errors import AdapterswapError, ArgumentError, BaseModelError, ExpertError, UnsupportedError
from core.matrix.architectures import ARCHITECTURES

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."

NAMES = ("llama", "gpt2", "mixtral", "qwen3_moe", "nemotron_h", "gemma3", "qwen2_vl", "smolvlm")

# The prefix of the language model's layers in memory.
ROOTS = {
    "llama": "model", "gpt2": "transformer", "mixtral": "model", "qwen3_moe": "model", "nemotron_h": "model",
    "gemma3": "model.language_model", "qwen2_vl": "model.language_model", "smolvlm": "model.text_model",
}  # fmt: skip

Rename = Callable[[str], str]


def at_root(new: str) -> Callable[[str], Rename]:
    """Rename the prefix of the language model; other modules keep their names."""

    def variant(architecture: str) -> Rename:
        root = f"{ROOTS[architecture]}."
        start = f"{new}." if new else ""
        return lambda name: f"{start}{name.removeprefix(root)}" if name.startswith(root) else name

    return variant


def older(architecture: str) -> Rename:
    """The name in transformers 4, from the matrix's table."""
    rules = ARCHITECTURES[architecture].v4
    if architecture == "mixtral":
        rules = ((r"\.mlp\.", ".block_sparse_moe."),)

    def rename(name: str) -> str:
        rule = next((rule for rule in rules if re.search(rule[0], name)), None)
        return re.sub(rule[0], rule[1], name, count=1) if rule else name

    return rename


def replaced(old: str, new: str) -> Callable[[str], Rename]:
    return lambda architecture: lambda name: re.sub(old, new, name, count=1)


def both(*variants: Callable[[str], Rename]) -> Callable[[str], Rename]:
    """One after the other."""

    def variant(architecture: str) -> Rename:
        def rename(name: str) -> str:
            for one in variants:
                name = one(architecture)(name)
            return name

        return rename

    return variant


IN_LAYER = r"((?:layers|h|blocks)\.\d+)\."
WRAPPERS: dict[str, Callable[[str], Rename]] = {
    "torch.compile": replaced("^", "_orig_mod."),
    "torch.compile, each layer": replaced(IN_LAYER, r"\1._orig_mod."),
    "torch.compile, each block": replaced(IN_LAYER + r"(\w+)\.", r"\1.\2._orig_mod."),
    "data parallel": replaced("^", "module."),
    "data parallel, compiled": replaced("^", "module._orig_mod."),
    "compiled, data parallel": replaced("^", "_orig_mod.module."),
    "FSDP": replaced("^", "_fsdp_wrapped_module."),
    "FSDP, each layer": replaced(IN_LAYER, r"\1._fsdp_wrapped_module."),
    "FSDP, whole and each layer": both(
        replaced("^", "_fsdp_wrapped_module."), replaced(IN_LAYER, r"\1._fsdp_wrapped_module.")
    ),
    "checkpointing": replaced(IN_LAYER, r"\1._checkpoint_wrapped_module."),
    "FSDP and checkpointing": replaced(IN_LAYER, r"\1._fsdp_wrapped_module._checkpoint_wrapped_module."),
    "FSDP, checkpointing, compiled": replaced(
        IN_LAYER, r"\1._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod."
    ),
}  # fmt: skip
OLDER: dict[str, Callable[[str], Rename]] = {
    "transformers 4": older,
    "transformers 4, compiled": both(older, WRAPPERS["torch.compile"]),
    "transformers 4, FSDP": both(older, WRAPPERS["FSDP, each layer"]),
    "transformers 4, data parallel": both(older, WRAPPERS["data parallel"]),
}
ROOTED: dict[str, Callable[[str], Rename]] = {
    f"under {root or 'nothing'}": at_root(root)
    for root in (
        "model", "", "model.language_model", "language_model.model", "language_model", "model.text_model", "text_model",
        "text_model.model", "thinker.model", "model.llm", "llm.model",
    )
} | {
    "text-only, compiled": both(at_root("model"), WRAPPERS["torch.compile"]),
    "text-only, FSDP": both(at_root("model"), WRAPPERS["FSDP, each layer"]),
    "multimodal, checkpointing": both(at_root("model.language_model"), WRAPPERS["checkpointing"]),
}  # fmt: skip
STRANGE: dict[str, Callable[[str], Rename]] = {
    "under a decoder": at_root("model.decoder"),
    "under a vision tower": at_root("model.vision_tower"),
    "under an encoder": at_root("encoder"),
    "a list called stages": replaced(r"(layers|h|blocks)\.(\d+)\.", r"stages.\2."),
    "numbers in words": replaced(r"(layers|h|blocks)\.(\d+)\.", r"\1.n\2."),
    "attention called attn_block": replaced(r"(self_attn|attn|mixer)\.", "attn_block."),
    "projections with another end": replaced(r"_proj$", "_projection"),
    "one segment more": replaced(IN_LAYER, r"\1.inner."),
    "numbers from one": lambda architecture: lambda name: re.sub(r"\d+", lambda m: str(int(m[0]) + 1), name, count=1),
    "another wrapper": replaced("^", "_ddp_wrapped."),
}
WRAPPER = r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
VARIANTS = {**WRAPPERS, **OLDER, **ROOTED, **STRANGE}
assert len(VARIANTS) == 40


class World:
    """A base that is only a config, and two experts under its names."""

    def __init__(self, name: str, folder: Path) -> None:
        architecture = ARCHITECTURES[name]
        config = architecture.config()
        with torch.device("meta"):
            model = architecture.model_class.from_config(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder / "base")
        self.base, self.folder = folder / "base", folder
        shapes = {}
        for module, part in model.named_modules():
            if type(part).__name__ in ("Linear", "Conv1D"):
                shape = tuple(part.weight.shape)
                shapes[module] = shape if type(part).__name__ == "Linear" else shape[::-1]
        self.shapes = shapes
        self.task = lora(folder / "task", shapes, base=self.base, seed=1)
        self.language = lora(folder / "language", shapes, base=self.base, seed=2)
        self.expected = adapterswap.soup(self.task, self.language).write(folder / "expected")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


def renamed(world: World, rename: Rename, folder: Path) -> Path:
    """The language expert under other names."""
    shapes = {rename(module): shape for module, shape in world.shapes.items()}
    assert len(shapes) == len(world.shapes)
    return lora(folder, shapes, base=world.base, seed=2)


def refusal(task: Path, language: Path, out: Path) -> str | None:
    """Write the average of two experts to `out`; returns the error message if it is refused."""
    try:
        adapterswap.soup(task, language).write(out)
    except AdapterswapError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architecture", NAMES)
def test_every_name_is_exact_or_refused(architecture: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds(architecture)
    exact, own = set(), set(load_file(world.language / WEIGHTS))
    for number, (variant, rename) in enumerate(VARIANTS.items()):
        folder, out = renamed(world, rename(architecture), tmp_path / f"in-{number}"), tmp_path / f"out-{number}"
        message = refusal(world.task, folder, out)
        if message is not None:
            keys = set(load_file(folder / WEIGHTS)) - own
            strange = [re.sub(WRAPPER, "", key.removeprefix(PREFIX)).rpartition(".lora_")[0] for key in keys]
            starts = {start for name in strange for start in itertools.accumulate(name.split("."), "{}.{}".format)}
            assert "adapts layer 5" in message or any(start in message for start in starts), (variant, message)
            continue
        assert (out / WEIGHTS).read_bytes() == (world.expected / WEIGHTS).read_bytes(), variant
        assert (out / CONFIG).read_text() == (world.expected / CONFIG).read_text(), variant
        exact.add(variant)
    assert WRAPPERS.keys() | OLDER.keys() <= exact
    if architecture != "gpt2":  # no other class contains its decoder
        assert {"under model", "under nothing", "under model.language_model", "under language_model.model"} <= exact
    assert not exact & (STRANGE.keys() - {"projections with another end"} if architecture == "gpt2" else STRANGE.keys())


@pytest.mark.parametrize("architecture", NAMES)
def test_names_of_transformers_4_and_back(architecture: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """Names from the matrix's table; adapters written under them compose as before."""
    world = worlds(architecture)
    plan = adapterswap.soup(world.task, world.language)
    out = plan.write(tmp_path / "old", names="transformers4")
    expected = {older(architecture)(name) for name in world.shapes}
    held = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in load_file(out / WEIGHTS)}
    assert held == expected
    assert set(json.loads((out / CONFIG).read_text())["target_modules"]) == expected
    assert adapterswap.verify(out, {"task": world.task, "language": world.language}).equal
    back = adapterswap.soup(out, world.task, language_weight=0).write(tmp_path / "new", names="transformers5")
    old, new = (load_file(folder / WEIGHTS) for folder in (out, back))
    for name in world.shapes:
        for factor in "AB":
            end = f".lora_{factor}.weight"
            assert np.array_equal(new[f"{PREFIX}{name}{end}"], old[f"{PREFIX}{older(architecture)(name)}{end}"])


def test_whose_names_are_written(worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds("gemma3")
    text = {name: shape for name, shape in world.shapes.items() if name.startswith("model.language_model.")}
    named = {name.replace("model.language_model.", "model."): shape for name, shape in text.items()}
    one = lora(tmp_path / "text", named, base=world.base, seed=3)
    seeing, reading = adapterswap.soup(world.task, one), adapterswap.soup(one, world.task)

    def modules(plan: adapterswap.Plan, folder: str, **options: str) -> set[str]:
        return set(adapterswap.open_adapter(plan.write(tmp_path / folder, **options)).modules)

    assert modules(seeing, "first") == modules(seeing, "task", names="task") == world.shapes.keys()
    assert modules(reading, "all") == world.shapes.keys()  # the text-only model lacks the tower
    with refused(UnsupportedError, "names", match="vision_tower"):
        reading.write(tmp_path / "no", names="task")
    blind = lora(tmp_path / "blind", text, base=world.base, seed=4)
    assert modules(adapterswap.soup(one, blind), "text-first") == named.keys()
    assert modules(adapterswap.soup(blind, one), "text-second", names="language") == named.keys()
    assert modules(adapterswap.soup(one, blind), "language", names="language") == text.keys()
    assert modules(adapterswap.soup(one, blind), "today", names="transformers5") == text.keys()


def test_two_names_of_a_module_are_compared_as_one(worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds("gemma3")
    other = renamed(world, older("gemma3"), tmp_path / "older")
    found, plain = adapterswap.diff(world.task, other), adapterswap.diff(world.task, world.language)
    assert found.as_json() == plain.as_json()
    assert adapterswap.diff(other, world.language).total.distance < 1e-6


MEASURED = (
    "torch.compile",
    "transformers 4",
    "transformers 4, FSDP",
    "under model",
    "under nothing",
    "text-only, FSDP",
)


@pytest.mark.parametrize("architecture", ["llama", "nemotron_h", "gemma3"])
def test_measurements_do_not_depend_on_names(architecture: str, worlds: Callable[[str], World], tmp_path: Path) -> None:
    """diff, analyze and suggest match names as a composition does, for a pair and for one expert with itself."""
    world = worlds(architecture)
    plain = adapterswap.analyze({"task": world.task, "language": world.language}).as_json()
    differences = adapterswap.diff(world.task, world.language).as_json()
    suggestion = adapterswap.suggest(world.task, world.language)
    for number, variant in enumerate(MEASURED):
        other = renamed(world, VARIANTS[variant](architecture), tmp_path / str(number))
        assert adapterswap.diff(world.task, other).as_json() == differences, variant
        result = adapterswap.analyze({"task": world.task, "language": other}).as_json()
        if architecture != "nemotron_h" or "4" not in variant:
            assert result == plain, variant
        assert result["pairs"][0]["layers"] == plain["pairs"][0]["layers"], variant
        assert result["experts"]["language"]["fractions_of_rows"] == plain["experts"]["language"]["fractions_of_rows"]
        assert adapterswap.suggest(world.task, other).composition == suggestion.composition, variant
    strange = renamed(world, STRANGE["attention called attn_block"](architecture), tmp_path / "strange")
    with refused(ExpertError, "base_model", match="attn_block"):
        adapterswap.analyze({"task": world.task, "language": strange})


def test_names_of_the_bases_file(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """The base stores names of transformers 4: relative norms, and an adapter with full weights made from that base."""
    world = worlds("gemma3")
    torch.manual_seed(0)
    model = ARCHITECTURES["gemma3"].model_class.from_config(ARCHITECTURES["gemma3"].config())
    base, full = tmp_path / "base", tmp_path / "full"
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    rename = older("gemma3")
    save_file({rename(key): tensor for key, tensor in stored.items()}, base / "model.safetensors", {"format": "pt"})
    adapterswap.soup(world.task, world.task, language_weight=0, base_model=str(base)).merge(full, base_model=base)
    result = adapterswap.analyze({"task": world.task, "full": full}, base_model=base).as_json()
    (pair,) = result["pairs"]
    assert pair["modules"]
    assert all(module["cosine"] > 0.9999 for module in pair["modules"].values())
    for name, module in result["experts"]["task"]["modules"].items():
        assert module["base_norm"] is not None or name.endswith("lm_head")  # which is tied and not stored
    with refused(BaseModelError, "base_model"):
        adapterswap.analyze({"task": world.task}, base_model=worlds("llama").base)


def test_modules_that_predict_further_tokens(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """They count as outside the layers in plans, diff, analyze and suggest, although their names have layer numbers."""
    world = worlds("llama")
    ahead = {
        name.replace("model.layers.0.", "mtp.layers.0."): shape
        for name, shape in world.shapes.items()
        if ".layers.0." in name
    }
    experts = [lora(tmp_path / f"{seed}", {**world.shapes, **ahead}, base=world.base, seed=seed) for seed in (1, 2)]
    without = [lora(tmp_path / f"bare-{seed}", world.shapes, base=world.base, seed=seed) for seed in (1, 2)]
    plan = adapterswap.compose("x+y@bottom=1,top=1,outside=language", dict(zip("xy", experts, strict=True)))
    assert {(slot.layer, slot.owner) for slot in plan if slot.name.startswith("mtp.")} == {(None, "y")}
    assert len(plan.modules) == len(world.shapes) + len(ahead)
    both_found, bare = (
        adapterswap.analyze(dict(zip("xy", experts, strict=True))),
        adapterswap.analyze(dict(zip("xy", without, strict=True))),
    )
    assert [set(table.cells) for table in both_found.tables] == [set(table.cells) for table in bare.tables]
    assert {row.name for row in adapterswap.diff(*experts).layers} == {"no layer", *map(str, range(5))}


def test_one_module_under_two_names_of_one_expert(worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds("gemma3")
    name = "model.language_model.layers.0.self_attn.q_proj"
    both_names = {"language_model.model.layers.0.self_attn.q_proj": world.shapes[name], name: world.shapes[name]}
    expert = lora(tmp_path / "twice", both_names, base=world.base, seed=5)
    with refused(ExpertError):
        adapterswap.soup(world.task, expert)


def test_a_square_module_of_another_shape_is_refused(worlds: Callable[[str], World], tmp_path: Path) -> None:
    world = worlds("llama")
    odd = {"model.language_model.layers.0.self_attn.k_proj": (48, 32)}
    expert = lora(tmp_path / "odd", odd, base=world.base, seed=6)
    with refused(ExpertError, "base_model", match=r"model\.language_model\.layers\.0\.self_attn\.k_proj"):
        adapterswap.soup(world.task, expert)


def test_canonical_names_of_single_modules(worlds: Callable[[str], World]) -> None:
    names = Base.at(worlds("gemma3").base, "gemma3")
    layers = "model.language_model.layers"
    for module, container, canonical in (
        (f"{layers}.3.mlp.up_proj", layers, f"{layers}.3.mlp.up_proj"),
        ("model.layers.3.mlp.up_proj", "model.layers", f"{layers}.3.mlp.up_proj"),
        ("language_model.lm_head", None, "lm_head"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", None,
         "model.vision_tower.encoder.layers.0.self_attn.q_proj"),
        ("model.embed_tokens", None, "model.language_model.embed_tokens"),
        ("model.decoder.layers.3.mlp.up_proj", "model.decoder.layers", None),
        ("model.layers.99.mlp.up_proj", "model.layers", None),
    ):  # fmt: skip
        assert names.find(module, container) == canonical, module


def test_names_on_the_command_line(worlds: Callable[[str], World], run: Callable[..., Result], tmp_path: Path) -> None:
    world = worlds("nemotron_h")
    zones = ("-t", world.task, "-l", world.language, "--method", "soup", "-o")
    assert run("compose", *zones, tmp_path / "old", "--names", "transformers4").exit_code == 0
    assert all(name.startswith(("backbone.", "lm_head")) for name in adapterswap.open_adapter(tmp_path / "old").modules)
    record = json.loads((tmp_path / "old" / "adapterswap.json").read_text())
    assert record["output"]["names"] == "transformers4"
    rules = adapterswap.Composition.model_validate({"allocation": [{"expert": "x"}]})
    with refused(ArgumentError, "names"):
        adapterswap.compose(rules, {"x": world.task}).write(tmp_path / "none", names="task")
    with refused(ArgumentError, "names"):
        adapterswap.compose(rules, {"x": world.task}).write(tmp_path / "none", names="gguf")  # type: ignore[arg-type]
