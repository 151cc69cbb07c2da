"""Zigzag: a weight matrix as Q4_K superblocks that each lie within one input column (SpQt, section 4.1.2).

A band is 256 output rows. The superblock of band b and column j quantises weight[256 b : 256 b + 256, j], so that
skipping an input column skips whole superblocks. They are stored band by band, within a band column by column:

                  column 0     column 1           column K - 1
    band 0      | 144 bytes  | 144 bytes  | ... | 144 bytes    |     rows   0 .. 255
    band 1      | 144 bytes  | 144 bytes  | ... | 144 bytes    |     rows 256 .. 511, missing ones are zeros
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from sparsepack.errors import PackingError
from sparsepack.formats.codecs import q4_k, q4_k_device
from sparsepack.formats.codecs.q4_k_fit import BLOCK_BYTES, LOWEST, encode_columns
from sparsepack.formats.codecs.superblock import BLOCK, encode_chunks, largest

BAND_ROWS = BLOCK


def bands(rows: int) -> int:
    """How many bands hold `rows` output rows, the last perhaps in part."""
    return -(-rows // BAND_ROWS)


def pack(weight: Tensor) -> Tensor:
    """Quantise to zigzag Q4_K: float32, float16 or bfloat16 [rows, columns] -> uint8 [bands, columns, 144].

    Rows are padded with zeros to whole bands; the caller keeps `rows`. Works on the weight's device as `q4_k.encode`
    does, without a padded copy. Raises PackingError for a weight that is not a matrix, or not finite.
    """
    if weight.dim() != 2:
        raise PackingError(f"weight {list(weight.shape)}: zigzag packs a matrix [rows, columns]")
    beyond = largest(weight) > -LOWEST
    weight = weight.detach()
    blocks = q4_k_device.encode(weight)
    if blocks is None:
        count = bands(weight.shape[0]) * weight.shape[1]
        made = partial(_encoded, weight, beyond)
        blocks = encode_chunks(count, BLOCK_BYTES, weight.device, made)
    return blocks.view(bands(weight.shape[0]), weight.shape[1], BLOCK_BYTES)


def pack_column(column: Tensor) -> Tensor:
    """One column, known to be finite, as `pack` stores it: float32 [rows] -> uint8 [bands, 144]."""
    blocks = q4_k_device.encode(column[:, None])
    if blocks is None:
        padded = functional.pad(column, (0, -len(column) % BAND_ROWS))
        blocks = encode_columns(padded.view(-1, BAND_ROWS).t().contiguous(), beyond=True).t()
    return blocks


def unpack_column(blocks: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_column`: uint8 [bands, 144] -> float32 [rows]."""
    return q4_k.CODEC.decode_chunk(blocks).view(-1)[:rows]


def _encoded(weight: Tensor, beyond: bool, part: slice) -> Tensor:
    return encode_columns(_columns(weight, part), beyond).t()


def _columns(weight: Tensor, part: slice) -> Tensor:
    """Superblocks `part` of the zigzag order, in columns: float32 [256, n], with zeros for missing rows."""
    rows, columns = weight.shape
    out = torch.empty(BAND_ROWS, part.stop - part.start, device=weight.device)
    for band in range(part.start // columns, (part.stop - 1) // columns + 1):
        start, stop = max(part.start, band * columns), min(part.stop, (band + 1) * columns)
        here = out[:, start - part.start : stop - part.start]
        top = band * BAND_ROWS
        held = min(BAND_ROWS, rows - top)
        here[:held] = weight[top : top + held, start - band * columns : stop - band * columns]
        here[held:] = 0
    return out


def unpack(blocks: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise: uint8 [bands, columns, 144] -> `dtype` [rows, columns].

    Raises PackingError where `blocks` is not a zigzag matrix of `rows` rows.
    """
    if blocks.dim() != 3 or blocks.shape[2] != BLOCK_BYTES or blocks.shape[0] != bands(rows):
        raise PackingError(
            f"zigzag blocks {list(blocks.shape)}: expected [{bands(rows)}, columns, {BLOCK_BYTES}] for {rows} rows"
        )
    weight = torch.empty(rows, blocks.shape[1], dtype=dtype, device=blocks.device)
    for band in range(blocks.shape[0]):
        top = band * BAND_ROWS
        weight[top : top + BAND_ROWS] = q4_k.decode(blocks[band], dtype).t()[: rows - top]
    return weight
