"""Checkpoints that are damaged, inconsistent or do not belong together: an error with a remedy, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import load_base
from crafting import edit_header, snapshot
from peft import PeftModel
from refusals import refused

import adapterswap
from adapterswap.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    FieldError,
    UnsupportedError,
)
from adapterswap.live import load_experts
from adapterswap.model.loading import quiet_peft
from merging.conftest import save_like, weights

Run = Callable[..., Result]


@pytest.fixture
def pair(model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two full experts; the second one, in three shards, belongs to the test and can be damaged."""
    return model(seed=1), save_like(tmp_path / "own", model(), weights(model(seed=2)), shards=3)


def stderr_of(run: Run, pair: tuple[Path, Path], tmp_path: Path, *more: object) -> str:
    """What the command prints; no folder is left behind."""
    before = snapshot(tmp_path)
    result = run("merge", "-t", pair[0], "-l", pair[1], "-o", tmp_path / "out", "--bottom", 2, "--top", 1, *more)
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert snapshot(tmp_path) == before
    return result.stderr


def change(folder: Path, name: str, tensor: torch.Tensor | None, **more: torch.Tensor) -> None:
    state = weights(folder)
    if tensor is None:
        del state[name]
    else:
        state[name] = tensor
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    save_like(folder, folder.with_name("copy"), {**state, **more})
    shutil.rmtree(folder.with_name("copy"))


