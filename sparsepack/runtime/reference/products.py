"""The oracle's products in plain torch, written to be right and read, not to be fast.

The products of faster backends pass the same tests (`tests/runtime/test_operations.py`). Here a
zigzag matrix is held decoded, in the order in which it is stored, so that an active column is one row of 256 weights
per band:

                  column 0            column 1                  column K - 1
    band 0      | 256 float32       | 256 float32       | ... | 256 float32        |     rows   0 .. 255
    band 1      | 256 float32       | 256 float32       | ... | 256 float32        |     rows 256 .. 511

That takes 32 bits a weight instead of the stored 4.5, 7.1 times the file; a matrix decoded anew for each token would
make every step cost as much as loading.

Which experts a token has, and how much of each: the oracle in plain torch.

The oracle of products with sparse24 weights: plain torch, on any device, written to be right and read.

Integers are multiplied and added exactly; FP8 and bfloat16 values are multiplied in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import neuron as codec
from sparsepack.formats.orders import zigzag
from sparsepack.formats.orders.gates import GateCopy, by_neuron
from sparsepack.formats.orders.slide import (
    PIECE,
    STEPS,
    Slide,
    expand,
    quantise_rows,
    unpack_positions,
    unslide,
    windowed,
)
from sparsepack.models.activations import clamped_swiglu
from sparsepack.models.blocks import CLAMPED_SWIGLU, Router


def route(
    x: Tensor,
    router: Tensor,
    used: int,
    normalised: bool,
    bias: Tensor | None = None,
    routing: Router | None = None,
    correction: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts that a router chooses, the likeliest ones by the softmax of its logits unless it has other scores.

    x -- float32 [S, hidden]; router -- float32 [experts, hidden]; used -- experts that a token has
    normalised -- whether the weights of these are made to add up to one
    bias -- float32 [experts], of the logits; None: there is none
    routing -- of other scores, or groups of experts; correction -- float32 [experts], added to scores that choose
    scale -- float32 [experts], by which weights are multiplied in the end; None: they are not

    Returns their numbers, int64 [S, used], and weights, float32 [S, used]; the likeliest first.
    """
    logits = x @ router.T if bias is None else x @ router.T + bias
    how = routing or Router()
    scores = logits.sigmoid() if how.sigmoid else torch.softmax(logits, -1)
    choosing = scores if correction is None else scores + correction
    if how.groups > 1:
        by_group = torch.unflatten(choosing, -1, (how.groups, -1))  # [S, groups, experts of one]
        best = by_group.topk(2 if how.sigmoid else 1, -1).values.sum(-1).topk(how.groups_used, -1).indices
        stays = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choosing = by_group.masked_fill(~stays[..., None], -torch.inf).flatten(1)
    chosen = choosing.topk(used, -1).indices
    weights = scores.gather(-1, chosen)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * (how.scale if scale is None else scale[chosen])


