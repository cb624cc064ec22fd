"""Records of the first format: results that an older version wrote are verified by the rules that it recorded.

`format1` holds pico experts and what adapterswap 0.1.0 made of them. All numbers are multiples of 1/8 or halves of
such, so that every sum is exact on any processor.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from adapterswap import AdapterswapError
from adapterswap.checking.verifying import verify

OLD = Path(__file__).parent / "format1"
ADAPTERS = {name: OLD / name for name in ("math", "code", "swahili", "bengali")}
MODEL = {**{name: OLD / name for name in ("math", "code", "swahili")}, "tuned": OLD / "tuned"}


@pytest.mark.parametrize("result", ["swap", "task_arithmetic", "magnitude_soup"])
def test_an_adapter_of_format_1_is_verified_by_its_own_rules(result: str) -> None:
    assert json.loads((OLD / result / "adapterswap.json").read_text())["format"] == 1
    assert verify(OLD / result, ADAPTERS).equal


def test_a_model_of_format_1_is_verified_by_its_own_rules() -> None:
    assert json.loads((OLD / "dare" / "adapterswap.json").read_text())["format"] == 1
    assert verify(OLD / "dare", MODEL, base_model=str(OLD / "base")).equal


def test_a_changed_result_of_format_1_is_found(tmp_path: Path) -> None:
    changed = shutil.copytree(OLD / "task_arithmetic", tmp_path / "out")
    tensors = load_file(changed / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    save_file(tensors, changed / "adapter_model.safetensors", {"format": "pt"})
    assert verify(changed, ADAPTERS).differing == (name,)


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_a_record_of_an_unknown_format_is_refused(version: object, tmp_path: Path) -> None:
    out = shutil.copytree(OLD / "swap", tmp_path / "out")
    record = json.loads((out / "adapterswap.json").read_text()) | {"format": version}
    (out / "adapterswap.json").write_text(json.dumps(record))
    with pytest.raises(AdapterswapError):
        verify(out, ADAPTERS)
