"""2:4 products through NVIDIA's libcusparseLt, by ctypes: torch's own calls make a plan anew for every product. What
was found of its algorithms is remembered on the disk.

Names and numbers are those of cusparseLt.h 0.8. The library comes with torch, in a wheel of its own.
"""

import ctypes
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import OutputError, UserError
from sparsepack.files.atomic import write_json
from sparsepack.runtime import tuning

LIBRARY = "libcusparseLt.so.0"
TOKENS = 16
"""The number of tokens of a product is a multiple of this."""
EXPANDED = 32
"""The number of expanded inputs of a product is a multiple of this."""
ROWS = 32
"""The number of outputs of a product is a multiple of this."""

_OPAQUE = 16 << 10
"""A structure of the library gets this many bytes, whatever the version: 0.6 has 11,024, 0.8 has 512."""
_ALIGNMENT = 16
_ROW, _COLUMN = 2, 1
_NOT_TRANSPOSED = 0
_HALF = 0  # of the weights are zeros
_TYPES: Mapping[torch.dtype, int] = {
    torch.float32: 0,
    torch.int8: 3,
    torch.int32: 10,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}
_COMPUTE: Mapping[torch.dtype, int] = {torch.int8: 0, torch.bfloat16: 2, torch.float8_e4m3fn: 2}
OUTPUTS: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.int8: (torch.bfloat16, torch.int32),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float32),
    torch.bfloat16: (torch.bfloat16,),
}
"""Products of a type can come in these types."""
_SEARCH_BYTES = 64 << 20
"""A search gives this many bytes to algorithms that share out the inputs, whose sums are added up afterwards: more than
any has asked for."""
_UNSUPPORTED = (4, 10)
"""The library answers with CUSPARSE_STATUS_ARCH_MISMATCH or CUSPARSE_STATUS_NOT_SUPPORTED where it cannot do what was
asked."""
_READ_BEYOND = 4096
"""This many bytes lie behind compressed weights: kernels of bfloat16 read the last tile whole, past the size that the
library names (compute-sanitizer, library 0.8.0 on an H100: 256 bytes)."""
_CONFIG, _SPLIT_K, _SPLIT_K_MODE, _SPLIT_K_BUFFERS = 0, 3, 4, 5


@dataclass(frozen=True)
class Algorithm:
    """The number of the library's kernel that makes a product, and how that kernel shares out the inputs."""

    config: int = 0
    split_k: int = 1
    split_k_mode: int = 0
    split_k_buffers: int = 0


@dataclass(frozen=True)
class ProductShape:
    """A product Y = X W^T.

    rows, expanded -- W, of which two in four along `expanded` may be nonzero
    tokens       -- rows of X
    dtype        -- of W and X: int8, float8_e4m3fn or bfloat16
    out          -- of Y, one of `OUTPUTS[dtype]`
    """

    rows: int
    expanded: int
    tokens: int
    dtype: torch.dtype
    out: torch.dtype


