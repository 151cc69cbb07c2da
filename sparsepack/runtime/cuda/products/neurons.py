"""MLPs by neurons on the GPU: records, the list of active neurons, and what these add up to (`kernels/neurons`)."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.placement.machine import BandwidthProfile
from sparsepack.runtime.cuda.driver.device import deepest_pipeline
from sparsepack.runtime.cuda.driver.kernel import architecture, kernel, launch, multiprocessors
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16, gated, new_sums
from sparsepack.runtime.cuda.products.tile_config import BLOCK_BYTES, STATIC_BYTES
from sparsepack.runtime.cuda.products.zigzag import headers_in_order

LIST_THREADS = 512
LIST_CLUSTER = 8
"""So many blocks make the list together, where GPUs have clusters: from Hopper on."""
HOPPER = 90
SUM_CHANNELS = 32
SUM_THREADS = 256
WAIT_THREADS = 32
MOST_TOGETHER = 4
"""One launch takes this many sequences at most: a thread keeps 16 sums of each."""
MOST_ROUND_WARPS = 16
"""This many warps at most share the channels of a record at a time."""
ENOUGH_WARPS = {1: 32}
"""A block has at most this many warps, by the number of sequences; with more sequences `MOST_ROUND_WARPS`, whose
threads have more registers."""
PARTS = 2
"""So many warps multiply a record's up row, where a block has as many warps."""
SLOTS = tuple(range(64, 0, -2))
"""A block has the first of these numbers of records on their way for which there is shared memory."""
REPACKED_AT_ONCE = 1 << 23
"""This many bytes of records are repacked at a time."""
COPIED = torch.complex128
"""torch copies a thread one value of a type at a time, and this is the largest, of 16 bytes: by bytes, records over the
bus take several times as long, and keep the multiprocessors from the step beside which they come."""
INPUT_BYTES = 4 * (2 * BAND_ROWS + 64)
"""What a sequence takes of a group of two superblocks in shared memory, as `kernels/neurons/neuron_input.cuh` draws
it."""


@dataclass(frozen=True)
class CudaNeurons:
    """Records as `kernels/neurons/neuron_record.cuh` draws them.

    records    -- uint8 [neurons, record bytes]
    fp16_scale -- power of two that brings the largest weight near the largest float16
    gated      -- whether they have rows of up beside columns of down
    """

    records: Tensor
    fp16_scale: float
    gated: bool = True

    @property
    def hidden(self) -> int:
        """Channels."""
        return self.records.shape[1] // ((1 + self.gated) * BLOCK_BYTES) * BAND_ROWS

    def piece(self, first: int, count: int) -> "CudaNeurons":
        """Some of the records, from the first on, at most `count`."""
        return replace(self, records=self.records[first : first + count])


@dataclass(frozen=True)
class ActiveNeurons:
    """What the kernels of an MLP leave for each other: the list of B sequences, their input, and sums of blocks.

    index   -- int32 [neurons]: the listed ones
    gates   -- float32 [B, neurons]: theirs, after the activation
    counts  -- int32 [3]: how many are listed of the first memory, in all, and how many are asked of the processor
    x       -- float32 [B, hidden]: the input, normed
    partial -- float32 [blocks, B, hidden]
    """

    index: Tensor
    gates: Tensor
    counts: Tensor
    x: Tensor
    partial: Tensor


@dataclass(frozen=True)
class Division:
    """How the neurons of a block are divided between the GPU's memory, the bus and the processor. Tensors in the host's
    memory are the GPU's all the same (`driver/memory.py`).

    tables   -- int32 [2, neurons]: two versions of the slot of each neuron, or -1
    version  -- int32 [1]: which of the two is in force
    bandwidth    -- float64 [4], as `bandwidth_tensor` makes them
    seen     -- int32 [kept, neurons / 32 rounded up]: who was active, a bit each, in step n at n modulo `kept`
    number   -- int32 [2]: of the step, which the first block (`begins`) counts up, and what it was before the sequence
    traffic  -- int64 [5], to which steps add: neurons from slots, over the bus, and by the processor, blocks handed
                over, and nanoseconds waited for answers
    replayed -- int32 [rows, neurons / 32 rounded up], or None: who is active in the steps of the sequence, in place of
                what the gates say; gates of zero then become 1
    abort    -- int32 [1], and the others as `runtime/hybrid/mailbox.py` draws them; sequences as many as the list has
    limit    -- milliseconds to wait for an answer
    """

    tables: Tensor
    version: Tensor
    bandwidth: Tensor
    seen: Tensor
    number: Tensor
    begins: bool
    abort: Tensor
    request_number: Tensor
    request_indices: Tensor
    request_gates: Tensor
    request_x: Tensor
    answer_number: Tensor
    answer: Tensor
    traffic: Tensor
    limit: int
    replayed: Tensor | None = None


def bandwidth_tensor(bandwidth: BandwidthProfile, device: torch.device) -> Tensor:
    """Seconds that a neuron takes from slots, over the bus, and by the processor, and a round through the mailbox:
    float64 [4]."""
    seconds = [1 / bandwidth.resident, 1 / bandwidth.bus, 1 / bandwidth.worker, bandwidth.handover]
    return torch.tensor(seconds, dtype=torch.float64, device=device)


