"""A text through the blocks of the stock model and through those of a `BlockStream`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.hf_model.blocks import BlockStream


@torch.inference_mode()
def by_the_stock_model(stock: Any, blocks: Any, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The hidden states after each of a stock model's blocks, and what enters its output matrix."""
    after: list[Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda _, __, output: after.append(output))
    return after, stock.model(ids, use_cache=False).last_hidden_state


@torch.inference_mode()
def by_a_stream(stream: BlockStream, layers: int, ids: Tensor, watched: bool) -> tuple[list[Tensor], list[Any]]:
    """The hidden states after each block, and the shapes of queries and keys where attention is watched."""
    after: list[Tensor] = []
    seen: list[Any] = []
    hidden = stream.embed(ids)
    for layer in range(layers):
        stream.load(layer)
        with stream.watched(lambda query, key, _: seen.append((query.shape, key.shape))) if watched else nullcontext():
            hidden = stream(hidden)
        after.append(hidden.clone())
    return after, seen
