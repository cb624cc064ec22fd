"""The real-data example with less training: every step runs on the real rows. The numbers mean nothing."""

from __future__ import annotations

import json
import math
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.experiments.training import TrainRecipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_data"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return runpy.run_path(str(EXAMPLE / "run.py"))


@pytest.mark.slow
def test_every_step_of_the_example_runs(example: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    with warnings.catch_warnings():
        # PEFT 0.21 uses a name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        results = example["run"](out, pretrain_steps=3, expert_steps=2, limit=1)
    assert list(results) == ["base", "math", "swahili", "composition"]
    for message in results.values():
        assert set(message["heldout_loss"]) == {"math", "swahili"}
        # An untrained model has a loss of about ln(1024) per token; two steps make it neither worse nor much better.
        assert all(4 < loss < 1.1 * math.log(1024) for loss in message["heldout_loss"].values())
        assert set(message["mgsm"]) == {"mgsm_direct_sw", "mgsm_direct_en"}
    losses = [tuple(message["heldout_loss"].values()) for message in results.values()]
    assert len(set(losses)) == 4  # each adapter changes something
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ adapterswap ")]
    assert [line.split()[2] for line in commands] == ["train", "train", "compose", *["evaluate"] * 4]

    composed = open_adapter(out / "math-swahili")
    experts = {name: open_adapter(out / "experts" / name) for name in ("math", "swahili")}
    assert set(composed.modules) == set(experts["math"].modules) == set(experts["swahili"].modules)
    message = json.loads((out / "experts" / "swahili" / "training.json").read_text(encoding="utf-8"))
    assert message["rows"]["train"] == 520
    assert message["rows"]["boundary_moved"] == 0


def test_the_page_shows_the_table(example: dict[str, Any], capsys: Any) -> None:
    told = {"heldout_loss": {"math": 1.2345, "swahili": 2.0}, "mgsm": {"mgsm_direct_sw": 0.0, "mgsm_direct_en": 0.5}}
    example["show"]({"base": told})
    assert "1.234" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["math", "swahili"])
def test_the_recipes_name_existing_rows(name: str) -> None:
    recipe = TrainRecipe.read(EXAMPLE / f"{name}.yaml")
    assert recipe.validation is not None
    for source in [*recipe.datasets, *(recipe.validation.datasets or [])]:
        assert (recipe.folder / source.path).is_file()


def test_rows_are_licensed_and_held_out_rows_are_not_trained_on() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in (EXAMPLE / "data").glob("*.jsonl")}
    assert sum(len(text.encode()) for text in files.values()) <= 600_000
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    for name, found in rows.items():
        for row in found:
            if name.startswith("math"):
                assert row["source"].startswith("GSM8K train, line ")
                assert row["source"].endswith("(MIT)")
            else:
                assert any(licence in row["source"] for licence in ("CC0 1.0", "CC BY 3.0", "CC BY 4.0"))
                assert not any(licence in row["source"] for licence in ("BY-SA", "BY-NC", "Apache"))
    for topic, column in (("math", "question"), ("swahili", "completion")):
        trained, held_out = ({row[column] for row in rows[f"{topic}_{part}"]} for part in ("train", "heldout"))
        assert not trained & held_out