def load_neurons(
    records: PackedMatrix, device: torch.device | str = "cuda", to: Tensor | None = None, gated: bool = True
) -> CudaNeurons:
    """Copy stored records to the GPU, or `to` memory of their shape, uint8. Takes their stored size.

    gated -- as of `CudaNeurons`
    """
    blocks = records.blocks
    loaded = torch.empty(blocks.shape, dtype=torch.uint8, device=device) if to is None else to
    step = max(REPACKED_AT_ONCE // max(blocks.shape[1], 1), 1)
    largest = [(0.0, 0.0)]
    for there, part in zip(torch.split(loaded, step), torch.split(blocks, step), strict=True):
        superblocks = part.to(device).view(len(part), -1, BLOCK_BYTES)
        largest.append(zigzag.largest_ends(superblocks))
        there.copy_(headers_in_order(superblocks).flatten(1))
    return CudaNeurons(loaded, zigzag.fp16_scale(*(max(ends) for ends in zip(*largest, strict=True))), gated)


def new_neurons(count: int, hidden: int, device: torch.device | str = "cuda") -> CudaNeurons:
    """Room for so many records, all of zeros. Who multiplies it knows the `fp16_scale` of what was copied there."""
    return CudaNeurons(torch.zeros(count, record_bytes(hidden), dtype=torch.uint8, device=device), 1.0)


def copy_neurons(to: CudaNeurons, slots: Tensor, source: CudaNeurons, records: Tensor) -> None:
    """Copy records of `source` to slots of `to`, on the current stream: int32 [n] each."""
    device = to.records.device
    there, here = (each.records.view(COPIED) for each in (to, source))
    there[slots.to(device).long()] = here[records.to(here.device).long()].to(device)


def new_active_neurons(neurons: int, hidden: int, sequences: int, device: torch.device) -> ActiveNeurons:
    """Room for the list and the sums of an MLP; MLPs on one stream share it."""
    return ActiveNeurons(
        index=torch.zeros(neurons, dtype=torch.int32, device=device),
        gates=torch.zeros(sequences, neurons, device=device),
        counts=torch.zeros(3, dtype=torch.int32, device=device),
        x=torch.zeros(sequences, hidden, device=device),
        partial=torch.zeros(multiprocessors(device), sequences, hidden, device=device),
    )


def list_neurons(
    gates: Tensor,
    activation: int,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    to: ActiveNeurons,
    *,
    everyone: bool = False,
    active: Tensor | None = None,
    flag_in_data: bool = False,
    division: Division | None = None,
) -> None:
    """List the active neurons of B sequences on the current stream: those whose gate is not zero in any of them.

    gates        -- float32 [B, neurons], before the activation
    activation   -- number of the function, see `kernels/common/activations.cuh`
    x            -- float32 [B, hidden], before its RMSNorm, whose weight is `norm` float32 [hidden]; None: x is normed
    everyone     -- list every neuron
    active       -- int64 []: the number of listed ones is added to it
    flag_in_data -- gates and x are in words of `driver/memory.py`, of one sequence
    division     -- how the neurons are divided; None: all records lie in one memory, in the order of the neurons
    """
    sequences, neurons = gates.shape
    if flag_in_data and sequences > 1:
        raise ValueError(f"{sequences} texts with their flag in the data: the list takes one such text")
    words, device = -(-neurons // 32), gates.device.index or 0
    cluster = LIST_CLUSTER if architecture(device) >= HOPPER else 1
    defines = {
        "CLUSTER": cluster,
        "INPUTS": sequences,
        "ROUNDS": -(-words // (cluster * LIST_THREADS // 32)),
        "ACTIVATION": activation,
        "ALL": int(everyone),
        "FLAG_IN_DATA": int(flag_in_data),
        "DIVIDED": int(division is not None),
        "REPLAYED": int(division is not None and division.replayed is not None),
    }
    divided: tuple[Tensor | int | None, ...] = (None, 0, None, None, None, 0, 0, None, 0, *[None] * 6, 0, 0)
    if division is not None:
        replayed = division.replayed
        divided = (
            *(division.tables, division.tables.stride(0), division.version, division.bandwidth),
            *(division.seen, division.seen.stride(0), len(division.seen), division.number, int(division.begins)),
            *(division.request_number, division.request_indices, division.request_gates, division.request_x),
            *(division.traffic, *((None, 0, 0) if replayed is None else (replayed, replayed.stride(0), len(replayed)))),
        )
    launch(
        kernel("neuron_list", "neuron_list", _macros(defines), device),
        (cluster,),
        LIST_THREADS,
        *(gates, neurons, x, x.shape[1], norm, float(eps), to.x, to.index, to.gates, to.counts, active),
        *divided,
    )


def add_neurons(
    neurons: CudaNeurons,
    listed: ActiveNeurons,
    residual: Tensor,
    y: Tensor,
    *,
    host: CudaNeurons | None = None,
    division: Division | None = None,
) -> None:
    """Put y = residual + the sum over listed neurons of gate_n (up_n . x) down_n, without rows of up of gate_n down_n,
    on the current stream.

    neurons     -- records of the first memory
    host        -- records of the second, as a tensor of the GPU (`driver/memory.py`)
    residual, y -- float32 [B, hidden], maybe the same
    division    -- of the list: what was asked of the processor is waited for, and added last
    """
    device, sequences, hidden = y.device, len(y), neurons.hidden
    blocks = len(listed.partial)
    for first in range(0, sequences, MOST_TOGETHER):
        of = slice(first, first + MOST_TOGETHER)
        x, gates, sums = listed.x[of], listed.gates[of], listed.partial[:, of]
        config = _ffn_config(hidden, len(x), device, neurons.gated)
        launch(
            kernel("neuron_ffn", "neuron_ffn", _macros(config.macros), device.index or 0),
            (blocks,),
            config.threads,
            *(neurons.records, None if host is None else host.records, hidden // BAND_ROWS, listed.counts),
            *(listed.index, gates, gates.stride(0), x, sums, sums.stride(0)),
            shared=config.shared_bytes,
        )
    if division is not None:
        launch(
            kernel("neuron_wait", "neuron_wait", (), device.index or 0),
            (1,),
            WAIT_THREADS,
            *(listed.counts, division.number, division.answer_number, division.abort, division.limit),
            division.traffic[4:],
        )
    launch(
        kernel("neuron_sum", "neuron_sum", (), device.index or 0),
        (hidden // SUM_CHANNELS, sequences),
        SUM_THREADS,
        *(listed.partial, blocks, listed.counts, hidden, residual, y, None if division is None else division.answer),
    )


@dataclass(frozen=True)
class _FfnConfig:
    """How a block of `neuron_ffn` is laid out: its macros but for BULK, as `kernels/neurons/neuron_ffn.cu` names them.

    record_bytes -- of a record; gated: as of `CudaNeurons`
    """

    inputs: int
    groups: int
    rounds: int
    slices: int
    slots: int
    record_bytes: int
    gated: bool = True

    @property
    def warps(self) -> int:
        return self.slices * -(-self.groups // self.rounds)

    @property
    def parts(self) -> int:
        return min(PARTS, self.warps)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """The bytes of dynamic shared memory: the inputs, then the ring."""
        return self.inputs * self.groups * INPUT_BYTES + self.slots * self.record_bytes

    @property
    def macros(self) -> dict[str, int]:
        return {
            "INPUTS": self.inputs,
            "GROUPS": self.groups,
            "ROUNDS": self.rounds,
            "SLICES": self.slices,
            "SLOTS": self.slots,
            "BATCH": min(self.warps // self.parts, self.slots),
            "PARTS": self.parts,
            "PLAIN": int(not self.gated),
        }


def _ffn_config(hidden: int, inputs: int, device: torch.device, gated: bool = True) -> _FfnConfig:
    """The layout with as many records on their way as shared memory has room for."""
    groups = -(-hidden // (2 * BAND_ROWS))
    rounds = -(-groups // MOST_ROUND_WARPS)
    slices = max(ENOUGH_WARPS.get(inputs, MOST_ROUND_WARPS) // -(-groups // rounds), 1)
    of_record = record_bytes(hidden, gated)
    config = partial(_FfnConfig, inputs, groups, rounds, slices, record_bytes=of_record, gated=gated)
    return config(slots=deepest_pipeline(SLOTS, lambda n: STATIC_BYTES + config(slots=n).shared_bytes, device))


def _macros(values: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in values.items())


def neurons_at_once(hidden: int, scratch: Tensor) -> int:
    """How many records `multiply_neurons` decodes at a time in a scratch: at least one, where `new_scratch` made it."""
    return len(scratch) // (2 * hidden)


def multiply_neurons(neurons: CudaNeurons, gate: Product, x: ScaledFp16, activation: int, scratch: Tensor) -> Product:
    """The sum over neurons of activation(gate_n) (up_n . x) down_n for every row of x, on the tensor cores, rounded as
    `gemm_fp16.multiply` does; without rows of up of activation(gate_n) gate_n down_n.

    neurons -- at most `neurons_at_once`, and at least one
    gate    -- [S, neurons], before the activation
    scratch -- float16, room for 2 * hidden of each neuron
    """
    count, hidden, inverse = len(neurons.records), neurons.hidden, 1 / neurons.fp16_scale
    width = (1 + neurons.gated) * hidden
    decoded = scratch[: count * width].view(-1, BAND_ROWS)
    zigzag.dequantise_blocks(neurons.records.view(1, -1, 1, BLOCK_BYTES), decoded, neurons.fp16_scale)
    *up, down = torch.split(decoded.view(count, width), hidden, dim=1)
    times = Product(new_sums(x, up[0].t()), x.factor, inverse, None) if up else gate
    mid = gated(gate, times, activation)
    return Product(new_sums(mid, down), mid.factor, inverse, None)
