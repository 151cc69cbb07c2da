"""Gates of which the GPU has a copy in two bits a weight: who may be active by it, and exact gates of these alone
(`kernels/neurons/neuron_score.cu`, `neuron_gates.cu` and `neuron_keep.cu`)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders.gates import CopyErrors, copied, errors_of, limits_of
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.cuda.driver.device import deepest_pipeline, shared_limit
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16, new_sums
from sparsepack.runtime.cuda.products.neurons import INPUT_BYTES, MOST_TOGETHER, ActiveNeurons, CudaNeurons
from sparsepack.runtime.cuda.products.tile_config import BLOCK_BYTES, STATIC_BYTES

SCORE_THREADS = KEEP_THREADS = 1024
WARPS_AND_SLOTS = ((16, 4), (16, 2), (8, 2), (8, 1), (4, 1), (1, 1))
"""A block has the first of these numbers of warps, and of rows on their way to each, that fit in shared memory."""


WEIGHTS_AT_ONCE = 1 << 20
"""So many weights are copied at a time; temporaries take some forty times as many bytes."""


@dataclass(frozen=True)
class CudaGateCopy:
    """A copy of a gate, as `kernels/neurons/neuron_score.cu` draws it.

    codes  -- uint8 [neurons, hidden / 4]
    scales -- float16 [neurons]; limits: float32 [neurons], as `gate_copy.limits` has them
    """

    codes: Tensor
    scales: Tensor
    limits: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Neurons and channels."""
        return len(self.codes), 4 * self.codes.shape[1]


