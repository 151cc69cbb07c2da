"""The names of the types in which tensors are stored, and their blocks.

Imports nothing, so that `--help` and recipes can say so.
"""

from collections.abc import Mapping

TYPES = ("q8_0", "q6_k", "q4_k", "f16", "bf16", "f32")
"""A user may ask for one of these types of the embedding or the output matrix, or for "auto"."""

BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
    "Q5_0": (32, 22),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8_E4M3": (1, 1),
    "U8": (1, 1),
    "I8": (1, 1),
    "I32": (1, 4),
}
"""The first number is how many weights are stored together, the second how many bytes they take."""


_SHORTER: Mapping[str, str] = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""llama-quantize takes these types in place of one whose superblocks do not fit a width: they have about as many bits,
in short blocks."""


def type_that_fits(type: str, columns: int) -> str:
    """`type`, or what takes its place for matrices of so many columns, as in llama-quantize: F16 fits any."""
    while columns % BLOCKS[type][0]:
        type = _SHORTER.get(type, "F16")
    return type


def stored_bytes(type: str, weights: int) -> int:
    """The bytes of so many weights, whole blocks of them."""
    block, block_bytes = BLOCKS[type]
    return weights // block * block_bytes
