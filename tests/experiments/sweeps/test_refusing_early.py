"""A folder that cannot be written is refused before experts and tasks are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused

from adapterswap.experiments.sweeps import prepared
from adapterswap.experiments.sweeps.run import sweep
from adapterswap.kit.errors import OutputError


def test_a_foreign_folder_is_refused_before_anything_is_read(
    recipe: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("experts and tasks were read")

    monkeypatch.setattr(prepared, "named_tasks", read)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    with refused(OutputError, "out_path"):
        sweep(recipe(), tmp_path / "run")  # type: ignore[operator]
