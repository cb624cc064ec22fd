"""Records that were tampered with: what a record says is checked, and what is missing from it is a difference."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import Result
from peft import LoraConfig
from pico_models import edit_json, trained
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import adapterswap
from adapterswap import AdapterswapError
from adapterswap.engines.gguf.adapter import GgufAdapter
from adapterswap.tools.verification import verify

RECORD, CONFIG, WEIGHTS = "adapterswap.json", "adapter_config.json", "adapter_model.safetensors"
KINDS = ("adapter", "model", "gguf", "pieces", "extraction", "conversion")

# Folders may move and versions change; how a conversion was asked for cannot be recomputed. Cards may be edited, and
# quote those of the sources.
NOT_COMPARED = {
    ("adapterswap_version",), ("base", "source"), ("experts", "math", "source"), ("experts", "swahili", "source"),
    ("extraction", "full", "source"), ("extraction", "base", "source"), ("extraction", "rank"),
    ("fingerprints", "README.md"),
}  # fmt: skip
NOT_COMPARED_OF_CONVERSIONS = {("output",), ("output", "layout"), ("conversion", "peft_type")}


class Made(NamedTuple):
    """A result of each kind, with the sources of the first."""

    paths: dict[str, Path]
    experts: dict[str, dict[str, Path]]
    base: Path

    def verify(self, kind: str, base: Path | None = None) -> Any:
        return verify(self.paths[kind], self.experts[kind], base_model=base or self.base)

    def record(self, kind: str) -> dict[str, Any]:
        """The record as plain data."""
        if kind in ("gguf", "pieces"):
            content = GgufAdapter.open(self.paths[kind]).content
            assert content is not None
            return content
        content = json.loads((self.paths[kind] / RECORD).read_text())
        return dict(content)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Put another record in place of the first one, padded where its length is part of the file."""
        if kind not in ("gguf", "pieces"):
            (self.paths[kind] / RECORD).write_text(json.dumps(record))
            return
        path = self.paths[kind]
        for file in [path] if path.is_file() else path.glob("*.gguf"):
            rewrite(file, json.dumps(record, ensure_ascii=False))


def rewrite(file: Path, record: str) -> None:
    """A GGUF file with another record: its length changes, and so does the padding before the tensors."""
    import gguf

    reader = gguf.GGUFReader(file)
    field = reader.fields["adapterswap.record"]
    data = bytes(reader.data[reader.data_offset :])
    start, old = field.offset, sum(part.nbytes for part in field.parts)
    key = bytes(reader.data[start : start + 8 + len(field.name) + 4])
    text = record.encode()
    head = bytes(reader.data[:start]) + key + len(text).to_bytes(8, "little") + text
    last = reader.tensors[-1].field
    end = last.offset + sum(part.nbytes for part in last.parts)
    head += bytes(reader.data[start + old : end])
    del reader, field, last
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("made")
    base, experts = folder / "base", {name: folder / name for name in ("math", "swahili")}
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)).save_pretrained(base)
    raw = (base / "model.safetensors").read_bytes()
    prints = {"model.safetensors": hashlib.sha256(str(len(raw)).encode() + raw).hexdigest()}
    for seed, expert in enumerate(experts.values()):
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trained(base, lora, expert, seed=seed)
        edit_json(expert / CONFIG, base_model_name_or_path="base")
        (expert / "training.json").write_text(json.dumps({"base": {"fingerprints": prints}}))
    pickled = shutil.copytree(experts["math"], folder / "pickled")
    torch.save(load_file(pickled / WEIGHTS), pickled / "adapter_model.bin")
    (pickled / WEIGHTS).unlink()
    plan = adapterswap.layer_swap(*experts.values(), base_model=base, bottom=1, top=1, bottom_transition=1)
    adapterswap.merge(experts["math"], base, out_path=folder / "full")
    adapterswap.extract(folder / "full", base, folder / "extraction", rank=2)
    adapterswap.convert(pickled, folder / "conversion", allow_pickle=True, base_model=base)
    paths = {
        "adapter": plan.write(folder / "adapter"),
        "model": plan.merge(folder / "model", base_model=base),
        "gguf": plan.export(folder / "swap.gguf").path,
        "pieces": plan.export(folder / "pieces", pieces="zone").path,
        "extraction": folder / "extraction",
        "conversion": folder / "conversion",
    }
    sources = dict.fromkeys(KINDS, experts)
    sources |= {"extraction": {"full": folder / "full"}, "conversion": {"pickled": pickled}}
    return Made(paths, sources, base)


