"""Metal kernels on this processor, from their own sources: `compile_shader` stands for torch's function of that name.

    source --prepared--> C++17 --zig's clang, twice--> address spaces are right; an object whose every access is checked
    object + metal/emulation/threads.cpp --> shared library --ctypes--> `library.kernel(*args, threads=, group_size=)`

What is checked, and how threads run: `metal/emulation/threads.cpp`. Beyond what Metal itself asks, arguments must have
the types that the kernel names, and a grid must be whole threadgroups of whole simdgroups.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compiled import kept
from torch import Tensor

HERE = Path(__file__).parent / "metal" / "emulation"
STACKS = Path(__file__).parent / "emulation"
LANES, MOST_THREADS = 32, 1024
AXES = (
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
)
"""These attributes have a number for each axis of a grid."""

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-Wall", "-Werror")
_FLAGS += ("-fno-sanitize=undefined", "-Wno-unused-function", "-fno-threadsafe-statics")

_TYPES = {
    "uchar": torch.uint8,
    "half": torch.float16,
    "float": torch.float32,
    "int": torch.int32,
    "long": torch.int64,
}
"""Elements of buffers have these types; those of vectors count singly."""
_CASTS = {"int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "fp16": torch.float16}


class EmulationError(Exception):
    """A kernel did what it must not do."""


class ShaderError(Exception):
    """A source does not compile."""


@dataclass(frozen=True)
class Argument:
    """A kernel's argument.

    declared -- type and name as in the source, without the attribute
    type     -- of an element, without its address space
    buffer   -- index in the argument table; None: what `attribute` says of the thread's place
    scalar   -- whether it is one value of `constant` memory
    """

    declared: str
    type: str
    name: str
    attribute: str
    buffer: int | None
    scalar: bool
    writable: bool


@dataclass(frozen=True)
class Memory:
    """A variable in threadgroup memory: its declaration, and the name in it."""

    declared: str
    name: str


@dataclass(frozen=True)
class Source:
    """A kernel's part of a source: text from `begin`, where `kernel` stands, to `end`, its last brace."""

    name: str
    arguments: tuple[Argument, ...]
    memory: tuple[Memory, ...]
    begin: int
    body: int
    end: int


@dataclass
class Order:
    """How launches run.

    seed     -- of the orders of threads and threadgroups, another one for each launch; 0: that of their numbers
    launched -- the names of the kernels executed, in order
    """

    seed: int = 0
    launched: list[str] = field(default_factory=list)

    @property
    def of_next(self) -> int:
        """The seed of the next launch."""
        return self.seed and self.seed * 1_000_003 + len(self.launched)


_order = Order()


@contextmanager
def order(seed: int) -> Iterator[Order]:
    """Launches inside run in this order."""
    global _order
    before, _order = _order, Order(seed)
    try:
        yield _order
    finally:
        _order = before


def kernels_of(source: str) -> list[Source]:
    """The kernels of a source, in their order."""
    return [_kernel(source, found) for found in re.finditer(r"^kernel void (\w+)\(", source, re.M)]


def _kernel(source: str, found: re.Match) -> Source:
    closed = _matching(source, found.end() - 1, "()")
    body = source.index("{", closed)
    end = _matching(source, body, "{}")
    arguments = tuple(_argument(text) for text in _split(source[found.end() : closed]))
    declared = re.findall(r"^ *threadgroup ([\w ]+ (\w+)(?:\[[^;]*\])?);", source[body:end], re.M)
    return Source(found[1], arguments, tuple(Memory(*each) for each in declared), found.start(), body + 1, end)


def _matching(source: str, at: int, pair: str) -> int:
    """Where the bracket that is open at `at` closes."""
    depth = 0
    for i in range(at, len(source)):
        depth += (source[i] == pair[0]) - (source[i] == pair[1])
        if not depth:
            return i
    raise ShaderError(f"{pair[0]} is not closed")


def _split(arguments: str) -> list[str]:
    without = re.sub(r"//[^\n]*", "", arguments)
    return [" ".join(each.split()) for each in re.split(r",(?![^()]*\))", without) if each.strip()]


def _argument(text: str) -> Argument:
    found = re.fullmatch(r"(.*?)(\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", text)
    if not found:
        raise ShaderError(f"argument {text!r}: expected a type, a name and an attribute")
    declared, name, attribute, index = found.groups()
    type = re.sub(r"\b(device|constant|const|threadgroup)\b|[*&]", "", declared).strip()
    writable = "device" in declared.split() and "const" not in declared.split()
    buffer = int(index) if attribute == "buffer" else None
    return Argument((declared + name).strip(), type, name, attribute, buffer, "&" in declared, writable)


