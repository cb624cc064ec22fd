"""Run the numerical tests with every set of kernels that this processor has, and with 1, 2 and 4 threads.

    python scripts/numerics.py [--only NAME]... [PYTEST ARGUMENTS]

PyTorch and its libraries choose their kernels when they are loaded, so each setting runs in a separate process. Prints
one line for each setting and the failures, and exits with 1 if a setting failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# More threads than cores would spend their time waiting for each other.
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}

# The last one stands for an old processor: all libraries at once with the instructions of 2008.
SETTINGS = {
    "native kernels": {},
    "plain C++": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "oneDNN with SSE4.1": {"DNNL_MAX_CPU_ISA": "SSE41"},
    "2 threads": {"OMP_NUM_THREADS": "2", **PATIENT},
    "4 threads": {"OMP_NUM_THREADS": "4", **PATIENT},
    "an old processor": {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}
CHOICES = {name for setting in SETTINGS.values() for name in setting}


def processor_flags() -> set[str]:
    """The instruction sets of this processor; empty if Linux does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def is_available(setting: dict[str, str], flags: set[str]) -> bool:
    needed = {"avx2": "avx2", "avx512": "avx512f"}.get(setting.get("ATEN_CPU_CAPABILITY", ""))
    return needed is None or needed in flags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SETTINGS, help="run this setting only; may be repeated")
    options, pytest_arguments = parser.parse_known_args()
    flags, failed = processor_flags(), []
    clean = {name: value for name, value in os.environ.items() if name not in CHOICES} | {"OMP_NUM_THREADS": "1"}
    for name in options.only or SETTINGS:
        if not is_available(SETTINGS[name], flags):
            print(f"{name}: skipped, this processor does not have it", flush=True)
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-m", "numerical", *pytest_arguments]
        done = subprocess.run(command, cwd=ROOT, env=clean | SETTINGS[name], capture_output=True, text=True)
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        print(f"{name}: {lines[-1].strip('= ')}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout, done.stderr, sep="\n", flush=True)
    sys.exit(f"failed with: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
