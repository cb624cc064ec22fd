"""`python -m adapterswap.engines.serving.start MODULE ARGUMENTS…`: run vLLM's server, and say why if it does not start.

vLLM ends with a traceback that points to another process's log, and with exit status 0 if its engine died. Here the
last line is the reason, and the status is 3.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import traceback

from adapterswap.engines.serving import readiness
from adapterswap.engines.serving.plugin import BASE_MODEL
from adapterswap.kit.errors import RunError, reason_of

_REMEDY = (
    "See the log above for details. Use a base that the installed vLLM supports on this device, or change its options"
)


def main() -> int:
    """Run the module named by the first argument with the other arguments, and return the exit status."""
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    handle, failures = tempfile.mkstemp(prefix="adapterswap-", suffix=".failures")
    os.close(handle)
    os.environ[readiness.FAILURES] = failures
    status, error = 0, None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as raised:  # whatever vLLM raises
        traceback.print_exc()
        status, error = 1, raised
    finally:
        reason = readiness.failure() or readiness.first_failure()
        with contextlib.suppress(OSError):
            os.unlink(failures)
    if readiness.is_ready() or (status == 0 and readiness.failure() is None) or status == _USAGE:
        return status
    if not reason:
        reason = f"vLLM ended with status {status}"
        if error is not None:
            reason = reason_of(error, 800)
    message = f"vLLM cannot serve the base {os.environ.get(BASE_MODEL, '')}: {reason}"
    print(f"Error: {RunError(message, _REMEDY)}", file=sys.stderr, flush=True)
    return _NOT_DONE


_USAGE, _NOT_DONE = 2, 3  # as in `adapterswap.cli`; of a usage error vLLM's parser has printed the reason


if __name__ == "__main__":
    sys.exit(main())