def with_shared(
    x: Tensor, gate: Tensor | None, numbers: range, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """What `route` returned, and after it the experts that every token has: [S, used + shared].

    gate -- float32 [1, hidden]: the sigmoid of its product with x is their weight; None: that is 1
    numbers -- of these experts
    """
    more = torch.arange(numbers.start, numbers.stop, device=x.device).expand(len(x), -1)
    weight = x.new_ones(len(x), 1) if gate is None else torch.sigmoid(x @ gate.T)
    weight = weight.expand(-1, len(numbers))
    return torch.cat([chosen, more], 1), torch.cat([weights, weight], 1)


_EXACT = 1024
"""Float32 adds products of int8 of this many columns without rounding: 1024 * 127 ** 2 is below 2 ** 24."""


@dataclass(frozen=True, eq=False)
class Sparse24Matrix:
    """A matrix as it lies in a slid folder.

    values    -- int8, float8_e4m3fn or bfloat16 [rows, stored]
    positions -- uint8 [rows, stored / 4 rounded up], two bits each
    scale     -- float32 [rows]; None where the values are the weights themselves
    """

    values: Tensor
    positions: Tensor
    scale: Tensor | None
    how: Slide
    columns: int

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights before they were slid, without their scales: `dtype` [rows, columns]. Raises `PackingError` for
        positions that were changed."""
        (rows, stored), step = self.values.shape, max(1, PIECE // max(1, self.columns))
        whole = torch.empty(rows, self.columns, dtype=dtype, device=self.values.device)
        for first in range(0, rows, step):  # unpacked positions take many times the memory of packed ones
            part = slice(first, first + step)
            positions = unpack_positions(self.positions[part], stored, self.how)
            whole[part] = unslide(self.values[part].float(), positions, self.how, self.columns)
        return whole


def quantise_slide(x: Tensor, how: Slide, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Quantise inputs token by token and expand them (SlideSparse, 4.2).

    x: floating [tokens, columns]. Returns the expanded values, `dtype` [tokens, expanded], and the scales, float32
    [tokens]; None for a type that is not quantised to. Raises `PackingError` for inputs that are not finite.
    """
    if dtype not in STEPS:
        return expand(x.to(dtype), how), None
    q, scale = quantise_rows(x, dtype)
    # One byte is like another where values only change places.
    return expand(q.view(torch.uint8), how).contiguous().view(dtype), scale


def slide_matmul(matrix: Sparse24Matrix, q: Tensor, scale: Tensor | None) -> Tensor:
    """Y = X W^T of expanded inputs: `quantise_slide`'s [tokens, expanded] and [tokens] -> float32 [tokens, rows]."""
    stored = matrix.values.shape[1]
    positions = unpack_positions(matrix.positions, stored, matrix.how)
    weight = windowed(matrix.values.float(), positions, matrix.how)
    sums = torch.zeros(len(q), len(weight), dtype=torch.float64, device=q.device)
    for first in range(0, weight.shape[1], _EXACT):
        part = slice(first, first + _EXACT)
        sums += q[:, part].float() @ weight[:, part].t()
    if scale is not None and matrix.scale is not None:
        sums *= scale[:, None].double() * matrix.scale.double()
    return sums.float()


ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
"""The MLP's function stands under the name in `Architecture.activation`."""


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """What enters the down matrix of an MLP with a gate, by the name of its activation."""
    return clamped_swiglu(gate, up) if activation == CLAMPED_SWIGLU else ACTIVATION_FUNCTIONS[activation](gate) * up


@dataclass(frozen=True)
class ReferenceZigzag:
    """A decoded zigzag matrix: tiles float32 [bands, columns, 256]; the last band's rows beyond `rows` are padding.

    lower -- of a matrix with planes, the tiles by the first plane, by two, ..., all but the last level
    """

    tiles: Tensor
    rows: int
    lower: tuple[Tensor, ...] = ()


def load_zigzag(matrix: PackedMatrix, device: torch.device | str = "cpu") -> ReferenceZigzag:
    """Decode a stored zigzag matrix on a device. Takes 4 bytes a weight, padding rows included."""
    if matrix.format.order != "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one in zigzag order")
    lower = tuple(_tiles(matrix, device, level) for level in range(1, len(matrix.levels)))
    return ReferenceZigzag(_tiles(matrix, device, 0), matrix.rows, lower)


def _tiles(matrix: PackedMatrix, device: torch.device | str, level: int) -> Tensor:
    block = matrix.format.block
    tiles = BLOCKS[block].decode(matrix.blocks.to(device), level=level)
    if matrix.tail is not None:
        tail = zigzag.unpack_tail(matrix.tail.to(device), matrix.rows, matrix.columns, block=block, level=level).t()
        tiles = torch.cat([tiles, F.pad(tail, (0, zigzag.BAND_ROWS - tail.shape[1]))[None]])
    if matrix.row_scale is not None:
        padded = F.pad(matrix.row_scale.to(device), (0, len(tiles) * zigzag.BAND_ROWS - matrix.rows))
        tiles *= padded.view(len(tiles), 1, -1)
    return tiles


