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

`q4_k_fit.py` says how the encoder chooses d, dmin, scales, mins and nibbles. A superblock of zeros becomes 144 zero
bytes. A CUDA device with Triton writes the CPU's bytes, many times faster than one without.
"""

import torch
from torch import Tensor

from sparsepack.formats.codecs import q4_k_device
from sparsepack.formats.codecs.q4_k_fit import LOWEST, SUB, SUBS, encode_columns
from sparsepack.formats.codecs.superblock import BLOCK, BlockCodec, fp16_from_bytes, superblocks_first


def scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The six-bit numbers of each superblock, one a byte: uint8 [..., 144] -> scales and mins, uint8 [..., 8] each."""
    first, second, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], dim=-1)
    return scales, torch.cat([second & 63, (mixed >> 4) | (second >> 6 << 4)], dim=-1)


def steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What a nibble counts in each sub-block, and what is taken off: uint8 [n, 144] -> float32 [n, 8] each."""
    scale, minimum = scales_and_mins(blocks)
    return fp16_from_bytes(blocks[:, 0:2]) * scale, fp16_from_bytes(blocks[:, 2:4]) * minimum


def set_scales_and_mins(blocks: Tensor, scales: Tensor, mins: Tensor) -> None:
    """Put other six-bit numbers into superblocks, the inverse of `scales_and_mins`: uint8 [n, 144], [n, 8] each."""
    blocks[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | (mins[:, 4:] << 4)


def set_nibbles(blocks: Tensor, nibbles: Tensor) -> None:
    """Put other nibbles into superblocks: uint8 [n, 144], [n, 256]."""
    pairs = nibbles.view(-1, SUBS // 2, 2, SUB)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _decode(blocks: Tensor) -> Tensor:
    s, m = steps(blocks)
    pairs = blocks[:, 16:].view(-1, SUBS // 2, 1, SUB)
    q = torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, SUBS, SUB)
    # Product and difference are rounded one after the other, as the reference does.
    return (q * s[:, :, None]).sub_(m[:, :, None]).view(-1, BLOCK)


def _encode(flat: Tensor, most: float) -> Tensor:
    return encode_columns(superblocks_first(flat), beyond=most > -LOWEST).t()


def _on_device(flat: Tensor) -> Tensor | None:
    return q4_k_device.encode(flat.t())


CODEC = BlockCodec("Q4_K", _encode, _decode, _on_device)
encode, decode = CODEC.encode, CODEC.decode
