"""Records of older formats: results that an older version wrote are verified by the rules of their format.

`format1` holds pico experts and what adapterswap 0.1.0 made of them, `format2` what 0.2.0 made of the same experts
before format 3. All numbers are multiples of 1/8 or 1/16, so that every sum is exact on any processor.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from adapterswap import AdapterswapError
from adapterswap.tools.verification import verify

OLD = Path(__file__).parent / "format1"
FORMAT2 = Path(__file__).parent / "format2"
ADAPTERS = {name: OLD / name for name in ("math", "code", "swahili", "bengali")}
MODEL = {**{name: OLD / name for name in ("math", "code", "swahili")}, "tuned": OLD / "tuned"}


@pytest.mark.parametrize("result", ["swap", "task_arithmetic", "magnitude_soup"])
def test_an_adapter_of_format_1_is_verified_by_that_formats_rules(result: str) -> None:
    assert json.loads((OLD / result / "adapterswap.json").read_text())["format"] == 1
    assert verify(OLD / result, ADAPTERS).equal


def test_a_model_of_format_1_is_verified_by_that_formats_rules() -> None:
    assert json.loads((OLD / "dare" / "adapterswap.json").read_text())["format"] == 1
    assert verify(OLD / "dare", MODEL, base_model=str(OLD / "base")).equal


def test_a_changed_result_of_format_1_is_detected(tmp_path: Path) -> None:
    changed = shutil.copytree(OLD / "task_arithmetic", tmp_path / "out")
    tensors = load_file(changed / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    save_file(tensors, changed / "adapter_model.safetensors", {"format": "pt"})
    assert verify(changed, ADAPTERS).differing == (name,)


@pytest.mark.parametrize("result", ["swap", "magnitude_soup", "slice", "merged"])
def test_results_of_format_2_are_verified(result: str, tmp_path: Path) -> None:
    sources = {
        "merged": {name: MODEL[name] for name in ("math", "tuned", "swahili")},
        "swap": {name: ADAPTERS[name] for name in ("math", "code", "swahili")},
        "magnitude_soup": {name: ADAPTERS[name] for name in ("math", "swahili")},
        "slice": {"swahili": ADAPTERS["swahili"]},
    }[result]
    record = json.loads((FORMAT2 / result / "adapterswap.json").read_text())
    assert record["format"] == 2
    base = str(OLD / "base") if result == "merged" else None
    assert verify(FORMAT2 / result, sources, base_model=base).equal

    lying = shutil.copytree(FORMAT2 / result, tmp_path / "lying")
    (lying / "adapterswap.json").write_text(json.dumps(record | {"rules": []}))
    assert verify(lying, sources, base_model=base).record_differs == ("rules",)


@pytest.mark.parametrize("version", [0, 4, "2", None])
def test_a_record_of_an_unknown_format_is_refused(version: object, tmp_path: Path) -> None:
    out = shutil.copytree(OLD / "swap", tmp_path / "out")
    record = json.loads((out / "adapterswap.json").read_text()) | {"format": version}
    (out / "adapterswap.json").write_text(json.dumps(record))
    with pytest.raises(AdapterswapError):
        verify(out, ADAPTERS)
