"""Configs are compared by what they compute: against a table of keys whose effect on logits was computed.

`scripts/config_keys.py` makes the table: it gives every key of some forty pico models other values, and keeps those
that change the logits of the same weights.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import save_like, weights
from refusals import refused

import adapterswap
from adapterswap.core.companions.config import MISSING, NEUTRAL, ConfigDifferences
from adapterswap.kit.errors import AdapterswapError, BaseModelError, CompositionError, ExpertError

ROOT = Path(__file__).parents[3]
TABLE: Mapping[str, Any] = json.loads((Path(__file__).parent / "config_keys.json").read_text())


@contextmanager
def scripts() -> Iterator[None]:
    """Import from the folder of scripts."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield
    finally:
        sys.path.pop(0)


def flipped(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *path, last = key.split(".")
    part = changed
    for name in path:
        part = part[name]
    part[last] = value
    return changed


@pytest.mark.parametrize("name", TABLE)
def test_every_key_that_changes_logits_is_a_difference(name: str) -> None:
    row = TABLE[name]
    assert row["computes"]
    for key, value in row["computes"].items():
        differences = ConfigDifferences.between(row["config"], flipped(row["config"], key, value))
        assert differences, key


@pytest.mark.parametrize("name", TABLE)
def test_no_neutral_key_is_a_difference(name: str) -> None:
    row = TABLE[name]
    assert row["neutral"]
    for key, value in row["neutral"].items():
        differences = ConfigDifferences.between(row["config"], flipped(row["config"], key, value))
        assert not differences, (key, differences)
        assert not differences.not_compared
    others = {
        "_name_or_path": "elsewhere",
        "transformers_version": "4.46.0",
        "torch_dtype": "float16",
        "use_cache": False,
    }
    assert not ConfigDifferences.between(row["config"], row["config"] | others)


def test_the_table_has_forty_architectures_and_no_neutral_key_computes() -> None:
    assert len(TABLE) >= 40
    computing = {(name, key) for name, row in TABLE.items() for key in row["computes"] if key.split(".")[-1] in NEUTRAL}
    assert computing == set()


def error_of(action: Callable[[], object]) -> AdapterswapError | None:
    """The error that an action raises; None if it raises none."""
    try:
        action()
    except AdapterswapError as error:
        return error
    return None


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", TABLE)
def test_every_command_sees_every_key(name: str, tmp_path: Path) -> None:
    """Two folders with the same weights, whose configs differ in one key."""
    row = TABLE[name]
    with scripts():
        from architectures import build
    base = tmp_path / "base"
    build(row["task"], row["config"]["model_type"], base)
    config = json.loads((base / "config.json").read_text())
    for number, (key, value) in enumerate([*row["computes"].items(), *row["neutral"].items()]):
        other = shutil.copytree(base, tmp_path / f"other-{number}")
        (other / "config.json").write_text(json.dumps(flipped(config, key, value)))
        merging = error_of(lambda other=other: adapterswap.soup(base, other))
        extracting = error_of(lambda other=other: adapterswap.extract(other, base, tmp_path / "x", rank=1))
        refusals = [error is not None and error.parameter == "config_from" for error in (merging, extracting)]
        differing = adapterswap.verify(other, base_model=base).differing
        if key in row["computes"]:
            assert merging is not None, key
            assert extracting is not None, key
            assert "config.json" in differing, key
        else:
            assert refusals == [False, False], key
            assert differing == (), key


@pytest.mark.full
def test_the_table_is_what_the_models_compute(tmp_path: Path) -> None:
    with scripts():
        from config_keys import MODELS, examined
    for task, model_type in MODELS:
        name = model_type if task != "SEQ_CLS" else f"{model_type} (classifier)"
        if name in TABLE:
            assert examined(task, model_type, tmp_path / name) == TABLE[name], name


LLAMA_4 = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None, "hidden_size": 64, "torch_dtype": "bfloat16"}
LLAMA_5 = {
    "model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "hidden_size": 64,
    "dtype": "float32",
}  # fmt: skip
SCALED = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LLAMA_4, LLAMA_5),
        (LLAMA_4 | SCALED, LLAMA_5 | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}),
        (LLAMA_5, LLAMA_5 | {"rms_norm_eps": 1e-6, "num_key_value_heads": None}),  # the class's defaults
        ({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4},
         {"model_type": "gemma3_text", "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
         {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}),  # which the class ignores
    ],
)  # fmt: skip
def test_one_number_under_two_names_is_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for first, second in ((one, other), (other, one)):
        found = ConfigDifferences.between(first, second)
        assert (found.values, found.not_compared) == ({}, ())


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters.rope_theta"),
        (SCALED, "rope_parameters.factor"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"attention_bias": True}, "attention_bias"),
        ({"a_key_of_tomorrow": 3}, "a_key_of_tomorrow"),
    ],
)
def test_a_difference_names_both_values(other: dict[str, Any], key: str) -> None:
    found = ConfigDifferences.between(LLAMA_5, LLAMA_5 | other)
    assert key in found.values
    ours, theirs = found.values[key]
    assert ours != theirs
    assert f"{key} is " in found.text("math", "swahili")


