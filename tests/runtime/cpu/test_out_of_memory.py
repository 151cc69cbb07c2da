"""Where the system gives no more memory or threads, the kernels raise: they never end the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_build import SANITISED

from sparsepack.runtime.cpu.machine import instruction_set, native

CHILD = """
import os, resource
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from sparsepack.runtime.cpu.machine import instruction_set, native
from tests.runtime.native_build import use_other_build
use_other_build()
context = 1 << 20
table = torch.zeros(context, 4)
cache = native().DenseKvCache(heads=2, kv_heads=2, head_dim=8, eps=1e-5, tables=[(table, table)],
                              scale=1.0, cap=0.0, layers=[(0, None, None, 0, None, 0, 0, False, -1)],
                              instruction_set=instruction_set())
operations = native().Operations(instruction_set(), 2)
rows, y = torch.zeros(1, 48), torch.zeros(1, 16)
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20),) * 2)
for attempt in (lambda: operations.attend(cache, 0, rows, y), lambda: native().Operations(instruction_set(), 900),
                lambda: native().read_bandwidth(bytes=1 << 34, threads=1)):
    try:
        attempt()
    except (MemoryError, RuntimeError) as error:
        print(type(error).__name__)
    else:
        print("done")
"""


@pytest.mark.skipif(SANITISED, reason="AddressSanitizer itself needs the memory that is refused")
def test_no_memory_is_an_exception() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["MemoryError", "RuntimeError", "MemoryError"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="shows what memory a process holds")
def test_a_token_takes_no_memory_of_those_that_may_follow() -> None:
    """A huge page at the first token of each head would be all of a cache that has 2 MiB for a head."""
    context, heads, width = 1 << 15, 32, 32
    table = torch.zeros(context, width // 2)
    cache = native().DenseKvCache(
        heads=heads,
        kv_heads=heads,
        head_dim=width,
        eps=1e-5,
        tables=[(table, table)],
        scale=1.0,
        cap=0.0,
        layers=[(0, None, None, 0, None, 0, 0, False, -1)],
        instruction_set=instruction_set(),
    )
    operations = native().Operations(instruction_set(), 1)
    rows = torch.zeros(1, 3 * heads * width)
    before = _held()
    operations.append(cache, 0, rows)
    assert _held() - before < 2 * 2 * heads * width * context / 8


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
