"""Attention of a decoding step to selected tokens whose keys and values lie in the host's memory: what Double
Sparsity-Offload (section 5) is for, without its guess.

The paper fetches what a guess of the next layer's query selects, and reads nothing else. Here the query itself selects,
so that the result has the bits of `attend` with a cache on the GPU, and what was read lately stays there: about 70 % of
what a step reads is what the step before has read, and 90 % is among twice as many tokens read last
(`benchmarks/notes/double.md`).
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention import KV_MACROS
from sparsepack.runtime.cuda.double.attention import DoubleParameters, Part, cluster_for, launch_part
from sparsepack.runtime.cuda.kernel import kernel, launch, multiprocessors

PLACE_THREADS, FETCH_THREADS = 1024, 256
"""Of a block, as in `kernels/token_places.cu`."""
PLACES = 2.0
"""For each token that a step reads at most: 90 % of them are among so many read last, 70 % among half as many."""
MOST_PLACES = 1 << 18
"""Of a key head: each has a bit in a block's shared memory."""


@dataclass(frozen=True)
class TokenPlaces:
    """The tokens of a layer that have a place on the GPU: see `kernels/token_places.cu`.

    keys, values   -- of the type of the cache: [B, kv_heads, places, head_dim]
    place_of       -- int32 [B, kv_heads, context]
    token_of       -- int32 [B, kv_heads, places]
    last_read      -- int32 [B, kv_heads, places]
    listed, counts -- int32 [B, kv_heads, most that a step reads], [B, kv_heads]: places that the last step read
    missed         -- int32 [B, kv_heads, most that a step reads, 2]
    missed_counts  -- int32 [B, kv_heads]: tokens that the last step fetched
    """

    keys: Tensor
    values: Tensor
    place_of: Tensor
    token_of: Tensor
    last_read: Tensor
    listed: Tensor
    counts: Tensor
    missed: Tensor
    missed_counts: Tensor

    def forget(self, sequence: int, first: int, count: int) -> None:
        """Positions that are being appended: what lies in their places is of another text."""
        self.place_of[sequence, :, first : first + count] = -1

    def forget_next(self, positions: Tensor) -> None:
        """The same of one position in every sequence, int32 [B], which only the device reads."""
        here = positions.long()[:, None, None].expand(-1, self.place_of.shape[1], 1)
        self.place_of.scatter_(2, here, -1)


def token_places(of: DoubleParameters, each: float = PLACES) -> TokenPlaces:
    """Places for so many times the tokens that a step reads at most, at least 1, none taken; at most `MOST_PLACES`.

    Raises `UserError` where a step reads more than that.
    """
    batch, kv_heads, context, head_dim = of.dense.keys.shape
    window = of.dense.layer.window
    seen = min(context, window) if window else context
    read = of.most_read(seen)
    if read > MOST_PLACES:
        raise UserError(
            f"offload: a step reads up to {read} of {context} tokens, expected at most {MOST_PLACES}; give a smaller "
            "context, or pack the model with a smaller share"
        )
    places = min(context, MOST_PLACES, ceil(max(each, 1) * read))
    device = of.dense.keys.device

    def integers(*shape: int, value: int = 0) -> Tensor:
        return torch.full((batch, kv_heads, *shape), value, dtype=torch.int32, device=device)

    keys, values = (
        torch.zeros(batch, kv_heads, places, head_dim, dtype=of.dense.keys.dtype, device=device) for _ in range(2)
    )
    return TokenPlaces(
        keys,
        values,
        place_of=integers(context, value=-1),
        token_of=integers(places, value=-1),
        last_read=integers(places),
        listed=integers(read),
        counts=integers(),
        missed=integers(read, 2),
        missed_counts=integers(),
    )


def attend_offloaded(
    of: DoubleParameters,
    places: TokenPlaces,
    qkv: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    cluster: int | None = None,
) -> None:
    """`double.attention.attend`, its keys and values in the host's memory: selects, gives the tokens places, fetches
    what has been given one, attends. Four launches."""
    batch, kv_heads, context, head_dim = of.dense.keys.shape
    device, count, listed = of.dense.keys.device, places.token_of.shape[2], places.listed.shape[2]
    cluster = cluster_for(of) if cluster is None else cluster
    step = (qkv, positions, out, cluster, places.listed, places.counts)
    launch_part(Part.SELECT, of, of.dense.keys, of.dense.values, *step)
    defines = (f"HEAD_DIM={head_dim}", f"KV={KV_MACROS[of.dense.keys.dtype]}")
    launch(
        kernel("token_places", "give_places", defines, device.index or 0),
        (kv_heads, batch),
        PLACE_THREADS,
        *(places.listed, places.counts, places.place_of, places.token_of, places.last_read, places.missed),
        *(places.missed_counts, positions, context, count, listed),
        shared=-(-count // 32) * 4,
    )
    launch(
        kernel("token_places", "fetch", defines, device.index or 0),
        (max(1, 2 * multiprocessors(device) // (batch * kv_heads)), kv_heads, batch),
        FETCH_THREADS,
        *(of.dense.keys, of.dense.values, places.keys, places.values, places.missed, places.missed_counts),
        *(context, count, listed),
    )
    launch_part(Part.ATTEND, of, places.keys, places.values, *step)
