"""Programs and commands in two processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start a program (or `-m` and a module) with these arguments in two processes."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [*TORCHRUN, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same, run to its end."""
    with started(*arguments) as run:
        try:
            out, message = run.communicate(timeout=900)
        except BaseException:
            run.kill()
            raise
    return subprocess.CompletedProcess(run.args, run.returncode, out, message)
