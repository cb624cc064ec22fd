"""The content of exported files, without running them; and refusals."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import crafting
import ml_dtypes
import numpy as np
import pytest
from click.testing import Result
from pico_models import copied
from refusals import refused
from safetensors.numpy import load_file, save_file
from tolerances import close

import adapterswap as asw
from adapterswap import AdapterswapError
from adapterswap.core.planning.composition import Composition
from adapterswap.kit.errors import (
    ArgumentError,
    BaseModelError,
    CompositionError,
    DependencyError,
    ExpertError,
    OutputError,
    UnsupportedError,
)
from engines.exporting.conftest import Bases, Experts

gguf = pytest.importorskip("gguf")

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "head_dim": 4, "vocab_size": 16, "tie_word_embeddings": False,
}  # fmt: skip


def base_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(BASE | changes))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_folder(tmp_path / "base")


@pytest.fixture
def math(tmp_path: Path) -> Path:
    return crafting.adapter(tmp_path / "math")


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata, and the tensors as numpy has them."""
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = np.frombuffer(data.tobytes(), ml_dtypes.bfloat16).reshape(tensor.shape[::-1]).astype(np.float32)
        elif tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            data = gguf.quants.dequantize(data, tensor.tensor_type)
        tensors[tensor.name] = np.array(data)
    return values, tensors


def test_the_tensors_are_the_experts_under_llama_cpps_names(math: Path, base: Path, tmp_path: Path) -> None:
    """Bit for bit in f32, except for the order of the query rows; alpha holds the scale."""
    exported = asw.export(math, tmp_path / "math.gguf", base_model=base)
    values, tensors = read(exported.path)
    stored = load_file(math / crafting.WEIGHTS)
    assert len(tensors) == len(stored) == 16
    assert values["adapter.lora.alpha"] == np.float32(4 * 2**0.5) == exported.alpha
    order = [0, 2, 1, 3, 4, 6, 5, 7]  # two heads of four dimensions, from halves to pairs
    for layer in range(4):
        at = f"{crafting.PREFIX}model.layers.{layer}"
        for name, module in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
            b = stored[f"{at}.{module}.lora_B.weight"]
            assert np.array_equal(tensors[f"blk.{layer}.{name}.weight.lora_a"], stored[f"{at}.{module}.lora_A.weight"])
            assert np.array_equal(tensors[f"blk.{layer}.{name}.weight.lora_b"], b[order] if name == "attn_q" else b)


def test_the_metadata_is_the_record(math: Path, base: Path, tmp_path: Path) -> None:
    swahili = crafting.adapter(tmp_path / "swahili", crafting.tensors(seed=1))
    plan = asw.layer_swap(math, swahili, bottom=1, top=1, base_model=str(base))
    values, _ = read(plan.export(tmp_path / "swap.gguf", outtype="f16").path)
    assert values["general.type"] == "adapter"
    assert values["general.architecture"] == "llama"
    assert values["adapter.type"] == "lora"
    assert values["adapterswap.version"] == asw.__version__
    record = json.loads(values["adapterswap.record"])
    assert record["composition"]["bottom"] == 1
    assert record["output"].items() >= {"format": "gguf", "outtype": "f16"}.items()
    for name, folder in (("math", math), ("swahili", swahili)):
        hashed = hashlib.sha256((folder / crafting.WEIGHTS).read_bytes()).hexdigest()
        assert record["experts"][name]["sha256"][crafting.WEIGHTS] == hashed
    assert str(tmp_path) not in json.dumps(record)


def test_the_same_inputs_give_the_same_bytes(math: Path, base: Path, tmp_path: Path) -> None:
    one, other = (asw.export(math, tmp_path / name, base_model=base) for name in ("one.gguf", "other.gguf"))
    assert one.path.read_bytes() == other.path.read_bytes()


