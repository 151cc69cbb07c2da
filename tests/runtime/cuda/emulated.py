"""Kernels that need no more of a GPU than threads, barriers and shuffles, run by the processor: what a host compiler
makes of the same source, with `emulation/common/common.cuh` in the place of its header."""

import ctypes
import mmap
import re
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from compiled import kept

from sparsepack.runtime.cuda.driver.kernel import FOLDER

HERE = Path(__file__).parent / "emulation"
STACKS = Path(__file__).parents[1] / "emulation"
INCLUDED = (HERE, FOLDER, STACKS)
COMPILER = shutil.which("c++")
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(16\) )?(\w+) (\w+)\[\];")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas")

needs_compiler = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="no compiler of these kernels"
)


@cache
def _version() -> str:
    assert COMPILER is not None
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


class Emulation:
    """Stands in for `kernel` and `launch` of a module; compiles each variant once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[str, ...]], ctypes.CDLL] = {}
        self._stacks = (ctypes.c_char * (1024 << 17)).from_buffer(mmap.mmap(-1, 1024 << 17))
        self.launches = 0

    def kernel(self, file: str, name: str, defines: tuple[str, ...] = (), device: int = 0) -> ctypes.CDLL:
        key = name, defines
        if key not in self._made:
            text = next(path for folder in (FOLDER, HERE) for path in folder.glob(f"*/{file}.cu")).read_text()
            text = DYNAMIC.sub(r"\1* const \2 = (\1*)dynamic_shared;", text)
            text = (
                f'#include "common/common.cuh"\n{text}\n'
                'extern "C" const char* run_it(int x, int y, int threads, char* shared, char* stacks, u64 seed, '
                "const u64* arguments) {\n"
                f"    fibres::stacks = stacks;\n    return run({name}, x, y, threads, shared, seed, arguments);\n}}\n"
            )
            command = [COMPILER, *FLAGS, *(f"-D{define}" for define in defines), *(f"-I{each}" for each in INCLUDED)]

            def compile(source: Path, library: Path) -> None:
                subprocess.run([*command, str(source), "-o", str(library)], check=True)

            self._made[key] = ctypes.CDLL(str(kept(text, [_version(), *FLAGS, *defines], INCLUDED, compile)))
            self._made[key].run_it.restype = ctypes.c_char_p
        return self._made[key]

    def launch(self, library: ctypes.CDLL, grid: tuple[int, ...], threads: int, *arguments, shared: int = 0) -> None:
        self.launches += 1
        words = (ctypes.c_ulonglong * len(arguments))(*map(_word, arguments))
        room = torch.full((shared + 15,), 0xFF, dtype=torch.uint8)  # what a GPU leaves there is not zero
        at = ctypes.c_void_p(room.data_ptr() + -room.data_ptr() % 16)
        wrong = library.run_it(*(*grid, 1)[:2], threads, at, self._stacks, ctypes.c_uint64(self.launches << 32), words)
        assert wrong is None, wrong.decode()


def _word(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f", value), "little")
    assert isinstance(value, int)
    assert 0 <= value < 2**31
    return value
