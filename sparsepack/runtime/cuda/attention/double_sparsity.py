"""Attention of one decoding step to the tokens that their labels rank best: one launch that also norms, rotates, labels
and appends to the cache.

Keys and values may lie in the host's memory (`attend_offloaded`): what Double Sparsity-Offload (section 5) is for,
without its guess. The paper fetches what a guess of the next layer's query selects, and reads nothing else. Here the
query itself selects, so that the result has the bits of `attend` with a cache on the GPU, and tokens that were read
last have slots on the GPU: about 70 % of what a step reads is what the step before has read, and 90 % is among twice as
many tokens read last.
"""

from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.blocks.labels import padded_channels
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention.attention import KV_MACROS, AttentionParameters, Variant
from sparsepack.runtime.cuda.driver.device import shared_limit
from sparsepack.runtime.cuda.driver.kernel import architecture, kernel, launch, multiprocessors
from sparsepack.runtime.kv_cache import AttentionShape

CLUSTERS = (1, 2, 4, 8)
"""A key head can be shared by these numbers of blocks."""
HOPPER = 90
"""The oldest architecture with clusters, as compute capability times ten."""
ALIGNMENT = 8
"""A block's segment has a multiple of this many tokens."""
LABEL_WARPS = 8
"""A block that labels has this many warps."""
MOST_CHANNELS = 256
"""A label has at most this many channels."""
CHANNELS_OF_WORD = 8
"""A word of 32 bits holds this many channels of a label."""
MANY_WARPS = 16
WIDEST_OF_MANY = 256
"""A row of keys has at most this many bytes where a block has many warps; their rings would leave no room for wider
rows."""
MOST_TOKENS = 1 << 16
"""A segment has at most this many tokens, since their numbers have 16 bits."""
FEWEST_TOKENS = 2048
"""A segment has at least this many tokens, where several blocks share a key head."""
BREAK_EVEN = 45 << 20
"""A step that is spared this many bytes of keys and values, of a layer and all sequences, takes no longer than one that
reads everything: measured on an H100 with 1 to 8 sequences of 32 query heads and 8 or 32 key heads of 128 channels in
bfloat16, labels of 32 and a share of 1/16 (`python -m benchmarks attention_decode`)."""
NEVER = 2**31 - 1
"""No context has as many tokens as this."""
STATIC_BYTES = 6 << 10
"""The kernel declares, and the system keeps, at most this many bytes of shared memory."""


@dataclass(frozen=True)
class TokenSlots:
    """The slots of a layer's tokens on the GPU: see `kernels/attention/token_slots.cu`.

    keys, values   -- of the type of the cache: [B, kv_heads, slots, head_dim]
    slot_of        -- int32 [B, kv_heads, context]
    token_of       -- int32 [B, kv_heads, slots]
    last_read      -- int32 [B, kv_heads, slots]
    listed, counts -- int32 [B, kv_heads, most that a step reads], [B, kv_heads]: slots that the last step read
    missed         -- int32 [B, kv_heads, most that a step reads, 2]
    missed_counts  -- int32 [B, kv_heads]: tokens that the last step fetched
    """

    keys: Tensor
    values: Tensor
    slot_of: Tensor
    token_of: Tensor
    last_read: Tensor
    listed: Tensor
    counts: Tensor
    missed: Tensor
    missed_counts: Tensor

    def forget(self, sequence: int, first: int, count: int) -> None:
        """Forget the slots of positions that are being written: what lies there is of another sequence."""
        self.slot_of[sequence, :, first : first + count] = -1

    def forget_next(self, positions: Tensor) -> None:
        """Forget the slot of one position in every sequence, int32 [B], which only the device reads."""
        here = positions.long()[:, None, None].expand(-1, self.slot_of.shape[1], 1)
        self.slot_of.scatter_(2, here, -1)


class Work(Enum):
    """What a launch does: whether it selects, and whether it attends."""

    WHOLE = (1, 1)
    SELECT = (1, 0)
    ATTEND = (0, 1)