@pytest.mark.parametrize(("rslora", "alpha"), [(True, 4), (False, 3), (True, -2.5)])
@pytest.mark.parametrize("pattern", [{}, {"q_proj": 7}, {"q_proj": -1e-3}])
def test_delta_w_by_llama_cpps_rule(
    rslora: bool, alpha: float, pattern: dict[str, float], base: Path, tmp_path: Path
) -> None:
    """alpha / rank · B·A equals PEFT's s·B·A, where alphas are negative too."""
    settings = crafting.config(lora_alpha=alpha, use_rslora=rslora, alpha_pattern=pattern)
    folder = crafting.adapter(tmp_path / "one", settings=settings)
    values, tensors = read(asw.export(folder, tmp_path / "one.gguf", base_model=base).path)
    written = values["adapter.lora.alpha"]
    stored = load_file(folder / crafting.WEIGHTS)
    alphas = {"self_attn.q_proj": pattern.get("q_proj", alpha), "mlp.down_proj": alpha}
    for name, (module, own) in zip(("attn_q", "ffn_down"), alphas.items(), strict=True):
        a, b = (tensors[f"blk.1.{name}.weight.lora_{factor}"] for factor in "ab")
        at = f"{crafting.PREFIX}model.layers.1.{module}"
        delta = stored[f"{at}.lora_B.weight"] @ stored[f"{at}.lora_A.weight"] * own / (2**0.5 if rslora else 2)
        if name == "attn_q":
            delta = delta[[0, 2, 1, 3, 4, 6, 5, 7]]
        close(written / 2 * (b @ a), delta)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_numbers_are_rounded_once(outtype: str, tmp_path: Path) -> None:
    width = 32
    base = base_folder(
        tmp_path / "base", hidden_size=width, intermediate_size=2 * width, head_dim=width, num_attention_heads=2
    )
    content = crafting.tensors(rank=32, width=width)
    folder = crafting.adapter(tmp_path / "one", content, crafting.config(r=32, alpha_pattern={"q_proj": 3}))
    exact, rounded = (
        read(asw.export(folder, tmp_path / f"{kind}.gguf", base_model=base, outtype=kind).path)[1]
        for kind in ("f32", outtype)
    )
    for name, values in exact.items():
        if outtype == "q8_0":
            blocks = values.reshape(values.shape[0], -1, 32)
            step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
            assert (np.abs(blocks - rounded[name].reshape(blocks.shape)) <= step * 0.5 + np.abs(blocks) * 1e-3).all()
        else:
            kind = np.float16 if outtype == "f16" else ml_dtypes.bfloat16
            assert np.array_equal(rounded[name], values.astype(kind).astype(np.float32))


@pytest.mark.parametrize(
    ("outtype", "size", "fits"), [("f16", 1e-3, True), ("f16", 1e-6, False), ("q8_0", 1e-6, False)]
)
def test_numbers_too_small_for_the_format_are_refused(outtype: str, size: float, fits: bool, tmp_path: Path) -> None:
    width = 32
    base = base_folder(tmp_path / "base", hidden_size=width, intermediate_size=2 * width, head_dim=width)
    content = {
        name: (dtype, shape, (np.frombuffer(raw, np.float32) * np.float32(size)).tobytes())
        for name, (dtype, shape, raw) in crafting.tensors(rank=32, width=width).items()
    }
    folder = crafting.adapter(tmp_path / "one", content, crafting.config(r=32))
    if fits:
        asw.export(folder, tmp_path / "one.gguf", base_model=base, outtype=outtype)
        return
    with pytest.raises(UnsupportedError) as caught:
        asw.export(folder, tmp_path / "one.gguf", base_model=base, outtype=outtype)
    assert caught.value.parameter == "outtype"
    assert not (tmp_path / "one.gguf").exists()
    asw.export(folder, tmp_path / "one.gguf", base_model=base, outtype="bf16")


