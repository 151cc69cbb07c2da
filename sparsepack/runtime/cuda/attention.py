"""Attention of one decoding step on the GPU: one launch that also norms, rotates, and appends to the cache."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import architecture, kernel, launch, multiprocessors

CACHE_TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Type of cached keys and values -> the kernel's macro KV."""

MOST_SPLITS = 16
MOST_GROUP = 16
MOST_HEAD_DIM = 256
FEWEST_POSITIONS = 64
"""Of the whole context, that a block should have."""

LARGE_CLUSTERS = (90, 100, 103)
"""Architectures whose clusters may have 16 blocks; 8 elsewhere."""


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, and the sizes that follow. Its names are those of
    `kernels/attention_layout.cuh`."""

    head_dim: int
    group: int
    dtype: torch.dtype
    stages: int = 4

    @property
    def warps(self) -> int:
        """As many as leave the warps' sums, [warps, group, head_dim], within 64 KB."""
        return 8 if self.group * self.head_dim <= 2048 else 4

    @property
    def defines(self) -> tuple[str, ...]:
        values = {
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "KV": CACHE_TYPES[self.dtype],
            "WARPS": self.warps,
            "STAGES": self.stages,
        }
        return tuple(f"{name}={value}" for name, value in values.items())

    def shared_bytes(self, splits: int, clusters: bool) -> int:
        """Dynamic shared memory of a block: rings, queries, weights, peaks, and what a cluster's blocks send."""
        chunk = 16 // self.dtype.itemsize
        chunks = -(-self.head_dim // chunk)
        lanes = min(32, 1 << (chunks - 1).bit_length())
        width = lanes * -(-chunks // lanes) * chunk
        batch = 2 * (32 // lanes)
        ring = max(self.stages * 2 * batch * width * self.dtype.itemsize, -(-self.group * self.head_dim // 4) * 16)
        scratch = 4 * (2 * self.group * batch + -(-self.group // 4) * 4)
        own = self.warps * (ring + scratch + 8 * self.group) + 4 * self.group * width
        return own + (8 + 8 * splits * (self.group + self.slice(splits)) if clusters and splits > 1 else 0)

    def slice(self, splits: int) -> int:
        """Pairs of a key head's result that a block combines."""
        return -(-self.group * self.head_dim // 2 // splits)


@dataclass(frozen=True)
class Workspace:
    """Where blocks meet that form no cluster. Steps on one stream may share it.

    partials -- float32: for each block its heads' sums, and what they are relative to
    tickets  -- int32 zeros, one for each key head of each sequence
    """

    partials: Tensor
    tickets: Tensor


@cache
def shared_workspace(device: torch.device) -> Workspace:
    """Room for as many blocks as `splits_for` chooses on a device, in any variant."""
    blocks = most_blocks(multiprocessors(device))
    return Workspace(
        torch.empty(blocks * MOST_GROUP * (MOST_HEAD_DIM + 2), device=device),
        torch.zeros(blocks, dtype=torch.int32, device=device),
    )


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    window: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    splits: int | None = None,
    workspace: Workspace | None = None,
    clusters: bool = True,
    handed: bool = False,
) -> None:
    """Put the attention of one new position per sequence on the current stream: norm and rotate q and k, append k and v
    to the cache, and out = softmax(q k^T / sqrt(head_dim)) v over the positions that the new one sees.

    qkv            -- float32 [B, (heads + 2 * kv_heads) * head_dim]: q, then k, then v; head_dim even, at most 256;
                      heads at most 16 * kv_heads
    keys, values   -- the cache: bfloat16, float16 or float32 [B, kv_heads, context, head_dim]; position `positions[b]`
                      is written, and attended to as rounded
    positions      -- int32 [B]: how many positions are cached, below `context`; only the device reads it
    cos, sin       -- float32 [context or more, head_dim / 2], as `reference.rotary_table` gives them
    out            -- float32 [B, heads * head_dim]
    window         -- how many positions a query sees, its own included; 0: all
    q_norm, k_norm -- float32 [head_dim]: RMSNorm of every head before it is rotated, with `eps`
    splits         -- blocks that share a key head's positions, 1 to 16; None: as many as fill the GPU
    workspace      -- where blocks meet that form no cluster; None: the one that all steps share
    clusters       -- False: as on GPUs before sm_90
    handed         -- qkv is words (`words.py`), read as soon as they are written; out may be read so in any case

    Raises `ValueError` naming the argument that does not fit.
    """
    variant = _checked(qkv, keys, values, positions, cos, sin, out, heads, kv_heads, window, q_norm, k_norm)
    batch, _, context, _ = keys.shape
    device = qkv.device
    if device.type != "cuda":
        raise ValueError(f"qkv: on {device}, expected a CUDA device")
    arch = architecture(device.index or 0)
    in_clusters = clusters and arch >= 90
    most = MOST_SPLITS if arch in LARGE_CLUSTERS or not in_clusters else 8
    if splits is None:
        seen = min(context, window) if window else context
        splits = splits_for(batch * kv_heads, seen, multiprocessors(device), most)
    if not 1 <= splits <= most:
        raise ValueError(f"splits: {splits}, expected 1 to {most}")
    meet = None
    if splits > 1 and not in_clusters:
        meet = workspace or shared_workspace(device)
        _check_workspace(meet, batch * kv_heads, splits * variant.group * (variant.head_dim + 2))
    slice = variant.slice(splits)
    switches = [f"HANDED={int(handed)}", *(() if clusters else ("CLUSTERS=0",))]
    launch(
        kernel("attention", "attention", (*variant.defines, *switches), device.index or 0),
        (splits, kv_heads, batch),
        variant.warps * 32,
        *(qkv, keys, values, positions, cos, sin, q_norm, k_norm, out),
        *((meet.partials, meet.tickets) if meet else (None, None)),
        *(kv_heads, context, window, float(eps)),
        *(slice, _magic(splits), _magic(slice)),
        shared=variant.shared_bytes(splits, in_clusters),
        cluster=splits if in_clusters else 1,
    )


def _magic(divisor: int) -> int:
    """What makes a division a multiplication (`kernels/attention_rows.cuh`), as the bits of an int."""
    return (2**32 // divisor + (2**32 % divisor > 0)) % 2**32


@cache
def splits_for(rows: int, context: int, processors: int, most: int = MOST_SPLITS) -> int:
    """How many blocks share the positions of a key head: a power of two, so that clusters pack well.

    rows    -- key heads times sequences: blocks that there are with one split
    context -- positions that a query sees at most
    """
    splits, blocks = 1, most_blocks(processors)
    while 2 * splits <= most and rows * 2 * splits <= blocks and context >= 2 * splits * FEWEST_POSITIONS:
        splits *= 2
    return splits


def most_blocks(processors: int) -> int:
    """That share the positions of key heads."""
    return 5 * processors // 4


def _checked(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    heads: int,
    kv_heads: int,
    window: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> Variant:
    """The variant that computes this; raises `ValueError` where the arguments do not fit each other."""
    if kv_heads < 1 or heads % kv_heads or not kv_heads <= heads <= MOST_GROUP * kv_heads:
        raise ValueError(f"heads: {heads} with {kv_heads} key heads, expected 1 to {MOST_GROUP} times as many")
    if keys.dim() != 4 or keys.dtype not in CACHE_TYPES:
        raise ValueError(f"keys: {_described(keys)}, expected bfloat16, float16 or float32 [B, kv_heads, context, D]")
    batch, _, context, head_dim = keys.shape
    if head_dim % 2 or not 2 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"keys: head dimension {head_dim}, expected an even number up to {MOST_HEAD_DIM}")
    if window < 0:
        raise ValueError(f"window: {window}, expected 0 (no limit) or more")
    if cos.shape[0] < context:
        raise ValueError(f"cos: {cos.shape[0]} positions, expected {context} or more, as in the cache")
    float32, table = torch.float32, (cos.shape[0], head_dim // 2)
    _check("qkv", qkv, qkv, float32, (batch, (heads + 2 * kv_heads) * head_dim))
    _check("keys", keys, qkv, keys.dtype, (batch, kv_heads, context, head_dim), 16)
    _check("values", values, qkv, keys.dtype, (batch, kv_heads, context, head_dim), 16)
    _check("positions", positions, qkv, torch.int32, (batch,))
    _check("cos", cos, qkv, float32, table)
    _check("sin", sin, qkv, float32, table)
    _check("out", out, qkv, float32, (batch, heads * head_dim), 8)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _check(name, norm, qkv, float32, (head_dim,))
    return Variant(head_dim, heads // kv_heads, keys.dtype)


def _check(
    name: str, tensor: Tensor, beside: Tensor, dtype: torch.dtype, shape: tuple[int, ...], alignment: int = 4
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise ValueError(f"{name}: {_described(tensor)}, expected contiguous {expected}")
    if tensor.device != beside.device:
        raise ValueError(f"{name}: on {tensor.device}, expected {beside.device}, where qkv is")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name}: at an address that is no multiple of {alignment}; copy it")


def _check_workspace(meet: Workspace, tickets: int, floats: int) -> None:
    if meet.tickets.numel() < tickets or meet.partials.numel() < tickets * floats:
        room = f"{meet.partials.numel()} partials and {meet.tickets.numel()} tickets"
        raise ValueError(f"workspace: {room}, expected {tickets * floats} and {tickets}")


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"
