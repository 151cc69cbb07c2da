"""ggml's own quantiser, through ctypes on the library inside llama-cpp-python: the peer of the codecs."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

TYPES = {"q5_0": 6, "q8_0": 8, "q2_k": 10, "q4_k": 12, "q6_k": 14, "tq2_0": 35}  # enum ggml_type


@cache
def library() -> ctypes.CDLL | None:
    """libggml-base, or None where llama-cpp-python is absent."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder, "lib").glob("*ggml-base.*")):
            ggml = ctypes.CDLL(str(path))
            ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
            ggml.ggml_quantize_chunk.argtypes = [
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_void_p,
                *[ctypes.c_int64] * 3,
                ctypes.c_void_p,
            ]
            return ggml
    return None


def quantize(name: str, weights: Tensor) -> Tensor:
    """float32 [rows, K] -> uint8 [rows, bytes per row], on one thread, without an importance matrix."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    ggml = library()
    assert ggml is not None, "ask library() first"
    weights = weights.float().contiguous()
    rows, columns = weights.shape
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(TYPES[name])]
    blocks = torch.zeros(rows, columns // block * block_bytes, dtype=torch.uint8)
    written = ggml.ggml_quantize_chunk(TYPES[name], weights.data_ptr(), blocks.data_ptr(), 0, rows, columns, None)
    assert written == blocks.numel(), f"ggml wrote {written} bytes, expected {blocks.numel()}"
    return blocks


def encoded(kind: str, weights: Tensor) -> Tensor:
    """float32 [rows, K] -> uint8 [rows, bytes per row] of any type that ggml quantises to, by its name there, all
    columns equally important."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    ggml, number = library(), int(GGMLQuantizationType[kind])
    assert ggml is not None, "ask library() first"
    weights = weights.float().contiguous()
    rows, columns = weights.shape
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = torch.zeros(rows, columns // block * block_bytes, dtype=torch.uint8)
    importance = torch.ones(columns)
    pointers = weights.data_ptr(), blocks.data_ptr()
    assert ggml.ggml_quantize_chunk(number, *pointers, 0, rows, columns, importance.data_ptr()) == blocks.numel()
    return blocks


def decoded(kind: str, blocks: Tensor, columns: int) -> Tensor:
    """ggml's own reading of blocks of such a type: uint8 [rows, bytes per row] -> float32 [rows, K]."""
    weights = torch.empty(blocks.shape[0], columns)
    function = getattr(library(), f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    function(blocks.contiguous().data_ptr(), weights.data_ptr(), weights.numel())
    return weights


def dequantize(name: str, blocks: Tensor) -> Tensor:
    """gguf-py's reading of the blocks: uint8 [..., bytes per row] -> float32 [..., K]."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType(TYPES[name])))
