"""Shell completion offers commands, experts, recipes, tasks and methods."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from adapterswap.cli import COMMANDS, main
from adapterswap.core.methods.registry import names_of
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.files.yaml import shipped_recipes

_Offered = list[tuple[str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two experts, one of them nested, a base, a recipe, and unrelated files."""
    for name, mark in (
        ("math", "adapter_config.json"),
        ("experts/swahili", "adapter_config.json"),
        ("base", "config.json"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / mark).write_text("{}")
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "hub" / "models--org--math-lora").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--org--rows").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def offered(*words: str) -> _Offered:
    """The completions of the last word, as (type, value); the shell handles types other than plain."""
    completions = ShellComplete(main, {}, "adapterswap", "_ADAPTERSWAP_COMPLETE").get_completions(
        list(words[:-1]), words[-1]
    )
    return [(item.type, item.value) for item in completions]


def plain(*values: str) -> _Offered:
    return [("plain", value) for value in values]


def test_commands_and_options() -> None:
    assert offered("") == plain(*COMMANDS)
    assert offered("me") == plain("merge", "methods")
    assert offered("recipes", "v") == plain("validate")
    assert offered("diff", "--max") == plain("--max-distance")


@pytest.mark.parametrize(
    "words",
    [("inspect",), ("diff", "math"), ("compose", "-t"), ("compose", "--language-expert"), ("merge", "--base-model")],
    ids=" ".join,
)
def test_experts_and_folders_that_may_contain_them(folder: Path, words: tuple[str, ...]) -> None:
    assert offered(*words, "") == plain("base", "experts/", "hub/", "math", "org/math-lora")
    assert offered(*words, "experts/") == plain("experts/swahili")
    assert offered(*words, "m") == plain("math")
    assert offered(*words, "org/") == plain("org/math-lora")


def test_a_single_folder_is_completed_by_the_shell_without_a_space(folder: Path) -> None:
    assert offered("inspect", "exp") == [("dir", "exp")]


def test_names_that_need_quotes_are_completed_by_the_shell(folder: Path) -> None:
    (folder / "math").rename(folder / "math 2")
    assert offered("inspect", "m") == [("dir", "m")]


def test_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert offered("inspect", "~/experts/") == plain("~/experts/swahili")


def test_named_experts(folder: Path) -> None:
    assert offered("analyze", "a=m") == plain("a=math")
    assert offered("verify", "math", "--expert", "math=experts/s") == plain("math=experts/swahili")


def test_recipes_by_name_and_file(folder: Path) -> None:
    shipped = list(shipped_recipes("train"))
    assert len(shipped) > 1
    assert offered("train", "train/") == plain(*shipped)
    assert offered("train", "mi") == plain("mine.yaml")
    assert offered("merge", "mi") == plain("mine.yaml")
    assert ("plain", "mine.yaml") in offered("compose", "")
    assert offered("recipes", "cat", "models/") == plain(*(name for name in shipped_recipes("models")))


def test_tasks() -> None:
    assert offered("evaluate", "--tasks", "mgsm_direct_b") == plain("mgsm_direct_bn")
    assert offered("evaluate", "--tasks", "mgsm_direct_sw,mgsm_direct_te") == plain("mgsm_direct_sw,mgsm_direct_te")


def test_tasks_of_the_harness() -> None:
    assert set(LoadedTasks.known_names("hellaswag")) >= {"hellaswag"}


def test_methods_and_choices() -> None:
    assert offered("compose", "--method", "") == plain(*names_of(packages=True))
    assert offered("compose", "--method", "ti") == plain("ties")
    assert offered("compose", "--layout", "p") == plain("portable")


def test_files_and_outputs_are_completed_by_the_shell(folder: Path) -> None:
    assert offered("compose", "-o", "x") == [("dir", "x")]
    assert offered("analyze", "--from-csv", "x") == [("file", "x")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_the_script_that_is_documented(folder: Path) -> None:
    """bash evaluates what `_ADAPTERSWAP_COMPLETE=bash_source adapterswap` prints, and calls its function."""
    scripts = Path(sys.executable).parent
    command = (
        'eval "$(_ADAPTERSWAP_COMPLETE=bash_source adapterswap)"; compopt() { :; }; '
        "COMP_WORDS=(adapterswap inspect experts/); COMP_CWORD=2; _adapterswap_completion adapterswap; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    process = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert process.stdout.split() == ["experts/swahili"], process.stderr
