"""Experts loaded into a running model, completely or a few layers of them; and compositions written from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, load_base, logits
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file
from tolerances import close, rounded_once

import adapterswap
from adapterswap import Composition
from adapterswap.engines.live import LiveComposer, load_expert
from adapterswap.kit.errors import ArgumentError, CompositionError, ExpertError, OutputError, UnsupportedError
from engines.live.conftest import EXPERTS, assert_same_tensors, state_of, tensors_of, written_files

Composers = Callable[..., LiveComposer]
Folders = Callable[..., dict[str, Path]]
Bases = Callable[[str], Path]

NAME = "math+swahili@bottom=2,top=1,bottom_transition=1"


def bytes_of(model: torch.nn.Module, name: str) -> int:
    """The bytes that the tensors of one adapter take."""
    return sum(p.nbytes for key, p in model.named_parameters() if f".{name}." in key)


def test_a_slice_takes_its_share_of_the_memory(base: Bases, folders: Folders) -> None:
    whole = LiveComposer.from_experts(load_base(base("llama")), folders())
    part = LiveComposer.from_experts(load_base(base("llama")), {"math": folders()["math"]})
    with part.use("math"):  # also inside a composition
        assert part.load_expert(folders()["swahili"], "swahili", layers="0-1,5") == "swahili"
    assert bytes_of(part.model, "swahili") * 2 == bytes_of(whole.model, "swahili")
    assert bytes_of(part.model, "math") == bytes_of(whole.model, "math")
    for name in ("math+swahili@bottom=2,top=1", "math+swahili@bottom=1,top=0,bottom_transition=1"):
        with part.use(name), whole.use(name):
            assert torch.equal(logits(part.model), logits(whole.model))
    with refused(CompositionError, match=r"swahili .*layers 0-1,5.* layer 2"):
        part.set("math+swahili@bottom=3,top=1")
    with refused(CompositionError, "weights"):
        part.set("math+swahili@bottom=1,top=1,bottom_transition=1,weights=magnitude")
    with refused(CompositionError, "composition", match=r"layers 0-1,5 .*swahili"):
        part.set("swahili")


def test_loading_only_the_layers_that_compositions_need(base: Bases, folders: Folders) -> None:
    composing = LiveComposer.from_experts(load_base(base("llama")), {"math": folders()["math"]})
    compositions = [
        "math+telugu@bottom=1,top=1",
        Composition(task="math", language="telugu", bottom=1, top=0, top_transition=2),
    ]
    composing.load_expert(folders()["telugu"], "telugu", compositions=compositions)
    model = composing.model
    layers = {int(key.split(".")[4]) for key, _ in model.named_parameters() if ".telugu." in key}
    assert layers == {0, 4, 5}
    for composition in compositions:
        composing.set(composition)
    with refused(CompositionError, "compositions", match="swahili"):
        composing.load_expert(folders()["swahili"], "swahili", compositions=compositions)
    with refused(ArgumentError, "layers"):
        composing.load_expert(folders()["swahili"], "swahili", layers="0", compositions=compositions)


def test_an_expert_is_loaded_unchanged(base: Bases, folders: Folders) -> None:
    model = load_expert(load_base(base("llama")), folders()["swahili"], "swahili")
    peft = PeftModel.from_pretrained(load_base(base("llama")), folders()["swahili"], adapter_name="swahili")
    assert_same_tensors(tensors_of(model), tensors_of(peft))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["math", "a.b", "base", "lora", ""])
def test_names_that_peft_would_confuse_are_refused(name: str, composer: Composers, folders: Folders) -> None:
    composing = composer()
    with refused(ArgumentError, "name", match=repr(name)):
        load_expert(composing.model, folders()["telugu"], name)


def test_an_expert_of_another_base_leaves_the_model_unchanged(composer: Composers, expert: Any) -> None:
    composing = composer()
    before, tensors = state_of(composing.model), tensors_of(composing.model)
    with refused(ExpertError, "expert", match="transformer"):
        composing.load_expert(expert("gpt2", seed=1), "other")
    with refused(ArgumentError, "layers"):
        composing.load_expert(expert(seed=1), "other", layers="9")
    assert state_of(composing.model) == before
    assert_same_tensors(tensors_of(composing.model), tensors)


def test_an_expert_of_another_width_is_refused(tmp_path: Path, base: Bases, folders: Folders) -> None:
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text((folders()["math"] / "adapter_config.json").read_text())
    tensors = load_file(folders()["math"] / "adapter_model.safetensors")
    wide = {key: torch.zeros(8, 40) if "q_proj.lora_A" in key else tensor for key, tensor in tensors.items()}
    save_file(wide, tmp_path / "adapter_model.safetensors")
    model = load_base(base("llama"))
    with refused(ExpertError, "expert", match=r"q_proj.* 32×40 .* 32×32"):
        load_expert(model, tmp_path, "math")
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_only_targeted_modules_are_loaded(tmp_path: Path, base: Bases, folders: Folders) -> None:
    config = json.loads((folders()["math"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    (tmp_path / "adapter_model.safetensors").write_bytes((folders()["math"] / "adapter_model.safetensors").read_bytes())
    by_peft = logits(PeftModel.from_pretrained(load_base(base("llama")), tmp_path))
    composer = LiveComposer.from_experts(load_base(base("llama")), {"math": tmp_path})
    with composer.use("math"):
        assert torch.equal(logits(composer.model), by_peft)


def test_a_file_that_its_config_does_not_describe_is_refused(tmp_path: Path, base: Bases, folders: Folders) -> None:
    """PEFT would initialise the missing factors at random."""
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text((folders()["math"] / "adapter_config.json").read_text())
    tensors = load_file(folders()["math"] / "adapter_model.safetensors")
    save_file({k: t for k, t in tensors.items() if "k_proj" not in k}, tmp_path / "adapter_model.safetensors")
    model = load_base(base("llama"))
    with refused(ExpertError, "expert", match="k_proj"):
        load_expert(model, tmp_path, "math")
    assert not any("lora" in name for name, _ in model.named_parameters())
    composing = LiveComposer.from_experts(model, {name: folders()[name] for name in ("telugu", "swahili")})
    before = state_of(composing.model)
    with composing.use("swahili+telugu@bottom=2,top=1"):
        output = logits(composing.model)
        with refused(ExpertError, "expert", match="k_proj"):
            composing.load_expert(tmp_path, "math")
        assert torch.equal(logits(composing.model), output)
    assert list(composing.model.peft_config) == ["telugu", "swahili"]
    assert state_of(composing.model) == before


@pytest.mark.parametrize("asked", [NAME, "plan"])
def test_saving_gives_the_bytes_of_writing(asked: str, composer: Composers, folders: Folders, tmp_path: Path) -> None:
    plan = adapterswap.compose(adapterswap.parse_composition(NAME), folders())
    written = adapterswap.write_adapter(plan, tmp_path / "written")
    composing = composer()
    with composing.use(plan if asked == "plan" else asked):
        saved = composing.save(tmp_path / "saved")
    assert written_files(saved) == written_files(written)


def test_saving_from_a_slice_and_in_other_forms(base: Bases, folders: Folders, tmp_path: Path) -> None:
    composing = LiveComposer.from_experts(load_base(base("llama")), {"math": folders()["math"]})
    composing.load_expert(folders()["swahili"], "swahili", layers="0-2,5")
    plan = adapterswap.compose(adapterswap.parse_composition(NAME), folders())
    with composing.use(NAME):
        for form in ({}, {"layout": "portable"}, {"max_rank": 4}):
            written = adapterswap.write_adapter(plan, tmp_path / "written", overwrite=True, **form)
            saved = composing.save(tmp_path / "saved", overwrite=True, **form)
            assert_same_tensors(
                load_file(saved / "adapter_model.safetensors"), load_file(written / "adapter_model.safetensors")
            )


@pytest.mark.parametrize("changed", [False, True])
def test_what_was_not_loaded_is_missing_from_what_is_saved(
    changed: bool, base: Bases, folders: Folders, tmp_path: Path
) -> None:
    """Whether the numbers come from the expert's file or, if they were changed, from the model."""
    composing = LiveComposer.from_experts(load_base(base("llama")), {"math": folders()["math"]})
    composing.load_expert(folders()["swahili"], "swahili", layers="0-2,5")
    if changed:
        next(p for name, p in composing.model.named_parameters() if ".swahili." in name).data *= 2
    with refused(CompositionError, "allocation", match=r"swahili .*layers 0-2,5.* layers 3-4"):
        composing.set(Composition.model_validate({"allocation": [{"expert": "swahili"}]}))
    with composing.use(
        Composition.model_validate({"allocation": [{"layers": "0", "expert": "swahili"}, {"expert": "base"}]})
    ):
        saved = composing.save(tmp_path / "saved")
    assert json.loads((saved / "adapterswap.json").read_text())["slice"] == {"layers": "0-2,5"}
    with refused(CompositionError):
        adapterswap.layer_swap(folders()["math"], saved, bottom=4, top=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_experts_loaded_by_peft(dtype: torch.dtype, base: Bases, expert: Any, tmp_path: Path) -> None:
    """Without a known file the tensors come from the model; PEFT holds bfloat16 experts in float32."""
    folders = {name: expert(**EXPERTS[name], dtype=dtype) for name in ("math", "swahili")}
    model = PeftModel.from_pretrained(load_base(base("llama")), folders["math"], adapter_name="math")
    model.load_adapter(folders["swahili"], adapter_name="swahili")
    composing = LiveComposer(model)
    plan = adapterswap.compose(adapterswap.parse_composition(NAME), folders)
    written = load_file(adapterswap.write_adapter(plan, tmp_path / "written") / "adapter_model.safetensors")
    before = state_of(model)
    with composing.use(NAME):
        output = logits(model)
        saved = composing.save(tmp_path / "saved")
    assert state_of(model) == before
    if dtype == torch.float32:
        assert_same_tensors(load_file(saved / "adapter_model.safetensors"), written)
    else:  # blends were rounded to bfloat16 once in the written one, and not at all here
        for name, tensor in load_file(saved / "adapter_model.safetensors").items():
            rounded_once(written[name], tensor, dtype=torch.bfloat16, name=name)
    reloaded = PeftModel.from_pretrained(load_base(base("llama")), saved)
    close(logits(reloaded), output, depth=LAYERS)


def test_saving_experts_trained_since_loading(composer: Composers, tmp_path: Path, base: Bases) -> None:
    composing = composer()
    for name, parameter in composing.model.named_parameters():
        if "lora_B.math" in name:
            parameter.data.mul_(1.5)
    with composing.use(NAME):
        output = logits(composing.model)
        saved = composing.save(tmp_path / "saved")
    reloaded = PeftModel.from_pretrained(load_base(base("llama")), saved)
    close(logits(reloaded), output, depth=LAYERS)


def test_saving_never_replaces_a_loaded_expert(base: Bases, folders: Folders, tmp_path: Path) -> None:
    """Not even one that adapterswap wrote, and not if the model's tensors are written instead of the file's."""
    shutil.copytree(folders()["math"], tmp_path / "math")
    (tmp_path / "math" / "README.md").touch()
    (tmp_path / "math" / "adapterswap.json").write_text('{"format": 1, "adapterswap_version": "0.1.0"}')
    experts = {"math": tmp_path / "math", "swahili": folders()["swahili"]}
    composing = LiveComposer.from_experts(load_base(base("llama")), experts)
    before = {path.name: path.read_bytes() for path in (tmp_path / "math").iterdir()}
    for factor in (1.0, 1.5):
        for name, parameter in composing.model.named_parameters():
            if "lora_B.math" in name:
                parameter.data.mul_(factor)
        with composing.use(NAME), refused(OutputError, "out_path"):
            composing.save(tmp_path / "math", overwrite=True)
        assert {path.name: path.read_bytes() for path in (tmp_path / "math").iterdir()} == before


def test_saving_without_a_composition_is_refused(composer: Composers, tmp_path: Path) -> None:
    composing = composer()
    with refused(UnsupportedError):
        composing.save(tmp_path / "out")
    with composing.use_rows([NAME, NAME]), refused(UnsupportedError):
        composing.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
