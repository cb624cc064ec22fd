"""Programs and commands in processes of their own: two as torchrun starts them, or one for several commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
FORKED = [sys.executable, str(HERE / "two_processes.py")]
"""Starts in half the time, for tests of what two processes compute; with TESTS=all torchrun itself starts them."""


def started(*arguments: object, by: Sequence[str] = TORCHRUN) -> subprocess.Popen[str]:
    """Start a program (or `-m` and a module) with these arguments in two processes."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [*by, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def launch(*arguments: object, by: Sequence[str] = TORCHRUN) -> subprocess.CompletedProcess[str]:
    """The same, run to its end."""
    with started(*arguments, by=by) as run:
        try:
            out, message = run.communicate(timeout=900)
        except BaseException:
            run.kill()
            raise
    return subprocess.CompletedProcess(run.args, run.returncode, out, message)


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


_ONE_BY_ONE = """
import json, sys
from click.testing import CliRunner
from adapterswap.cli import main

ended = [CliRunner().invoke(main, words) for words in json.load(sys.stdin)]
json.dump([(each.exit_code, each.stdout, each.stderr) for each in ended], sys.stdout)
"""


def commands_in(environment: dict[str, str], *commands: list[object]) -> list[Ended]:
    """Run commands of adapterswap, one after another, in a process with these variables."""
    words = json.dumps([list(map(str, command)) for command in commands])
    program = [sys.executable, "-c", _ONE_BY_ONE]
    process = subprocess.run(program, input=words, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return [Ended(*each) for each in json.loads(process.stdout)]