def load_gate_copy(
    gate: PackedMatrix, frequency: Tensor, times: float, device: torch.device | str = "cuda"
) -> CudaGateCopy:
    """Make a copy of a gate stored by rows, on a device, some rows at a time. Takes an eighth of a byte for each bit.

    frequency, times -- as `gate_copy.limits_of` takes them
    """
    codes, scales, found = [], [], []
    for blocks in torch.split(gate.blocks, max(WEIGHTS_AT_ONCE // gate.columns, 1)):
        rows = decode_matrix(PackedMatrix(blocks.to(device), gate.format, len(blocks), gate.columns))
        copy = copied(rows)
        codes.append(copy.codes)
        scales.append(copy.scales)
        found.append(errors_of(copy, rows))
    errors = CopyErrors(torch.cat([each.error for each in found]), torch.cat([each.norm for each in found]))
    limits = limits_of(errors, gate.columns, frequency, times)
    return CudaGateCopy(torch.cat(codes), torch.cat(scales), limits)


def score_neurons(copy: CudaGateCopy, x: Tensor, norm: Tensor, eps: float, listed: Tensor) -> None:
    """Put 1 for each neuron that may be active and 0 for the others on the current stream, for B sequences.

    x      -- float32 [B, hidden], before its RMSNorm, whose weight is `norm` float32 [hidden]
    listed -- float32 [B, neurons]
    """
    neurons, hidden = copy.shape
    if x.shape != (len(listed), hidden) or listed.shape[1] != neurons:
        raise ValueError(f"x {list(x.shape)}, listed {list(listed.shape)}: expected {hidden}, {neurons} of each text")
    device = x.device
    at_once = max(min(MOST_TOGETHER, (shared_limit(device) - STATIC_BYTES) // (4 * hidden)), 1)
    for first in range(0, len(x), at_once):
        of = slice(first, first + at_once)
        sequences = len(x[of])
        launch(
            kernel("neuron_score", "neuron_score", (f"INPUTS={sequences}",), device.index or 0),
            (min(multiprocessors(device), -(-neurons // 4)),),
            SCORE_THREADS,
            *(copy.codes, copy.scales, copy.limits, neurons, hidden // 16, x[of], norm, float(eps), listed[of]),
            shared=4 * hidden * sequences,
        )


def multiply_listed(
    gates: CudaNeurons, listed: ActiveNeurons, activation: int, *, host: CudaNeurons | None = None
) -> None:
    """Put the exact gates of the neurons of a list, after the activation, in place of those that it has, on the current
    stream.

    gates -- rows of the first memory of the list, uint8 [neurons, bytes]; host: those of the second
    """
    sequences, hidden = listed.x.shape
    device = listed.x.device
    bands = hidden // BAND_ROWS
    row_bytes = bands * BLOCK_BYTES
    slot_bytes = -(-(row_bytes + 112) // 128) * 128
    groups = -(-bands // 2)
    for first in range(0, sequences, MOST_TOGETHER):
        of = slice(first, first + MOST_TOGETHER)
        x, values = listed.x[of], listed.gates[of]

        def needed(choice: int, inputs: int = len(x)) -> int:
            warps, slots = WARPS_AND_SLOTS[choice]
            return inputs * groups * INPUT_BYTES + warps * slots * slot_bytes

        choice = deepest_pipeline(range(len(WARPS_AND_SLOTS)), lambda n: STATIC_BYTES + needed(n), device)
        warps, slots = WARPS_AND_SLOTS[choice]
        defines = (
            *(f"INPUTS={len(x)}", f"GROUPS={groups}", f"WARPS={warps}", f"SLOTS={slots}"),
            f"ACTIVATION={activation}",
        )
        launch(
            kernel("neuron_gates", "neuron_gates", defines, device.index or 0),
            (multiprocessors(device),),
            32 * warps,
            *(gates.records, None if host is None else host.records, bands, listed.counts, listed.index),
            *(x, values, values.stride(0)),
            shared=needed(choice),
        )


def keep_active(listed: ActiveNeurons, kept: ActiveNeurons, read: Tensor | None = None) -> None:
    """Put those of a list whose gate is not zero in any sequence into another list, in their order, on the current
    stream. Its counts then say how many these are, but for what the processor is asked for.

    read -- int64 []: to it is added what was read of the gate, in columns of a whole one
    """
    sequences, hidden = listed.x.shape
    launch(
        kernel("neuron_keep", "neuron_keep", (f"INPUTS={sequences}",), listed.x.device.index or 0),
        (1,),
        KEEP_THREADS,
        *(listed.counts, listed.index, listed.gates, listed.gates.stride(0)),
        *(kept.counts, kept.index, kept.gates, read, hidden, listed.gates.shape[1]),
    )


def new_kept(neurons: int, sequences: int, device: torch.device) -> ActiveNeurons:
    """Room for what `keep_active` keeps, but for input and sums, which `kept_of` takes from the list."""
    nothing = torch.zeros(0, device=device)
    index = torch.zeros(neurons, dtype=torch.int32, device=device)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    return ActiveNeurons(index, torch.zeros(sequences, neurons, device=device), counts, nothing, nothing)


def kept_of(listed: ActiveNeurons, kept: ActiveNeurons) -> ActiveNeurons:
    """What is kept of a list, with its input and its sums."""
    return replace(kept, x=listed.x, partial=listed.partial)


def multiply_gates(gates: CudaNeurons, x: ScaledFp16, scratch: Tensor) -> Product:
    """The product with every row of gates for every row of x, rounded as `gemm_fp16.multiply` does. The rows may lie in
    the host's memory.

    scratch -- float16, room for `hidden` at least
    """
    count, row_bytes = gates.records.shape
    hidden = row_bytes // BLOCK_BYTES * BAND_ROWS
    sums = torch.empty(len(x.values), count, device=x.values.device)
    step = min(len(scratch) // hidden, count)
    for first in range(0, count, step):
        rows = gates.records[first : first + step]
        decoded = scratch[: len(rows) * hidden].view(-1, BAND_ROWS)
        zigzag.dequantise_blocks(rows.reshape(1, -1, 1, BLOCK_BYTES), decoded, gates.fp16_scale)
        sums[:, first : first + step] = new_sums(x, decoded.view(-1, hidden).t())
    return Product(sums, x.factor, 1 / gates.fp16_scale, None)
