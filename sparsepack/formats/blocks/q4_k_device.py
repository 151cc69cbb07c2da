"""Q4_K's encoder as one kernel, with error feedback or without: C++ on the CPU, Triton on a GPU.

The oracle of both is `q4_k.encode_columns`, whose bytes they write; where neither can run, that does the work.
"""

from typing import Any

import torch
from torch import Tensor

from sparsepack.formats.blocks.cpu_encoder import encode_on_cpu, kernels
from sparsepack.runtime.cpu.machine import instruction_set
from sparsepack.triton_kernels import run_triton

WITHOUT = "Q4_K is encoded by plain torch, many times slower"
COLUMNS = 64
"""Columns that one call of the C++ kernel feeds errors back in: 256 rows of them stay in the L2 cache."""


def encode(weight: Tensor, divisors: Tensor | None = None) -> Tensor | None:
    """Zigzag superblocks of a finite matrix [rows, columns]: uint8 [bands * columns, 144]; None without a kernel.

    divisors -- what each row is divided by first, float32 [rows]; None: nothing
    """
    if weight.device.type == "cpu":
        return encode_on_cpu("Q4_K", weight, divisors)

    def by_kernel() -> Tensor:
        from sparsepack.formats.blocks import q4_k_triton

        return q4_k_triton.encode(weight if divisors is None else weight.float() / divisors[:, None])

    return run_triton(weight, by_kernel, WITHOUT)


def quantise_block(
    block: Tensor, factor: Tensor, first: int, blocks: Tensor, steps: Tensor | None = None
) -> Tensor | None:
    """Quantise columns one after the other, each one's error taken off those behind it; None without a kernel.

    block  -- contiguous float32 [columns, rows], each column in one piece; becomes what is decoded
    factor -- float32 [all columns, all columns], U of `Inputs.inverse_factor`
    first  -- the number of the block's first column in the matrix
    blocks -- uint8 [columns, bands, 144], written
    steps  -- float32 [columns, 2], d and dmin of each column, of one band on the CPU; None: those that suit it best.
              Only the CPU's kernel takes them: a tail is of few rows (`gptq._tail`)

    Returns the errors, each divided by its pivot: float32 [columns, rows].
    """
    if block.device.type == "cpu":
        found = kernels()
        if found is None:
            return None
        here = slice(first, first + len(block))
        errors = torch.empty_like(block)
        part = factor[here, here].contiguous()
        _quantise(found.quantise_q4_k, block, blocks, part, errors, steps)
        return errors

    if steps is not None:
        raise ValueError(f"given steps on {block.device}, where no kernel takes them; expected the CPU")

    def by_kernel() -> Tensor:
        from sparsepack.formats.blocks import q4_k_triton

        return q4_k_triton.quantise_block(block, factor, first, blocks)

    return run_triton(block, by_kernel, WITHOUT)


def on_cpu() -> bool:
    """Whether the CPU has a kernel."""
    return kernels() is not None


def columns_at_once(device: torch.device) -> int:
    """How many columns `quantise_block` takes."""
    return COLUMNS if device.type == "cpu" else COLUMNS // 2


def _quantise(kernel: Any, *tensors: Tensor | None) -> None:
    arrays = [None if tensor is None else tensor.numpy() for tensor in tensors]
    kernel(*arrays, instruction_set(), torch.get_num_threads())
