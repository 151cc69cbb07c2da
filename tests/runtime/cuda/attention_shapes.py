"""Layers with random heavy channels for the tests of sparse attention's kernels."""

from fractions import Fraction

import torch

from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention

EIGHTH = TokenPolicy(Fraction(1, 8), sinks=2, recent=5, min_context=0)


def shape_of(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    *,
    channels: int | None = None,
    window: int = 0,
    turned: bool = False,
    norms: bool = False,
) -> AttentionShape:
    """One layer for one text, of whose tokens an eighth is read, on the CPU.

    channels -- of each head, by which tokens are ranked; None: a quarter of them
    turned   -- whether queries and keys are rotated; norms -- whether they are normed
    """
    random, channels = torch.Generator().manual_seed(heads * head_dim), channels or head_dim // 4
    angles = torch.rand(context, head_dim // 2, generator=random) * 6 * turned
    heavy = torch.stack([torch.randperm(head_dim, generator=random)[:channels].sort().values for _ in range(kv_heads)])
    q_norm, k_norm = (1 + torch.rand(head_dim, generator=random) if norms else None for _ in range(2))
    layer = LayerAttention(window, q_norm, k_norm, heavy)
    return AttentionShape(heads, kv_heads, head_dim, 1e-5, angles.cos(), angles.sin(), (layer,), policy=EIGHTH)
