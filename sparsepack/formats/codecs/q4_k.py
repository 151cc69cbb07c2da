"""Q4_K: 256 weights in 144 bytes, 4.5 bits each; the bytes that ggml and every GGUF reader know.

    byte    0  1     2  3      4 .. 15                   16 .. 143
          +--------+--------+-------------------------+--------------------------------------+
          | d fp16 | dmin   | 8 scales, 8 mins, 6 bit | 256 nibbles q                        |
          +--------+--------+-------------------------+--------------------------------------+

    weight = d * scale[j] * q  -  dmin * min[j]         j: which of the eight sub-blocks of 32 weights

    bytes  4 ..  7   low 6 bits: scale 0 .. 3     high 2 bits: high bits of scale 4 .. 7
    bytes  8 .. 11   low 6 bits: min   0 .. 3     high 2 bits: high bits of min   4 .. 7
    bytes 12 .. 15   low nibble: scale 4 .. 7, high nibble: min 4 .. 7, their low 4 bits
    byte 16 + 32 i + e   low nibble: weight e of sub-block 2 i, high nibble: weight e of sub-block 2 i + 1

`q4_k_fit.py` says how the encoder chooses d, dmin, scales, mins and nibbles.
"""

import torch
from torch import Tensor

from sparsepack.formats.codecs import q4_k_device
from sparsepack.formats.codecs.q4_k_fit import BLOCK_BYTES, LOWEST, SUB, SUBS, encode_columns
from sparsepack.formats.codecs.superblock import (
    BLOCK,
    check_columns,
    decode_blocks,
    for_each_chunk,
    fp16_from_bytes,
    largest,
    superblocks_first,
)


def encode(weights: Tensor) -> Tensor:
    """Quantise along the last dimension.

    weights: float32, float16 or bfloat16 [..., K], K a multiple of 256. Returns uint8 [..., K / 256 * 144] on the same
    device. Minimises the squared error, every weight counting the same. Weights beyond what the format holds become
    its largest; a superblock of zeros becomes 144 zero bytes. A CUDA device with Triton writes the CPU's bytes, many
    times faster than one without.

    Raises PackingError for weights that are not finite, or a K that 256 does not divide.
    """
    check_columns(weights, "Q4_K")
    beyond = largest(weights) > -LOWEST
    flat = weights.detach().reshape(-1, BLOCK)
    blocks = q4_k_device.encode(flat.t())
    if blocks is None:
        blocks = _encode_in_chunks(flat, beyond)
    return blocks.view(*weights.shape[:-1], weights.shape[-1] // BLOCK * BLOCK_BYTES)


def _encode_in_chunks(flat: Tensor, beyond: bool) -> Tensor:
    blocks = torch.empty(flat.shape[0], BLOCK_BYTES, dtype=torch.uint8, device=flat.device)

    def work(part: slice) -> None:
        blocks[part] = encode_columns(superblocks_first(flat[part]), beyond).t()

    for_each_chunk(flat.shape[0], flat.device, work)
    return blocks


def decode(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantise: uint8 [..., n * 144] -> `dtype` [..., n * 256], computed in float32 as ggml does, then rounded.

    Raises PackingError where `blocks` is not uint8 or not whole superblocks.
    """
    return decode_blocks(blocks, dtype, BLOCK_BYTES, "Q4_K", _decode)


def scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit numbers of each superblock, one a byte: uint8 [..., 144] -> scales and mins, uint8 [..., 8] each."""
    first, second, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=-1)
    return scales, torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=-1)


def _decode(blocks: Tensor) -> Tensor:
    scale, minimum = scales_and_mins(blocks)  # [n, 8]
    s = fp16_from_bytes(blocks[:, 0:2]) * scale
    m = fp16_from_bytes(blocks[:, 2:4]) * minimum
    pairs = blocks[:, 16:].view(-1, SUBS // 2, 1, SUB)
    q = torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, SUBS, SUB)
    # Product and difference are rounded one after the other, as the reference does.
    return (q * s[:, :, None]).sub_(m[:, :, None]).view(-1, BLOCK)
