"""The operations of `runtime/reference/products.py` by native kernels, on float32 tensors of the CPU.

Matrices keep the bits that they are stored in. `load_*` copy them into the order that the kernels read and give the
pages of a mapped file back, so that a model is held once. Threads are torch's (`torch.set_num_threads`); results have
the same bits every run with as many threads.

Kernels are given NumPy's views of tensors. For a tensor itself nanobind runs Python code of torch's, and forgets what
is raised there, which may be a user's Ctrl-C.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedExperts, PackedMatrix
from sparsepack.formats.orders.zigzag import check_steps
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cpu.kv_cache import NativeKvCache
from sparsepack.runtime.cpu.machine import instruction_set, native, operations, usable_cores
from sparsepack.runtime.cpu.tile_config import CpuTileConfig, tile_config
from sparsepack.runtime.hybrid.mailbox import Mailbox
from sparsepack.runtime.kv_cache import AttentionShape

PLANES_NUMBER = 1000  # blocks.h: Q6_P, which ggml does not know
_SPARE_INDICES = 16  # kernels.h: room that `collect` may write beyond the last index


def load_zigzag(
    matrix: PackedMatrix,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    absent: int = 0,
    config: CpuTileConfig | None = None,
) -> Any:
    """Copy a stored zigzag matrix into the order that the kernels read. Takes the matrix's stored size.

    threads -- that will run it; None: torch's
    absent  -- of planes, so many first ones lie elsewhere: products add what the others of columns above that level
               make, and no product is dense
    config  -- None: what suits the machine

    Raises `PackingError` for a tail that is none (`zigzag.check_steps`).
    """
    if matrix.format.order != "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one in zigzag order")
    find_backend("cpu").check_device(device)
    shape = matrix.rows, matrix.columns
    config = config or tile_config(shape, threads or torch.get_num_threads(), matrix.format.block)
    tail = None if matrix.tail is None else matrix.tail.contiguous()
    if tail is not None:
        check_steps(tail, matrix.rows, matrix.columns, matrix.format.block)
    return operations().load_zigzag(
        matrix.blocks.contiguous().numpy(),
        matrix.rows,
        1 if absent else config.span,  # a worker's product may begin at another column in its first span
        config.tile,
        None if tail is None else tail.numpy(),
        None if matrix.row_scale is None else matrix.row_scale.contiguous().numpy(),
        _number(matrix),
        absent,
    )


def _number(matrix: PackedMatrix | PackedExperts) -> int:
    """The type of a zigzag matrix's superblocks as blocks/blocks.h numbers it: ggml's number, or our own."""
    number = BLOCKS[matrix.format.block].gguf
    return PLANES_NUMBER if number is None else number


def load_experts(matrix: PackedExperts, threads: int | None = None) -> Any:
    """The same for the matrices of all experts of a site, side by side in one piece of memory."""
    config = tile_config((matrix.rows, matrix.columns), threads or torch.get_num_threads(), matrix.format.block)
    tail = None if matrix.tail is None else matrix.tail.contiguous()
    for of_one in () if tail is None else tail:
        check_steps(of_one, matrix.rows, matrix.columns, matrix.format.block)
    return operations().load_experts(
        matrix.blocks.contiguous().numpy(),
        matrix.rows,
        config.span,
        config.tile,
        None if tail is None else tail.numpy(),
        _number(matrix),
    )


def load_rows(matrix: PackedMatrix, device: torch.device | str = "cpu") -> Any:
    """Copy a matrix stored by rows (the output matrix) for the kernels. Takes the matrix's stored size."""
    if matrix.format.order == "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one stored by rows")
    find_backend("cpu").check_device(device)
    return operations().load_rows(matrix.blocks.contiguous().numpy(), matrix.columns, BLOCKS[matrix.format.block].gguf)


