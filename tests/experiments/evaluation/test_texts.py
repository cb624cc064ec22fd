"""Lone surrogates, which JSON and arguments can hold but UTF-8 cannot, are refused in all input texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from refusals import refused

from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.results import broken_texts
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError, DataError

Model = tuple[Any, Any]
Call = Callable[..., Result]

HALF = "{{{{ '\\\\ud800' }}}}"  # a template that writes one
HEAD = """
task: half_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
generation_kwargs: {{until: ["."], do_sample: false, max_gen_toks: 4}}
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""
ASK = "doc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{a}}}}'\n"
LIKELY, WRITTEN = "output_type: loglikelihood\n", "output_type: generate_until\n"
TASKS = {
    "fine": ("exact_match", WRITTEN + ASK),
    "prompt": ("exact_match", WRITTEN + f'doc_to_text: "{HALF}"\ndoc_to_target: "b"\n'),
    "target": ("exact_match", WRITTEN + f'doc_to_text: "b"\ndoc_to_target: "{HALF}"\n'),
    "context": ("acc", LIKELY + f'doc_to_text: "{HALF}"\ndoc_to_target: "b"\n'),
    "continuation": ("acc", LIKELY + f'doc_to_text: "b"\ndoc_to_target: "{HALF}"\n'),
    "description": ("acc", LIKELY + ASK + f'description: "{HALF}"\n'),
    "prefix": ("exact_match", WRITTEN + ASK + f'gen_prefix: "{HALF}"\n'),
    "choice": (
        "acc",
        "output_type: multiple_choice\ndoc_to_text: b\ndoc_to_target: 0\ndoc_to_choice: \"['a', '\\\\ud800']\"\n",
    ),
    "rolling": ("byte_perplexity", f"output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: \"{HALF}\"\n"),
}
ROWS = [{"q": "ab", "a": "c"}, {"q": "bc", "a": "d"}]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("halves"), tmp_path_factory.mktemp("data")
    good = "".join(json.dumps(row) + "\n" for row in ROWS)
    rows = dict.fromkeys(TASKS, good) | {
        "row": good + json.dumps({"q": "x\ud800y", "a": "c"}) + "\n",
        "torn": good + '{"q": \n',
    }
    texts = TASKS | dict.fromkeys(("row", "torn", "latin"), ("acc", LIKELY + ASK))
    for name, (metric, text) in texts.items():
        file = data / f"{name}.jsonl"
        file.write_bytes(rows[name].encode() if name in rows else b'{"q": "caf\xe9", "a": "b"}\n')
        known = {"name": name, "data": file, "metric": metric}
        (folder / f"{name}.yaml").write_text((HEAD + text).format(**known), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [name for name in TASKS if name != "fine"])
def test_a_text_with_a_lone_surrogate_is_refused(byte_model: Model, halves: Path, name: str) -> None:
    model, tokenizer = byte_model
    settings = Settings(include_path=halves)
    for ask in (
        lambda: preview(tokenizer, model.config, [f"half_{name}"], settings),
        lambda: evaluate_model(model, tokenizer, [f"half_{name}"], settings),
    ):
        with refused(DataError, "tasks", match=rf"half_{name}.*document 0.*\\ud800"):
            ask()


@pytest.mark.parametrize(("name", "place"), [("row", "row 2"), ("torn", "row 2"), ("latin", "0xe9")])
def test_data_that_is_not_text_is_refused(halves: Path, name: str, place: str) -> None:
    with refused(DataError, "tasks", match=place):
        LoadedTasks.load([f"half_{name}"], Settings(include_path=halves))


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [
        ("--system-instruction", "\udcff", {"system_instruction": "\udcff"}),
        ("--gen-kwargs", "until=\udcff", {"gen_kwargs": {"until": ["a", "\ud800"]}}),
    ],
)
def test_settings_that_are_not_text_are_refused(
    run: Call, byte_base: Path, byte_model: Model, halves: Path, tmp_path: Path, option: str, value: str,
    setting: dict[str, Any],
) -> None:  # fmt: skip
    with refused(ArgumentError, next(iter(setting))):
        Settings(**setting).check(byte_model[1])
    result = run(
        "evaluate", "--base-model", byte_base, "--tasks", "half_fine", "--include-path", halves, option, value,
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 2
    assert result.stderr.startswith(f"reading the tasks\nError: {option} ")
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_not_text_is_unknown() -> None:
    with refused(ArgumentError, "tasks", match=r"'fi\\udcff'"):
        LoadedTasks.check_names(["fi\udcff"])


def test_a_chat_template_that_writes_one(run: Call, byte_base: Path, halves: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(byte_base, base)
    template = "{% for turn in messages %}{{ turn.content + '\\ud800' }}{% endfor %}"
    (base / "chat_template.jinja").write_text(template, encoding="utf-8")
    command = ("evaluate", "--base-model", base, "--tasks", "half_fine", "--include-path", halves)
    for options in (("--dry-run",), ("-o", tmp_path / "out", "--device", "cpu")):
        result = run(*command, "--apply-chat-template", *options)
        assert result.exit_code == 3
        assert "half_fine: the prompt of document 0" in result.stderr
    assert not (tmp_path / "out").exists()


def test_names_of_folders_that_are_not_utf8(run: Call, byte_base: Path, halves: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "tasks\udcff", tmp_path / "out\udcff"
    shutil.copytree(halves, folder)
    result = run(
        "evaluate", "--base-model", byte_base, "--tasks", "half_fine", "--include-path", folder, "-o", out,
        "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (task,) = json.loads((out / "results.json").read_text(encoding="utf-8"))["tasks"]
    assert task["name"] == "half_fine"


def test_texts_are_searched_in_all_plain_data() -> None:
    content = {"a\ud800": [1, ("b", "c" * 100 + "\udfff" + "d" * 100)], "e": None, "\U0001f600": "ok"}
    first, second = broken_texts(content)
    assert first == "a\ud800"
    assert second == "c" * 30 + "\udfff" + "d" * 29
