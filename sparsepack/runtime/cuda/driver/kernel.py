"""Compile the CUDA C++ of `kernels/` through cuda.core (NVRTC), once per source and architecture, and launch it:
compiled kernels as Python values, one after the other by programmatic dependent launch."""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import OutputError, UserError
from sparsepack.files.atomic import write_bytes
from sparsepack.files.tensors import parallel_map
from sparsepack.process import cache_folder, cores

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
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if name.endswith((".cu", ".cuh"))}


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


Argument = Any
"""A tensor or None is passed as a pointer, an int as a 32-bit integer, a float as a 32-bit float, a structure of the
driver (a tensor map) as it is."""

STATIC_SHARED = 48 << 10
"""A block gets this many bytes of shared memory without asking."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel loaded on a device.

    arch    -- the device's compute capability times ten
    allowed -- what it was allowed beyond the defaults, by name
    """

    function: Any
    arch: int
    name: str
    allowed: dict[str, int] = field(default_factory=dict)


_Source = tuple[str, int, tuple[str, ...]]  # file, compute capability times ten, macros
_named: ContextVar[list[_Source] | None] = ContextVar("kernels that are named and not launched", default=None)
_PLENTY = 1 << 20  # blocks at once of a kernel that is not launched


def kernel(file: str, name: str, defines: tuple[str, ...] = (), device: int = 0) -> Kernel:
    """Kernel `name` of the file FILE.cu in a folder of `kernels/`, compiled with macros for a device and loaded there.

    Raises `UserError` where it cannot be compiled for want of something on this machine.
    """
    if (named := _named.get()) is not None:
        named.append((file, architecture(device), defines))
        return Kernel(None, architecture(device), name)
    return _loaded(file, name, defines, device)


@cache
def _loaded(file: str, name: str, defines: tuple[str, ...], device: int) -> Kernel:
    from cuda.bindings import driver

    arch = architecture(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        module = checked(driver.cuModuleLoadData(_code((file, arch, defines))))
        function = checked(driver.cuModuleGetFunction(module, name.encode()))
    return Kernel(function, arch, name)


@cache
def _code(of: _Source) -> bytes:
    return cubin(*of)


def compile_together(run: Callable[[], object]) -> None:
    """Compile the kernels that a function launches many at a time, so that it finds them when it runs: one after the
    other they take a few tenths of a second each.

    The function is called here, and launches nothing: it must not look at what its kernels would compute.

    Raises `UserError` as `kernel`.
    """
    with _naming() as named:
        run()
    sources = list(dict.fromkeys(named))
    parallel_map(_code, sources, max(1, min(len(sources), cores())), done=lambda: None)


@contextmanager
def _naming() -> Iterator[list[_Source]]:
    """Kernels are named while the context lasts, and neither loaded nor launched."""
    named: list[_Source] = []
    before = _named.set(named)
    try:
        yield named
    finally:
        _named.reset(before)


@cache
def architecture(device: int) -> int:
    """The compute capability of a device, times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    threads: int,
    *arguments: Argument,
    shared: int = 0,
) -> None:
    """Put a kernel on torch's current stream. It may begin before the one ahead has ended (`common.cuh`).

    grid   -- blocks, up to three numbers
    shared -- bytes of dynamic shared memory
    """
    if _named.get() is not None:
        return
    from cuda.bindings import driver

    _allow(kernel, shared)
    # Of a device by its number: to find out which it is, torch takes a third of a launch.
    stream = torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream
    config = _config(kernel.arch, tuple(grid), threads, shared, stream)
    values, types = zip(*(_argument(a) for a in arguments), strict=True)
    checked(driver.cuLaunchKernelEx(config, kernel.function, (values, types), 0), kernel.name)


def _argument(value: Argument) -> tuple[Any, Any]:
    if value is None:
        return 0, ctypes.c_void_p
    if isinstance(value, Tensor):
        return value.data_ptr(), ctypes.c_void_p
    if isinstance(value, int | float):
        return value, ctypes.c_int if isinstance(value, int) else ctypes.c_float
    return value, None


@lru_cache(maxsize=4096)
def _config(arch: int, grid: tuple[int, ...], threads: int, shared: int, stream: int) -> Any:
    """The configuration of a launch, which is kept, since making one takes the host 5 us."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = stream
    if arch >= 90:
        dependent = driver.CUlaunchAttribute()
        dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [dependent]
        config.numAttrs = 1
    return config


def _allow(kernel: Kernel, shared: int) -> None:
    """Ask for more shared memory than a kernel has by default, or was allowed before."""
    from cuda.bindings import driver

    if shared <= kernel.allowed.get("shared", STATIC_SHARED):
        return
    what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(kernel.function, what, shared), kernel.name)
    kernel.allowed["shared"] = shared


def blocks_at_once(kernel: Kernel, device: torch.device, threads: int, shared: int) -> int:
    """The number of the kernel's blocks, with so much dynamic shared memory, that run on a GPU at the same time."""
    return _PLENTY if _named.get() is not None else _blocks_at_once(kernel, device, threads, shared)


@cache
def _blocks_at_once(kernel: Kernel, device: torch.device, threads: int, shared: int) -> int:
    from cuda.bindings import driver

    _allow(kernel, shared)
    each = checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, threads, shared), kernel.name)
    return int(each) * multiprocessors(device)


def checked(result: tuple[Any, ...], name: str = "") -> Any:
    """The values of a call of the driver, without its error code. Raises `RuntimeError` where the call has failed."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}{f' in {name}' if name else ''}")
    return values[0] if values else None
