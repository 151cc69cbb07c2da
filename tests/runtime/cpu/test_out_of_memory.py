"""Where the system gives no more memory or threads, the kernels raise: they never end the program."""

import subprocess
import sys

import pytest
from native_build import SANITISED

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
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
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
