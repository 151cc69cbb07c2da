"""Attention of a decoding step to selected tokens whose keys and values lie in the host's memory: what Double
Sparsity-Offload (section 5) is for, without its guess; the tokens that were read last have slots on the GPU.

The paper fetches what a guess of the next layer's query selects, and reads nothing else. Here the query itself selects,
so that the result has the bits of `attend` with a cache on the GPU, and what was read lately stays there: about 70 % of
what a step reads is what the step before has read, and 90 % is among twice as many tokens read last.
"""

from math import ceil

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention.attention import KV_MACROS
from sparsepack.runtime.cuda.attention.double_sparsity import (
    DoubleSparsityParameters,
    TokenSlots,
    Work,
    cluster_for,
    launch_work,
)
from sparsepack.runtime.cuda.driver.kernel import kernel, launch, multiprocessors

SLOT_THREADS, FETCH_THREADS = 1024, 256
"""A block has this many threads, as in `kernels/attention/token_slots.cu`."""
SLOTS = 2.0
"""A key head has this many slots for each token that a step may read. Of the tokens that a step reads 90 % are among so
many that were read last, and 70 % among half as many."""
MOST_SLOTS = 1 << 18
"""A key head has at most this many slots: each has a bit in a block's shared memory."""


def token_slots(of: DoubleSparsityParameters, each: float = SLOTS) -> TokenSlots:
    """Slots for so many times the tokens that a step reads at most, at least 1, none taken; at most `MOST_SLOTS`.

    Raises `UserError` where a step reads more than that.
    """
    batch, kv_heads, context, head_dim = of.dense.keys.shape
    window = of.dense.layer.window
    seen = min(context, window) if window else context
    read = of.most_read(seen)
    if read > MOST_SLOTS:
        raise UserError(
            f"offload: a step reads up to {read} of {context} tokens, expected at most {MOST_SLOTS}; give a smaller "
            "context, or pack the model with a smaller share"
        )
    slots = min(context, MOST_SLOTS, ceil(max(each, 1) * read))
    device = of.dense.keys.device

    def integers(*shape: int, value: int = 0) -> Tensor:
        return torch.full((batch, kv_heads, *shape), value, dtype=torch.int32, device=device)

    keys, values = (
        torch.zeros(batch, kv_heads, slots, head_dim, dtype=of.dense.keys.dtype, device=device) for _ in range(2)
    )
    return TokenSlots(
        keys,
        values,
        slot_of=integers(context, value=-1),
        token_of=integers(slots, value=-1),
        last_read=integers(slots),
        listed=integers(read),
        counts=integers(),
        missed=integers(read, 2),
        missed_counts=integers(),
    )


def attend_offloaded(
    of: DoubleSparsityParameters,
    slots: TokenSlots,
    qkv: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    cluster: int | None = None,
) -> None:
    """`double_sparsity.attend`, its keys and values in the host's memory: selects, gives the tokens slots, fetches
    what has been given one, attends. Four launches."""
    batch, kv_heads, context, head_dim = of.dense.keys.shape
    device, count, listed = of.dense.keys.device, slots.token_of.shape[2], slots.listed.shape[2]
    cluster = cluster_for(of) if cluster is None else cluster
    launch_work(Work.SELECT, of, qkv, positions, out, cluster, slots)
    defines = (f"HEAD_DIM={head_dim}", f"KV={KV_MACROS[of.dense.keys.dtype]}")
    launch(
        kernel("token_slots", "assign_slots", defines, device.index or 0),
        (kv_heads, batch),
        SLOT_THREADS,
        *(slots.listed, slots.counts, slots.slot_of, slots.token_of, slots.last_read, slots.missed),
        *(slots.missed_counts, positions, context, count, listed),
        shared=-(-count // 32) * 4,
    )
    launch(
        kernel("token_slots", "fetch", defines, device.index or 0),
        (max(1, 2 * multiprocessors(device) // (batch * kv_heads)), kv_heads, batch),
        FETCH_THREADS,
        *(of.dense.keys, of.dense.values, slots.keys, slots.values, slots.missed, slots.missed_counts),
        *(context, count, listed),
    )
    launch_work(Work.ATTEND, of, qkv, positions, out, cluster, slots)
