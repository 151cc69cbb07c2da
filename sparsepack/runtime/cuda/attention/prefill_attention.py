"""Attention of many positions at once, by torch's kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from sparsepack.runtime.reference import attention as reference_attention

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch may take these backends, and not cuDNN's, which makes a plan anew for every length of a prompt."""


MOST_SCORES = 1 << 26
"""So many scores of float32 exist at one time, where torch's kernels cannot attend."""


def attention(
    q: Tensor, keys: Tensor, values: Tensor, first: int, window: int, *, scale: float = 0.0, cap: float = 0.0
) -> Tensor:
    """Attention of positions first .. first + S - 1, which are in the cache, each to those up to its own. In float32,
    and with a cap, by products of float32.

    q            -- [S, heads, head_dim]
    keys, values -- the cache of a layer, [kv_heads, context, head_dim]; all of one type
    window       -- how many positions a query sees, its own included; 0: all
    scale, cap   -- of scores, as `reference.attention.attention` takes them

    Returns float32 [S, heads * head_dim].
    """
    length, heads = len(q), q.shape[1]
    oldest = max(0, first + 1 - window) if window else 0
    keys, values = (cached[:, oldest : first + length] for cached in (keys, values))
    if q.dtype == torch.float32 or cap:
        return _in_float32(q, keys, values, first, oldest, window, scale, cap)
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


def _in_float32(
    q: Tensor, keys: Tensor, values: Tensor, first: int, oldest: int, window: int, scale: float, cap: float
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
        part = reference_attention.attention(queries, keys[:, here], values[:, here], seen, scale, cap)
        attn_output[start : start + at_once] = part
    return attn_output
