"""The types in which tensors are stored, a row each: blocks of weights that are quantised together, or single numbers.

Cheap to import, without torch: `--help` and recipes name the types.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from sparsepack.formats.blocks.superblock import BlockCodec, FloatCodec


@dataclass(frozen=True)
class Block:
    """A type of blocks. Its codec is `CODEC` of the module of its name, or a row of `superblock.FLOATS`.

    name    -- ggml's, or where `gguf` is None that of safetensors
    weights -- how many are stored together
    bytes   -- how many these take
    gguf    -- ggml's number of the type
    error   -- largest relative Frobenius error of weights that the type itself can cause. Q4_K leaves 0.07 on normal
               weights and 0.09 on heavy-tailed ones (Student t with 3 degrees of freedom), Q6_K a quarter of that, Q6_P
               a third, Q5_0 and Q8_0 0.05 and 0.01 (tests/codec_cases.py has the weights); F16 and BF16 round to 11 and
               8 significant bits; F32 holds every source type. I8 and F8_E4M3 have one scale for a row: 0.01 and 0.03
               on normal weights, of I8 more where a row's largest weight is far from the others, ten times as far at
               this bound. Weights of another model of the same shapes are off by 1.4
    instead -- what llama-quantize takes in its place for widths that its blocks do not fit: about as many bits in short
               blocks, or F16
    file_type -- llama.cpp's enum llama_ftype of a file of it, which viewers of GGUFs show
    zigzag  -- whether superblocks of it can lie in zigzag order: there is a format of these
    levels  -- bits of a weight that readers of its first plane, first two, ... know; empty: it has no planes
    """

    name: str
    weights: int
    bytes: int
    gguf: int | None = None
    error: float = 0.0
    instead: str = "F16"
    file_type: int = 0
    zigzag: bool = False
    levels: tuple[int, ...] = ()

    @cached_property
    def codec(self) -> "BlockCodec | FloatCodec":
        """What encodes and decodes it."""
        if self.weights > 1:
            found: BlockCodec = import_module(f"sparsepack.formats.blocks.{self.name.lower()}").CODEC
            return found
        from sparsepack.formats.blocks.superblock import FLOATS

        return FLOATS[self.name]

    @property
    def bits(self) -> float:
        """Bits that a weight takes, scales included."""
        return 8 * self.bytes / self.weights

    @cached_property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes of a block up to the end of its first plane, of its second, ..."""
        planes = [(high - low) * self.weights // 8 for low, high in pairwise((0, *self.levels))]
        return tuple(self.bytes - sum(planes[n:]) for n in range(1, len(planes) + 1))

    def encode(self, weight: "Tensor") -> "Tensor":
        """Round along the last dimension: floats [..., columns] -> uint8 [..., bytes].

        Raises `PackingError` for weights that are not finite, not whole blocks, or that F16 cannot hold.
        """
        return self.codec.encode(weight)

    def decode(self, blocks: "Tensor", dtype: "dtype | None" = None, level: int = 0) -> "Tensor":
        """The inverse of `encode`: uint8 [..., bytes] -> `dtype`, float32 unless given, [..., columns].

        level -- of blocks with planes, how many are read; 0: all
        """
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if level:
            options["level"] = level
        return self.codec.decode(blocks, **options)


BLOCKS: Mapping[str, Block] = {
    block.name: block
    for block in (
        Block("Q4_K", 256, 144, 12, 0.12, instead="Q5_0", file_type=14, zigzag=True),
        Block("Q6_K", 256, 210, 14, 0.05, instead="Q8_0", file_type=18, zigzag=True),
        Block("Q8_0", 32, 34, 8, 0.015, file_type=7, zigzag=True),
        Block("Q6_P", 256, 200, None, 0.06, zigzag=True, levels=(2, 3, 4, 5, 6)),
        Block("Q5_0", 32, 22, 6, 0.08),
        Block("F32", 1, 4, 0, 1e-6),
        Block("F16", 1, 2, 1, 1e-3, file_type=1),
        Block("BF16", 1, 2, 30, 2**-8, file_type=32),
        Block("I32", 1, 4, 26),
        Block("F8_E4M3", 1, 1, error=0.06),
        Block("I8", 1, 1, 24, error=0.1),
        Block("U8", 1, 1),
    )
}

ZIGZAG_BLOCKS = tuple(block.name for block in BLOCKS.values() if block.zigzag)

TYPES = ("q8_0", "q6_k", "q4_k", "f16", "bf16", "f32")
"""A user may ask for one of these types of the embedding or the output matrix, or for "auto"."""


def type_that_fits(type: str, columns: int) -> str:
    """`type`, or what takes its place for matrices of so many columns, as in llama-quantize: F16 fits any."""
    while columns % BLOCKS[type].weights:
        type = BLOCKS[type].instead
    return type


def stored_bytes(type: str, weights: int) -> int:
    """The bytes of so many weights, whole blocks of them."""
    return weights // BLOCKS[type].weights * BLOCKS[type].bytes
