"""Neuron records: what an active neuron of an MLP needs beside its gate, in one piece (KAIROX; LLM in a flash, 3.2).

Row n is the neuron's row of the up matrix and then its column of the down matrix, both in Q4_K superblocks:

                  up[n, 0:256]   ...  up[n, -256:]   down[0:256, n]  ...  down[-256:, n]
    neuron 0    | 144 bytes    | ... | 144 bytes   | 144 bytes     | ... | 144 bytes    |
    neuron 1    | 144 bytes    | ... | 144 bytes   | 144 bytes     | ... | 144 bytes    |

The first half is the row as `q4_k` stores it, the second the column as `zigzag` does, byte for byte. Neurons stand by
falling frequency, so that those which should be near at hand are a prefix.
"""

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.blocks.q4_k import BLOCK_BYTES
from sparsepack.formats.blocks.superblock import BLOCK


def record_bytes(hidden: int) -> int:
    """Bytes of a record. Raises `PackingError` for a width that 256 does not divide."""
    if hidden < 1 or hidden % BLOCK:
        raise PackingError(f"hidden size {hidden}: neuron records need a multiple of {BLOCK}; use another format")
    return 2 * hidden // BLOCK * BLOCK_BYTES


def by_frequency(counts: Tensor) -> Tensor:
    """The order by falling counts, of equal ones the lower number first: [neurons] -> int64 [neurons]."""
    return torch.argsort(counts, descending=True, stable=True)


def original_order(order: Tensor) -> Tensor:
    """The position at which each neuron of the model is stored, from the neuron at each position: both int64 [neurons].

    Raises `PackingError` where `order` does not name each neuron once.
    """
    order = order.long()
    expected = torch.arange(order.numel(), device=order.device)
    positions = torch.argsort(order)
    if order.dim() != 1 or not torch.equal(order[positions], expected):
        raise PackingError(f"order {list(order.shape)}: expected each of {order.numel()} neurons once; calibrate again")
    return positions


def pack(up: Tensor, down: Tensor, order: Tensor) -> Tensor:
    """Quantise: floats [neurons, hidden] and [hidden, neurons] -> uint8 [neurons, record_bytes(hidden)].

    order -- int64 [neurons]: which neuron is stored at each position

    Raises `PackingError` for shapes that do not fit together, a width that 256 does not divide, an order that is none,
    or weights that are not finite.
    """
    if up.dim() != 2 or tuple(down.shape) != (up.shape[1], up.shape[0]):
        raise PackingError(f"up {list(up.shape)}, down {list(down.shape)}: expected [n, h] and [h, n]")
    record_bytes(up.shape[1])
    if order.numel() != len(up):
        raise PackingError(f"order of {order.numel()} neurons, the model has {len(up)}; calibrate this model")
    original_order(order)
    order = order.to(up.device).long()
    return q4_k.encode(torch.cat([up[order], down.t()[order]], dim=1))


def unpack(records: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantise: uint8 [neurons, record_bytes(hidden)] -> float32 [neurons, hidden] and [hidden, neurons], as stored.

    Raises `PackingError` where these are no records.
    """
    if records.dim() != 2 or not records.shape[1] or records.shape[1] % (2 * BLOCK_BYTES):
        raise PackingError(f"records {list(records.shape)}: expected [neurons, a multiple of {2 * BLOCK_BYTES} bytes]")
    up, down = q4_k.decode(records).chunk(2, dim=1)
    return up, down.t()
