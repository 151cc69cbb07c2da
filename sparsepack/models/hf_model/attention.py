"""Watch queries and keys inside attention (after rotary embedding and q/k norms), through transformers' interface.

Attention's masks of stock models for texts that are whole: each row is one text from its first position on, without
padding. Stock code finds that out by looking at positions, for which a GPU is waited for in every run. While a run is
recorded it makes a mask that attention would do without, and then takes another kernel, which is slower and rounds
otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from sparsepack.models.activations import soft_capped

_ANSWERS: dict[str, Any] = {"find_packed_sequence_indices": None, "is_tracing": False}
"""What functions of transformers' masks give for such texts, whatever they are asked: no row holds several texts, and
what is not looked at need not be traced."""
_lock = Lock()
_inside = 0
_before: dict[str, Callable[..., Any]] = {}


@contextmanager
def masks_of_whole_texts() -> Iterator[None]:
    """Within the context, stock models make masks for whole texts. Threads may be in it at one time; what others run
    meanwhile must be such texts, too."""
    global _inside
    from transformers import masking_utils

    with _lock:
        if _inside == 0:
            for name, answer in _ANSWERS.items():
                _before[name] = getattr(masking_utils, name)
                setattr(masking_utils, name, _always(answer))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name, function in _before.items():
                    setattr(masking_utils, name, function)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


_NAME = "sparsepack_watched"
Watcher = Callable[[torch.Tensor, torch.Tensor, int], None]
"""A watcher receives query [B, H, S, D], key [B, H_kv, S, D], and how many tokens a query sees at most with itself (0:
all). Scores are the products of queries and keys over sqrt(D); a query that its model scales otherwise is shown scaled
for that."""


@contextmanager
def watched_attention(backbone: Any, watcher: Watcher) -> Iterator[None]:
    """Within the context, every attention of `backbone` shows its query and key to `watcher`, then runs as
    `dense_attention`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def forward(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        usual = query.shape[-1] ** -0.5
        scaling = options.get("scaling") or usual
        shown = query if scaling == usual else query * (scaling / usual)
        watcher(shown, key, options.get("sliding_window") or 0)
        return dense_attention(module, query, key, *rest, **options)

    AttentionInterface.register(_NAME, forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        backbone.set_attn_implementation(before)


def dense_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA as transformers calls it, and where scores are soft-capped or heads have sinks (`s_aux` [heads]), which SDPA
    does not know, plain torch.

    query          -- [B, heads, S, D]
    key, value     -- [B, kv_heads, T, D]
    attention_mask -- as `sdpa_mask` makes it: bool [B, 1, S, T]; None: causal, or a single query sees all

    Returns [B, S, heads, D].
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not softcap and s_aux is None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found
    group = query.shape[1] // key.shape[1]
    keys, values = (of.repeat_interleave(group, 1) for of in (key, value))
    scores = soft_capped(query @ keys.mT * (scaling or query.shape[-1] ** -0.5), softcap or 0.0)
    if attention_mask is None:
        length = query.shape[2]
        seen = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device).tril()
        attention_mask = seen if length > 1 else torch.ones_like(seen)
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(query.dtype)
    else:
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values).transpose(1, 2).contiguous(), None
