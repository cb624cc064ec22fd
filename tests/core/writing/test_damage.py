"""Bad input through the real command line: one line that says what is wrong, the fix, exit 1, nothing left behind."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import refusals
from click.testing import Result
from crafting import BASE_CONFIG, BYTES, CONFIG, PREFIX, WEIGHTS, adapter, config, edit_header, parts, snapshot, tensors

import adapterswap
from adapterswap.kit.errors import ExpertError, UnsupportedError

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
Damage = Callable[[Path], object]


@pytest.fixture
def refused(run: Callable[..., Result], tmp_path: Path) -> Callable[..., None]:
    """`refused("part of the message", "compose", …)` runs a command that must fail, and checks its effects."""

    def check(told: str, *arguments: object) -> None:
        before = snapshot(tmp_path)
        result = run(*arguments)
        lines = result.stderr.splitlines()
        assert result.exit_code in (2, 3), result.stderr
        assert isinstance(result.exception, SystemExit)
        assert result.stdout == ""
        assert told in result.stderr
        assert 1 <= len(lines) <= 21, result.stderr
        odd = [line for line in lines if not (line.startswith("Error: ") and line.endswith(".") and line.isprintable())]
        assert not odd, result.stderr
        assert snapshot(tmp_path) == before

    return check


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two valid adapters, math and swahili."""
    return adapter(tmp_path / "math"), adapter(tmp_path / "swahili", tensors(seed=1))


def compose(math: Path, swahili: Path, out: Path | str, *options: object) -> tuple[object, ...]:
    return ("compose", "-t", math, "-l", swahili, "-o", out, "--num-layers", 4, "--bottom", 1, "--top", 1, *options)


def rewrite(edit: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / WEIGHTS).write_bytes(edit((folder / WEIGHTS).read_bytes()))


def header(text: str | bytes) -> Damage:
    """The whole header replaced."""
    raw = text if isinstance(text, bytes) else text.encode()
    return rewrite(lambda old: len(raw).to_bytes(8, "little") + raw + old[8 + int.from_bytes(old[:8], "little") :])


def entry(key: str, value: Any, name: str = f"{Q0}.lora_A.weight") -> Damage:
    return lambda folder: edit_header(folder, lambda content: content[name].update({key: value}))


def shift(name: str, first: int, last: int) -> Damage:
    def edit(content: dict[str, Any]) -> None:
        start, stop = content[name]["data_offsets"]
        content[name]["data_offsets"] = [start + first, stop + last]

    return lambda folder: edit_header(folder, edit)


def size_of(content: dict[str, Any]) -> int:
    start, stop = content["data_offsets"]
    return int(stop - start)


