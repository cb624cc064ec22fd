"""The French study's numbers in README and docs/lab.md are those of its results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "smollm2"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "table.py"))


def test_the_pages_have_the_tables_of_the_results(script: dict[str, Any]) -> None:
    content = json.loads((EXAMPLE / "results.json").read_text(encoding="utf-8"))
    marks = content["marks"]
    lab = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8").splitlines()
    for line in (*script["table"](marks), *script["by_operation"](marks), *script["beside_pairs"](content)):
        assert line in lab
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for line in script["in_short"](marks):
        assert line in readme


def test_a_table_by_hand(script: dict[str, Any]) -> None:
    """Three pairs; the swap solves what the math expert does and one whole template more, in one pair only."""
    templates = [problem["template"] for problem in script["test_problems"]()]
    math = "".join(str(int(template == "t01")) for template in templates)
    more = "".join(str(int(template in ("t01", "t02"))) for template in templates)
    swap = {"math-0+french-0": math, "math-1+french-1": more, "math-2+french-2": math}
    marks = {
        "base": {"": "0" * len(templates)},
        "task expert": {f"math-{seed}": math for seed in range(3)},
        "layer swap": swap,
    }
    heading, _, base, task, last = script["table"](marks)
    assert heading.startswith("| | math 0 + french 0 | math 1 + french 1 | math 2 + french 2 | mean |")
    assert base.startswith("| base | 0.000 | 0.000 | 0.000 | 0.000 | +0.044 |")
    # of 30 templates one differs by 1/3: mean 1/90, standard error 1/90; over pairs 0, 1/30 and 0: 4.3 · 1/90;
    # of 285 problems ten differ by 1/3: mean 0.0117, standard error 0.0037
    assert task.startswith("| **math expert** (= reset) | 0.033 | 0.033 | 0.033 | 0.033 | +0.011 | [")
    assert task.endswith("] | ± 0.023 | ± 0.048 | +0.012 ± 0.007 |")
    assert last.startswith("| layer swap | 0.033 | 0.067 | 0.033 | 0.044 |")
    assert np.mean(script["of_pair"](marks["task expert"], "math-1+french-0")) == pytest.approx(10 / len(templates))
