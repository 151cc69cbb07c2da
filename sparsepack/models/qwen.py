"""Qwen's dense models: biases of queries, keys and values in the second generation, norms of each head in the third."""

from sparsepack.models.family import Family
from sparsepack.models.llama_cpp import LlamaCpp
from sparsepack.models.parts import QK_NORMS

QWEN3_HEAD = 128

FAMILIES = (
    Family("qwen2", LlamaCpp("qwen2")),
    Family("qwen3", LlamaCpp("qwen3", biases=(), head=QWEN3_HEAD), norms=QK_NORMS),
)
