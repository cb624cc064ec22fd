"""benchmarks/gpu_check.py on the CPU: what can run here passes, what cannot says why, and a difference is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from importing import loaded
from safetensors.torch import load_file, save_file

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with experts that are trained for two steps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = loaded(BENCHMARKS / "gpu_check.py")
    module.STEPS, module.REPEATS = 2, 1
    for slow in ("training", "several processes"):  # processes of their own
        del module.PLACES[slow]
    return module


def run(check: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, dict[str, Any]]]:
    monkeypatch.setattr("sys.argv", ["gpu_check.py", str(out), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    return int(ended.value.code or 0), {row["place"]: row for row in json.loads(out.read_text())["places"]}


@pytest.mark.full
def test_on_a_cpu(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows = run(check, tmp_path / "out.json", monkeypatch)
    statuses = {place: row["status"] for place, row in rows.items()}
    assert statuses == {
        "training with FlashAttention": "skipped", "training with 8-bit AdamW": "skipped", "live switching": "ok",
        "merging": "ok", "extracting": "ok", "evaluation": "ok", "vLLM: a sweep": "skipped",
    }  # fmt: skip
    assert code == 0
    assert all(row["difference"] == 0 and row["seconds"] > 0 for row in rows.values() if row["status"] == "ok")
    assert rows["vLLM: a sweep"]["reason"] == "needs a CUDA device"


def test_what_fails_or_differs_is_told(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(check, "PLACES", {"one": broken, "other": lambda world: check.Found(0.2, 0.1)})
    code, rows = run(check, tmp_path / "out.json", monkeypatch)
    assert code == 1
    assert rows["one"]["reason"] == "RuntimeError: no kernel image"
    assert rows["other"]["status"] == "differs"


def test_merged_weights_are_compared(check: Any, tmp_path: Path) -> None:
    for name, last in (("one", 4.0), ("other", 4.5)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([1.0, last]), "v": torch.ones(2)}, tmp_path / name / "model.safetensors")
    assert check.weights_apart(tmp_path / "one", tmp_path / "other") == 0.125
    assert load_file(tmp_path / "one" / "model.safetensors")["w"][1] == 4