def test_pieces_together_equal_the_whole_file(math: Path, base: Path, tmp_path: Path) -> None:
    whole, pieces = (
        asw.export(math, tmp_path / name, base_model=base, pieces=name == "pieces") for name in ("m.gguf", "pieces")
    )
    values, tensors = read(whole.path)
    assert sorted(path.name for path in pieces.path.iterdir()) == [f"layer-0{layer}.gguf" for layer in range(4)]
    found: dict[str, Any] = {}
    for file in pieces.files:
        own, held = read(file.path)
        assert own["adapterswap.layer"] == file.layer
        assert own["adapter.lora.alpha"] == values["adapter.lora.alpha"]
        found |= held
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert sum(file.nbytes for file in pieces.files) == whole.nbytes
    assert whole.server_command("b.gguf") == ["llama-server", "-m", "b.gguf", "--lora", str(whole.path)]
    assert pieces.server_command()[-1].split(",") == [f"{file.path}:0" for file in pieces.files]
    assert pieces.modelfile() is None
    asw.export(math, pieces.path, base_model=base, pieces=True, overwrite=True)
    (pieces.path / "mine.txt").touch()
    with refused(OutputError, "out_path"):
        asw.export(math, pieces.path, base_model=base, pieces=True, overwrite=True)


def test_zones_where_layers_are_divided(math: Path, base: Path, tmp_path: Path) -> None:
    """Attention of one expert with MLPs of the other, blends with two weights, and an unusable file name."""
    swahili = crafting.adapter(tmp_path / "swahili", crafting.tensors(seed=1))
    rules = [
        {"layers": "0-1", "modules": "q_proj", "expert": "a/b"}, {"layers": "0-1", "expert": "math"},
        {"layers": 2, "blend": {"math": 1, "a/b": 1}}, {"layers": 3, "blend": {"math": 1, "a/b": 3}},
    ]  # fmt: skip
    composition = Composition.model_validate({"allocation": rules, "base_model": str(base)})
    plan = asw.compose(composition, {"math": asw.open_adapter(math), "a/b": asw.open_adapter(swahili)})
    exported = plan.export(tmp_path / "zones", pieces="zone")
    assert {file.path.name: (file.layers, file.modules) for file in exported.files} == {
        "zone-00-01-a_b.gguf": ((0, 1), 2), "zone-00-01-math.gguf": ((0, 1), 2),
        "zone-02-a_b+math.gguf": ((2,), 2), "zone-03-a_b+math.gguf": ((3,), 2),
    }  # fmt: skip
    whole = read(plan.export(tmp_path / "whole.gguf").path)[1]
    held: dict[str, Any] = {}
    for file in exported.files:
        held |= read(file.path)[1]
    assert held.keys() == whole.keys()
    assert all(np.array_equal(held[name], whole[name]) for name in whole)


def test_zones_have_files_of_their_own(base: Path, tmp_path: Path) -> None:
    """The number after a second zone of the same experts may give the name of a third one; one of both was lost."""
    experts: dict[str, asw.Adapter] = {}
    targets = ["q_proj", "k_proj", "down_proj"]
    for seed, name in enumerate(("math", "Math", "math-2")):
        content = crafting.tensors(seed=seed)
        content |= {key.replace("q_proj", "k_proj"): tensor for key, tensor in content.items() if "q_proj" in key}
        folder = crafting.adapter(tmp_path / str(seed), content, crafting.config(target_modules=targets))
        experts[name] = asw.open_adapter(folder)
    rules = [f"{module} of {name}" for module, name in zip(targets, experts, strict=True)]
    plan = asw.compose(Composition.model_validate({"rules": rules, "base_model": str(base)}), experts)
    names = sorted(file.path.name for file in plan.export(tmp_path / "zones", pieces="zone").files)
    assert sorted(path.name for path in (tmp_path / "zones").iterdir()) == names
    assert len({name.casefold() for name in names}) == 3  # on disks that ignore case, too


