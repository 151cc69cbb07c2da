"""Compile the CUDA C++ of `kernels/` through cuda.core (NVRTC), once per source and architecture."""

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from sparsepack.errors import OutputError, UserError
from sparsepack.files.atomic import write_bytes
from sparsepack.process import cache_folder

FOLDER = files("sparsepack.runtime.cuda") / "kernels"
OLDEST = 80
"""The oldest GPUs for which kernels are compiled have this compute capability, times ten."""
_TARGETS = {90: "sm_90a"}
"""A GPU of this compute capability is compiled for with the instructions that only such GPUs have."""


def cubin(name: str, arch: int, defines: Sequence[str] = ()) -> bytes:
    """The machine code of the file NAME.cu in a folder of `kernels/`, from the disk where an earlier run left it.

    arch    -- compute capability times ten, 80 or more
    defines -- macros, `NAME=VALUE`

    Where the environment has $SPARSEPACK_CUDA_CHECKED, with barriers that racecheck sees (`kernels/common/common.cuh`).

    Raises `UserError` where cuda.core or NVRTC is missing, or for an older GPU.
    """
    check_architecture(arch)
    if os.environ.get("SPARSEPACK_CUDA_CHECKED"):
        defines = (*defines, "CHECKED=1")
    options = {"arch": _TARGETS.get(arch, f"sm_{arch}"), "defines": tuple(defines), "nvrtc": nvrtc_version()}
    sources = {file: text for file, text in _sources().items() if file.endswith((f"/{name}.cu", ".cuh"))}
    key = hashlib.sha256(repr((name, sorted(sources.items()), sorted(options.items()))).encode()).hexdigest()[:24]
    path = compiled_folder() / f"{name}-sm_{arch}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compiled(name, sources, arch, defines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, code)
    except (OSError, OutputError):
        pass  # the next run compiles again
    return code


def check_architecture(arch: int) -> None:
    """Raises `UserError` for a GPU older than the kernels: `arch` is its compute capability times ten."""
    if arch < OLDEST:
        raise UserError(
            f"a GPU of compute capability {arch / 10}: the cuda backend needs {OLDEST / 10} (Ampere) or later; "
            "use --device cpu"
        )


def compiled_folder() -> Path:
    """The folder that keeps compiled kernels."""
    return cache_folder() / "cuda"


@cache
def _sources() -> dict[str, str]:
    folders = [folder for folder in FOLDER.iterdir() if folder.is_dir()]
    files = {f"{folder.name}/{file.name}": file for folder in folders for file in folder.iterdir()}
    return {name: file.read_text() for name, file in files.items() if name.endswith((".cu", ".cuh"))}


def kernel_files() -> list[str]:
    """The names that `cubin` takes, in alphabetical order."""
    return sorted(Path(file).stem for file in _sources() if file.endswith(".cu"))


def _compiled(name: str, sources: dict[str, str], arch: int, defines: Sequence[str]) -> bytes:
    core = cuda_core()
    options = core.ProgramOptions(
        std="c++17",
        arch=_TARGETS.get(arch, f"sm_{arch}"),
        define_macro=[tuple(define.split("=", 1)) for define in defines] or None,
        include_path=str(FOLDER),
        use_fast_math=False,
        lineinfo=True,  # for profilers and sanitizers; the machine code is the same
    )
    source = next(text for file, text in sources.items() if file.endswith(f"/{name}.cu"))
    return bytes(core.Program(source, "c++", options).compile("cubin").code)


_importing = Lock()
"""Its modules import each other: threads that import it at one time find a half of it."""


def cuda_core() -> Any:
    """The module cuda.core. Raises `UserError` where it is missing."""
    try:
        with _importing:
            import cuda.core
    except ImportError as error:
        raise _no_cuda_core(str(error)) from error
    return cuda.core


def _no_cuda_core(why: str) -> UserError:
    return UserError(f"the cuda backend needs cuda.core ({why}); install it with: pip install 'sparsepack[cuda]'")


@cache
def nvrtc_version() -> str:
    """The version of the run-time compiler: "13.0". Raises `UserError` where the compiler is missing."""
    try:  # it takes tenths of a second to import, and who finds all kernels compiled need not
        missing_core = find_spec("cuda.core") is None
    except ImportError:
        missing_core = True
    if missing_core:
        raise _no_cuda_core("no such module")
    from cuda.bindings import nvrtc

    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except Exception as missing:  # cuda.pathfinder's error where the library is not found
        raise UserError(
            "the cuda backend needs NVRTC, CUDA's run-time compiler, 12.8 or later; "
            "install it with: pip install 'sparsepack[cuda]'"
        ) from missing
    if int(error):
        raise UserError(f"NVRTC does not say its version (error {int(error)}); reinstall nvidia-cuda-nvrtc")
    return f"{major}.{minor}"
