"""The names of the types in which tensors are stored. Imports nothing, so that `--help` and recipes can list them."""

from collections.abc import Mapping

TYPES = ("q6_k", "q4_k", "f16", "bf16", "f32")
"""What a user may ask for as the type of the embedding or the output matrix, beside "auto"."""

BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "U8": (1, 1),
    "I8": (1, 1),
}
"""Weights that are stored together, and the bytes that they take."""


def stored_bytes(type: str, weights: int) -> int:
    """The bytes of so many weights, whole blocks of them."""
    block, block_bytes = BLOCKS[type]
    return weights // block * block_bytes