def prepared(source: str) -> str:
    """C++ of a source, with the same lines: attributes taken out, threadgroup memory outside of its kernel with guards,
    and behind each kernel what calls it."""
    kernels = kernels_of(source)
    text, at = "", 0
    for of in kernels:
        text += source[at : of.begin] + _memory(of) + source[of.begin : of.body]
        body = source[of.body : of.end + 1]
        for memory in of.memory:
            body = body.replace(f"threadgroup {memory.declared};", f"GUARDED_IN({of.name}_memory, {memory.name});")
        text += body + _entry(of)
        at = of.end + 1
    text = (text + source[at:]).replace("#include <metal_stdlib>", '#include "metal_stdlib.h"')
    return re.sub(r"\[\[[^\]]*\]\]", "", text)


def _memory(of: Source) -> str:
    guards = " ".join(f"GUARDED({memory.declared}, {memory.name});" for memory in of.memory)
    return f"namespace {of.name}_memory {{ {guards} }} " if of.memory else ""


def _entry(of: Source) -> str:
    """A function that calls a kernel, and its threadgroup memory: pairs of a beginning and a number of bytes."""
    values = []
    for argument in of.arguments:
        pointer = argument.declared.rsplit(argument.name, 1)[0].strip()
        if argument.buffer is None:
            values.append(_place(argument))
        elif argument.scalar:
            values.append(f"*({pointer.replace('&', '*')})buffers[{argument.buffer}]")
        else:
            values.append(f"({pointer})buffers[{argument.buffer}]")
    memory = [f"{of.name}_memory::GUARDED_AT({each.name})" for each in of.memory]
    pieces = ", ".join(f"(void*)&{each}, (void*)sizeof({each})" for each in memory)
    return (
        f' extern "C" UNCHECKED void run_{of.name}(void** buffers, const Place& place) '
        f"{{ {of.name}({', '.join(values)}); }}"
        f' extern "C" UNCHECKED void** memory_of_{of.name}() '
        f"{{ static void* pieces[] = {{{pieces + ', ' if pieces else ''}nullptr}}; return pieces; }}"
    )


def _place(argument: Argument) -> str:
    """An argument that tells a thread's place, in one number or by axes."""
    place = f"place.{argument.attribute}"
    if argument.attribute not in AXES:
        return place
    axes = int(argument.type[4:] or 1)
    return f"{argument.type}{{{', '.join(f'{place}[{axis}]' for axis in range(axes))}}}"


def compile_shader(source: str) -> "Library":
    """The library of a source's kernels. Raises `ShaderError` with the compiler's words where it does not compile."""
    return _compiled(source)


@cache
def _compiled(source: str) -> "Library":
    library = kept(prepared(source), (version("ziglang"), sys.platform, *_FLAGS), [HERE, STACKS], _compile)
    compiled = ctypes.CDLL(str(library))
    compiled.emulation_stacks.argtypes, compiled.emulation_stacks.restype = [ctypes.c_void_p], ctypes.c_void_p
    _stacks[:] = [compiled.emulation_stacks(*(_stacks or [None]))]
    return Library(compiled, {of.name: of for of in kernels_of(source)})


_stacks: list[int] = []
"""Where the threads of all libraries have their stacks."""


def _compile(cpp: Path, library: Path) -> None:
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    with tempfile.TemporaryDirectory(prefix="sparsepack-metal-") as folder:
        spaces, checked, threads = (f"{folder}/{name}.o" for name in ("spaces", "checked", "threads"))
        _zig("-c", "-DSPACES", "-O0", str(cpp), "-o", spaces)
        _zig("-c", "-fsanitize=thread", str(cpp), "-o", checked)
        _zig("-c", str(HERE / "threads.cpp"), "-o", threads)
        _zig("-shared", "-nostdlib", *undefined, checked, threads, "-o", str(library))


def _zig(*arguments: str) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", *_FLAGS, f"-I{HERE}", f"-I{STACKS}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ShaderError(done.stderr)


@dataclass(frozen=True)
class Library:
    """What `compile_shader` gives: its kernels are attributes."""

    compiled: ctypes.CDLL
    sources: Mapping[str, Source]

    def __getattr__(self, name: str) -> "Kernel":
        if name not in self.sources:
            raise AttributeError(f"no kernel {name}")
        return Kernel(self.compiled, self.sources[name])


