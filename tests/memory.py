"""The most memory that a command takes, in a process of its own."""

import os
import subprocess
import sys
from functools import cache

# Not `getrusage`: its peak counts the process that started this one, which may be a large test run.
_PEAK = """
import sys
{code}
lines = open("/proc/self/status").read().splitlines()
print("peak", next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10)
"""
IMPORTS = """
import click, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
import sparsepack.calibration.run, sparsepack.eval.run, sparsepack.formats.verify
"""
_COMMAND = """
from sparsepack.cli import main
main({arguments!r}, standalone_mode=False)
"""


def peak_bytes(code: str) -> int:
    """The peak of resident memory, mapped files included, of a Python process that runs `code`; Linux only."""
    made = subprocess.run(
        [sys.executable, "-c", _PEAK.format(code=code)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert made.returncode == 0, made.stderr
    return int(made.stdout.split("peak ")[-1])


def command_peak_bytes(*arguments: str) -> int:
    """Of a `sparsepack` command, above what its imports take."""
    found = peak_bytes(_COMMAND.format(arguments=list(arguments))) - _imports_peak_bytes()
    print("above its imports:", found >> 20, "MiB for", *arguments[:2])
    return found


@cache
def _imports_peak_bytes() -> int:
    return peak_bytes(IMPORTS)
