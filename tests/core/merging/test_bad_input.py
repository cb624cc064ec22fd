"""Checkpoints that are damaged, inconsistent or do not belong together: an error with a remedy, and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import load_base, save_like, weights
from crafting import edit_header, snapshot
from peft import PeftModel
from refusals import refused

import adapterswap
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.engines.live import load_experts
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    FieldError,
    UnsupportedError,
)

Run = Callable[..., Result]


@pytest.fixture
def pair(model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two full experts; the second one, in three shards, belongs to the test and can be damaged."""
    return model(seed=1), save_like(tmp_path / "own", model(), weights(model(seed=2)), shards=3)


def stderr_of(run: Run, pair: tuple[Path, Path], tmp_path: Path, *more: object) -> str:
    """What the command prints; no folder is left behind."""
    before = snapshot(tmp_path)
    result = run(
        "merge", "-t", pair[0], "-l", pair[1], "-o", tmp_path / "out", "--bottom", 2, "--top", 1, *more, exit_code=3
    )
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


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def cut(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-8])


def reindex(folder: Path, **places: str) -> None:
    """Say that the tensors lie elsewhere; without a shard of ours the rest of the index goes."""
    kept = json.loads((folder / INDEX).read_text())["weight_map"] if {*places.values()} <= {*SHARDS} else {}
    (folder / INDEX).write_text(json.dumps({"weight_map": kept | places}))


def pickle(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def grow(folder: Path) -> None:
    change(folder, "model.embed_tokens.weight", torch.zeros(100, 32), **{"lm_head.weight": torch.zeros(100, 32)})


def spoil(folder: Path, name: str, value: float) -> None:
    tensor = weights(folder)[name]
    tensor.view(-1)[3] = value
    change(folder, name, tensor)


def reshape(folder: Path) -> None:
    change(folder, NORM, weights(folder)[NORM])
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    edit_header(folder, lambda header: header[NORM].update(shape=[31]))
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")


# What happens to the second expert, and what the error says of it.
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a missing shard": (lambda own: (own / SHARDS[1]).unlink(), [SHARDS[1]]),
    "a truncated shard": (cut, ["not fully covered"]),
    "a wrong index": (
        lambda own: reindex(own, **dict.fromkeys((NORM, "lm_head.weight"), SHARDS[0])),
        [f"{INDEX} says that", "Download or save the model again"],
    ),
    "a shard outside the folder": (
        lambda own: reindex(own, **{NORM: "../other.safetensors"}), ["is not an index of safetensors shards"],
    ),
    "pickled weights": (pickle, ["pickled weights (.bin)", "save_pretrained writes safetensors"]),
    "a larger vocabulary without tokenizers": (
        grow, ["rows of model.embed_tokens.weight are those of different tokens", "100 rows in own", "--base-model"],
    ),
    "a tensor is missing": (lambda own: change(own, NORM, None), [f"holds {NORM}, but own does not"]),
    "NaN is copied": (lambda own: spoil(own, QUERY, float("nan")), [f"{QUERY} of the expert 'own' holds NaN"]),
    "infinity is averaged": (lambda own: spoil(own, NORM, float("inf")), [f"{NORM} of the expert 'own' holds NaN"]),
    "whole numbers": (lambda own: change(own, NORM, torch.ones(32, dtype=torch.int64)), [f"{NORM} is I64"]),
    "a header of another size": (reshape, ["invalid shape, data type, or offset"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(damage: str, run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    do, words = DAMAGE[damage]
    do(pair[1])
    stderr = stderr_of(run, pair, tmp_path)
    assert all(part in stderr for part in words), stderr


def test_another_architecture(run: Run, pair: tuple[Path, Path], model: Callable[..., Path], tmp_path: Path) -> None:
    stderr = stderr_of(run, (pair[0], model("qwen2", seed=1)), tmp_path)
    assert "model_type is 'llama'" in stderr
    assert "fine-tuned from one base" in stderr


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
    result = run("merge", expert(seed=1), "--base-model", model("gpt2"), "-o", tmp_path / "out", exit_code=3)
    assert "has no such module" in result.stderr
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
        # An adapter that is deeper or narrower than its base is refused before the base's weights are read.
        assert message in result.stderr or re.search(r"the base has 5 layers|but (64|16) in the base", result.stderr)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 5, "num_nextn_predict_layers": 1},
        {"text_config": {"num_hidden_layers": 6, "hidden_size": 32}, "num_hidden_layers": 9, "hidden_size": 9},
        {"hidden_size": 64, "word_embed_proj_dim": 32},
    ],
    ids=str,
)
def test_unusual_configs_that_fit_the_weights(
    changes: dict[str, object], model: Callable[..., Path], tmp_path: Path
) -> None:
    """A layer that predicts further tokens, a multimodal model, a narrow embedding."""
    odd = described(tmp_path / "odd", model(), **changes)
    assert adapterswap.open_checkpoint(odd).container == "model.layers"