@dataclass(frozen=True)
class DoubleSparsityParameters:
    """What sparse attention of a layer takes at every step.

    dense         -- its shape, norms, keys and values
    channels      -- int32 [kv_heads, R], -1 where a label has no channel
    codes, scales -- its labels: uint8 [B, kv_heads, context, R / 2], float16 [B, kv_heads, context]
    policy        -- how many tokens are read
    largest_whole -- tokens of the longest text that is read whole, beside longer ones or by itself
    """

    dense: AttentionParameters
    channels: Tensor
    codes: Tensor
    scales: Tensor
    policy: TokenPolicy
    largest_whole: int

    @property
    def label_words(self) -> int:
        """The number of words of 32 bits in a label."""
        return self.channels.shape[1] // CHANNELS_OF_WORD

    def most_read(self, seen: int) -> int:
        """The number of tokens that a position reads at most, where it sees up to so many."""
        return max(self.policy.budget(seen), min(seen, self.largest_whole))  # of fewer tokens all are read


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory of a block, in bytes and tokens.

    segment -- tokens that a block may score
    first   -- bytes of scores, and later of rings
    list    -- tokens that a block may list of its segment
    total   -- bytes
    """

    segment: int
    first: int
    list: int
    total: int


def double_sparsity_parameters(
    dense: AttentionParameters, channels: Tensor, policy: TokenPolicy, largest_whole: int | None = None
) -> DoubleSparsityParameters:
    """The parameters of a layer with these heavy channels, int64 [kv_heads, r], and an empty label cache.

    largest_whole -- as in `DoubleSparsityParameters`; None: as the policy says

    Raises `UserError` as `cluster_for` does.
    """
    kv_heads, count = channels.shape
    if not 1 <= count <= min(MOST_CHANNELS, dense.shape.head_dim):
        raise ValueError(f"channels: {count} a head, expected 1 to {min(MOST_CHANNELS, dense.shape.head_dim)}")
    padding = padded_channels(count) - count
    there = torch.nn.functional.pad(channels, (0, padding), value=-1).to(dense.keys.device, torch.int32).contiguous()
    batch, _, context, _ = dense.keys.shape
    codes = torch.zeros(batch, kv_heads, context, there.shape[1] // 2, dtype=torch.uint8, device=dense.keys.device)
    scales = torch.zeros(batch, kv_heads, context, dtype=torch.float16, device=dense.keys.device)
    whole = policy.min_context - 1 if largest_whole is None else largest_whole
    of = DoubleSparsityParameters(dense, there, codes, scales, policy, whole)
    cluster_for(of)
    return of


def label_append(
    of: DoubleSparsityParameters, first: int, count: int, sequence: int | None = None, positions: Tensor | None = None
) -> None:
    """Label `count` keys that are cached, from position `first` of a sequence on, or from each sequence's position of
    int32 [B] on, which only the device reads."""
    keys, codes, scales = of.dense.keys, of.codes, of.scales
    if sequence is not None:
        keys, codes, scales = keys[sequence : sequence + 1], codes[sequence : sequence + 1], scales[sequence, None]
    batch, kv_heads, context, head_dim = keys.shape
    if not count:
        return
    launch(
        kernel(
            "labels",
            "label_append",
            (f"LABEL_WORDS={of.label_words}", f"KV={KV_MACROS[keys.dtype]}"),
            keys.device.index or 0,
        ),
        (-(-count // LABEL_WARPS), kv_heads, batch),
        LABEL_WARPS * 32,
        *(keys, of.channels, codes, scales, positions, first, count, context, head_dim),
    )


def break_even(shape: AttentionShape, type: torch.dtype) -> int:
    """The number of tokens of a sequence from which on a sparse step takes no longer than one that reads everything;
    `NEVER` where labels take more than they spare, or no layer has labels.

    type -- of keys and values
    """
    channels = max((layer.channels.shape[1] for layer in shape.layers if layer.channels is not None), default=0)
    if shape.policy is None or not channels:
        return NEVER
    row = 2 * shape.head_dim * type.itemsize
    spared = row * (1 - shape.policy.tokens) - padded_channels(channels) // 2 - torch.float16.itemsize
    rows = shape.kv_heads * shape.sequences
    return min(NEVER, ceil(BREAK_EVEN / (rows * spared))) if spared > 0 else NEVER


def attend(
    of: DoubleSparsityParameters,
    qkv: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    min_context: int | None = None,
    cluster: int | None = None,
) -> None:
    """Put the attention of one new position per sequence on the current stream; see `cuda.attention.attend`, whose
    arguments these are, and `reference.double_sparsity.DoubleSparsityKvCache`.

    min_context -- a position that sees fewer tokens reads all of them; None: the policy's
    cluster     -- blocks that share a key head, of `CLUSTERS`; None: as many as suit the GPU
    """
    cluster = cluster_for(of) if cluster is None else cluster
    launch_work(Work.WHOLE, of, qkv, positions, out, cluster, min_context=min_context)


def launch_work(
    work: Work,
    of: DoubleSparsityParameters,
    qkv: Tensor,
    positions: Tensor,
    out: Tensor,
    cluster: int,
    slots: TokenSlots | None = None,
    *,
    min_context: int | None = None,
) -> None:
    """Put one launch of a step on the current stream; others as for `attend`.

    slots -- what `Work.SELECT` lists the tokens in, and of which `Work.ATTEND` reads the listed rows; None: nothing is
             listed, and the cache is read
    """
    held = slots if slots is not None and work is Work.ATTEND else of.dense
    keys, values = held.keys, held.values
    listed, counts = (None, None) if slots is None else (slots.listed, slots.counts)
    shape, layer = of.dense.shape, of.dense.layer
    batch, kv_heads, context, _ = of.dense.keys.shape
    selects, attends = work.value
    variant, policy = variant_for(of, cluster), of.policy
    shared = shared_memory_for(of, cluster, variant, selects=bool(selects))
    launch(
        kernel(
            "double_sparsity",
            "double_sparsity",
            (
                *variant.defines,
                f"LABEL_WORDS={of.label_words}",
                f"CLUSTER={cluster}",
                f"SELECTS={selects}",
                f"ATTENDS={attends}",
            ),
            keys.device.index or 0,
        ),
        (cluster, kv_heads, batch),
        variant.warps * 32,
        *(qkv, keys, values, of.codes, of.scales, of.channels, positions, *of.dense.table),
        *(layer.q_norm, layer.k_norm, out, kv_heads, context, layer.window, float(shape.eps)),
        *(of.dense.rope_stride, of.dense.query_scale, shape.query_scale, of.dense.log2_cap, layer.sinks),
        *(policy.tokens.numerator, policy.tokens.denominator, policy.sinks, policy.recent),
        *(policy.min_context if min_context is None else min_context, shared.first, shared.list),
        *(keys.shape[2], listed, counts, 0 if listed is None else listed.shape[2]),
        shared=shared.total,
    )


def variant_for(of: DoubleSparsityParameters, cluster: int) -> Variant:
    """What the kernel is compiled for: more warps a block where there is no more than one on a multiprocessor, and
    shared memory has room for their rings."""
    variant, keys = of.dense.variant, of.dense.keys
    many = replace(variant, warps=MANY_WARPS)
    alone = cluster == 1 and keys.shape[0] * keys.shape[1] <= multiprocessors(keys.device)
    wide = variant.head_dim * keys.dtype.itemsize > WIDEST_OF_MANY
    if not alone or wide or variant.warps > many.warps or not fits(shared_memory_for(of, cluster, many), keys.device):
        return variant
    return many


def shared_memory_for(
    of: DoubleSparsityParameters, cluster: int, variant: Variant, *, selects: bool = True
) -> SharedMemory:
    """The shared memory that a block needs where so many share a key head; less where the tokens are listed already."""
    layer, context = of.dense.layer, of.dense.keys.shape[2]
    seen = min(context, layer.window) if layer.window else context
    segment = -(-(seen + ALIGNMENT) // (cluster * ALIGNMENT)) * ALIGNMENT
    most = of.most_read(seen)
    rings = variant.warps * variant.ring_bytes
    first = max(rings, -(-2 * segment // 16) * 16) if selects else rings
    listed = -(-min(segment, most) // 8) * 8 if selects else 0
    parts = 0 if cluster == 1 else cluster * variant.slice(cluster) * 16
    share = 0 if cluster == 1 or not selects else 4 * (most // cluster + 2)
    total = first + variant.shared_bytes - rings + 16 + parts + 2 * listed + share
    return SharedMemory(segment, first, listed, total)


def fits(shared: SharedMemory, device: torch.device) -> bool:
    """Whether a block of a GPU has that much shared memory."""
    return shared.total <= shared_limit(device) - STATIC_BYTES and shared.segment <= MOST_TOKENS


def cluster_for(of: DoubleSparsityParameters) -> int:
    """The number of blocks that share a key head: more where multiprocessors would be idle and segments stay long
    enough for what it costs to wait for each other, and where shared memory has no room for longer segments.

    Raises `UserError` for a context that no number of blocks has room for.
    """
    device = of.dense.keys.device
    batch, kv_heads, context, _ = of.dense.keys.shape
    clusters = CLUSTERS if architecture(device.index or 0) >= HOPPER else CLUSTERS[:1]
    shared_by_cluster = {n: shared_memory_for(of, n, variant_for(of, n)) for n in clusters}
    fitting = [n for n, shared in shared_by_cluster.items() if fits(shared, device)]
    if not fitting:
        raise UserError(
            f"a context of {context} tokens of which {of.policy.tokens} are read: sparse attention finds no room for "
            "their scores and numbers in this GPU's shared memory; give a smaller context, or pack the model with a "
            "smaller share or without --attention"
        )
    chosen = fitting[0]
    for n in fitting[1:]:
        if 2 * batch * kv_heads * n <= multiprocessors(device) and shared_by_cluster[n].segment >= FEWEST_TOKENS:
            chosen = n
    return chosen


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
