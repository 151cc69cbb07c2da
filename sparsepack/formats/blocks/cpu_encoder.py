"""Zigzag superblocks, encoded and decoded by the CPU's kernels, on as many threads as torch has; their oracles are the
codecs in torch."""

from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.blocks.superblock import BLOCK
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.runtime.cpu.machine import instruction_set, native

_CONVERTED_AT_ONCE = 1 << 22
"""So many weights of another type than float32 are converted at a time: in memory that the allocator does not give back
to the system after each time."""

_DECODED = ("Q4_K", "Q6_P")
"""What error feedback encodes, whose outputs are then measured."""


def kernels() -> Any | None:
    """The compiled module; None where it was installed without a compiler, which `sparsepack --version` says."""
    try:
        return native()
    except UserError:
        return None


def decode_on_cpu(block: str, blocks: Tensor, weight: Tensor) -> bool:
    """Put what bands in zigzag order decode to, uint8 [bands, columns, bytes], into float32 `weight` [rows, columns] on
    the CPU; False without a kernel for the type, and elsewhere."""
    found = kernels() if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if found is None or block not in _DECODED:
        return False
    found.decode(block, blocks.contiguous().numpy(), weight.numpy(), torch.get_num_threads())
    return True


def encode_on_cpu(block: str, weight: Tensor, divisors: Tensor | None) -> Tensor | None:
    """Zigzag superblocks of a finite matrix [rows, columns] on the CPU, of any strides: uint8 [bands * columns, bytes];
    None without a kernel, and on another device.

    divisors -- what each row is divided by first, float32 [rows]; None: nothing
    """
    found = kernels() if weight.device.type == "cpu" else None
    if found is None:
        return None
    rows, columns = weight.shape
    blocks = torch.empty(-(-rows // BLOCK), columns, BLOCKS[block].bytes, dtype=torch.uint8)
    by_rows = None if divisors is None else divisors.contiguous().numpy()

    def encode(part: Tensor, into: Tensor) -> None:
        found.encode(block, part.numpy(), by_rows, into.numpy(), instruction_set(), torch.get_num_threads())

    if weight.dtype == torch.float32:
        encode(weight, blocks)
        return blocks.view(-1, blocks.shape[2])
    step = max(_CONVERTED_AT_ONCE // max(rows, 1), 1)
    for first in range(0, columns, step):
        part = weight[:, first : first + step].float()
        made = torch.empty(blocks.shape[0], part.shape[1], blocks.shape[2], dtype=torch.uint8)
        encode(part, made)
        blocks[:, first : first + step] = made
    return blocks.view(-1, blocks.shape[2])
