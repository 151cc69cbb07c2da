"""Sparse attention of the cuda backend in plain torch: `kernels/double_attention.cu`, whose cache may lie in the host's
memory. Each function stands in for the one of its name."""

from dataclasses import replace

import torch
from simulated_places import give_places
from torch import Tensor

from sparsepack.codecs.labels import encode_labels
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime import reference
from sparsepack.runtime.cuda.attention import AttentionParameters
from sparsepack.runtime.cuda.double.attention import DoubleParameters
from sparsepack.runtime.cuda.double.offload import TokenPlaces
from sparsepack.runtime.double import reference as double


def double_parameters(
    dense: AttentionParameters, channels: Tensor, policy: TokenPolicy, from_tokens: int = 0
) -> DoubleParameters:
    batch, kv_heads, context, _ = dense.keys.shape
    codes, scales = encode_labels(torch.zeros(batch, kv_heads, context, channels.shape[1]))
    return DoubleParameters(dense, channels, codes, scales, policy, from_tokens)


def label_append(
    of: DoubleParameters, first: int, count: int, sequence: int | None = None, positions: Tensor | None = None
) -> None:
    starts = [first] * len(of.codes) if positions is None else positions.tolist()
    for n, start in enumerate(starts):
        if sequence in (None, n):
            new = slice(start, start + count)
            codes, scales = encode_labels(double.heavy(of.dense.keys[n, :, new], of.channels))
            of.codes[n, :, new], of.scales[n, :, new] = codes, scales


def attend_double(
    of: DoubleParameters, qkv: Tensor, positions: Tensor, out: Tensor, *, from_tokens: int | None = None
) -> None:
    policy = of.policy if from_tokens is None else replace(of.policy, min_context=from_tokens)
    shape, layer, keys, values = of.dense.shape, of.dense.layer, of.dense.keys, of.dense.values
    for n, here in enumerate(positions.tolist()):
        q, k, v = qkv[n].view(1, -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q = rotated(q, layer.q_norm, shape.eps, shape.cos[here], shape.sin[here]).transpose(0, 1)
        keys[n, :, here] = rotated(k, layer.k_norm, shape.eps, shape.cos[here], shape.sin[here])[0]
        values[n, :, here] = v[0]
        label_append(of, here, 1, n)
        codes, scales = of.codes[n, :, : here + 1], of.scales[n, :, : here + 1]
        scores = double.label_scores(double.label_queries(q, of.channels), codes, scales)
        selected = double.select_tokens(scores, here, policy, layer.window)
        cached = (x[n, :, : here + 1].float() for x in (keys, values))
        out[n] = double.attend_selected(q, *cached, selected)[0]


def attend_offloaded(of: DoubleParameters, places: TokenPlaces, qkv: Tensor, positions: Tensor, out: Tensor) -> None:
    attend_double(of, qkv, positions, out)  # which appends, too
    shape, layer, keys, values = of.dense.shape, of.dense.layer, of.dense.keys, of.dense.values
    for n, here in enumerate(positions.tolist()):
        q = qkv[n, : shape.heads * shape.head_dim].view(1, -1, shape.head_dim)
        q = rotated(q, layer.q_norm, shape.eps, shape.cos[here], shape.sin[here]).transpose(0, 1)
        codes, scales = of.codes[n, :, : here + 1], of.scales[n, :, : here + 1]
        scores = double.label_scores(double.label_queries(q, of.channels), codes, scales)
        selected = double.select_tokens(scores, here, of.policy, layer.window)
        for head, tokens in enumerate(selected[:, 0]):
            found = give_places(places, (n, head), tokens.nonzero().flatten().tolist(), here)
            for token in found:
                place = places.place_of[n, head, token]
                places.keys[n, head, place] = keys[n, head, token]
                places.values[n, head, place] = values[n, head, token]
        heads = torch.arange(len(selected))[:, None]
        listed = places.listed[n, :, : places.counts[n, 0]].long()
        cached = (x[n][heads, listed].float() for x in (places.keys, places.values))
        everything = torch.ones(len(selected), 1, listed.shape[1], dtype=torch.bool, device=listed.device)
        out[n] = double.attend_selected(q, *cached, everything)[0]


def rotated(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [.., head_dim], normed where their layer norms them."""
    return reference.rotate(x if norm is None else reference.rms_norm(x, norm, eps), cos, sin)