def test_a_missing_shard(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    (pair[1] / "model-00002-of-00003.safetensors").unlink()
    stderr = stderr_of(run, pair, tmp_path)
    assert "model-00002-of-00003.safetensors" in stderr


def test_a_truncated_shard(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = pair[1] / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "not fully covered" in stderr_of(run, pair, tmp_path)


def test_a_wrong_index(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    index = pair[1] / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    stderr = stderr_of(run, pair, tmp_path)
    assert "model.safetensors.index.json says that" in stderr
    assert "Download or save the model again" in stderr


def test_a_shard_outside_the_folder(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    index = pair[1] / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    assert "is not an index of safetensors shards" in stderr_of(run, pair, tmp_path)


def test_pickled_weights(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    for path in [*pair[1].glob("*.safetensors"), pair[1] / "model.safetensors.index.json"]:
        path.unlink()
    (pair[1] / "pytorch_model.bin").write_bytes(b"\x80")
    stderr = stderr_of(run, pair, tmp_path)
    assert "pickled weights (.bin)" in stderr
    assert "save_pretrained writes safetensors" in stderr


def test_another_architecture(run: Run, pair: tuple[Path, Path], model: Callable[..., Path], tmp_path: Path) -> None:
    stderr = stderr_of(run, (pair[0], model("qwen2", seed=1)), tmp_path)
    assert "model_type is llama" in stderr
    assert "fine-tuned from one base" in stderr


def test_a_vocabulary_of_another_size_without_tokenizers(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[1], "model.embed_tokens.weight", torch.zeros(100, 32), **{"lm_head.weight": torch.zeros(100, 32)})
    stderr = stderr_of(run, pair, tmp_path)
    assert "rows of model.embed_tokens.weight are those of different tokens" in stderr
    assert "100 rows in own" in stderr
    assert "--base-model" in stderr


def test_a_tensor_that_only_one_has(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[1], "model.norm.weight", None)
    assert "holds model.norm.weight, but own does not" in stderr_of(run, pair, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_nan_and_infinity_are_refused(
    name: str, value: float, run: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """In a tensor that is copied, and in one that is averaged."""
    tensor = weights(pair[1])[name]
    tensor.view(-1)[3] = value
    change(pair[1], name, tensor)
    assert f"{name} of the expert 'own' holds NaN or infinity" in stderr_of(run, pair, tmp_path)


def test_a_result_that_overflows(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change(pair[1], name, weights(pair[1])[name] * 1e7)
    stderr = stderr_of(run, pair, tmp_path, "--dtype", "float16")
    assert f"{name} overflows F16" in stderr
    assert "--dtype bfloat16" in stderr


def test_an_overflow_that_no_dtype_helps_against(pair: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change(pair[1], name, weights(pair[1])[name] * 1e37)
    allocation = [{"blend": {"a": 1e9, "b": -999_999_999}}]
    composition = adapterswap.Composition.model_validate({"allocation": allocation, "allow_negative": True})
    plan = adapterswap.compose(composition, dict(zip("ab", pair, strict=True)))
    for dtype in ("float32", "bfloat16"):
        with refused(UnsupportedError, match=f"{name} overflows") as caught:
            adapterswap.merge(plan, out_path=tmp_path / "out", dtype=dtype)
        assert "dtype" not in str(caught.value)


def test_whole_numbers_cannot_be_averaged(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[1], "model.norm.weight", torch.ones(32, dtype=torch.int64))
    assert "model.norm.weight is I64" in stderr_of(run, pair, tmp_path)


def test_a_header_of_another_size(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    change(pair[1], "model.norm.weight", weights(pair[1])["model.norm.weight"])
    (pair[1] / "model.safetensors").rename(pair[1] / "adapter_model.safetensors")
    edit_header(pair[1], lambda header: header["model.norm.weight"].update(shape=[31]))
    (pair[1] / "adapter_model.safetensors").rename(pair[1] / "model.safetensors")
    assert "invalid shape, data type, or offset" in stderr_of(run, pair, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-shard-size", "much"], "'much' is not a size"),
        (["--device", "nonsense"], "The device 'nonsense' cannot be used"),
        (["--num-layers", 4], "--num-layers is 4"),
        (["--row-threshold", 0.1], "row_threshold applies to rows of adapters"),
        (["--method", "ties", "--density", 0.5], "--base-model"),
        (["--weights", "magnitude"], "--base-model"),
    ],
    ids=str,
)
def test_unsupported_options(
    options: list[object], message: str, run: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    result = run("merge", "-t", pair[0], "-l", pair[1], "-o", tmp_path / "out", *options)
    assert result.exit_code in (2, 3)
    assert result.stdout == ""
    assert message in result.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("fields", "kind", "parameter"),
    [
        ({"num_layers": 4}, CompositionError, "num_layers"),
        ({"row_threshold": 0.1}, CompositionError, "row_threshold"),
        ({"bottom": 4, "top": 3}, CompositionError, "bottom"),
        ({"method": "ties", "density": 0.5}, BaseModelError, "base_model"),
        ({"weights": "magnitude"}, BaseModelError, "base_model"),
    ],
    ids=str,
)
def test_the_field_at_fault_is_named(
    fields: dict[str, Any], kind: type[AdapterswapError], parameter: str, pair: tuple[Path, Path]
) -> None:
    composition = adapterswap.Composition(task="a", language="b", **fields)
    with refused(kind, parameter):
        adapterswap.compose(composition, dict(zip("ab", pair, strict=True)))


@pytest.mark.parametrize("changes", [{"max_shard_size": "much"}, {"max_shard_size": "0GB"}, {"dtype": "int8"}], ids=str)
def test_an_unknown_form(changes: dict[str, Any], pair: tuple[Path, Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(*pair, bottom=2, top=1)
    with refused(ArgumentError, *changes):
        adapterswap.merge(plan, out_path=tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base(
    run: Run, expert: Callable[..., Path], model: Callable[..., Path], tmp_path: Path
) -> None:
    result = run("merge", expert(seed=1), "--base-model", model("gpt2"), "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "base stores no such weight" in result.stderr
    assert not (tmp_path / "out").exists()
    with refused(BaseModelError, "base_model"):
        adapterswap.merge(expert(seed=1), model("gpt2"), out_path=tmp_path / "out")


def test_only_adapters_are_written_as_adapters_or_run_live(
    pair: tuple[Path, Path], base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    plan = adapterswap.layer_swap(*pair, bottom=2, top=1)
    with refused(UnsupportedError, match="Write full weights with `merge`"):
        adapterswap.write_adapter(plan, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    with quiet_peft():
        live = PeftModel.from_pretrained(load_base(base("llama")), expert(seed=1), adapter_name="math")
    with (
        refused(UnsupportedError),
        adapterswap.LiveComposer(live).use(plan),
    ):
        pass
    with refused(UnsupportedError):
        load_experts(load_base(base("llama")), plan)


def test_norms_belong_to_zones() -> None:
    rules = (adapterswap.Rule(expert="math"),)
    with refused(FieldError, "norms", match="`norms` cannot be set with them"):
        adapterswap.Composition(allocation=rules, norms="layer")
    with refused(FieldError, "norms", match="`norms` only applies to a layer swap"):
        adapterswap.Composition(method="soup", norms="layer")


def test_norms_change_nothing_for_adapters() -> None:
    for norms in ("average", "layer"):
        composition = adapterswap.Composition(bottom=2, top=1, norms=norms)  # type: ignore[arg-type]
        assert composition.rules(6) == adapterswap.Composition(bottom=2, top=1).rules(6)


def described(folder: Path, like: Path, **changes: object) -> Path:
    """The checkpoint `like` with another config."""
    shutil.copytree(like, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 8}, "config.json says 8 layers, but the weights have 6 in model.layers"),
        ("llama", {"num_hidden_layers": 5}, "config.json says 5 layers, but the weights have 6 in model.layers"),
        ("llama", {"hidden_size": 64}, "says a hidden size of 64, but model.embed_tokens.weight is [96, 32]"),
        ("gpt2", {"n_layer": 8}, "config.json says 8 layers, but the weights have 6 in transformer.h"),
        ("gpt2", {"n_embd": 64}, "says a hidden size of 64, but transformer.wte.weight is [96, 32]"),
        ("neox", {"hidden_size": 16}, "says a hidden size of 16, but gpt_neox.embed_in.weight is [96, 32]"),
    ],
    ids=str,
)
def test_a_config_of_other_weights(
    architecture: str, changes: dict[str, object], message: str, run: Run, model: Callable[..., Path],
    expert: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    """As the base of an adapter, as a full expert, and as the source of an extracted adapter."""
    odd = described(tmp_path / "odd", model(architecture), **changes)
    adapter = expert(architecture, seed=1)
    for command in (
        ["merge", "-t", adapter, "-l", adapter, "--bottom", 2, "--top", 1, "--base-model", odd],
        ["merge", "-t", model(architecture, seed=1), "-l", odd, "--bottom", 2, "--top", 1],
        ["extract", odd, "--base-model", model(architecture), "--rank", 2],
    ):
        result = run(*command, "-o", tmp_path / "out")
        assert (result.exit_code, result.stdout) == (3, "")
        # An adapter deeper than its base is refused before the base's weights are read.
        assert message in result.stderr or "the base has 5 layers" in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 5, "num_nextn_predict_layers": 1},
        {"text_config": {"num_hidden_layers": 6, "hidden_size": 32}, "num_hidden_layers": 9, "hidden_size": 9},
        {"hidden_size": 64, "word_embed_proj_dim": 32},
        {"num_hidden_layers": 12, "num_hidden_groups": 6},
    ],
    ids=str,
)
def test_unusual_configs_that_fit_the_weights(
    changes: dict[str, object], model: Callable[..., Path], tmp_path: Path
) -> None:
    """A layer that predicts further tokens, a multimodal model, a narrow embedding, layers that run repeatedly."""
    odd = described(tmp_path / "odd", model(), **changes)
    assert adapterswap.open_checkpoint(odd).container == "model.layers"
