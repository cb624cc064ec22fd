"""Reading adapters, against PEFT's resolution of patterns and safetensors' loader; and the cost of reading."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import load_base
from crafting import CONFIG, WEIGHTS, adapter, file_bytes, parts, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from refusals import refused
from safetensors import safe_open

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.core.experts.config import AdapterConfig, Patterns
from adapterswap.core.writing.outputs import header_bytes
from adapterswap.kit.errors import ExpertError, UnsupportedError
from adapterswap.kit.files.tensorfile import TensorFile

EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {"use_rslora": False, "r": 6, "lora_alpha": 9},
    "rslora": {},
    "patterns": {
        "rank_pattern": {"q_proj": 3, r".*\.(0|1)\.mlp\..*": 5},
        "alpha_pattern": {r"^model\.layers\.\d+\.mlp.*": 7},
    },
    # Overlapping keys: PEFT sorts them when it saves, so the order in the file decides.
    "overlap": {"alpha_pattern": {"layers.1.*": 1, ".*v_proj": 2, "model.layers.2.self_attn.k_proj": 3, "k_proj": 4}},
    "some layers": {"layers_to_transform": [0, 5], "target_modules": ["v_proj"]},
    "head": {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "alpha_pattern": {"lm_head": 2.5}},
}


@pytest.mark.parametrize("options", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_modules_match_peft(
    options: str, dtype: torch.dtype, base: Callable[[str], Path], expert: Callable[..., Path]
) -> None:
    folder = expert(seed=1, dtype=dtype, **EXPERTS[options])
    opened = open_adapter(folder)
    model = PeftModel.from_pretrained(load_base(base("llama")), folder)
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert opened.modules.keys() == layers.keys()
    for name, module in opened.modules.items():
        layer = layers[name]
        assert module.rank == layer.r["default"]
        assert module.alpha == layer.lora_alpha["default"]
        assert module.scale == layer.scaling["default"]
        assert (module.out_features, module.in_features) == (
            (layer.out_features, layer.in_features) if not module.embedding else (32, 96)
        )
        result = re.search(r"layers\.(\d+)\.", name)
        assert module.layer == (int(result[1]) if result else None)
        part = name.split(".")[3] if result else ""
        assert module.kind == {"self_attn": "attention", "mlp": "mlp"}.get(part, "other")
        assert module.dtype == {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[str(dtype).split(".")[1]]
    assert opened.container in ("model.layers", None)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox"])
def test_byte_ranges_match_safetensors(architecture: str, expert: Callable[..., Path]) -> None:
    folder = expert(architecture, seed=1, dtype=torch.bfloat16)
    raw = (folder / WEIGHTS).read_bytes()
    header = TensorFile.read(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert set(file.keys()) == set(header.tensors)
        for name, place in header.tensors.items():
            tensor = file.get_tensor(name)
            assert list(place.shape) == list(tensor.shape)
            assert raw[place.start : place.stop] == tensor.view(torch.uint8).numpy().tobytes()


def test_a_written_header_is_read_back(tmp_path: Path) -> None:
    specs = [("b", "F16", (3, 5)), ("ä", "F32", (2, 0)), ("a", "BF16", ()), ("c", "F32", (7,)), ("d", "I8", (3,))]
    header, places = header_bytes(specs)
    size = max(place.stop for place in places.values())
    (tmp_path / "x").write_bytes(header + bytes(size - len(header)))
    assert len(header) % 8 == 0
    assert dict(TensorFile.read(tmp_path / "x").tensors) == places
    with safe_open(tmp_path / "x", "np") as file:
        assert {name: list(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            name: list(shape) for name, _, shape in specs
        }


def test_unusual_but_valid_files(tmp_path: Path) -> None:
    """Tensors in any order, other metadata or none, spaces after the header, mixed dtypes."""
    first, second = tensors(), tensors(seed=1, dtype="F16")
    name = next(iter(first))
    content = dict(reversed({**first, name: second[name]}.items()))
    header, data = parts(content)
    for metadata in (None, {}, {"format": "pt", "note": "two\nlines"}):
        header.pop("__metadata__", None)
        if metadata is not None:
            header["__metadata__"] = metadata
        raw = json.dumps(header).encode() + b" " * 13
        adapter(tmp_path)
        (tmp_path / WEIGHTS).write_bytes(file_bytes(raw, data))
        opened = open_adapter(tmp_path)
        assert len(opened.modules) == 8
        assert opened.modules["model.layers.0.self_attn.q_proj"].a.dtype == "F16"
        assert opened.modules["model.layers.0.self_attn.q_proj"].dtype == "F32"


def test_defaults_match_peft(tmp_path: Path) -> None:
    """A config may omit most keys; null is valid only where PEFT accepts it (see test_peft_defaults)."""
    for content in ({"peft_type": "LORA"}, {"peft_type": "LORA", **dict.fromkeys(["use_rslora", "fan_in_fan_out"])}):
        (tmp_path / CONFIG).write_text(json.dumps(content))
        read = AdapterConfig.read(tmp_path / CONFIG)
        assert (read.rank, read.alpha, read.rslora, read.fan_in_fan_out) == (8, 8, False, False)
        assert read.resolved(["any"]) == ({"any": 8}, {"any": 8})


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    header = TensorFile.read(folder / WEIGHTS)
    with header.open() as file:
        assert file.read(8) == header.header[:8]

    def write_meanwhile() -> None:
        with header.open(), (folder / WEIGHTS).open("r+b") as other:
            other.seek(-1, 2)
            other.write(b"x")

    with refused(ExpertError, match="changed since it was opened"):
        write_meanwhile()
    with refused(ExpertError), header.open():
        pass


PIECES = [
    "q_proj", "layers", "model", "self_attn", "mlp", ".", r"\.", ".*", ".+", r"\d+", "(0|1)", "(q|k)_proj", "[01]", "^",
    "$", "1?", "_", "a", "(mlp|self_attn)", r"\w{2,5}", "(?:.*proj)", "(?=q)", "(?!q)", "(?<=s)", "(?i:Q_PROJ)", "|",
]  # fmt: skip
NAMES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 10)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.1.w1")
]
NAMES += ["lm_head", "model.embed_tokens", "q_proj", "a", "a.a.a", "model_layers.1.q_proj"]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.integers(1, 9), max_size=4))
def test_patterns_resolve_as_in_peft(values: dict[str, int]) -> None:
    for key in values:
        try:
            re.compile(key)
        except re.error:
            return
    patterns = Patterns(values)
    patterns.check(NAMES)
    for name in NAMES:
        expected = values.get(get_pattern_key(values.keys(), name), 0)
        assert patterns.get(name, 0) == expected, name


REAL_PATTERNS = [
    r"^model\.layers\.\d+\.mlp.*", r".*\.(0|1)\..*", "model.decoder.layers.0.encoder_attn.k_proj", "q_proj",
    r".*layers.*self_attn.*q_proj", r"layers\.(\d|1\d|2[0-3])\..*", r"model\.layers\.(?:0|1|2)\.self_attn\.[qkv]_proj",
    r"^(?!.*lm_head).*proj$", r"(.*\.)?experts\.\d+\.w[123]",
]  # fmt: skip


def test_patterns_of_real_adapters_are_not_refused() -> None:
    """For 126 layers of a 405B model, and for 48 layers of 128 experts; resolved quickly."""
    dense = [
        f"model.layers.{layer}.{part}"
        for layer in range(126)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    experts = [
        f"model.layers.{i}.mlp.experts.{j}.{w}_proj" for i in range(48) for j in range(128) for w in ("up", "down")
    ]
    for names, keys in ((dense, REAL_PATTERNS), (dense, dense), (experts, REAL_PATTERNS[:3])):
        patterns = Patterns(dict.fromkeys(keys, 1))
        patterns.check(names)
        start = time.process_time()
        for name in names[:: max(1, len(names) // 500)]:
            patterns.get(name, 0)
        assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "key",
    [r"(a+)+$x", r"(.*)*x", r"(.*a){20}x", r"(\w+\s?)*x", ".*" * 9 + "x", "(a?){60}x", "a?" * 60 + "x", r"(?=(a+)+x)",
     r"(?>(a|a)*)x", r"((a{0,8}){0,8}){0,8}x"],
)  # fmt: skip
def test_patterns_that_are_too_slow_for_re_are_resolved(key: str) -> None:
    start = time.process_time()
    patterns = Patterns({key: 1})
    patterns.check(["a" * 60 + str(number) for number in range(100)])
    assert patterns.get("a" * 60 + "1", 0) == 0
    assert time.process_time() - start < 5


@pytest.mark.parametrize("key", [r"(a|aa)+x", "(?:.|..)+[xyz]", "(" * 50 + "a*" + ")*" * 50])
def test_patterns_that_take_too_long_are_refused_in_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapterswap.core.experts.config._SECONDS", 0.5)
    start = time.process_time()
    with pytest.raises(ValueError, match="takes too long"):
        Patterns({key: 1}).check(["a" * 60 + str(number) for number in range(100)])
    assert time.process_time() - start < 5


def test_the_time_limit_covers_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapterswap.core.experts.config._SECONDS", 0)
    Patterns({"a.b": 1}).check(["a.b"])  # a plain name is not matched as a regex
    with pytest.raises(ValueError, match="takes too long"):
        Patterns({"a.*": 1}).check(["a.b"])


@pytest.mark.parametrize(
    "key", [r"(q|k)_proj\1", r"(?P<x>q|k)_(?P=x)", r"(model\.)?layers\.\d+\.\1?mlp.*", "a{,2}", "a{2}"]
)
def test_groups_are_numbered_as_in_peft(key: str) -> None:
    """PEFT puts two groups of its own before a key's."""
    names = [*NAMES, "k_projk", "q_q", "aa", "a.k_proja."]
    patterns = Patterns({key: 1})
    for name in names:
        assert patterns.get(name, 0) == {key: 1}.get(get_pattern_key([key], name), 0), name


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="3000 regexes"):
        Patterns({f"a*{i}": 1 for i in range(3000)})
    names = [f"model.layers.{i}.q_proj" for i in range(20_000)]
    with pytest.raises(ValueError, match="20000 keys take too long"):
        Patterns(dict.fromkeys(names, 1)).check(names)
    with pytest.raises(ValueError, match="200 regexes of 19"):
        Patterns({("a|" * 495) + str(i): 1 for i in range(200)})