def test_without_the_class_a_key_that_one_lacks_is_reported() -> None:
    one = {"model_type": "unknown_to_transformers", "scale": 2.0, "width": 64}
    found = ConfigDifferences.between(one, {"model_type": "unknown_to_transformers", "width": 64})
    assert (found.values, found.not_compared) == ({}, ("scale",))
    found = ConfigDifferences.between(one, one | {"scale": 3.0})
    assert found.values == {"scale": (2.0, 3.0)}
    assert MISSING not in found.values["scale"]


def test_a_number_in_place_of_an_object_is_a_difference() -> None:
    """Also where transformers cannot read such a config, and so knows no default."""
    found = ConfigDifferences.between(LLAMA_5, LLAMA_5 | {"rope_parameters": 3})
    assert found.values
    assert not found.not_compared


def test_no_quantization_is_written_in_two_ways() -> None:
    assert not ConfigDifferences.between(LLAMA_5, LLAMA_5 | {"quantization_config": None})
    assert ConfigDifferences.between(LLAMA_5, LLAMA_5 | {"quantization_config": {"quant_method": "fp8"}})


def test_a_classifier_finds_the_end_of_a_text_by_its_padding() -> None:
    for name, differs in (("LlamaForCausalLM", False), ("LlamaForSequenceClassification", True)):
        config = LLAMA_5 | {"architectures": [name]}
        assert bool(ConfigDifferences.between(config | {"pad_token_id": 1}, config | {"pad_token_id": 2})) is differs


@pytest.mark.parametrize(
    ("rope", "differs"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "yarn", "factor": 2.0}, True),  # whose first length is this one, unless it says another
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, False),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic"}}, True),
    ],
)
def test_the_longest_text_computes_only_where_rotary_positions_depend_on_it(rope: Any, differs: bool) -> None:
    """Instruct models often differ from their base in it."""
    config = LLAMA_5 | {"model_type": "unheard-of", "rope_parameters": rope, "max_position_embeddings": 32768}
    longer = config | {"max_position_embeddings": 131072}
    assert bool(ConfigDifferences.between(config, longer)) is differs
    learned = {"model_type": "unheard-of", "max_position_embeddings": 64}
    assert ConfigDifferences.between(learned, learned | {"max_position_embeddings": 65})


