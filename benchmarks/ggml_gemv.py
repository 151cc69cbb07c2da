"""llama.cpp's Q4_K matrix-vector product by itself, through ctypes on the ggml inside llama-cpp-python.

The weights lie in the buffer type that llama.cpp itself chooses for them on this CPU (CPU_REPACK where there is one).
"""

import ctypes
import time
from pathlib import Path

import llama_cpp
import torch
from llama_cpp_peer import silent

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_F32, _Q4_K = 0, 12  # enum ggml_type
_CONTEXT_BYTES = 1 << 25

_BASE_FUNCTIONS = {
    "ggml_new_tensor_1d": (_POINTER, [_POINTER, _INT, ctypes.c_int64]),
    "ggml_new_tensor_2d": (_POINTER, [_POINTER, _INT, ctypes.c_int64, ctypes.c_int64]),
    "ggml_mul_mat": (_POINTER, [_POINTER, _POINTER, _POINTER]),
    "ggml_new_graph": (_POINTER, [_POINTER]),
    "ggml_build_forward_expand": (None, [_POINTER, _POINTER]),
    "ggml_free": (None, [_POINTER]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_alloc_ctx_tensors": (_POINTER, [_POINTER, _POINTER]),
    "ggml_backend_tensor_set": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_backend_tensor_get": (None, [_POINTER, _POINTER, _SIZE, _SIZE]),
    "ggml_backend_graph_compute": (_INT, [_POINTER, _POINTER]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_POINTER]),
    "ggml_backend_reg_dev_get": (_POINTER, [_POINTER, _SIZE]),
    "ggml_backend_reg_get_proc_address": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "ggml_backend_buffer_free": (None, [_POINTER]),
    "ggml_backend_free": (None, [_POINTER]),
}
_CPU_FUNCTIONS = {
    "ggml_backend_cpu_init": (_POINTER, []),
    "ggml_backend_cpu_reg": (_POINTER, []),
    "ggml_backend_cpu_buffer_type": (_POINTER, []),
    "ggml_backend_cpu_set_n_threads": (None, [_POINTER, _INT]),
}


class _Init(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


def _library(name: str, functions: dict[str, tuple]) -> ctypes.CDLL:
    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(iter(sorted(folder.glob(f"*{name}.*"))))))
    for function, (result, arguments) in functions.items():
        if hasattr(library, function):
            getattr(library, function).restype = result
            getattr(library, function).argtypes = arguments
    return library


class GgmlGemv:
    """`copies` of one Q4_K matrix (uint8 [rows, bytes per row]) and a product with each of them."""

    def __init__(self, blocks: torch.Tensor, rows: int, columns: int, copies: int) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._base = base = _library("ggml-base", _BASE_FUNCTIONS)
        self._cpu = cpu = _library("ggml-cpu", _CPU_FUNCTIONS)
        base.ggml_init.restype, base.ggml_init.argtypes = _POINTER, [_Init]
        self.rows, self.columns, self.copies = rows, columns, copies
        self._backend = cpu.ggml_backend_cpu_init()
        self._weights, self._products = (base.ggml_init(_Init(_CONTEXT_BYTES, None, True)) for _ in range(2))
        weights = [base.ggml_new_tensor_2d(self._weights, _Q4_K, columns, rows) for _ in range(copies)]
        buffer_type = self._buffer_type()
        self.buffer_name = base.ggml_backend_buft_name(buffer_type).decode()
        self._buffers = [base.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buffer_type)]
        for weight in weights:
            base.ggml_backend_tensor_set(weight, blocks.data_ptr(), 0, blocks.nbytes)
        self._x = base.ggml_new_tensor_1d(self._products, _F32, columns)
        self._y = [base.ggml_mul_mat(self._products, weight, self._x) for weight in weights]
        self._graphs = [self._graph(y) for y in self._y]
        self._buffers.append(base.ggml_backend_alloc_ctx_tensors(self._products, self._backend))

    def _graph(self, product: int) -> int:
        graph: int = self._base.ggml_new_graph(self._products)
        self._base.ggml_build_forward_expand(graph, product)
        return graph

    def _buffer_type(self) -> int:
        """The first extra buffer type of the CPU whose name says repack, as llama.cpp prefers it; else the ordinary."""
        registry = self._cpu.ggml_backend_cpu_reg()
        address = self._base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(
            self._base.ggml_backend_reg_dev_get(registry, 0)
        )
        i = 0
        while listed and listed[i]:
            if b"REPACK" in self._base.ggml_backend_buft_name(listed[i]):
                return int(listed[i])
            i += 1
        plain: int = self._cpu.ggml_backend_cpu_buffer_type()
        return plain

    def close(self) -> None:
        """Give its memory back."""
        for buffer in self._buffers:
            self._base.ggml_backend_buffer_free(buffer)
        self._base.ggml_free(self._weights)
        self._base.ggml_free(self._products)
        self._base.ggml_backend_free(self._backend)

    def threads(self, count: int) -> None:
        """Set how many threads the products to come take."""
        self._cpu.ggml_backend_cpu_set_n_threads(self._backend, count)

    def product(self, x: torch.Tensor, copy: int = 0) -> torch.Tensor:
        """W x of one copy: float32 [columns] -> [rows]."""
        self.set_input(x)
        self._compute(self._graphs[copy])
        y = torch.empty(self.rows)
        self._base.ggml_backend_tensor_get(self._y[copy], y.data_ptr(), 0, y.nbytes)
        return y

    def set_input(self, x: torch.Tensor) -> None:
        """The vector of the products to come: float32 [columns]."""
        x = x.float().contiguous()
        self._base.ggml_backend_tensor_set(self._x, x.data_ptr(), 0, x.nbytes)

    def seconds(self) -> list[float]:
        """The seconds of the product with each copy, starting the threads and the call from Python (some us) included.

        One graph with all the products, as a decoding step has them, takes as long for each: 391 us against 392.
        """
        seconds = []
        for graph in self._graphs:
            start = time.perf_counter_ns()
            self._compute(graph)
            seconds.append((time.perf_counter_ns() - start) / 1e9)
        return seconds

    def _compute(self, graph: int) -> None:
        if self._base.ggml_backend_graph_compute(self._backend, graph):
            raise RuntimeError("ggml_backend_graph_compute failed")