BOMBS = {
    "lists": b'{"a":' + b"[" + b"[]," * 100_000 + b"[]]}",
    "objects": b"{" + b",".join(b'"%x":{}' % i for i in range(30_000)) + b"}",
    "numbers": b'{"a":[' + b"1.5," * 75_000 + b"0]}",
    "a name": b'{"' + b"x" * 2_000_000 + b'": 1}',
    "tensors": json.dumps(
        {f"{i:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(5_000)}
    ).encode(),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_grows_only_with_the_file(bomb: str, tmp_path: Path) -> None:
    """A quarter of a megabyte that expands in memory as header and as config; at most 60 bytes per byte of the file."""
    raw = BOMBS[bomb]
    adapter(tmp_path)
    for damage in ((tmp_path / CONFIG, raw), (tmp_path / WEIGHTS, file_bytes(raw, b""))):
        kept = damage[0].read_bytes()
        damage[0].write_bytes(damage[1])
        tracemalloc.start()
        with pytest.raises((ExpertError, UnsupportedError)) as caught:
            open_adapter(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60 * len(raw)
        assert len(str(caught.value)) < 25_000
        damage[0].write_bytes(kept)


def test_an_oversized_header_is_refused(tmp_path: Path) -> None:
    adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(file_bytes(b" " * (32 * 2**20 + 8), b""))
    with refused(ExpertError, match="its header claims 33554440 bytes"):
        open_adapter(tmp_path)


def test_names_of_many_parts_are_read_quickly(tmp_path: Path) -> None:
    """A careless regex for layers would try every way to split such a name."""
    name = ".".join(["abcdefgh"] * 40)
    content = {key.replace("model.layers.0", name): tensor for key, tensor in tensors().items()}
    start = time.process_time()
    opened = open_adapter(adapter(tmp_path, content))
    assert time.process_time() - start < 1
    assert opened.modules[f"{name}.mlp.down_proj"].layer is None
    assert opened.container == "model.layers"