@cache
def library() -> ctypes.CDLL:
    """The library, loaded. Raises `UserError` where it is missing."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for name in (LIBRARY, *(str(Path(folder) / "cusparselt" / "lib" / LIBRARY) for folder in folders)):
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        found.cusparseLtGetErrorString.restype = ctypes.c_char_p
        return found
    wheel = f"nvidia-cusparselt-cu{(torch.version.cuda or '13').partition('.')[0]}"
    raise UserError(f"2:4 products need {LIBRARY}; install it with: pip install {wheel}")


@cache
def version() -> str:
    """The version of the library: "0.8.0"."""
    numbers = []
    for which in range(3):
        number = ctypes.c_int()
        _call("GetProperty", which, ctypes.byref(number))
        numbers.append(str(number.value))
    return ".".join(numbers)


def compress(weight: Tensor) -> Tensor:
    """Weights [rows, expanded] of 2:4 structure, on the GPU -> uint8, as the library's kernels take them.

    A group of four with more than two nonzeros is not noticed: whoever calls has made sure that there is none.
    """
    rows, expanded = weight.shape
    with torch.cuda.device(weight.device):
        handle, matrix = _handle(weight.device.index or 0), _structured(weight.device, rows, expanded, weight.dtype)
        size, buffer_size = ctypes.c_size_t(), ctypes.c_size_t()
        _call("SpMMACompressedSize2", handle, matrix, ctypes.byref(size), ctypes.byref(buffer_size))
        compressed = torch.empty(size.value + _READ_BEYOND, dtype=torch.uint8, device=weight.device)
        buffer = torch.empty(max(1, buffer_size.value), dtype=torch.uint8, device=weight.device)
        weight = weight.contiguous()
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (weight, compressed, buffer)]
        _call("SpMMACompress2", handle, matrix, 1, _NOT_TRANSPOSED, *pointers, _stream())
        _call("MatDescriptorDestroy", matrix)
    return compressed


class MatmulPlan:
    """The library's plan for the products of a shape on a device.

    Making one takes the host half a millisecond, and no work of the GPU.
    """

    def __init__(self, shape: ProductShape, device: torch.device, algorithm: Algorithm | None = None) -> None:
        """algorithm -- None: the library's own choice. Raises `UserError` for a GPU that has no such product."""
        self.shape, self.device = shape, device
        with torch.cuda.device(device):
            self._handle = _handle(device.index or 0)
            self._matrices = (
                _structured(device, shape.rows, shape.expanded, shape.dtype),
                self._dense(shape.expanded, shape.tokens, shape.dtype),
                self._dense(shape.rows, shape.tokens, shape.out),
            )
            self._product, self._choice, self._plan = _opaque(), _opaque(), _opaque()
            weight, x, y = self._matrices
            transposed = (_NOT_TRANSPOSED, _NOT_TRANSPOSED)
            self._call("MatmulDescriptorInit", self._product, *transposed, weight, x, y, y, _COMPUTE[shape.dtype])
            self._call("MatmulAlgSelectionInit", self._choice, self._product, 0)
            if algorithm is not None:
                self._choose(algorithm)
            self._call("MatmulPlanInit", self._plan, self._product, self._choice)
            size = ctypes.c_size_t()
            self._call("MatmulGetWorkspace", self._plan, ctypes.byref(size))
            self._workspace_bytes = size.value
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def __del__(self) -> None:
        if hasattr(self, "_one"):
            library().cusparseLtMatmulPlanDestroy(self._plan)
            for matrix in self._matrices:
                library().cusparseLtMatDescriptorDestroy(matrix)

    def run(self, compressed: Tensor, x: Tensor, y: Tensor) -> None:
        """Put Y = X W^T on the current stream.

        compressed -- W, from `compress`
        x          -- [tokens, expanded], contiguous
        y          -- [tokens, rows], contiguous, to be filled
        """
        self._run("Matmul", compressed, x, y, self._workspace_bytes)

    def search(self, compressed: Tensor, x: Tensor, y: Tensor) -> Algorithm:
        """Try the library's algorithms with these; returns the fastest. Waits for the GPU."""
        self._run("MatmulSearch", compressed, x, y, max(_SEARCH_BYTES, self._workspace_bytes))
        attributes = (_CONFIG, _SPLIT_K, _SPLIT_K_MODE, _SPLIT_K_BUFFERS)
        return Algorithm(*(self._attribute(attribute) for attribute in attributes))

    def _run(self, what: str, compressed: Tensor, x: Tensor, y: Tensor, workspace_bytes: int) -> None:
        shape = self.shape
        for name, tensor, of, dtype in (
            ("x", x, (shape.tokens, shape.expanded), shape.dtype),
            ("y", y, (shape.tokens, shape.rows), shape.out),
        ):
            if tuple(tensor.shape) != of or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(of)}, contiguous"
                )
        out = ctypes.c_void_p(y.data_ptr())
        stream = _stream()
        # Of torch's allocator, which knows streams and captured graphs.
        workspace = torch.empty(max(1, workspace_bytes), dtype=torch.uint8, device=self.device)
        self._call(
            what,
            self._plan,
            ctypes.byref(self._one),
            ctypes.c_void_p(compressed.data_ptr()),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.byref(self._zero),
            out,
            out,
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.byref(stream),
            1,
        )

    def _dense(self, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """[columns, rows] of ours, which the library calls a matrix column by column."""
        found = _opaque()
        sizes = (ctypes.c_int64(n) for n in (rows, columns, rows))
        self._call("DenseDescriptorInit", found, *sizes, _ALIGNMENT, _TYPES[dtype], _COLUMN)
        return found

    def _choose(self, algorithm: Algorithm) -> None:
        values = {_CONFIG: algorithm.config, _SPLIT_K: algorithm.split_k}
        if algorithm.split_k > 1:
            values |= {_SPLIT_K_MODE: algorithm.split_k_mode, _SPLIT_K_BUFFERS: algorithm.split_k_buffers}
        for attribute, value in values.items():
            number = ctypes.c_int(value)
            self._call("MatmulAlgSetAttribute", self._choice, attribute, ctypes.byref(number), ctypes.c_size_t(4))

    def _attribute(self, attribute: int) -> int:
        number = ctypes.c_int()
        self._call("MatmulAlgGetAttribute", self._choice, attribute, ctypes.byref(number), ctypes.c_size_t(4))
        return number.value

    def _call(self, what: str, *arguments: Any) -> None:
        _call(what, self._handle, *arguments)


def _structured(device: torch.device, rows: int, expanded: int, dtype: torch.dtype) -> Any:
    found = _opaque()
    sizes = (ctypes.c_int64(n) for n in (rows, expanded, expanded))
    handle = _handle(device.index or 0)
    _call("StructuredDescriptorInit", handle, found, *sizes, _ALIGNMENT, _TYPES[dtype], _ROW, _HALF)
    return found


@cache
def _handle(device: int) -> Any:
    """The library's state on a device, which is the current one."""
    found = _opaque()
    _call("Init", found)
    return found


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _opaque() -> Any:
    """Memory for a structure that the library alone knows, aligned as it wants."""
    memory = (ctypes.c_uint8 * (_OPAQUE + _ALIGNMENT))()
    return (ctypes.c_uint8 * _OPAQUE).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)


