"""Watch queries and keys inside attention (after rotary embedding and q/k norms), through transformers' interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "sparsepack_watched"
Watcher = Callable[[torch.Tensor, torch.Tensor, int], None]
"""A watcher receives query [B, H, S, D], key [B, H_kv, S, D], and how many tokens a query sees at most with itself (0:
all). Scores are the products of queries and keys over sqrt(D); a query that its model scales otherwise is shown scaled
for that."""


@contextmanager
def watched_attention(backbone: Any, watcher: Watcher) -> Iterator[None]:
    """Within the context, every attention of `backbone` shows its query and key to `watcher`, then runs SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        usual = query.shape[-1] ** -0.5
        scaling = options.get("scaling") or usual
        shown = query if scaling == usual else query * (scaling / usual)
        watcher(shown, key, options.get("sliding_window") or 0)
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register(_NAME, forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        backbone.set_attn_implementation(before)
