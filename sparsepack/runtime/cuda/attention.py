"""Attention of one decoding step on the GPU: one launch that also norms, rotates, and appends to the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.runtime.cuda.kernel import blocks_at_once, kernel, launch, multiprocessors
from sparsepack.runtime.cuda.words import slots

CACHE_TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Type of cached keys and values -> the kernel's macro KV."""

SPLITS = (1, 2, 4, 8, 16, 32)
MOST_SPLITS = SPLITS[-1]
PART_WORDS = 4
"""Of a pair of the result, as blocks hand it on."""

MOST_GROUP = 16
MOST_HEAD_DIM = 256
FEWEST_POSITIONS = 64
"""Of the whole context, that a block should have."""


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

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: rings, queries, weights, peaks."""
        chunk = 16 // self.dtype.itemsize
        chunks = -(-self.head_dim // chunk)
        lanes = min(32, 1 << (chunks - 1).bit_length())
        width = lanes * -(-chunks // lanes) * chunk
        batch = 2 * (32 // lanes)
        ring = max(self.stages * 2 * batch * width * self.dtype.itemsize, -(-self.group * self.head_dim // 4) * 16)
        scratch = 4 * (2 * self.group * batch + -(-self.group // 4) * 4)
        return self.warps * (ring + scratch + 8 * self.group) + 4 * self.group * width

    def slice(self, splits: int) -> int:
        """Pairs of a key head's result that a block finishes."""
        return -(-self.group * self.head_dim // 2 // splits)


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
    splits         -- blocks that share a key head's positions, a power of two up to 32; None: as many as fill the GPU
    handed         -- qkv is words (`words.py`), read as soon as they are written; out may be read so in any case

    Raises `ValueError` naming the argument that does not fit.
    """
    variant = _checked(qkv, keys, values, positions, cos, sin, out, heads, kv_heads, window, q_norm, k_norm)
    batch, _, context, _ = keys.shape
    device = qkv.device
    if device.type != "cuda":
        raise ValueError(f"qkv: on {device}, expected a CUDA device")
    rows, index = batch * kv_heads, device.index or 0
    compiled = kernel("attention", "attention", (*variant.defines, f"HANDED={int(handed)}"), index)
    at_once = blocks_at_once(compiled, device, variant.warps * 32, variant.shared_bytes)
    if splits is None:
        seen = min(context, window) if window else context
        splits = splits_for(rows, seen, multiprocessors(device), at_once)
    if splits not in SPLITS:
        raise ValueError(f"splits: {splits}, expected a power of two up to {MOST_SPLITS}")
    if splits > 1 and rows * splits > at_once:
        raise ValueError(f"splits: {splits} of {rows} rows wait for each other, but only {at_once} blocks run at once")
    slice = variant.slice(splits)
    _check_slots(slots(device), PART_WORDS * rows * splits**2 * slice if splits > 1 else 0)
    launch(
        compiled,
        (splits, kv_heads, batch),
        variant.warps * 32,
        *(qkv, keys, values, positions, cos, sin, q_norm, k_norm, out),
        *(slots(device), kv_heads, context, window, float(eps)),
        *(slice, _magic(slice)),
        shared=variant.shared_bytes,
    )


def _magic(divisor: int) -> int:
    """What makes a division of what is below 2^16 a multiplication (`kernels/attention.cu`), as the bits of an int."""
    return (2**32 // divisor + (2**32 % divisor > 0)) % 2**32


def splits_for(rows: int, context: int, processors: int, at_once: int) -> int:
    """How many blocks share the positions of a key head.

    rows       -- key heads times sequences: blocks that there are with one split
    context    -- positions that a query sees at most
    processors -- multiprocessors, a quarter of which may have a second block
    at_once    -- blocks that run at the same time
    """
    most = min(5 * processors // 4, at_once)
    return max(s for s in SPLITS if s == 1 or (rows * s <= most and context >= s * FEWEST_POSITIONS))


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


def _check_slots(room: Tensor, words: int) -> None:
    if words > room.numel():
        raise ValueError(f"{words} words where blocks meet, more than {room.numel()}; take fewer splits")


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"
