"""Random weights of a shape as a GGUF for llama.cpp, without a tokenizer; blocks have the same weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_synthetic import random_rows, random_superblocks


def q4_k(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> np.ndarray:
    """Random weights [.., columns] with a standard deviation: uint8 [.., bytes of a row]."""
    *rows, columns = shape
    found: np.ndarray = random_superblocks((*rows, columns // 256), deviation, generator).flatten(-2).numpy()
    return found


def write_random(
    path: Path,
    architecture: str,
    numbers: Mapping[str, Any],
    of_block: Mapping[str, np.ndarray],
    generator: torch.Generator,
) -> Path:
    """Write a model: its blocks' matrices, uint8 in Q4_K and float32 as they are, the output matrix in Q6_K.

    architecture -- llama.cpp's name of the family
    numbers      -- by the names of gguf's methods that add them: {"block_count": 32, ..}
    of_block     -- by the names of a block's tensors
    """
    import gguf

    quantised = gguf.GGMLQuantizationType
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, architecture)
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("no_vocab")
    vocabulary, hidden = numbers["vocab_size"], numbers["embedding_length"]
    embedding = q4_k((vocabulary, hidden), 1.0, generator)
    output = random_rows(vocabulary, hidden, hidden**-0.5, generator).blocks.numpy()
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=quantised.Q4_K)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output.weight", output, raw_dtype=quantised.Q6_K)
    for block in range(numbers["block_count"]):
        for name, weights in of_block.items():
            type = quantised.Q4_K if weights.dtype == np.uint8 else quantised.F32
            writer.add_tensor(f"blk.{block}.{name}.weight", weights, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)