def with_config(
    folder: Path, source: Path, seed: int, change: Mapping[str, Any], checkpoint: Callable[..., Path]
) -> Path:
    """A checkpoint with a changed config.json."""
    place = save_like(folder, source, weights(checkpoint(seed=seed)))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | dict(change)))
    return place


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.01}, {"hidden_act": "relu"}, {"no_such_key": 99}])
def test_merge_extract_and_verify_refuse_another_config(
    change: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint(seed=1)
    other = with_config(tmp_path / "other", base, 2, change, checkpoint)
    with refused(ExpertError, parameter="config_from"):
        adapterswap.layer_swap(base, other, bottom=2, top=1)
    with refused(BaseModelError, parameter="config_from"):
        adapterswap.extract(other, base, tmp_path / "extracted", rank=2)
    with_config(tmp_path / "copy", base, 1, change, checkpoint)
    verified = adapterswap.verify(tmp_path / "copy", base_model=base)
    assert not verified.equal
    assert verified.differing == ("config.json",)
    assert verified.answers[0] == "base, in its weights"


@pytest.mark.parametrize(
    "change",
    [{"use_cache": False}, {"attention_dropout": 0.1}, {"eos_token_id": 7}, {"max_position_embeddings": 99}],
)
def test_neutral_keys_are_accepted(change: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint(seed=1)
    other = with_config(tmp_path / "other", base, 2, change, checkpoint)
    adapterswap.layer_swap(base, other, bottom=2, top=1)
    adapterswap.extract(other, base, tmp_path / "extracted", rank=2)
    assert adapterswap.verify(with_config(tmp_path / "copy", base, 1, change, checkpoint), base_model=base).equal


def test_analyzing_a_checkpoint_of_another_config_says_so(
    checkpoint: Callable[..., Path], tmp_path: Path, run: Callable[..., Any]
) -> None:
    base = checkpoint(seed=1)
    other = with_config(tmp_path / "other", base, 2, {"rms_norm_eps": 0.01}, checkpoint)
    assert adapterswap.analyze({"math": checkpoint(seed=2)}, base_model=base).remarks == ()
    (remark,) = adapterswap.analyze({"math": other}, base_model=base).remarks
    assert remark.startswith("the configs of math and the base compute differently")
    assert "rms_norm_eps" in remark
    shown = run("analyze", f"math={other}", "--base-model", base, exit_code=0)
    assert f"Warning: {remark}" in shown.stderr


def test_config_from_decides_and_is_recorded(
    checkpoint: Callable[..., Path], tmp_path: Path, run: Callable[..., Any]
) -> None:
    base = checkpoint(seed=1)
    other = with_config(tmp_path / "other", base, 2, {"rms_norm_eps": 0.01}, checkpoint)
    options = ["--expert", f"math={base}", "--expert", f"swahili={other}", "--rule", "math: 0-2", "--rule", "swahili"]
    assert run("merge", *options, "-o", tmp_path / "out").exit_code == 3
    for owner, epsilon in (("swahili", 0.01), ("math", json.loads((base / "config.json").read_text())["rms_norm_eps"])):
        out = tmp_path / owner
        shown = run("merge", *options, "--config-from", owner, "-o", out, exit_code=0)
        assert "differs: rms_norm_eps" in shown.stderr
        assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == epsilon
        record = json.loads((out / "adapterswap.json").read_text())
        assert (record["composition"]["config_from"], record["companions"]["config"]) == (owner, owner)
        assert adapterswap.verify(out, {"math": base, "swahili": other}).equal
    plan = adapterswap.layer_swap(base, other, bottom=1, top=0, config_from="language")
    assert json.loads((plan.merge(tmp_path / "swap") / "config.json").read_text())["rms_norm_eps"] == 0.01
    out = plan.merge(tmp_path / "of-the-task", config_from=base.name)
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == epsilon
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"experts: {{a: {base}, b: {other}}}\nmethod: soup\ntask: a\nlanguage: b\nconfig_from: nobody\n")
    with refused(CompositionError, parameter="config_from"):
        adapterswap.compose(adapterswap.read_composition(recipe))
    adapterswap.extract(other, base, tmp_path / "extracted", rank=2, config_from="base")
    record = json.loads((tmp_path / "extracted" / "adapterswap.json").read_text())
    assert record["extraction"]["config_from"] == "base"
    assert adapterswap.verify(tmp_path / "extracted", {"full": other}, base_model=base).equal
