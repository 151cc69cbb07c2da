"""The oracle's MLPs by neurons in plain torch: records, what the active ones add up to, and who may be active by a copy
of the gate."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import neuron as codec
from sparsepack.formats.orders.gates import GateCopy, by_neuron
from sparsepack.runtime.reference.products import active_values, collect


@dataclass(frozen=True)
class Neurons:
    """Decoded neuron records: of each neuron its row of up and its column of down, float32 [neurons, hidden] each."""

    up: Tensor
    down: Tensor


def load_neurons(records: PackedMatrix, device: torch.device | str = "cpu") -> Neurons:
    """Decode stored neuron records on a device. Takes 4 bytes a weight."""
    up, down = codec.unpack(records.blocks.to(device))
    return Neurons(up, down.t())


def neuron_ffn(neurons: Neurons, x: Tensor, gate: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = sum over active n of gate_n (up_n . x) down_n: an MLP that reads the records of active neurons alone (KAIROX,
    section 8). The same as with every neuron, as far as the others have a gate of exactly zero.

    x              -- float32 [hidden]
    gate           -- float32 [neurons], after the activation
    indices, count -- as `collect` returns them, of the gate

    Returns float32 [hidden], summed over the active neurons in ascending order, in float32: the same bits every run. No
    active neuron gives zeros.
    """
    active, values = active_values(gate, indices, count)
    inner = values * torch.mv(neurons.up[active], x)
    bag = torch.zeros(1, dtype=active.dtype, device=x.device)
    # One bag: a weighted sum of the active rows of down, added one after the other.
    return F.embedding_bag(active, neurons.down, offsets=bag, mode="sum", per_sample_weights=inner)[0]


def neuron_matmul(neurons: Neurons, x: Tensor, gate: Tensor) -> Tensor:
    """`neuron_ffn` for several positions and every neuron: float32 [S, hidden], [S, neurons] -> [S, hidden]."""
    return (gate * F.linear(x, neurons.up)) @ neurons.down


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