def load_rows(matrix: PackedMatrix, device: torch.device | str = "cpu") -> Tensor:
    """Decode a matrix stored by rows (the output matrix) on a device: float32 [rows, columns]."""
    if matrix.format.order == "zigzag":
        raise ValueError(f"matrix of type {matrix.format}, expected one stored by rows")
    return decode_matrix(PackedMatrix(matrix.blocks.to(device), matrix.format, matrix.rows, matrix.columns))


def embed(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Look up rows of a stored embedding, decoding no others: ids int64 [S] -> float32 [S, columns]."""
    return BLOCKS[matrix.format.block].decode(matrix.blocks[ids])


def collect(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """List the active columns of an input vector (TEAL's magnitude criterion; SpQt, section 4.2.3).

    x         -- [columns], any floating type; compared in float32
    threshold -- float32 scalar or [columns]; column j is active where |x_j| > threshold_j, strictly; NaN never is

    Returns (indices, count). indices: int32 [columns], the first `count` of them the active columns in ascending
    order; the rest is unspecified and never read. count: int32 scalar. Both stay on x's device, and nothing waits
    for it.
    """
    active = x.float().abs() > threshold
    # A stable sort by activity keeps the columns in order, and has the same shape whatever is active.
    indices = torch.argsort(active.byte(), descending=True, stable=True)
    return indices.int(), active.sum(dtype=torch.int32)


def zigzag_gemv(matrix: ReferenceZigzag, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = W[:, active] x[active]: the product that skips inactive columns (SpQt, section 4.1.2).

    x              -- float32 [columns]
    indices, count -- as `collect` returns them

    Returns float32 [rows], without the padding rows. Each row's sum runs over the active columns in ascending order,
    in float32: the same bits every run, however many threads there are. No active column gives zeros.
    """
    bands, columns, band_rows = matrix.tiles.shape
    active, values = active_values(x, indices, count)
    tile = torch.arange(bands, dtype=torch.int32, device=x.device)
    tiles = (tile[:, None] * columns + active).reshape(-1)  # band by band, within a band the active columns
    # One bag per band: a weighted sum of its tiles, added one after the other, none of them copied.
    y = F.embedding_bag(
        tiles,
        matrix.tiles.view(-1, band_rows),
        offsets=tile * active.numel(),
        mode="sum",
        per_sample_weights=values.repeat(bands),
    )
    return y.reshape(-1)[: matrix.rows]


def active_values(x: Tensor, indices: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The columns to read and their values. On the CPU those are cut at the count, which costs nothing to read there;
    elsewhere all columns stay and those beyond the count weigh zero, so that the host need not wait for it."""
    if x.device.type == "cpu":
        active = indices[: int(count)]
        return active, x[active]
    inside = torch.arange(indices.numel(), device=x.device) < count
    active = torch.where(inside, indices, 0)
    return active, torch.where(inside, x[active], 0)


def zigzag_matmul(matrix: ReferenceZigzag, x: Tensor) -> Tensor:
    """Y = X W^T with every column, for prefill and dense sites: float32 [S, columns] -> float32 [S, rows]."""
    y = torch.matmul(x, matrix.tiles)  # [bands, S, 256]
    return y.transpose(0, 1).reshape(x.shape[0], -1)[:, : matrix.rows]


def planes_matmul(matrix: ReferenceZigzag, x: Tensor, levels: Tensor) -> Tensor:
    """Y = X W^T, every column read at a level of its own: float32 [S, columns] -> float32 [S, rows].

    levels -- uint8 [S, columns]: how many planes are read, 0: none
    """
    y = torch.zeros(len(x), matrix.rows, device=x.device)
    for level, tiles in enumerate((*matrix.lower, matrix.tiles), 1):
        y += zigzag_matmul(ReferenceZigzag(tiles, matrix.rows), torch.where(levels == level, x, 0))
    return y


def matmul(weight: Tensor, x: Tensor) -> Tensor:
    """Y = X W^T for a matrix loaded by `load_rows`: float32 [S, columns] -> float32 [S, rows]."""
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: float32 [..., width]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm where there is a bias, whose mean is subtracted first, else `rms_norm`; as that."""
    if bias is None:
        return rms_norm(x, weight, eps)
    return rms_norm(x - x.mean(-1, keepdim=True), weight, eps) + bias


@dataclass(frozen=True)
class Neurons:
    """Decoded neuron records, float32 [neurons, hidden] each: rows of up, None without gates, and columns of down."""

    up: Tensor | None
    down: Tensor


def load_neurons(records: PackedMatrix, device: torch.device | str = "cpu", gated: bool = True) -> Neurons:
    """Decode stored neuron records on a device. Takes 4 bytes a weight.

    gated -- whether they have rows of up
    """
    up, down = codec.unpack(records.blocks.to(device), gated)
    return Neurons(up, down.t())


def neuron_ffn(neurons: Neurons, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = sum over active n of gate_n (up_n . x) down_n, without gates of gate_n down_n, where gate_n is what the
    activation makes of up_n . x: an MLP that reads the records of active neurons alone (KAIROX,
    section 8). The same as with every neuron, as far as the others have a gate of exactly zero.

    x              -- float32 [hidden]
    gate           -- float32 [neurons], after the activation
    indices, count -- as `collect` returns them, of the gate

    Returns float32 [hidden], summed over the active neurons in ascending order, in float32: the same bits every run. No
    active neuron gives zeros.
    """
    active, values = active_values(gate, indices, count)
    inner = values if neurons.up is None else values * torch.mv(neurons.up[active], x)
    bag = torch.zeros(1, dtype=active.dtype, device=x.device)
    # One bag: a weighted sum of the active rows of down, added one after the other.
    return F.embedding_bag(active, neurons.down, offsets=bag, mode="sum", per_sample_weights=inner)[0]


def neuron_matmul(neurons: Neurons, x: Tensor, gate: Tensor) -> Tensor:
    """`neuron_ffn` for several positions and every neuron: float32 [S, hidden], [S, neurons] -> [S, hidden]."""
    return (gate if neurons.up is None else gate * F.linear(x, neurons.up)) @ neurons.down


@dataclass(frozen=True)
class ReferenceCopy:
    """A decoded copy of a gate: weight float32 [neurons, hidden], limits float32 [neurons]."""

    weight: Tensor
    limits: Tensor


def load_gate_copy(copy: GateCopy, limits: Tensor, device: torch.device | str = "cpu") -> ReferenceCopy:
    """Decode a copy of a gate, and its limits (`gate_copy.limits`), on a device."""
    return ReferenceCopy(copy.decoded().to(device), limits.to(device))


def load_gate_rows(gate: PackedMatrix, device: torch.device | str = "cpu") -> Tensor:
    """Decode a zigzag gate, laid out by neuron, on a device: float32 [neurons, hidden]."""
    return by_neuron(gate).decoded().to(device)


def may_be_active(copy: ReferenceCopy, x: Tensor) -> Tensor:
    """Which neurons may be active by a copy of the gate: those n with copy_n . x > -limit_n |x|, strictly.

    x -- float32 [..., hidden]. Returns bool [..., neurons].
    """
    return torch.gt(F.linear(x, copy.weight), -copy.limits * torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def list_neurons(copy: ReferenceCopy, x: Tensor) -> tuple[Tensor, Tensor]:
    """List the neurons that `may_be_active` for x, float32 [hidden].

    Returns (indices, count) as `collect` does. Who is active but not listed is lost, which two bits make rare.
    """
    return collect(may_be_active(copy, x).float(), torch.zeros((), device=x.device))


def listed_gates(gate: Tensor, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """The products of the listed neurons' gates with x, and zero for all others, which are not read: float32 [neurons].

    gate           -- by neuron, float32 [neurons, hidden]
    x              -- float32 [hidden]
    indices, count -- as `list_neurons` returns them
    """
    listed = indices[: int(count)].long()
    return gate.new_zeros(len(gate)).index_copy(0, listed, torch.mv(gate[listed], x))