@pytest.mark.parametrize("pieces", ["layers", 1, None], ids=str)
def test_another_way_to_divide(pieces: Any, math: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        asw.export(math, tmp_path / "out", base_model=base, pieces=pieces)
    assert caught.value.parameter == "pieces"


@pytest.mark.parametrize("changes", [{"num_local_experts": 8}, {"intermediate_size": 48}], ids=str)
def test_experts_of_another_mixture(changes: dict[str, Any], bases: Bases, experts: Experts, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    folder = experts("mixtral", target_parameters=["mlp.experts.down_proj"], r=2)
    content = json.loads((bases("mixtral")[0] / "config.json").read_text())
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(BaseModelError) as caught:
        asw.export(folder, tmp_path / "math.gguf", base_model=tmp_path / "base")
    assert caught.value.parameter == "base_model"


def test_experts_of_a_mixture_are_inspected(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    folder = experts("mixtral", target_parameters=["mlp.experts.gate_up_proj"], r=2)
    path = asw.export(folder, tmp_path / "math.gguf").path
    found = {one["name"]: one for one in asw.inspect(path).as_json()["modules"]}["blk.0.ffn_up_exps"]
    assert (found["experts"], found["rank"], found["out_features"], found["in_features"]) == (4, 2, 96, 64)
    assert asw.verify(path, {folder.name: folder}).equal


# The base's config, and the class of the error: a base of other modules is no question of GGUF.
UNSUPPORTED: dict[str, tuple[dict[str, Any], type[AdapterswapError]]] = {
    "another architecture": ({"model_type": "mamba"}, BaseModelError),
    "a multimodal base": ({"model_type": "llava", "text_config": BASE}, UnsupportedError),
    "a mixture's experts": ({"model_type": "mixtral"}, BaseModelError),
    "Falcon with ALiBi": ({"model_type": "falcon", "alibi": True}, UnsupportedError),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_base_is_refused(case: str, math: Path, tmp_path: Path) -> None:
    changes, kind = UNSUPPORTED[case]
    with pytest.raises(kind) as caught:
        asw.export(math, tmp_path / "math.gguf", base_model=base_folder(tmp_path / "base", **changes))
    assert caught.value.parameter == "base_model"
    assert not (tmp_path / "math.gguf").exists()


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 8}, {"intermediate_size": 12}, {"num_attention_heads": 4}], ids=str
)
def test_an_expert_of_another_size(changes: dict[str, Any], math: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError) as caught:
        asw.export(math, tmp_path / "math.gguf", base_model=base_folder(tmp_path / "base", **changes))
    assert caught.value.parameter == "base_model"


def test_an_expert_of_another_depth(math: Path, tmp_path: Path) -> None:
    with refused(ExpertError, match="layer 3"):
        asw.export(math, tmp_path / "math.gguf", base_model=base_folder(tmp_path / "base", num_hidden_layers=3))


def test_a_module_trained_in_full(base: Path, tmp_path: Path) -> None:
    content = crafting.tensors()
    content[f"{crafting.PREFIX}lm_head.weight"] = ("F32", (16, 4), bytes(256))
    settings = crafting.config(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    folder = crafting.adapter(tmp_path / "one", content, settings)
    with pytest.raises(UnsupportedError) as caught:
        asw.export(folder, tmp_path / "one.gguf", base_model=base)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"model_type": "gemma2"}], ids=str)
def test_a_tied_head(config: dict[str, Any], tmp_path: Path) -> None:
    content = crafting.tensors(layers=4)
    for factor, shape in (("A", (2, 4)), ("B", (16, 2))):
        content[f"{crafting.PREFIX}lm_head.lora_{factor}.weight"] = ("F32", shape, bytes(4 * shape[0] * shape[1]))
    settings = crafting.config(target_modules=["q_proj", "down_proj", "lm_head"])
    folder = crafting.adapter(tmp_path / "one", content, settings)
    tied = {key: value for key, value in (BASE | config).items() if key != "tie_word_embeddings" or config.get(key)}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(tied))
    with pytest.raises(UnsupportedError):
        asw.export(folder, tmp_path / "one.gguf", base_model=tmp_path / "base")