def _call(what: str, *arguments: Any) -> None:
    """Call `cusparseLtWHAT`. Raises `UserError` for a GPU that cannot do this, `RuntimeError` for other errors."""
    status = getattr(library(), f"cusparseLt{what}")(*arguments)
    if status:
        said = library().cusparseLtGetErrorString(status).decode()
        if status in _UNSUPPORTED:
            raise UserError(f"2:4 products: libcusparseLt says {said!r} on this GPU ({what})")
        raise RuntimeError(f"libcusparseLt: {what}: {said}")


SCHEMA = 1
LARGEST = 16384
"""Algorithms are tried for up to this many tokens; more tokens have the algorithm of so many."""

_known: dict[Path, dict[str, Algorithm]] = {}


def best_algorithm(shape: ProductShape, compressed: torch.Tensor) -> Algorithm:
    """The fastest algorithm for a shape, the same for all numbers of tokens up to the next power of two.

    compressed -- weights of the shape. Where nothing is known, algorithms are tried with them, which takes 10 ms to a
                  second, and what was found is kept below ~/.cache.
    """
    tokens = min(LARGEST, 1 << max(4, (shape.tokens - 1).bit_length()))
    device = compressed.device
    path = tuning.tuning_path("cusparselt", torch.cuda.get_device_name(device), version())
    if path not in _known:
        _known[path] = _read(path)
    key = f"{shape.rows} x {shape.expanded}, {tokens} tokens, {shape.dtype} to {shape.out}".replace("torch.", "")
    if key not in _known[path]:
        _known[path][key] = _search(
            ProductShape(shape.rows, shape.expanded, tokens, shape.dtype, shape.out), compressed
        )
        _write(path, _known[path])
    return _known[path][key]


def _search(shape: ProductShape, compressed: torch.Tensor) -> Algorithm:
    # Any inputs do: it is time that counts. Zeros would draw less power, and so run faster.
    size = (shape.tokens, shape.expanded * shape.dtype.itemsize)
    x = torch.randint(0, 64, size, dtype=torch.uint8, device=compressed.device).view(shape.dtype)
    y = torch.empty(shape.tokens, shape.rows, dtype=shape.out, device=compressed.device)
    return MatmulPlan(shape, compressed.device).search(compressed, x, y)


def _read(path: Path) -> dict[str, Algorithm]:
    """The algorithms that an earlier run found. A file that is missing, damaged or of another schema holds nothing."""
    try:
        content: Any = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            return {}
        found = {str(key): Algorithm(**values) for key, values in content["products"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    numbers = (value for algorithm in found.values() for value in asdict(algorithm).values())
    return found if all(type(value) is int for value in numbers) else {}


def _write(path: Path, found: dict[str, Algorithm]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        together = {**_read(path), **found}  # other processes find some, too
        write_json(path, {"schema": SCHEMA, "products": {key: asdict(value) for key, value in together.items()}})
    except (OSError, OutputError):
        pass  # the next run tries again