@dataclass(frozen=True)
class Kernel:
    """One kernel, called as torch's."""

    compiled: ctypes.CDLL
    source: Source

    max_threads_per_threadgroup = MOST_THREADS
    thread_execution_width = LANES

    @property
    def static_thread_group_memory_length(self) -> int:
        """Bytes of the kernel's variables in threadgroup memory."""
        return sum(self._memory()[1])

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        name = self.source.name
        buffers = sorted((a for a in self.source.arguments if a.buffer is not None), key=lambda a: a.buffer or 0)
        if len(args) != len(buffers):
            raise EmulationError(f"{name}: {len(args)} arguments, expected {len(buffers)}")
        given = [
            self._bound(argument, value, (arg_casts or {}).get(i) if not isinstance(arg_casts, str) else arg_casts)
            for i, (argument, value) in enumerate(zip(buffers, args, strict=True))
        ]
        if threads is None or group_size is None:
            raise EmulationError(f"{name}: expected threads and group_size")
        grid, of_group = (_three(each) for each in (threads, group_size))
        if any(a % b for a, b in zip(grid, of_group, strict=True)) or not all(grid):
            raise EmulationError(f"{name}: {grid} threads are no whole threadgroups of {of_group}")
        in_group = of_group[0] * of_group[1] * of_group[2]
        if in_group % LANES or in_group > MOST_THREADS:
            raise EmulationError(
                f"{name}: {in_group} threads a group, expected a multiple of {LANES} up to {MOST_THREADS}"
            )
        self._launch(buffers, given, [a // b for a, b in zip(grid, of_group, strict=True)], of_group)
        _order.launched.append(name)

    def _bound(self, argument: Argument, value: Any, cast: str | None) -> Tensor:
        """What lies in the buffer of an argument."""
        name = f"{self.source.name}: {argument.name}"
        if isinstance(value, Tensor):
            tensor = value
            if not tensor.is_contiguous():
                raise EmulationError(f"{name}: a tensor with strides")
        elif isinstance(value, int | float):
            tensor = torch.tensor(
                value, dtype=_CASTS[cast] if cast else torch.int64 if isinstance(value, int) else torch.float32
            )
        else:
            raise EmulationError(f"{name}: {type(value).__name__}, expected a tensor, an int or a float")
        element = re.sub(r"[234]$", "", argument.type)
        if tensor.dtype != _TYPES[element]:
            raise EmulationError(f"{name}: {tensor.dtype}, expected {_TYPES[element]}")
        if tensor.device.type != "cpu":
            raise EmulationError(f"{name}: on {tensor.device}")
        return tensor

    def _launch(self, arguments: list[Argument], given: list[Tensor], groups: list[int], of_group: list[int]) -> None:
        count = len(given)
        pointers = (ctypes.c_void_p * count)(*(each.data_ptr() for each in given))
        lengths = (ctypes.c_uint64 * count)(*(each.numel() * each.element_size() for each in given))
        writable = (ctypes.c_uint8 * count)(*(argument.writable for argument in arguments))
        pieces, piece_lengths = self._memory()
        error = ctypes.create_string_buffer(512)
        launch = self.compiled.emulation_launch
        launch.argtypes = None
        failed = launch(
            getattr(self.compiled, f"run_{self.source.name}"),
            *(pointers, lengths, writable, ctypes.c_uint32(count)),
            *(pieces, piece_lengths, ctypes.c_uint32(len(pieces))),
            *((ctypes.c_uint32 * 3)(*groups), (ctypes.c_uint32 * 3)(*of_group), ctypes.c_uint64(_order.of_next)),
            *(error, ctypes.c_uint64(len(error))),
        )
        if failed:
            raise EmulationError(f"{self.source.name}: {error.value.decode()}")

    def _memory(self) -> tuple[Any, Any]:
        """Beginnings and lengths of the kernel's variables in threadgroup memory."""
        function = getattr(self.compiled, f"memory_of_{self.source.name}")
        function.restype = ctypes.POINTER(ctypes.c_void_p)
        found = function()
        count = len(self.source.memory)
        pieces = (ctypes.c_void_p * count)(*(found[2 * i] for i in range(count)))
        return pieces, (ctypes.c_uint64 * count)(*(found[2 * i + 1] or 0 for i in range(count)))


def _three(of: int | Sequence[int]) -> list[int]:
    given = [of] if isinstance(of, int) else list(of)
    return given + [1] * (3 - len(given))
