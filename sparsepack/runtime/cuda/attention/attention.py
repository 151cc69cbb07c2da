"""Attention of one decoding step on the GPU: one launch that also norms, rotates, and appends to the cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.driver.device import deepest_pipeline
from sparsepack.runtime.cuda.driver.kernel import blocks_at_once, kernel, launch, multiprocessors
from sparsepack.runtime.cuda.driver.memory import workspace
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention

KV_MACROS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Each type of cached keys and values is this value of the kernel's macro KV."""

SPLITS = (1, 2, 4, 8, 16, 32)
MOST_SPLITS = SPLITS[-1]
STAGES = (4, 3, 2)
"""A warp's pipeline has the first of these numbers of stages that shared memory has room for."""
PAIR_WORDS = 4
"""A pair of the result is this many flag-in-data words where blocks leave it for each other."""

MOST_GQA_RATIO = 16
MOST_HEAD_DIM = 512
MOST_LATENT_DIM, LATENT_GQA_RATIO = find_backend("cuda").latent_width, 4
"""Channels of a cached latent, and query heads that a block has of such a cache, at most."""
FEWEST_POSITIONS = 64
"""A block has at least this many positions of the whole context."""


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for, and the sizes that follow. Its names are those of
    `kernels/attention/attention_layout.cuh`; gqa_ratio: query heads of a key head; rotary_dim: channels that turn,
    None: all; neighbours: whether they do in pairs of neighbours; gated: whether there are output gates; value_dim:
    channels of values, 0: head_dim; k_eq_v: whether values are keys; latents: whether there is one key head for all,
    which has values, too; shared: whether keys and values are another layer's."""

    head_dim: int
    gqa_ratio: int
    dtype: torch.dtype
    stages: int = STAGES[0]
    warps: int = 8
    rotary_dim: int | None = None
    capped: bool = False
    neighbours: bool = False
    gated: bool = False
    value_dim: int = 0
    k_eq_v: bool = False
    latents: bool = False
    shared: bool = False

    @property
    def defines(self) -> tuple[str, ...]:
        values = {
            "HEAD_DIM": self.head_dim,
            "GQA_RATIO": self.gqa_ratio,
            "KV": KV_MACROS[self.dtype],
            "WARPS": self.warps,
            "STAGES": self.stages,
            "ROTARY_DIM": self.head_dim if self.rotary_dim is None else self.rotary_dim,
            "CAPPED": int(self.capped),
            "NEIGHBOURS": int(self.neighbours),
            "OUTPUT_GATES": int(self.gated),
            "K_EQ_V": int(self.k_eq_v),
        }
        if self.value_dim not in (0, self.head_dim):
            values["VALUE_DIM"] = self.value_dim
        if self.latents:
            values["LATENTS"] = 1
        if self.shared:
            values["SHARED_KV"] = 1
        return tuple(f"{name}={value}" for name, value in values.items())

    @property
    def ring_bytes(self) -> int:
        """The bytes of shared memory for a warp's rows on their way, and later for the warp's sums."""
        rows = self.stages * 2 * self._batch * self._width * self.dtype.itemsize
        return max(rows, -(-self.gqa_ratio * self.head_dim // 4) * 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: rings, queries, weights, softmax states."""
        scratch = 4 * (2 * self.gqa_ratio * self._batch + -(-self.gqa_ratio // 4) * 4)
        return self.warps * (self.ring_bytes + scratch + 8 * self.gqa_ratio) + 4 * self.gqa_ratio * self._width

    @property
    def _row_vectors(self) -> int:
        return -(-self.head_dim // (16 // self.dtype.itemsize))

    @property
    def _lanes(self) -> int:
        return min(32, 1 << (self._row_vectors - 1).bit_length())

    @property
    def _width(self) -> int:
        return self._lanes * -(-self._row_vectors // self._lanes) * (16 // self.dtype.itemsize)

    @property
    def _batch(self) -> int:
        return 2 * (32 // self._lanes)

    def slice(self, splits: int) -> int:
        """The number of pairs of a key head's result that a block finishes."""
        return -(-self.gqa_ratio * self.head_dim // 2 // splits)


@dataclass(frozen=True)
class AttentionParameters:
    """What attention of a layer takes at every step: built, and checked, once when a model is loaded.

    shape        -- heads, at most 16 * kv_heads; head_dim even, at most 512
    layer        -- its window, the number of its rotary table, the norms of its heads, float32 [head_dim], and sinks
    keys, values -- its cache: bfloat16, float16 or float32 [B, kv_heads, context, head_dim]
    own_table    -- cos and sin by which each sequence turns, in place of the shape's: float32 [B, context or more, n /
                    2]; None: the shape's
    v_norm       -- ones, float32 [head_dim], where the layer norms values; None: it does not

    Raises `ValueError` naming what does not fit.
    """

    shape: AttentionShape
    layer: LayerAttention
    keys: Tensor
    values: Tensor
    own_table: tuple[Tensor, Tensor] | None = None
    v_norm: Tensor | None = None

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        """cos and sin of each sequence, or of all: float32 [B or 1, context or more, n / 2]."""
        if self.own_table is not None:
            return self.own_table
        cos, sin = self.shape.tables[self.layer.table]
        return cos[None], sin[None]

    @property
    def rope_stride(self) -> int:
        """How many numbers the table of a sequence lies behind that of the one before."""
        cos, _ = self.table
        return cos.stride(0) if len(cos) > 1 else 0

    @property
    def query_scale(self) -> float:
        """What the kernel multiplies queries by: scores are then in units of log2, or where they have a soft cap what
        `soft_capped` of `kernels/attention/attention_sums.cuh` takes."""
        scale, cap = self.shape.score_scale, self.shape.cap
        return (2 * scale / cap if cap else scale) / math.log(2)

    @property
    def log2_cap(self) -> float:
        """The soft cap of scores in units of log2; 0: they have none."""
        return self.shape.cap / math.log(2)

    @property
    def rows(self) -> int:
        """Rows of attn_in."""
        shape = self.shape
        if shape.latents is not None:
            return (shape.heads + 1) * shape.head_dim
        of_keys = 0 if self.layer.source is not None else 2 - self.layer.k_eq_v
        return ((1 + self.layer.gated) * shape.heads + of_keys * shape.kv_heads) * shape.head_dim

    @property
    def groups(self) -> int:
        """Of query heads, each of which reads a key head by itself."""
        heads = self.shape.heads
        if self.shape.latents is None:
            return self.shape.kv_heads
        return heads // max(ratio for ratio in range(1, LATENT_GQA_RATIO + 1) if heads % ratio == 0)

    def __post_init__(self) -> None:
        shape, layer, keys = self.shape, self.layer, self.keys
        heads, kv_heads, most = shape.heads, shape.kv_heads, MOST_HEAD_DIM if shape.latents is None else MOST_LATENT_DIM
        if shape.latents is None and (
            kv_heads < 1 or heads % kv_heads or not kv_heads <= heads <= MOST_GQA_RATIO * kv_heads
        ):
            raise ValueError(f"heads: {heads} with {kv_heads} key heads, expected 1 to {MOST_GQA_RATIO} times as many")
        if keys.dim() != 4 or keys.dtype not in KV_MACROS:
            raise ValueError(
                f"keys: {_described(keys)}, expected bfloat16, float16 or float32 [B, kv_heads, context, D]"
            )
        batch, _, context, head_dim = keys.shape
        if head_dim % 2 or not 2 <= head_dim <= most:
            raise ValueError(f"keys: head dimension {head_dim}, expected an even number up to {most}")
        if layer.window < 0:
            raise ValueError(f"window: {layer.window}, expected 0 (no limit) or more")
        if shape.context < context:
            raise ValueError(f"cos: {shape.context} positions, expected {context} or more, as in the cache")
        cached = (batch, kv_heads, context, shape.head_dim)
        _check("keys", keys, keys, keys.dtype, cached, 16)
        _check("values", self.values, keys, keys.dtype, cached, 16)
        rotary_dim = 2 * self.table[0].shape[-1]
        if not 2 <= rotary_dim <= head_dim:
            raise ValueError(f"cos: {rotary_dim} channels of a head turn, expected 2 to {head_dim}")
        sequences = 1 if self.own_table is None else batch
        for name, table in zip(("cos", "sin"), self.table, strict=True):
            _check(name, table, keys, torch.float32, (sequences, shape.context, rotary_dim // 2))
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm), ("v_norm", self.v_norm)):
            if norm is not None:
                _check(name, norm, keys, torch.float32, (head_dim,))
        if layer.sinks is not None:
            _check("sinks", layer.sinks, keys, torch.float32, (heads,))
        if shape.query_scale is not None:
            _check("query_scale", shape.query_scale, keys, torch.float32, (shape.context,))

    @cached_property
    def variant(self) -> Variant:
        """The variant of the kernel for this attention, with as many stages as the GPU's shared memory has room for."""
        of = self.shape.head_dim, self.shape.heads // self.groups, self.keys.dtype
        warps = 8 if of[0] * of[1] <= 2048 else 4  # their sums, [warps, gqa_ratio, head_dim], stay within 64 KB

        cos, _ = self.table
        variant = partial(Variant, *of, warps=warps, capped=self.shape.cap > 0, gated=self.layer.gated)
        variant = partial(variant, k_eq_v=self.layer.k_eq_v)
        variant = partial(variant, rotary_dim=2 * cos.shape[-1], neighbours=self.shape.neighbours)
        variant = partial(variant, value_dim=self.shape.value_dim, latents=self.shape.latents is not None)
        variant = partial(variant, shared=self.layer.source is not None)

        def needed(stages: int) -> int:
            return variant(stages=stages).shared_bytes

        return variant(stages=deepest_pipeline(STAGES, needed, self.keys.device))


def attention_parameters(
    shape: AttentionShape, keys: Sequence[Tensor], values: Sequence[Tensor], first_table: tuple[Tensor, Tensor] | None
) -> tuple[AttentionParameters, ...]:
    """The parameters of every layer's attention, over the layer's cache.

    first_table -- of each sequence, in layers of the shape's first rotary table; None: the shape's own
    """
    found = []
    for number, (layer, k, v) in enumerate(zip(shape.layers, keys, values, strict=True)):
        kv_heads, head_dim = shape.heads_of(number)
        of_layer = replace(shape, kv_heads=kv_heads, head_dim=head_dim)
        ones = torch.ones(head_dim, device=k.device) if layer.value_norm else None
        found.append(AttentionParameters(of_layer, layer, k, v, None if layer.table else first_table, ones))
    return tuple(found)


def attend(
    parameters: AttentionParameters,
    qkv: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    splits: int | None = None,
    flag_in_data: bool = False,
) -> None:
    """Put the attention of one new position per sequence on the current stream: norm and rotate q and k, append k and v
    to the cache, and out = softmax(scale q k^T) v over the positions that the new one sees.

    qkv        -- float32 [B, rows]: q, then k, then v, where the layer has output gates those of each head behind its
                  queries
    positions  -- int32 [B]: how many positions are cached, below `context`; only the device reads it. The cache's
                  position `positions[b]` is written, and attended to as rounded
    out        -- float32 [B, heads * head_dim], or of each head as many channels as values have
    splits     -- blocks that share a key head's positions (Flash-Decoding's splits), a power of two up to 32; None: as
                  many as fill the GPU
    flag_in_data -- qkv is in words of `driver/memory.py`: read as soon as it is stored; out may be read so in any case

    Raises `ValueError` naming the argument that does not fit.
    """
    shape, layer, keys, kv_heads = parameters.shape, parameters.layer, parameters.keys, parameters.groups
    batch, _, context, head_dim = keys.shape
    _check("qkv", qkv, keys, torch.float32, (batch, parameters.rows))
    _check("positions", positions, keys, torch.int32, (batch,))
    if flag_in_data and layer.source is not None:
        raise ValueError("qkv: in words, which may be there before another layer has left its keys and values")
    _check(
        "out",
        out,
        keys,
        torch.float32,
        (batch, shape.heads * (shape.value_dim or head_dim)),
        4 if shape.value_dim else 8,
    )
    device = qkv.device
    if device.type != "cuda":
        raise ValueError(f"qkv: on {device}, expected a CUDA device")
    variant = parameters.variant
    rows, threads = batch * kv_heads, variant.warps * 32
    defines = (*variant.defines, f"FLAG_IN_DATA={int(flag_in_data)}")
    compiled = kernel("attention", "attention", defines, device.index or 0)
    at_once = blocks_at_once(compiled, device, threads, variant.shared_bytes)
    if splits is None:
        seen = min(context, layer.window) if layer.window else context
        splits = splits_for(rows, seen, multiprocessors(device), at_once)
    if splits not in SPLITS:
        raise ValueError(f"splits: {splits}, expected a power of two up to {MOST_SPLITS}")
    if splits > 1 and rows * splits > at_once:
        raise ValueError(f"splits: {splits} of {rows} rows wait for each other, but only {at_once} blocks run at once")
    slice, partial_results = variant.slice(splits), workspace(device)
    words = PAIR_WORDS * rows * splits**2 * slice if splits > 1 else 0
    if words > partial_results.numel():
        raise ValueError(f"{words} words of partial results, more than {partial_results.numel()}; take fewer splits")
    launch(
        compiled,
        (splits, kv_heads, batch),
        threads,
        *(qkv, keys, parameters.values, positions, *parameters.table, layer.q_norm, layer.k_norm),
        *(parameters.v_norm, out, partial_results, kv_heads, context, layer.window, float(shape.eps)),
        *(parameters.rope_stride, parameters.query_scale, shape.query_scale, parameters.log2_cap, layer.sinks),
        *(slice, _magic(slice)),
        shared=variant.shared_bytes,
    )


def _magic(divisor: int) -> int:
    """The bits, as an int, of the factor that makes a division of a number below 2^16 a multiplication
    (`kernels/attention/attention.cu`)."""
    return (2**32 // divisor + (2**32 % divisor > 0)) % 2**32


def splits_for(rows: int, context: int, processors: int, at_once: int) -> int:
    """The number of blocks that share the positions of a key head.

    rows       -- key heads times sequences: blocks that there are with one split
    context    -- positions that a query sees at most
    processors -- multiprocessors, a quarter of which may have a second block
    at_once    -- blocks that run at the same time
    """
    most = min(5 * processors // 4, at_once)
    return max(s for s in SPLITS if s == 1 or (rows * s <= most and context >= s * FEWEST_POSITIONS))


def _check(
    name: str, tensor: Tensor, keys: Tensor, dtype: torch.dtype, shape: tuple[int, ...], alignment: int = 4
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise ValueError(f"{name}: {_described(tensor)}, expected contiguous {expected}")
    if tensor.device != keys.device:
        raise ValueError(f"{name}: on {tensor.device}, expected {keys.device}, where keys is")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name}: at an address that is no multiple of {alignment}; copy it")


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}"


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch may take these backends, and not cuDNN's, which makes a plan anew for every length of a prompt."""


FLASH_CHANNELS = 8
"""Heads of a multiple of so many channels are taken by torch's kernel that gives the sums of its weights, too."""
MOST_SCORES = 1 << 26
"""So many scores of float32 exist at one time, where torch's kernels cannot attend."""


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    window: int,
    *,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of positions first .. first + S - 1, which are in the cache, each to those up to its own. In float32,
    and with a cap, by products of float32.

    q            -- [S, heads, head_dim]
    keys, values -- the cache of a layer, [kv_heads, context, head_dim]; all of one type
    window       -- how many positions a query sees, its own included; 0: all
    scale, cap, sinks -- of scores, as `reference.attention.attention` takes them

    Returns float32 [S, heads * head_dim].
    """
    length, heads = len(q), q.shape[1]
    oldest = max(0, first + 1 - window) if window else 0
    keys, values = (cached[:, oldest : first + length] for cached in (keys, values))
    if q.dtype == torch.float32 or cap or (sinks is not None and q.shape[2] % FLASH_CHANNELS):
        return _in_float32(q, keys, values, first, oldest, window, scale, cap, sinks)
    if sinks is not None:
        return _with_sinks(q, keys, values, window, scale, sinks)
    q = q.transpose(0, 1)
    seen = None  # the kernels' own mask: right for as many queries as keys, and it takes the host least
    if window and keys.shape[1] > window:
        # The kernels that take a mask want a key head for each query head.
        ratio = heads // keys.shape[0]
        keys, values = (cached.repeat_interleave(ratio, 0) for cached in (keys, values))
        seen = reference_attention.visible(first, length, oldest, window, q.device)
    elif keys.shape[1] > length:
        from torch.nn.attention.bias import causal_lower_right  # and all of torch's compiler, for a second or two

        seen = causal_lower_right(length, keys.shape[1])
    attn_output = F.scaled_dot_product_attention(
        q[None],
        keys[None],
        values[None],
        seen,
        is_causal=seen is None,
        enable_gqa=heads != keys.shape[0],
        scale=scale or None,
    )
    return attn_output[0].transpose(0, 1).reshape(length, -1).float()


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, window: int, scale: float, sinks: Tensor) -> Tensor:
    """See `prefill_attention`. A sink takes its share of the softmax from the logarithm of the weights' sum, which this
    kernel gives beside the result. keys, values -- up to the last query's, which has the last of them"""
    keys, values = (cached.transpose(0, 1)[None] for cached in (keys, values))
    of_window = {"window_size_left": window - 1 if window else None, "window_size_right": 0}
    lengths = q.shape[0], keys.shape[1]
    attn_output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        *(q[None], keys, values, None, None, *lengths, 0.0, True, False),
        scale=scale or q.shape[2] ** -0.5,
        **of_window,
    )
    share = torch.sigmoid(log_sums[0, :, : len(q)].t() - sinks)  # [S, heads]
    weighted: Tensor = attn_output[0] * share[..., None]
    return weighted.flatten(1)


def _in_float32(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    oldest: int,
    window: int,
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See `attention`. keys, values -- from position `oldest` on, up to the last query's."""
    keys, values = keys.float(), values.float()
    attn_output = torch.empty(len(q), q[0].numel(), device=q.device)
    at_once = max(1, MOST_SCORES // (q.shape[1] * keys.shape[1]))
    for start in range(0, len(q), at_once):
        queries = q[start : start + at_once].transpose(0, 1).float()
        begin, end = first + start, first + start + queries.shape[1]
        from_ = max(oldest, begin + 1 - window) if window else oldest
        here = slice(from_ - oldest, end - oldest)
        seen = reference_attention.visible(begin, end - begin, from_, window, q.device)
        part = reference_attention.attention(queries, keys[:, here], values[:, here], seen, scale, cap, sinks)
        attn_output[start : start + at_once] = part
    return attn_output