def collect(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """List the active columns of an input vector; see `reference.collect`."""
    columns = x.float().contiguous().numpy()
    indices = torch.empty(x.numel() + _SPARE_INDICES, dtype=torch.int32)
    limits = threshold.float().reshape(-1).contiguous().numpy()
    count = operations().collect(columns, None, limits, 0, np.empty_like(columns), indices.numpy())
    return indices[: x.numel()], torch.tensor(count, dtype=torch.int32)


def zigzag_gemv(matrix: Any, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = W[:, active] x[active]; see `reference.zigzag_gemv`. Same bits every run with as many threads."""
    y = torch.empty(matrix.rows)
    operations().zigzag_gemv(matrix, x.contiguous().numpy(), indices.contiguous().numpy(), int(count), y.numpy())
    return y


def planes_matmul(matrix: Any, x: Tensor, levels: Tensor) -> Tensor:
    """Y = X W^T, every column read at a level of its own; see `reference.planes_matmul`. Row by row, each as a decoder
    of one sequence has it."""
    y = torch.empty(x.shape[0], matrix.rows)
    for row, of_row, to in zip(x.contiguous(), levels, y, strict=True):
        indices = torch.argsort(of_row, stable=True).int()  # level by level, each ascending
        ends = of_row.long().bincount(minlength=len(BLOCKS["Q6_P"].levels) + 1).cumsum(0).int()
        indices, ends = indices[ends[0] :], ends[1:-1] - ends[0]
        operations().planes_gemv(matrix, row.numpy(), indices.numpy(), ends.numpy(), to.numpy())
    return y


def zigzag_matmul(matrix: Any, x: Tensor) -> Tensor:
    """Y = X W^T with every column: float32 [S, columns] -> float32 [S, rows]."""
    y = torch.empty(x.shape[0], matrix.rows)
    operations().zigzag_matmul(matrix, x.contiguous().numpy(), y.numpy())
    return y


def matmul(weight: Any, x: Tensor) -> Tensor:
    """Y = X W^T for a matrix loaded by `load_rows`: float32 [S, columns] -> float32 [S, rows]."""
    y = torch.empty(x.shape[0], weight.rows)
    operations().rows_matmul(weight, x.contiguous().numpy(), y.numpy())
    return y


def load_neurons(records: PackedMatrix, device: torch.device | str = "cpu", gated: bool = True) -> Any:
    """Copy stored neuron records into the order that the kernels read. Takes their stored size, up to whole cache
    lines. gated: whether they have rows of up."""
    find_backend("cpu").check_device(device)
    return operations().load_neurons(records.blocks.contiguous().numpy(), gated)


def load_gates(gates: PackedMatrix) -> Any:
    """Copy gates by rows, Q4_K [neurons, hidden], into the order in which a few of them are multiplied."""
    return operations().load_gates(gates.blocks.contiguous().numpy())


def neuron_ffn(neurons: Any, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """The sum over active neurons; see `reference.neuron_ffn`. Same bits every run with as many threads."""
    y = torch.empty(neurons.hidden)
    inputs = (each.contiguous().numpy() for each in (x, gate, indices))
    operations().neuron_ffn(neurons, *inputs, int(count), y.numpy())
    return y


def cold_worker(
    records: Sequence[Any],
    memory: np.ndarray,
    layout: Mailbox,
    threads: int | None = None,
    limit: float = 60.0,
    products: Sequence[Any] = (),
    gates: Sequence[Any] = (),
) -> Any:
    """Threads that compute what a device asks for through a mailbox; see `runtime/hybrid/mailbox.py`.

    records -- of each block, as `load_neurons` gives them
    memory  -- uint8 [layout.size], which the device reads and writes too; zeros at first
    threads -- at most as many as there are cores beside those of the caller and of the policy, which run meanwhile;
               None: that many
    limit   -- seconds that it waits for a request of a step that has begun: of a first one kernels are compiled
    products -- the matrices of the layout's products, as `load_zigzag` gives them
    gates   -- of each block, as `load_gates` gives them, or None: with them the requests of a block list neurons that
               may be active, and the worker keeps those whose gate is above zero; empty: no block has them

    What it gives has `begin(number, sequences=1)`, before the device asks for the first block of a step, and when both
    sides have ended the step before; and `end(number)`, which waits for the worker alone. Both raise RuntimeError from
    the moment when either side gave up; after Ctrl-C, or `interrupt()`, the next step begins anew as soon as the device
    has ended. `stop()` ends the threads. `neurons` and `seconds` say what was computed, and how long that took,
    `product_seconds` how long products took. The same requests have the same bits with as many threads.
    """
    most = worker_threads()
    chosen = min(threads or most, most)
    of_records, of_products, of_gates = (list(each) for each in (records, products, gates))
    return native().ColdWorker(instruction_set(), of_records, memory, layout, chosen, limit, of_products, of_gates)


def slow_policy() -> Callable[..., Any]:
    """What makes a native `SlowPolicy`, as `runtime/hybrid/policy.py` takes it; a prompt is followed by as many
    threads as a worker has, which has nothing to do meanwhile."""
    return partial(native().SlowPolicy, threads=worker_threads())


def worker_threads() -> int:
    """How many threads a `cold_worker` has at most: all cores but the caller's and, where there are more, the policy's.
    Threads that spin keep whoever shares their core from running."""
    return max(1, usable_cores() - 2)


def neuron_matmul(neurons: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The sum of `neuron_ffn` for several positions: float32 [S, hidden], [S, neurons] -> [S, hidden]."""
    y = torch.empty(x.shape[0], neurons.hidden)
    operations().neuron_matmul(neurons, x.contiguous().numpy(), gate.contiguous().numpy(), y.numpy())
    return y


def new_cache(shape: AttentionShape, type: str | None = None, device: torch.device | str = "cpu") -> NativeKvCache:
    """An empty cache of float16 keys and values; see `reference.backend.new_cache`. Raises `UserError` for
    another type."""
    row = find_backend("cpu")
    row.check_device(device)
    row.choose_cache_type(type)
    return NativeKvCache(shape)