def test_a_copy_of_another_embedding(bases: Bases, experts: Experts, tmp_path: Path) -> None:
    """PEFT would replace the base's weight with the copy; a GGUF file omits it."""
    pytest.importorskip("xllamacpp")
    folder = experts("llama", target_modules=["q_proj", "embed_tokens"], r=4)
    content = load_file(folder / crafting.WEIGHTS)
    key = next(name for name in content if name.endswith("embed_tokens.base_layer.weight"))
    content[key] = content[key] + 1
    other = tmp_path / "other"
    other.mkdir()
    save_file(content, other / crafting.WEIGHTS)
    (other / crafting.CONFIG).write_bytes((folder / crafting.CONFIG).read_bytes())
    with refused(BaseModelError, "base_model"):
        asw.export(other, tmp_path / "other.gguf")
    headless = base_folder(tmp_path / "headless", **json.loads((bases("llama")[0] / "config.json").read_text()))
    with pytest.raises(BaseModelError) as caught:  # its weights are missing, so that nothing can be compared
        asw.export(folder, tmp_path / "other.gguf", base_model=headless)
    assert caught.value.parameter == "base_model"


def test_arguments(math: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "math.gguf"
    wrong: list[tuple[dict[str, Any], type[AdapterswapError], str]] = [
        ({"outtype": "f23"}, ArgumentError, "outtype"),
        ({"outtype": "q8_0"}, UnsupportedError, "outtype"),  # rank 2
        ({"outtype": 8}, ArgumentError, "outtype"),
        ({"pieces": "yes"}, ArgumentError, "pieces"),
    ]
    for options, kind, parameter in wrong:
        with pytest.raises(kind) as caught:
            asw.export(math, out, base_model=base, **options)
        assert caught.value.parameter == parameter
    with pytest.raises(BaseModelError) as without:
        asw.export(math_without_base(tmp_path), out, base_model=None)
    assert without.value.parameter == "base_model"
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DependencyError):
        asw.export(math, out, base_model=base)
    assert not out.exists()


def math_without_base(tmp_path: Path) -> asw.Plan:
    folder = crafting.adapter(tmp_path / "alone", settings=crafting.config(base_model_name_or_path=None))
    return asw.slice_layers(folder, "0-3", num_layers=4)


def test_numbers_out_of_range(base: Path, tmp_path: Path) -> None:
    folder = crafting.adapter(tmp_path / "one", settings=crafting.config(alpha_pattern={"q_proj": 4e8}))
    with pytest.raises(UnsupportedError) as caught:
        asw.export(folder, tmp_path / "one.gguf", base_model=base, outtype="f16")
    assert caught.value.parameter == "outtype"
    content = crafting.tensors()
    key = next(name for name in content if "lora_B" in name)
    content[key] = (*content[key][:2], np.full(content[key][1], np.nan, np.float32).tobytes())
    with refused(ExpertError, match="NaN"):
        asw.export(crafting.adapter(tmp_path / "nan", content), tmp_path / "nan.gguf", base_model=base)
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".*"))


def test_a_plan_that_changes_nothing(math: Path, base: Path, tmp_path: Path) -> None:
    whole = asw.slice_layers(math, "0-3", base_model=str(base))
    nothing = replace(whole, slots={name: replace(slot, terms=()) for name, slot in whole.slots.items()})
    with pytest.raises(CompositionError):
        nothing.export(tmp_path / "none.gguf")


