"""Two processes with gloo get the same results as one, to the last bit, and report them once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import choices
import pytest
from click.testing import Result
from launching import FORKED, TORCHRUN, launch
from refusals import refused
from tiers import ALL

from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.harness import in_batches
from adapterswap.kit.errors import ArgumentError
from adapterswap.kit.processes import Processes

from .in_processes import judge
from .test_evaluate import Model, memorizer
from .test_flores import flores
from .test_harness_kinds import kinds

__all__ = ["flores", "kinds", "memorizer"]  # the fixtures

HERE = Path(__file__).parent
SHORT = {"num_fewshot": 1, "max_gen_toks": 12}
EVALUATE = ["evaluate", "--device", "cpu", "--limit", "3", "--num-fewshot", "0", "--max-gen-toks", "20"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error(done: subprocess.CompletedProcess[str]) -> str:
    """The one error that was printed."""
    assert done.returncode == 1  # the launcher's own, whatever its processes end with
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def folder(memorizer: Model, tmp_path: Path) -> Path:
    """A folder with the model that has memorised two answers of mgsm_direct_sw, and its tokenizer."""
    for part in memorizer:
        part.save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("flores")
def test_two_processes_get_the_results_of_one(folder: Path, memorizer: Model, kinds: Path) -> None:
    options = {"num_fewshot": 2, "limit": 3, "max_gen_toks": 8}
    (longest,) = preview(memorizer[1], memorizer[0].config, ["mgsm_direct_sw"], Settings(**options))
    own = {"include_path": str(kinds), "trust_task_code": True}
    with_choices = {"include_path": str(choices.write_task(folder / "own"))}
    cases: dict[str, Any] = {
        # Seven documents in batches of two: four batches of one task; outputs that end by themselves, and some cut.
        "written": {"tasks": ["mgsm_direct_sw"], "settings": {"limit": 7, "num_fewshot": 0, "max_gen_toks": 13}},
        "languages": {"tasks": ["mgsm_native_cot_te", "mgsm_direct_ja"], "settings": SHORT | {"limit": 3}},
        "choices": {"tasks": [choices.TASK], "settings": with_choices | {"limit": 9}},
        "corpus": {"tasks": ["flores_eng_Latn-swh_Latn"], "settings": {"max_gen_toks": 12}},
        "some": {
            "tasks": ["mgsm_direct_sw", choices.TASK],
            "settings": SHORT | with_choices,
            "documents": {"mgsm_direct_sw": [8, 1, 3], choices.TASK: [39]},
        },
        "drawn": {
            "tasks": ["mgsm_direct_sw"],
            "settings": SHORT | {"limit": 5, "gen_kwargs": {"do_sample": True, "temperature": 1.0}},
        },
        "shots drawn": {"tasks": ["pico_choice_all"], "settings": own | {"num_fewshot": 2}},
        # One task has a single document, and two tasks' standard errors are bootstrapped.
        "kinds": {"tasks": ["pico_all", "pico_write", "pico_perplexity", "pico_last"], "settings": own},
        "truncated": {
            "tasks": ["mgsm_direct_sw"], "settings": options | {"truncate": True}, "context": longest.longest + 7,
        },
    }  # fmt: skip
    if not ALL:
        cases = {name: cases[name] for name in ("written", "choices", "kinds", "truncated")}
    for case in cases.values():
        case["settings"]["batch_size"] = 2
    (folder / "cases.json").write_text(json.dumps(cases))
    alone = judge(folder, folder / "alone")
    completed = launch(HERE / "in_processes.py", folder, by=TORCHRUN if ALL else FORKED)
    assert completed.returncode == 0, completed.stderr

    one, other = (json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1))
    for name in cases:
        expected = files(folder / "alone" / name)
        assert len(expected) == 2
        for rank in (0, 1):
            assert files(folder / f"process-{rank}" / name) == expected, name
        parts = [message["cases"][name]["calls"] for message in (one, other)]
        assert min(parts) > 0
        assert sum(parts) == alone[name]["calls"]
        assert one["cases"][name]["last"] == list(alone[name]["last"])
    assert one["squares"] == other["squares"] == [[number**2 for number in range(count)] for count in range(6)]
    assert one["main"] == other["main"] == 0
    (written,), (truncated,) = (
        json.loads((folder / "alone" / name / "results.json").read_text())["tasks"] for name in ("written", "truncated")
    )
    assert 0 < written["cut"] < 7
    assert truncated["truncated"] == 1


@pytest.mark.full
@pytest.mark.slow
def test_the_command_prints_once_and_writes_one_folder(folder: Path, run: Callable[..., Result]) -> None:
    own = ["--include-path", choices.write_task(folder / "own"), "--tasks", f"mgsm_direct_sw,{choices.TASK}"]
    command = [*EVALUATE, "--base-model", folder / "model", *own, "--batch-size", 2]
    alone = run(*command, "-o", folder / "alone", "--json")
    process = launch("-m", "adapterswap", *command, "-o", folder / "together", "--json")
    assert process.returncode == 0, process.stderr
    output = json.loads(process.stdout)
    assert output == json.loads(alone.stdout) | {"out_path": str(folder / "together")}
    assert process.stderr.count("written to") == 1
    assert "Loading weights" not in process.stderr  # it is not a terminal
    assert files(folder / "together") == files(folder / "alone")


@pytest.mark.full  # as in training, of which `make test` runs one
@pytest.mark.slow
def test_an_error_of_one_is_reported_once(folder: Path) -> None:
    error_message = error(launch(HERE / "in_processes.py", folder, "failing"))
    assert error_message == "Error: Process 1 fails. Correct it."
    assert not (folder / "failing").exists()


@pytest.mark.full
@pytest.mark.slow
def test_an_error_of_all_is_reported_once(folder: Path) -> None:
    requested = [*EVALUATE, "--base-model", folder / "model", "--tasks", "mgsm_direct_sw", "--adapter", folder / "none"]
    assert "none" in error(launch("-m", "adapterswap", *requested))


def test_a_numbered_device_is_refused_for_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(ArgumentError, "device"), Processes.joined("cuda:1"):
        pass


class Request:
    """The parts of the harness's request that decide its batch."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def test_choices_of_a_question_stay_together_and_settings_apart() -> None:
    def measured(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    choices = [Request(text, more) for text in ("ab", "abcd", "abc") for more in ("x", "yy")]
    assert in_batches(choices, 2, measured) == [[2, 3, 4, 5], [0, 1]]
    assert in_batches([Request("", "x"), Request("", "yyy"), Request("", "yy")], 2, measured) == [[1, 2], [0]]
    assert in_batches([Request("a"), Request("aaa"), Request("aa")], 2, measured) == [[1, 2], [0]]
    greedy, drawn = {"until": ["."]}, {"until": ["."], "do_sample": True}
    prompts = [Request("a", drawn), Request("aa", greedy), Request("aaa", drawn), Request("a", drawn)]
    assert in_batches(prompts, 2, measured) == [[2, 0, 3], [1]]
    assert in_batches([], 2, measured) == []
