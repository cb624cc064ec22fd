"""A GGUF file whose counts are wrong is refused at once, whatever they announce."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from adapterswap.engines.gguf.adapter import GgufAdapter
from adapterswap.engines.gguf.header import read_gguf
from adapterswap.kit.errors import AdapterswapError, ExpertError

gguf = pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """LoRA on one weight, with an array of each kind."""
    path = tmp_path / "lora.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["one", "two"])
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((32, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header_size(file: Path) -> int:
    return file.read_bytes().index(b"blk.0.attn_q.weight.lora_b") + 60


def test_the_file_as_it_is(file: Path) -> None:
    fields = read_gguf(file).fields
    assert fields["numbers"].contents() == [1, 2, 3]
    assert fields["texts"].contents() == ["one", "two"]
    assert len(GgufAdapter.open(file).modules) == 1


@pytest.mark.parametrize("count", [2**64 - 1, 2**62, 2**40, 10**6])
def test_any_eight_bytes_may_lie(file: Path, count: int) -> None:
    """No count keeps the reader busy: without the check, one of 2⁴⁰ texts would for days."""
    content = file.read_bytes()
    refusals = 0
    for place in range(8, header_size(file), 4):
        file.write_bytes(content[:place] + struct.pack("<Q", count) + content[place + 8 :])
        try:
            GgufAdapter.open(file)
        except AdapterswapError:
            refusals += 1
    assert refusals > 20


@pytest.mark.parametrize("length", [0, 3, 4, 8, 23, 100])
def test_a_file_that_ends_early(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with refused(ExpertError, "path"):
        GgufAdapter.open(file)
