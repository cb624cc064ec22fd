"""The examples at the end of every command's help run in their order, as the pages' commands do."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest

from adapterswap.cli import COMMANDS, find_command

from .blocks import Reader, Step, changed
from .test_pages import worlds  # noqa: F401  (a fixture)
from .worlds import adapters_of_other_tools, full_checkpoint, open_base, train_page

# What does not run here, and why.
NOT_RUN = {
    r"^adapterswap studio|^adapterswap serve (?!.*--dry-run)": "starts a server",
    r"^adapterswap lab": "trains for minutes",
}

# The same with less work, or only checked.
CHANGED = [
    ("evaluate", "--tasks", "--limit 1 --max-gen-toks 4 --tasks"),
    ("evaluate", "--limit 20", ""),
    ("serve", "-- --port", "--dry-run -- --port"),
    ("ask", "ask ", "ask --max-new-tokens 4 "),
]


def examples(name: str) -> list[str]:
    """The lines of a command's help after `Examples:`; of a group, those of its commands too."""
    command = find_command(name)
    inner = list(command.commands.values()) if isinstance(command, click.Group) else []
    lines = []
    for one in (command, *inner):
        # click remembers a command's help option, which is -h for all tests of the command line
        names = ["-h", "--help"]
        context = click.Context(one, info_name=one.name, terminal_width=60, help_option_names=names)
        shown = re.search(r"^Examples:\n((?:  adapterswap .*\n?)+)\Z", one.get_help(context), flags=re.MULTILINE)
        assert shown, f"the help of {one.name} does not end with examples"
        lines += [line.strip() for line in shown[1].splitlines()]
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_two_examples(name: str) -> None:
    lines = examples(name)
    assert len(lines) >= 2
    assert all(line.startswith(f"adapterswap {name}") for line in lines)


@pytest.mark.slow
def test_the_examples_run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which help lists the commands, so that later ones use what earlier ones wrote."""
    here = tmp_path / "here"
    shutil.copytree(request.getfixturevalue("worlds")(32), here, symlinks=True)
    monkeypatch.chdir(here)
    prepare()
    reader, used = Reader({}), set()
    for name in COMMANDS:
        for line in examples(name):
            excuse = next((pattern for pattern in NOT_RUN if re.search(pattern, line)), None)
            step, changes = changed(Step(name, 0, "bash", line), CHANGED)
            used |= changes | {excuse}
            if excuse is None or re.search(excuse, step.text) is None:
                reader.follow(step)
    assert used - {None} == {*NOT_RUN, *range(len(CHANGED))}


def prepare() -> None:
    """What the examples name besides the base and its experts."""
    adapters_of_other_tools()
    full_checkpoint(Path("full/math"), seed=0)
    train_page()
    merged = open_base()
    from peft import PeftModel

    PeftModel.from_pretrained(merged, "experts/math").merge_and_unload().save_pretrained("other-tool")
    sweep = {
        "base_model": "org/base",
        "task_experts": {"math": "experts/math"},
        "language_experts": {"swahili": "experts/swahili"},
        "compositions": {"swap": {"bottom": 5, "top": 2}},
        "tasks": ["mgsm_direct_sw"],
        "settings": {"limit": 4, "num_fewshot": 1, "max_gen_toks": 4},
    }
    Path("sweep.yaml").write_text(json.dumps(sweep))