SECOND = f"{Q0}.lora_B.weight"
DAMAGED_FILES: dict[str, tuple[Damage, str]] = {
    "empty": (rewrite(lambda raw: b""), "0 bytes long, but it has no header"),
    "seven bytes": (rewrite(lambda raw: raw[:7]), "it has no header"),
    "cut in the header": (rewrite(lambda raw: raw[:50]), "its header claims"),
    "cut in the data": (rewrite(lambda raw: raw[:-1]), "file not fully covered"),
    "longer than its header says": (rewrite(lambda raw: raw + b"x"), "file not fully covered"),
    "header longer than the file": (rewrite(lambda raw: struct.pack("<Q", len(raw)) + raw[8:]), "its header claims"),
    "header of 2**64 bytes": (rewrite(lambda raw: b"\xff" * 8 + raw[8:]), "its header claims"),
    "not JSON": (header('{"a": '), "EOF while parsing"),
    "not UTF-8": (header(b'{"\xff": {}}'), "invalid UTF-8"),
    "a pickle": (rewrite(lambda raw: b"\x80\x04\x95" + raw), "its header claims"),
    "a list": (header("[]"), "expected struct"),
    "NaN": (header('{"a": NaN}'), "invalid JSON in header: expected value"),
    "a key twice": (header('{"a": 1, "a": 1}'), "invalid type: integer `1`"),
    "a thousand brackets": (header('{"a": ' + "[" * 1000 + "]" * 1000 + "}"), "recursion limit exceeded"),
    "fifty brackets": (header('{"a": ' + "[" * 50 + "]" * 50 + "}"), "invalid JSON in header"),
    "a number of 5000 digits": (header('{"a": ' + "9" * 5000 + "}"), "number out of range"),
    "metadata that is not text": (header('{"__metadata__": {"format": 1}}'), "expected a string"),
    "no tensors": (rewrite(lambda raw: (2).to_bytes(8, "little") + b"{}"), "holds no LoRA tensors"),
    "overlap": (shift(SECOND, -8, -8), "invalid offset for tensor `"),
    "gap": (shift(SECOND, 8, 8), "invalid offset for tensor `"),
    "negative offset": (shift(f"{Q0}.lora_A.weight", -8, -8), "integer `-8`"),
    "reversed offsets": (entry("data_offsets", [32, 0]), "invalid offset for tensor `"),
    "offsets of text": (entry("data_offsets", ["0", "32"]), 'string "0", expected usize'),
    "offsets beyond 64 bits": (entry("data_offsets", [2**64, 2**64 + 32]), "expected usize"),
    "negative shape": (entry("shape", [-2, -4]), "integer `-2`"),
    "shape of booleans": (entry("shape", [True, 8]), "boolean `true`"),
    "shape of nine": (entry("shape", [1] * 8 + [8]), "impossible shape"),
    "another shape": (entry("shape", [2, 5]), "invalid shape, data type, or offset"),
    "unknown dtype": (entry("dtype", "F12"), "unknown variant `F12`"),
    "dtype that is a list": (entry("dtype", ["F32"]), "invalid JSON in header"),
    "an entry without a dtype": (
        lambda folder: edit_header(folder, lambda h: h[SECOND].pop("dtype")),
        "missing field `dtype`",
    ),
    "a dtype of four bits": (
        lambda folder: edit_header(folder, lambda h: h[SECOND].update(dtype="F4", shape=[2, size_of(h[SECOND])])),
        "the unknown dtype 'F4'",
    ),
    "a shape beyond 64 bits": (
        lambda folder: edit_header(
            folder, lambda h: h.update(a={"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]})
        ),
        "the impossible shape [0, 9223372036854775808]",
    ),
    "a colour in a name": (
        lambda folder: edit_header(folder, lambda h: h.update({"\x1b[31m": h.pop(SECOND)})),
        r"'\x1b[31m' is not the name of a tensor",
    ),
    "a name of 600 characters": (
        lambda folder: edit_header(folder, lambda h: h.update({"x" * 600: h.pop(SECOND)})),
        "is not the name of a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_file(damage: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path) -> None:
    apply, message = DAMAGED_FILES[damage]
    apply(pair[1])
    refused(message, *compose(*pair, tmp_path / "out"))
    refused(message, "inspect", pair[1])
    with refusals.refused(ExpertError):
        adapterswap.open_adapter(pair[1])


def renamed(old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): tensor for name, tensor in tensors().items()}


def with_tensor(name: str, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    size = int(np.prod(shape)) * BYTES[dtype]
    return {**tensors(), name: (dtype, shape, bytes(size))}


def without(name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


# What the tensors are, whether the config has modules_to_save, what is printed.
WRONG_TENSORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no lora_B": (without(f"{Q0}.lora_B.weight"), {}, "q_proj has no lora_B"),
    "no lora_A": (without(f"{Q0}.lora_A.weight"), {}, "q_proj has no lora_A"),
    "A and B of two ranks": (
        with_tensor(f"{Q0}.lora_B.weight", (8, 3)), {}, "lora_A has rank 2, but lora_B has 3"
    ),
    "another rank than the config's": (tensors(rank=3), {}, "has rank 3, but adapter_config.json says 2"),
    "a rank pattern that lies": (tensors(), {"rank_pattern": {"q_proj": 1}}, "has rank 2, but adapter_config.json"),
    "a convolution": (with_tensor(f"{Q0}.lora_A.weight", (2, 4, 1, 1)), {}, "not convolutions"),
    "nothing in it": (with_tensor(f"{Q0}.lora_A.weight", (2, 0)), {}, "ZeRO-3"),
    "float8": (with_tensor(f"{Q0}.lora_A.weight", (2, 4), "F8_E4M3"), {}, "is F8_E4M3. Save it as one of F32"),
    "integers": (with_tensor(f"{Q0}.lora_A.weight", (2, 4), "I8"), {}, "is I8. Save it as one of"),
    "float64": (with_tensor(f"{Q0}.lora_A.weight", (2, 4), "F64"), {}, "is F64. Save it as one of"),
    "DoRA": (with_tensor(f"{Q0}.lora_magnitude_vector"), {}, "has lora_magnitude_vector"),
    "a bias of lora_B": (with_tensor(f"{Q0}.lora_B.bias"), {}, "has lora_B.bias"),
    "a bias of the base": (with_tensor(f"{Q0}.base_layer.bias"), {}, "a trained bias of the base"),
    "trainable tokens": (
        with_tensor(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"), {}, "trainable tokens"
    ),
    "a whole weight": (with_tensor(f"{PREFIX}lm_head.weight"), {}, "Averaging lm_head with"),
    "the base's weight without LoRA": (
        with_tensor(f"{PREFIX}lm_head.base_layer.weight"), {}, "is a copy of a module without LoRA"
    ),
    "an unknown tensor": (with_tensor(f"{PREFIX}lm_head.sheen"), {}, "nor in modules_to_save"),
    "a saved module of integers": (
        with_tensor(f"{PREFIX}lm_head.weight", (2, 2), "I64"), {"modules_to_save": ["lm_head"]}, "is I64"
    ),
    "no prefix": (renamed(PREFIX, ""), {}, "neither a LoRA factor as PEFT names it"),
    "markup in a name": (renamed("q_proj", "[/red]"), {}, "is not a valid module name"),
    "a regex in a name": (renamed("q_proj", "(a+)+$"), {}, "is not a valid module name"),
    "a layer of many digits": (renamed("layers.0", "layers." + "9" * 400), {}, "has a layer number above 9998"),
}  # fmt: skip


SOUND_TENSORS = {  # valid, but cannot be composed exactly
    "a convolution", "float8", "integers", "float64", "a bias of the base",
    "trainable tokens", "the base's weight without LoRA", "a saved module of integers",
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_that_are_not_lora(
    wrong: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path
) -> None:
    content, settings, message = WRONG_TENSORS[wrong]
    adapter(tmp_path / "swahili", content, config(**settings))
    refused(message, *compose(*pair, tmp_path / "out"))
    if wrong == "a whole weight":  # PEFT saves it beside new tokens; only its average with the base's own is refused
        adapterswap.open_adapter(pair[1])
        return
    with refusals.refused(UnsupportedError if wrong in SOUND_TENSORS else ExpertError):
        adapterswap.open_adapter(pair[1])


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "is neither a tensor of (IA)³ as PEFT names it"),
    "virtual tokens": ({"peft_type": "PROMPT_TUNING"}, "peft_type is PROMPT_TUNING, which cannot be composed"),
    "a kind that PEFT does not have": ({"peft_type": "WONDER"}, "peft_type is 'WONDER', and it is unknown"),
    "no type": ({"peft_type": None}, "peft_type is None"),
    "a list of types": ({"peft_type": ["LORA"]}, "peft_type is ['LORA']"),
    "DoRA": ({"use_dora": True}, "has no lora_magnitude_vector"),
    "lora_bias": ({"lora_bias": True}, "has no lora_B.bias"),
    "bias": ({"bias": "some"}, "bias is 'some'"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
    "trainable tokens": ({"trainable_token_indices": [1]}, "has no such rows"),
    "negative tokens": ({"trainable_token_indices": [-1]}, "trainable_token_indices is [-1]"),
    "layer replication": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is set"),
    "QA-LoRA": ({"use_qalora": True}, "use_qalora is set"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is set"),
    "Arrow": ({"arrow_config": {"top_k": 2}}, "arrow_config is set"),
    **{
        init: ({"init_lora_weights": init}, f"init_lora_weights is {init!r}, which changed the base")
        for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    },
    "an init that is a list": ({"init_lora_weights": ["pissa"]}, "init_lora_weights is ['pissa']"),
    "a key of a later PEFT": ({"use_wonder": 3, "peft_version": "0.99.0"}, "the key 'use_wonder' is unknown here"),
    "rank 0": ({"r": 0}, "r is 0, but must be a whole number"),
    "rank true": ({"r": True}, "r is True"),
    "rank as text": ({"r": "8"}, "r is '8'"),
    "a huge rank": ({"r": 10**40}, "r is <a number of 133 bits>"),
    "alpha 0": ({"lora_alpha": 0}, "lora_alpha is 0"),
    "alpha so small that it vanishes": ({"lora_alpha": 5e-324}, "lora_alpha is 5e-324"),
    "alpha of 400 digits": ({"lora_alpha": 10**400}, "lora_alpha is <a number of"),
    "rslora as text": ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    "a base that is a list": ({"base_model_name_or_path": ["org/base"]}, "base_model_name_or_path is"),
    "a colour in the base's name": ({"base_model_name_or_path": "org/\x1b[31mbase"}, r"org/\x1b[31mbase"),
    "half a character": ({"base_model_name_or_path": "org/\ud800"}, r"'org/\ud800'"),
    "patterns that are a list": ({"rank_pattern": [["q_proj", 2]]}, "rank_pattern is"),
    "a pattern to text": ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern is"),
    "no regex": ({"rank_pattern": {"q_proj(": 2}}, "'q_proj(' is not a valid regex"),
    "a regex that steps out": ({"rank_pattern": {"a)|(b": 2}}, "is not a valid regex"),
    "a regex that regex reads otherwise": ({"alpha_pattern": {"(?:q_prj){e<=1}|k_proj": 2}}, "is not a valid regex"),
    "a regex that looks ahead to a later Python": ({"alpha_pattern": {"[[:alpha:]_]*": 2}}, "is not a valid regex"),
    "a repeat too large": ({"alpha_pattern": {"a{99999999999999999999}": 2}}, "is not a valid regex"),
    "a regex of 2000 characters": ({"alpha_pattern": {"a|" * 1000: 2}}, "longer than 1000 characters"),
    "names of modules that are numbers": ({"modules_to_save": [1]}, "modules_to_save is [1]"),
}


SOUND_CONFIGS = {  # likewise
    "virtual tokens", "a kind that PEFT does not have", "aLoRA", "layer replication", "QA-LoRA", "BD-LoRA", "Arrow",
    "pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "a key of a later PEFT",
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_CONFIGS)
def test_configs_that_cannot_be_composed_exactly(
    wrong: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path
) -> None:
    changes, message = WRONG_CONFIGS[wrong]
    adapter(tmp_path / "swahili", None, config(**changes))
    refused(message, *compose(*pair, tmp_path / "out"))
    refused(message, "inspect", pair[1])
    with refusals.refused(UnsupportedError if wrong in SOUND_CONFIGS else ExpertError):
        adapterswap.open_adapter(pair[1])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{", "is not JSON in UTF-8"),
        (b"[1]", "is not a JSON object"),
        (b'{"r": 2, "r": 8}', "the same key twice"),
        (b'{"peft_type": "LORA", "lora_alpha": Infinity}', "lora_alpha is inf"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, "nested more than 40 levels deep"),
        (b"{" * 100_000, "is not JSON"),
        (b" " * (2**24 + 1), "is larger than 16,777,216 bytes"),
    ],
)
def test_a_damaged_config(
    raw: bytes, message: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path
) -> None:
    (pair[0] / CONFIG).write_bytes(raw)
    refused(message, *compose(*pair, tmp_path / "out"))
    with refusals.refused(ExpertError):
        adapterswap.open_adapter(pair[0])


def test_all_mistakes_of_both_experts_are_reported_together(
    pair: tuple[Path, Path], run: Callable[..., Result]
) -> None:
    (pair[0] / WEIGHTS).write_bytes(b"")
    adapter(pair[1], None, config(layer_replication=[[0, 1]], bias="some"))
    lines = run(*compose(*pair, "out")).stderr.splitlines()
    assert [line.split(": ", 2)[2].split(" ")[0] for line in lines[1:]] == ["layer_replication", "bias"]
    assert len(lines) == 3


def test_the_same_mistake_everywhere_is_counted(pair: tuple[Path, Path], run: Callable[..., Result]) -> None:
    adapter(pair[1], tensors(layers=30, rank=3))
    lines = run(*compose(*pair, "out")).stderr.splitlines()
    assert len(lines) == 4
    assert lines[-1] == "Error: 57 more problems were found. Correct these first."


def test_the_same_mistake_in_both_experts_is_reported_for_each(
    pair: tuple[Path, Path], run: Callable[..., Result]
) -> None:
    for path in pair:
        adapter(path, tensors(layers=30, rank=3))
    lines = run(*compose(*pair, "out")).stderr.splitlines()
    assert [sum(line.startswith(f"Error: {path}: ") for line in lines) for path in pair] == [3, 3]
    assert lines[-1] == "Error: 114 more problems were found. Correct these first."


@pytest.mark.parametrize("options", [(), ("--method", "soup"), ("--method", "soup", "--max-rank", 1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_nan_and_infinity_are_refused(
    dtype: str, value: float, options: tuple[object, ...], refused: Callable[..., None], tmp_path: Path
) -> None:
    """In a tensor that is copied, in one that is blended, and in one that is truncated; in A and in B."""
    math = adapter(tmp_path / "math", tensors(dtype=dtype))
    for factor in "AB":
        content = tensors(dtype=dtype, seed=1)
        name, (_, shape, raw) = f"{Q0}.lora_{factor}.weight", content[f"{Q0}.lora_{factor}.weight"]
        size = len(raw) // 8 if factor == "A" else len(raw) // 16
        bad = {"F32": "<f4", "F16": "<f2"}.get(dtype)
        spoilt = np.array(value, bad).tobytes() if bad else np.array(value, "<f4").tobytes()[2:]
        assert len(spoilt) == size
        swahili = adapter(tmp_path / "swahili", {**content, name: (dtype, shape, raw[:-size] + spoilt)})
        refused(f"{name} of the expert 'swahili' holds NaN", *compose_soup(math, swahili, tmp_path / "out", *options))


def compose_soup(math: Path, swahili: Path, out: Path, *options: object) -> tuple[object, ...]:
    zones = () if options else ("--bottom", 1, "--top", 1)
    return ("compose", "-t", math, "-l", swahili, "-o", out, "--num-layers", 4, *zones, *options)


@pytest.mark.parametrize("options", [(), ("--layout", "portable"), ("--max-rank", 1)])
@pytest.mark.parametrize(("dtype", "large"), [("F16", 6e4), ("F32", 3e38)])
def test_sums_that_overflow(
    dtype: str, large: float, options: tuple[object, ...], refused: Callable[..., None], tmp_path: Path
) -> None:
    folders = []
    for seed, name in enumerate(("math", "swahili")):
        content = {
            key: (dtype, shape, np.full(shape, large, dtype={"F16": "<f2", "F32": "<f4"}[dtype]).tobytes())
            for key, (_, shape, _) in tensors(dtype=dtype, seed=seed).items()
        }
        folders.append(adapter(tmp_path / name, content, config(lora_alpha=64)))
    method = ("--method", "task_arithmetic", "--scale", 100)
    refused("overflow", *compose_soup(folders[0], folders[1], tmp_path / "out", *method, *options))


def test_a_file_that_changes_between_its_header_and_its_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(*pair, num_layers=4, bottom=1, top=1)
    soup = adapterswap.soup(*pair, num_layers=4)
    raw = (pair[0] / WEIGHTS).read_bytes()
    (pair[0] / "new").write_bytes(raw[:-4] + b"\0\0\0\0")  # as a trainer would save it again: the header is the same
    os.utime(pair[0] / "new", ns=(1, 1))
    (pair[0] / "new").rename(pair[0] / WEIGHTS)
    for each in (plan, soup):
        with refusals.refused(ExpertError):
            adapterswap.write_adapter(each, tmp_path / "out")
    (pair[0] / WEIGHTS).unlink()
    with refusals.refused(ExpertError, match="cannot be read: No such file"):
        adapterswap.write_adapter(plan, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["math", "swahili"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapter_model.bin"], "holds a pickled adapter (.bin), which can run code when loaded. Rewrite it with"),
        (["adapter_model-00001-of-00002.safetensors"], "holds a sharded adapter. PEFT cannot load it either"),
        (["adapter_model.safetensors.index.json"], "holds a sharded adapter"),
        ([], "has no adapter_model.safetensors"),
    ],
)
def test_other_kinds_of_files(
    files: list[str], message: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path
) -> None:
    (pair[1] / WEIGHTS).unlink()
    for file in files:
        (pair[1] / file).write_bytes(b"x")
    refused(message, *compose(*pair, tmp_path / "out"))
    with refusals.refused(UnsupportedError if files else ExpertError):
        adapterswap.open_adapter(pair[1])


def test_inputs_that_are_not_files(pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path) -> None:
    """Reading a pipe would block, a device would never end, and a folder is not a file."""
    for file, damage in ((WEIGHTS, os.mkfifo), (CONFIG, os.mkfifo), (CONFIG, os.mkdir), (WEIGHTS, os.mkdir)):
        content = (pair[1] / file).read_bytes()
        (pair[1] / file).unlink()
        damage(pair[1] / file)
        refused(f"{file} ", *compose(*pair, tmp_path / "out"))
        (pair[1] / file).rmdir() if damage is os.mkdir else (pair[1] / file).unlink()
        (pair[1] / file).write_bytes(content)
    (pair[1] / CONFIG).unlink()
    (pair[1] / CONFIG).symlink_to("/dev/zero")
    refused("is not a regular file", "inspect", pair[1])
    (pair[1] / CONFIG).unlink()
    refused("adapter_config.json cannot be read: No such file or directory", "inspect", pair[1])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "path is empty"),
        ("nowhere", "The path nowhere does not exist"),
        ("./org/name", "does not exist"),
        ("~nosuchuser/adapter", "does not exist"),
        ("x" * 5000, "x does not exist"),
        ("/dev/null", "is a file, but the expert must be a folder. Pass the expert's folder"),
        ("org/name@../../x", "does not exist"),
        ("org/name@/etc", "does not exist"),
    ],
)
def test_references_without_a_target(reference: str, message: str, refused: Callable[..., None]) -> None:
    refused(message, "inspect", reference)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"num_hidden_layers": 10**15}, "does not say how many layers it has"),
        ({"num_hidden_layers": -4}, "does not say how many layers it has"),
        ({"num_hidden_layers": "4"}, "does not say how many layers it has"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "does not say how many layers it has"),
        ([1], "is not a JSON object"),
        ({"text_config": {"text_config": {"num_hidden_layers": 2}}}, "adapts layer 3, but the base has 2 layers"),
    ],
)
def test_an_invalid_base_config(
    base: Any, message: str, pair: tuple[Path, Path], refused: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(base))
    refused(message, "compose", "-t", pair[0], "-l", pair[1], "-o", tmp_path / "out", "--base-model", tmp_path / "base")


def test_a_base_config_with_infinity(pair: tuple[Path, Path], run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"num_hidden_layers": 4, "time_step_limit": [0.0, Infinity]}')
    zones = ("--bottom", 1, "--top", 1, "--base-model", tmp_path / "base")
    assert run("compose", "-t", pair[0], "-l", pair[1], "-o", tmp_path / "out", *zones).exit_code == 0


def test_a_base_of_another_shape(refused: Callable[..., None], tmp_path: Path) -> None:
    """A module trained in full by one expert only is averaged with the base's own weights, which must fit."""
    saved = with_tensor(f"{PREFIX}lm_head.weight", (4, 4))
    math = adapter(tmp_path / "math", saved, config(modules_to_save=["lm_head"]))
    swahili = adapter(tmp_path / "swahili", tensors(seed=1))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(BASE_CONFIG))
    options = (*compose(math, swahili, tmp_path / "out"), "--base-model", base)
    refused("has no safetensors weights", *options)
    for content, message in (
        ({"lm_head.weight": ("F32", (5, 4), bytes(80))}, "lm_head.weight"),
        ({"lm_head.weight": ("F8_E4M3", (4, 4), bytes(16))}, "lm_head.weight"),
        ({"other": ("F32", (4, 4), bytes(64))}, "has no tensor lm_head.weight"),
    ):
        result, data = parts(content)
        raw = json.dumps(result).encode()
        (base / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        refused(message, *options)


def test_an_invalid_record_is_ignored(pair: tuple[Path, Path], run: Callable[..., Result], tmp_path: Path) -> None:
    """`inspect` reads adapterswap.json, but shows the adapter whatever the record contains."""
    plain = run("inspect", pair[0])
    for raw in (
        b"\xff",
        b"{}",
        b'{"num_layers": 1000000000000, "experts": {}, "modules": {}}',
        b'{"num_layers": 4, "experts": {"a": 1}, "modules": {}}',
        b'{"num_layers": 4, "experts": {}, "modules": {"model.layers.0.self_attn.q_proj": "nobody"}}',
        b'{"num_layers": 4, "experts": {}, "modules": {"model.layers.0.self_attn.q_proj": {"a": 1e999}}}',
        b'{"num_layers": 4, "experts": {}, "modules": ' + b"[" * 100 + b"]" * 100 + b"}",
    ):
        (pair[0] / "adapterswap.json").write_bytes(raw)
        for options in ((), ("--json",)):
            result = run("inspect", pair[0], *options, exit_code=0)
            assert options or result.stdout == plain.stdout
    experts = {"\x1b[31mred\n": {"source": "a\x07b", "revision": None}}
    record = {"num_layers": 4, "experts": experts, "modules": {Q0.removeprefix(PREFIX): "\x1b[31mred\n"}}
    (pair[0] / "adapterswap.json").write_text(json.dumps(record))
    output = run("inspect", pair[0]).stdout
    assert r"\u001b[31mred\n from a\u0007b" in output
    assert output.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (b"\xff", "is not valid YAML"),
        (b"experts: {a: b", "is not valid YAML"),
        (b"experts: {a: b}\nexperts: {a: c}", "the key 'experts' appears twice"),
        (b'task: "\\e]0;title\\a"', "contains the control character"),
        (b"task: " + b"[" * 5000, "maximum depth of data"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "is not a known key"),
        (b"num_layers: 100000", "must be at most 9999"),
        (b"num_layers: 0x" + b"f" * 4000, "is not a valid int: it is too large"),
        (b"method: soup\ntask_weight: 1e308\nlanguage_weight: 1e308", "not a finite number up to 1e9"),
        (b"allocation: [{layers: '" + b"0-9999," * 9000 + b"1', expert: a}]", "write ranges"),
    ],
)
def test_invalid_recipes(recipe: bytes, message: str, refused: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(recipe)
    refused(message, "compose", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    refused("is neither a file nor a shipped recipe", "compose", tmp_path / "other.yaml", "-o", tmp_path / "out")
    refused("is not a regular file", "compose", "/dev/zero", "-o", tmp_path / "out")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_with_other_encodings(encoding: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Messages contain α and √, and a path may contain bytes that are not valid text."""
    out = os.fsencode(tmp_path) + b"/out-\xff"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    program = [sys.executable, "-m", "adapterswap"]
    for command in (["inspect", pair[0]], ["inspect", pair[0], "--json"], [*compose(*pair, "x", "--json"), "-o", out]):
        arguments = [part if isinstance(part, bytes) else str(part) for part in command]
        process = subprocess.run([*program, *arguments], capture_output=True, env=environment)
        assert (process.returncode, b"Traceback" in process.stderr) == (0, False), process.stderr
        if "--json" in command:
            json.loads(process.stdout)


def test_a_closed_pipe_is_not_an_error(pair: tuple[Path, Path]) -> None:
    """`adapterswap inspect … | head -1` ends in silence."""
    with subprocess.Popen(
        [sys.executable, "-m", "adapterswap", "inspect", str(pair[0]), "--json"], stdout=-1, stderr=-1
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_too_little_memory(refused: Callable[..., None], tmp_path: Path) -> None:
    """A file of eight megabytes may define a ΔW of sixteen terabytes, which TIES would need in full."""
    large = {
        f"{Q0}.lora_A.weight": ("F16", (2, 2_000_000), bytes(8_000_000)),
        f"{Q0}.lora_B.weight": ("F16", (2_000_000, 2), bytes(8_000_000)),
    }
    folders = [adapter(tmp_path / name, large) for name in ("math", "swahili")]
    options = ("--method", "ties", "--density", 0.5, "--max-rank", 1)
    refused("Out of memory", *compose_soup(folders[0], folders[1], tmp_path / "out", *options))
