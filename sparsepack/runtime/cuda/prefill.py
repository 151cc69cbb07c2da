"""Many positions through the model at once, every site dense."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sparsepack.runtime import reference
from sparsepack.runtime.cuda.dense import (
    Product,
    ScaledFp16,
    add,
    gated,
    multiply,
    new_scratch,
    split_heads,
    to_scaled_fp16,
)
from sparsepack.runtime.cuda.model import Cache, Layer, Model, attention_of
from sparsepack.runtime.cuda.rows import embed

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, which makes a plan anew for every length of a prompt."""


class Prefill:
    """A model's blocks over a chunk of positions. Takes about 15 bytes * intermediate of memory for each of them, and
    `zigzag.SCRATCH_BYTES` at most, kept, for weights in float16."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self._model, self._parameters = model, attention_of(model, cache)
        matrices = [site.matrix for layer in model.layers for site in layer.sites.values()]
        self._scratch = new_scratch(matrices, model.device)

    def run(self, ids: Tensor, first: int, sequence: int = 0) -> Tensor:
        """Append tokens int32 [S], on the GPU, as positions first .. first + S - 1 of one of the cache's sequences.
        Returns what the last block leaves, before the output norm: float32 [S, hidden]."""
        model, eps = self._model, self._model.architecture.norm_eps
        x = torch.empty(len(ids), model.architecture.hidden, device=model.device)
        embed(model.embedding, ids, x)
        more: Product | None = None  # that x still lacks
        with sdpa_kernel(_ATTENTION):
            for number, layer in enumerate(model.layers):
                mixed = self._attention(
                    number, layer, to_scaled_fp16(x, more, layer.norms["attn_norm"], eps), first, sequence
                )
                more = self._product(layer, "attn_out", to_scaled_fp16(mixed))
                more = self._mlp(layer, to_scaled_fp16(x, more, layer.norms["mlp_norm"], eps))
        if more is not None:
            add(x, more)
        return x

    def _attention(self, number: int, layer: Layer, x: ScaledFp16, first: int, sequence: int) -> Tensor:
        """float32 [S, heads * head_dim]"""
        parameters = self._parameters[number]
        q = split_heads(parameters, self._product(layer, "attn_in", x), first, sequence)
        return attention(q, parameters.keys[sequence], parameters.values[sequence], first, layer.window)

    def _mlp(self, layer: Layer, x: ScaledFp16) -> Product:
        mid = gated(self._product(layer, "mlp_in", x), self._model.activation)
        return self._product(layer, "mlp_mid", mid)

    def _product(self, layer: Layer, name: str, x: ScaledFp16) -> Product:
        site = layer.sites[name]
        return multiply(site.matrix, x, self._scratch, site.bias)


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
        return reference.attention(q, keys, values, reference.visible(first, length, oldest, window, q.device))
    seen = None  # the kernels' own mask: right for as many queries as keys, and it takes the host least
    if window and keys.shape[1] > window:
        # The kernels that take a mask want a key head for each query head.
        group = heads // keys.shape[0]
        keys, values = (cached.repeat_interleave(group, 0) for cached in (keys, values))
        seen = reference.visible(first, length, oldest, window, q.device)
    elif keys.shape[1] > length:
        seen = causal_lower_right(length, keys.shape[1])
    mixed = F.scaled_dot_product_attention(
        q[None], keys[None], values[None], seen, is_causal=seen is None, enable_gqa=heads != keys.shape[0]
    )
    return mixed[0].transpose(0, 1).reshape(length, -1).float()
