"""Attention of many positions at once, by torch's kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from sparsepack.runtime.reference import attention as reference_attention

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch may take these backends, and not cuDNN's, which makes a plan anew for every length of a prompt."""


def attention(q: Tensor, keys: Tensor, values: Tensor, first: int, window: int) -> Tensor:
    """Attention of positions first .. first + S - 1, which are in the cache, each to those up to its own.

    q            -- [S, heads, head_dim]
    keys, values -- the cache of a layer, [kv_heads, context, head_dim]; all of one type. Of float32 the scores of all
                    heads exist at one time
    window       -- how many positions a query sees, its own included; 0: all

    Returns float32 [S, heads * head_dim].
    """
    length, heads = len(q), q.shape[1]
    oldest = max(0, first + 1 - window) if window else 0
    keys, values = (cached[:, oldest : first + length] for cached in (keys, values))
    q = q.transpose(0, 1)
    if q.dtype == torch.float32:
        return reference_attention.attention(
            q, keys, values, reference_attention.visible(first, length, oldest, window, q.device)
        )
    seen = None  # the kernels' own mask: right for as many queries as keys, and it takes the host least
    if window and keys.shape[1] > window:
        # The kernels that take a mask want a key head for each query head.
        ratio = heads // keys.shape[0]
        keys, values = (cached.repeat_interleave(ratio, 0) for cached in (keys, values))
        seen = reference_attention.visible(first, length, oldest, window, q.device)
    elif keys.shape[1] > length:
        seen = causal_lower_right(length, keys.shape[1])
    attn_output = F.scaled_dot_product_attention(
        q[None], keys[None], values[None], seen, is_causal=seen is None, enable_gqa=heads != keys.shape[0]
    )
    return attn_output[0].transpose(0, 1).reshape(length, -1).float()
