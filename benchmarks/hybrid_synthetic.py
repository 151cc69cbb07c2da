"""Models by neurons of 13 and 70 billion parameters, made in memory in seconds, and their shape for llama.cpp.

Blocks have the same random weights, which are there once until an engine loads them: then every block has its own.
"""

import math
from pathlib import Path

import numpy as np
import torch
from cuda_synthetic import random_rows, random_superblocks, random_zigzag
from llama_cpp_file import write_shape
from synthetic import Size, llama_config

from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.packed import NeuronMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of

TINY = Size("tiny", 512, 4, 1280, 8, 4, 8192)
LLAMA_13B = Size("Llama-2-13B", 5120, 40, 13_824, 40, 40, 32_000)
LLAMA_70B = Size("Llama-2-70B", 8192, 80, 28_672, 64, 8, 32_000)
SIZES = {"tiny": TINY, "13b": LLAMA_13B, "70b": LLAMA_70B}
CONTEXT = 4096


def random_neurons(
    size: Size, frequency: np.ndarray, device: str = "cpu", seed: int = 0, *, rows: bool = False
) -> PackedModel:
    """A model of a size, in host memory.

    frequency -- float64 [blocks, neurons], falling: the file would say so
    rows      -- whether gates are stored by rows
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    config = llama_config(size, hidden_act="relu", max_position_embeddings=CONTEXT)
    kv, narrow = size.kv_heads * config.head_dim, 1 / math.sqrt(2 * size.layers)

    def zigzag(rows: int, scale: float = 1.0) -> PackedMatrix:
        return _here(random_zigzag(rows, size.hidden, scale, generator))

    attention = {
        "attn_in": PackedSite(zigzag(size.hidden + 2 * kv), None, None, (size.hidden, kv, kv)),
        "attn_out": PackedSite(zigzag(size.hidden, narrow), None, None, (size.hidden,)),
    }
    superblocks = 2 * size.hidden // 256
    records = random_superblocks((size.intermediate, superblocks), size.hidden**-0.5 * narrow, generator)
    gate = gate_by_rows(size, generator) if rows else zigzag(size.intermediate)
    stored = PackedMatrix(records.flatten(1).cpu(), "Q4_K", size.intermediate, 2 * size.hidden)
    norm = torch.ones(size.hidden)
    layers = tuple(
        PackedLayer(
            attention,
            {"attn_norm": norm, "mlp_norm": norm},
            NeuronMlp(gate, stored, torch.from_numpy(row).float(), torch.arange(size.intermediate)),
        )
        for row in frequency
    )
    return PackedModel(
        architecture=architecture_of(config, None),
        layers=layers,
        embedding=_here(random_rows(size.vocabulary, size.hidden, 1.0, generator)),
        output_norm=norm,
        output=_here(random_rows(size.vocabulary, size.hidden, size.hidden**-0.5, generator)),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"kind": "neuron-q4_k", "model": {"name": f"random {size.name}"}},
    )


def gate_by_rows(size: Size, generator: torch.Generator) -> PackedMatrix:
    """A random gate by rows."""
    superblocks = random_superblocks((size.intermediate, size.hidden // 256), size.hidden**-0.5, generator)
    return PackedMatrix(superblocks.flatten(1).cpu(), "Q4_K", size.intermediate, size.hidden)


def _here(matrix: PackedMatrix) -> PackedMatrix:
    return PackedMatrix(matrix.blocks.cpu(), matrix.type, matrix.rows, matrix.columns)


def write_for_llama_cpp(size: Size, path: Path) -> Path:
    """The shape as a GGUF. llama.cpp's Llama knows SiLU alone: it reads and computes as much as it would with ReLU."""
    return write_shape(path, llama_config(size, max_position_embeddings=CONTEXT))