@pytest.fixture
def made(originals: Made, tmp_path: Path) -> Made:
    """The results in a folder of their own, to be changed."""
    paths = {kind: tmp_path / path.name for kind, path in originals.paths.items()}
    for kind, path in originals.paths.items():
        shutil.copy(path, paths[kind]) if path.is_file() else shutil.copytree(path, paths[kind])
    return originals._replace(paths=paths)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a record, without the many modules and rules, of which the first is enough."""
    many = bool(path) and path[-1] in ("modules", "tensors", "extracted", "rules", "unchanged", "files", "allocation")
    items = list(
        content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else ())
    )
    for key, value in items[:1] if many else items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(value: Any) -> Any:
    if isinstance(value, bool | None):
        return "org/x" if value is None else not value
    if isinstance(value, int | float):
        return value + 1
    return "0" * len(value) if isinstance(value, str) else type(value)()


def tampered(record: dict[str, Any], path: tuple[Any, ...], *, delete: bool) -> dict[str, Any]:
    result = copy.deepcopy(record)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if delete:
        del inner[path[-1]]
    else:
        inner[path[-1]] = changed(inner[path[-1]])
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_record_can_be_deleted_or_changed(kind: str, made: Made) -> None:
    record = made.record(kind)
    assert made.verify(kind).equal
    ignored = NOT_COMPARED | (NOT_COMPARED_OF_CONVERSIONS if kind == "conversion" else set())
    ignored |= {("experts", "pickled", "source")}
    passing = set()
    for path in places(record):
        for delete in (True, False):
            new = tampered(record, path, delete=delete)
            if new == record or (path in ignored and not (delete and path == ("adapterswap_version",))):
                continue
            made.write(kind, new)
            try:
                result = made.verify(kind)
            except AdapterswapError:
                continue  # refused: the record cannot be read any more
            if result.equal:
                passing.add((path, "deleted" if delete else "changed"))
    assert not passing
    made.write(kind, record)
    assert made.verify(kind).equal


@pytest.mark.parametrize("kind", KINDS)
def test_another_base_is_a_difference(kind: str, made: Made, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "base"
    shutil.copytree(made.base, other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    result = made.verify(kind, other)
    assert not result.equal
    assert result.changed_sources["base"] == "model.safetensors"


@pytest.mark.parametrize("kind", ["adapter", "model", "extraction", "conversion"])
def test_files_beside_a_result_are_reported(kind: str, made: Made, run: Callable[..., Result]) -> None:
    folder = made.paths[kind]
    (folder / "thesis.txt").write_text("mine")
    (folder / "README.md").write_text("edited")
    experts = [text for name, path in made.experts[kind].items() for text in ("--expert", f"{name}={path}")]
    result = run("verify", folder, *experts, "--base-model", made.base, exit_code=0)
    assert "thesis.txt" in result.stderr
    assert ("README.md" in result.stderr) == (kind in ("adapter", "model"))


@pytest.mark.parametrize("kind", ["gguf", "pieces"])
def test_bytes_after_the_end_of_a_file_are_a_difference(kind: str, made: Made) -> None:
    path = made.paths[kind]
    file = path if path.is_file() else min(path.glob("*.gguf"))
    file.write_bytes(file.read_bytes() + b"\0" * 32)
    assert len(made.verify(kind).differing) == 1


def test_a_file_beside_the_weights_is_compared(made: Made) -> None:
    """The tokenizer, generation settings and so on of full weights."""
    file = made.paths["model"] / "generation_config.json"
    file.write_text(file.read_text().replace("}", ', "temperature": 2}'))
    assert made.verify("model").differing == (file.name,)
    file.unlink()
    assert made.verify("model").differing == (file.name,)


def test_a_conversion_without_its_source(made: Made, run: Callable[..., Result]) -> None:
    result = run("verify", made.paths["conversion"], "--base-model", made.base, exit_code=0)
    assert "--expert pickled=PATH" in result.stderr
