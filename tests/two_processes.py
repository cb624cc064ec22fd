"""Run a program, or `-m` and a module, in two processes with the variables that torchrun sets.

They are forked from one that has imported the libraries, so that these are imported once and not three times.
Prints what they print. If one fails, the other is terminated, and this ends with the exit code of the first.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import datasets  # noqa: F401
import lm_eval.models.huggingface  # noqa: F401
import peft  # noqa: F401

from adapterswap.engines.serving.llama_engine import free_port


def run(rank: int, port: int, arguments: list[str]) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os._exit(run(rank, port, sys.argv[1:]))
        children.append(child)

    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] != 0:  # as torchrun does
            for other in children:
                os.kill(other, signal.SIGTERM)
    sys.exit(next((code for code in codes if code != 0), 0))