def test_the_command(run: Callable[..., Result], math: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "math.gguf"
    options = ("--base-model", base, "-o", out)
    output = json.loads(run("export", math, *options, "--dry-run", "--json").stdout)
    assert not out.exists()
    result = run("export", math, *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == output | {"written": True}
    assert output["server_command"] == ["llama-server", "-m", "base.gguf", "--lora", str(out)]
    assert output["modelfile"] == f"FROM ./base.gguf\nADAPTER ./{out.name}\n"  # Ollama looks beside the Modelfile
    assert output["bytes"] == sum(tensor.nbytes for tensor in read(out)[1].values())
    again = run("export", math, *options)
    assert again.exit_code == 3
    assert "--overwrite" in again.stderr
    shown = run("export", math, *options, "--overwrite")
    assert f"ADAPTER ./{out.name}" in shown.stdout
    assert "llama-server -m base.gguf --lora" in shown.stdout
    assert run("export", math, *options, "--outtype", "f23").exit_code == 2
    assert run("export", math, "-t", math, *options).exit_code == 2
    assert run("export", math, *options, "--by", "zone").exit_code == 2  # without --pieces


def test_the_base_to_convert_is_the_one_that_was_passed(math: Path, base: Path, tmp_path: Path) -> None:
    """Nobody can convert a copy in 4 bits, which is what the expert was trained on and names."""
    expert = copied(math, tmp_path / "expert", base_model_name_or_path="org/base-bnb-4bit")
    exported = asw.export(expert, tmp_path / "math.gguf", base_model=base)
    assert exported.base_model == base.name


def test_the_command_composes(run: Callable[..., Result], math: Path, base: Path, tmp_path: Path) -> None:
    swahili = crafting.adapter(tmp_path / "swahili", crafting.tensors(seed=1))
    zones = ("--bottom", 1, "--top", 1, "--base-model", base)
    result = run("export", "-t", math, "-l", swahili, *zones, "--pieces", "-o", tmp_path / "pieces")
    assert result.exit_code == 0, result.stderr
    assert f"{tmp_path / 'pieces' / 'layer-00.gguf'}:0" in result.stdout
    by_zone = run(
        "export", "-t", math, "-l", swahili, *zones, "--pieces", "--by", "zone", "-o", tmp_path / "z", "--json"
    )
    files = json.loads(by_zone.stdout)["files"]
    assert [file["layers"] for file in files] == [[0], [1, 2], [3]]
    assert {file["name"] for file in files} == {path.name for path in (tmp_path / "z").iterdir()}
    recipe = {"experts": {"math": "math", "swahili": "swahili"}, "task": "math", "language": "swahili"}
    (tmp_path / "swap.yaml").write_text(json.dumps(recipe | {"bottom": 1, "top": 1}))  # JSON is YAML
    made = run("export", tmp_path / "swap.yaml", "--base-model", base, "-o", tmp_path / "swap.gguf")
    assert made.exit_code == 0, made.stderr
    swap = asw.layer_swap(math, swahili, bottom=1, top=1, base_model=str(base)).export(tmp_path / "same.gguf")
    tensors, same = read(tmp_path / "swap.gguf")[1], read(swap.path)[1]
    assert all(np.array_equal(tensors[name], same[name]) for name in same)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_names_of_a_multimodal_base(prefix: str, tmp_path: Path) -> None:
    """llama.cpp's names are those of the language model, whatever transformers calls its container."""
    content = {key.replace("model.layers", f"{prefix}layers"): value for key, value in crafting.tensors().items()}
    folder = crafting.adapter(tmp_path / "math", content)
    text = BASE | {"model_type": "gemma3_text"}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    exported = asw.export(folder, tmp_path / "math.gguf", base_model=base)
    assert exported.architecture == "gemma3"
    assert "blk.3.ffn_down.weight.lora_b" in read(exported.path)[1]


def exported_swap(math: Path, base: Path, folder: Path, **options: Any) -> tuple[Path, dict[str, Path]]:
    """A swap in GGUF, and its sources."""
    swahili = crafting.adapter(folder / "swahili", crafting.tensors(seed=1))
    plan = asw.layer_swap(math, swahili, bottom=1, top=1, base_model=str(base))
    return plan.export(folder / "swap.gguf", **options).path, {"math": math, "swahili": swahili}


@pytest.mark.parametrize("pieces", [False, "layer", "kind", "zone"])
def test_inspecting_a_file(pieces: Any, math: Path, base: Path, tmp_path: Path, run: Callable[..., Result]) -> None:
    path, _ = exported_swap(math, base, tmp_path, pieces=pieces, outtype="f16")
    result = asw.inspect(path)
    outcome = result.as_json()
    assert (outcome["kind"], outcome["architecture"]) == ("gguf", "llama")
    assert len(outcome["files"]) == {False: 1, "layer": 4, "kind": 8, "zone": 3}[pieces]
    assert outcome["parameters"] == sum(np.size(value) for value in load_file(math / crafting.WEIGHTS).values())
    modules = {
        (one["name"], one["rank"], one["out_features"], one["in_features"], one["dtype"]) for one in outcome["modules"]
    }
    assert modules == {
        (f"blk.{layer}.{name}", 2, out, into, "F16")
        for layer in range(4)
        for name, out, into in (("attn_q", 8, 4), ("ffn_down", 4, 8))
    }
    assert outcome["composed_of"]["experts"].keys() == {"math", "swahili"}
    assert result.strip == asw.layer_swap(math, tmp_path / "swahili", bottom=1, top=1, num_layers=4).strip.split("\n")
    shown = run("inspect", path)
    assert shown.exit_code == 0, shown.stderr
    assert "attn_q" in shown.stdout


@pytest.mark.parametrize("pieces", [False, "kind", "zone"])
def test_verifying_a_file(pieces: Any, math: Path, base: Path, tmp_path: Path, run: Callable[..., Result]) -> None:
    path, sources = exported_swap(math, base, tmp_path, pieces=pieces, outtype="bf16")
    assert asw.verify(path, sources, base_model=base).equal
    file = next(iter(sorted(path.iterdir()))) if pieces else path
    assert asw.verify(file, sources, base_model=base).equal
    raw = bytearray(file.read_bytes())
    raw[-32] ^= 1  # in the last tensor, 16 bytes and as many zeros behind them
    file.write_bytes(raw)
    assert len(asw.verify(path, sources, base_model=base).differing) == 1
    options = [text for name, folder in sources.items() for text in ("--expert", f"{name}={folder}")]
    result = run("verify", path, *options, "--base-model", base, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["differing"]) == 1
    if pieces:
        file.unlink()
        assert asw.verify(path, sources, base_model=base).differing == (file.name,)


@pytest.mark.parametrize("pieces", [False, "zone"])
def test_verifying_a_file_of_experts_out_of_alphabetical_order(
    pieces: Any, math: Path, base: Path, tmp_path: Path
) -> None:
    """The names of the file and of blended pieces keep the experts' order."""
    sources = {"swahili": crafting.adapter(tmp_path / "swahili", crafting.tensors(seed=1)), "math": math}
    plan = asw.layer_swap(sources["swahili"], math, bottom=1, top=1, bottom_transition=1, base_model=str(base))
    path = plan.export(tmp_path / "swap.gguf", pieces=pieces).path
    assert asw.verify(path, sources, base_model=base).equal


def test_a_changed_source_or_another_scale(math: Path, base: Path, tmp_path: Path) -> None:
    path, sources = exported_swap(math, base, tmp_path)
    content = bytearray(path.read_bytes())
    place = content.index(b"adapter.lora.alpha") + len("adapter.lora.alpha") + 4
    content[place + 2] ^= 1
    path.write_bytes(content)
    result = asw.verify(path, sources, base_model=base)
    assert (result.config_differs, result.differing, result.changed_sources) == (True, (), {})
    crafting.adapter(tmp_path / "other", crafting.tensors(seed=9))
    result = asw.verify(path, sources | {"swahili": tmp_path / "other"}, base_model=base)
    assert result.changed_sources.keys() == {"swahili"}
    with pytest.raises(ArgumentError) as caught:
        asw.verify(path)
    assert caught.value.parameter == "experts"


@pytest.mark.parametrize("damage", ["truncated", "text", "model", "no record"])
def test_gguf_files_that_cannot_be_read(damage: str, math: Path, base: Path, tmp_path: Path) -> None:
    path = asw.export(math, tmp_path / "math.gguf", base_model=base).path
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "text":
        path.write_text("no adapter")
    elif damage == "model":
        path.write_bytes(path.read_bytes().replace(b"adapter.type", b"adapter.typo"))
    else:
        path.write_bytes(path.read_bytes().replace(b"adapterswap.record", b"adapterswap.recorf"))
        assert asw.inspect(path).record is None
    with pytest.raises((ExpertError, UnsupportedError)) as caught:
        asw.verify(path, {"math": math}, base_model=base)
    assert caught.value.parameter == "path"
    if damage != "no record":
        with pytest.raises((ExpertError, UnsupportedError)):
            asw.inspect(path)
