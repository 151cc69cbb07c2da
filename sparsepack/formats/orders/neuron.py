"""Neuron records: what an active neuron of an MLP needs beside its gate, in one piece (KAIROX; LLM in a flash, 3.2).

Row n is the neuron's row of the up matrix and then its column of the down matrix, both in Q4_K superblocks:

                  up[n, 0:256]   ...  up[n, -256:]   down[0:256, n]  ...  down[-256:, n]
    neuron 0    | 144 bytes    | ... | 144 bytes   | 144 bytes     | ... | 144 bytes    |
    neuron 1    | 144 bytes    | ... | 144 bytes   | 144 bytes     | ... | 144 bytes    |

The first half is the row as `q4_k` stores it, the second the column as `zigzag` does, byte for byte. Neurons stand by
falling frequency, so that those which should be near at hand are a prefix. The record of a neuron without a gate has
the second half alone: its row of up says whether it is active, and has been multiplied by then.
"""

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.blocks import q4_k
from sparsepack.formats.blocks.q4_k import BLOCK_BYTES
from sparsepack.formats.blocks.superblock import BLOCK


def record_bytes(hidden: int, gated: bool = True) -> int:
    """Bytes of a record. Raises `PackingError` for a width that 256 does not divide.

    gated -- whether it has a row of up beside the column of down
    """
    if hidden < 1 or hidden % BLOCK:
        raise PackingError(f"hidden size {hidden}: neuron records need a multiple of {BLOCK}; use another format")
    return (1 + gated) * hidden // BLOCK * BLOCK_BYTES


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


def pack(up: Tensor | None, down: Tensor, order: Tensor) -> Tensor:
    """Quantise: floats [neurons, hidden] and [hidden, neurons] -> uint8 [neurons, record_bytes(hidden, gated)].

    up -- None: of neurons without a gate
    order -- int64 [neurons]: which neuron is stored at each position

    Raises `PackingError` for shapes that do not fit together, a width that 256 does not divide, an order that is none,
    or weights that are not finite.
    """
    if down.dim() != 2 or (up is not None and up.shape != down.t().shape):
        shown = "none" if up is None else list(up.shape)
        raise PackingError(f"up {shown}, down {list(down.shape)}: expected [n, h] and [h, n]")
    hidden, count = down.shape
    record_bytes(hidden)
    if order.numel() != count:
        raise PackingError(f"order of {order.numel()} neurons, the model has {count}; calibrate this model")
    original_order(order)
    order = order.to(down.device).long()
    columns = down.t()[order]
    return q4_k.encode(columns if up is None else torch.cat([up[order], columns], dim=1))


def unpack(records: Tensor, gated: bool = True) -> tuple[Tensor | None, Tensor]:
    """Dequantise: uint8 [neurons, record_bytes(hidden, gated)] -> float32 [neurons, hidden], None without gates, and
    [hidden, neurons], as stored.

    Raises `PackingError` where these are no records.
    """
    if records.dim() != 2 or not records.shape[1] or records.shape[1] % (whole := (1 + gated) * BLOCK_BYTES):
        raise PackingError(f"records {list(records.shape)}: expected [neurons, a multiple of {whole} bytes]")
    if not gated:
        return None, q4_k.decode(records).t()
    up, down = q4_k.decode(records).chunk(2, dim=1)
    return up, down.t()
