"""Sparse attention of the cuda backend in plain torch: `kernels/attention/double_sparsity.cu`, whose cache may lie in
the host's memory. Each function stands in for the one of its name."""

from dataclasses import replace

import torch
from simulated_slots import assign_slots
from torch import Tensor

from sparsepack.formats.blocks.labels import encode_labels
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention.attention import AttentionParameters
from sparsepack.runtime.cuda.attention.double_sparsity import DoubleSparsityParameters, TokenSlots
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import double_sparsity
from sparsepack.runtime.reference import products as reference


def double_sparsity_parameters(
    dense: AttentionParameters, channels: Tensor, policy: TokenPolicy, largest_whole: int | None = None
) -> DoubleSparsityParameters:
    batch, kv_heads, context, _ = dense.keys.shape
    codes, scales = encode_labels(torch.zeros(batch, kv_heads, context, channels.shape[1]))
    return DoubleSparsityParameters(dense, channels, codes, scales, policy, largest_whole or 0)


def label_append(
    of: DoubleSparsityParameters, first: int, count: int, sequence: int | None = None, positions: Tensor | None = None
) -> None:
    starts = [first] * len(of.codes) if positions is None else positions.tolist()
    for n, start in enumerate(starts):
        if sequence in (None, n):
            new = slice(start, start + count)
            codes, scales = encode_labels(double_sparsity.heavy(of.dense.keys[n, :, new], of.channels))
            of.codes[n, :, new], of.scales[n, :, new] = codes, scales


def attend_double_sparsity(
    of: DoubleSparsityParameters, qkv: Tensor, positions: Tensor, out: Tensor, *, min_context: int | None = None
) -> None:
    policy = of.policy if min_context is None else replace(of.policy, min_context=min_context)
    shape, layer, keys, values = of.dense.shape, of.dense.layer, of.dense.keys, of.dense.values
    for n, here in enumerate(positions.tolist()):
        q, keys[n, :, here], values[n, :, here], gates = new_rows(of.dense, qkv, n, here)
        label_append(of, here, 1, n)
        codes, scales = of.codes[n, :, : here + 1], of.scales[n, :, : here + 1]
        scores = double_sparsity.label_scores(double_sparsity.label_queries(q, of.channels), codes, scales)
        selected = double_sparsity.select_tokens(scores, here, policy, layer.window)
        cached = (x[n, :, : here + 1].float() for x in (keys, values))
        attended = double_sparsity.attend_selected(q, *cached, selected, shape.scale, shape.cap, layer.sinks)[0]
        out[n] = attended * gates


def attend_offloaded(
    of: DoubleSparsityParameters, slots: TokenSlots, qkv: Tensor, positions: Tensor, out: Tensor
) -> None:
    attend_double_sparsity(of, qkv, positions, out)  # which appends, too
    shape, layer, keys, values = of.dense.shape, of.dense.layer, of.dense.keys, of.dense.values
    for n, here in enumerate(positions.tolist()):
        q, _, _, gates = new_rows(of.dense, qkv, n, here)
        codes, scales = of.codes[n, :, : here + 1], of.scales[n, :, : here + 1]
        scores = double_sparsity.label_scores(double_sparsity.label_queries(q, of.channels), codes, scales)
        selected = double_sparsity.select_tokens(scores, here, of.policy, layer.window)
        for head, tokens in enumerate(selected[:, 0]):
            found = assign_slots(slots, (n, head), tokens.nonzero().flatten().tolist(), here)
            for token in found:
                slot = slots.slot_of[n, head, token]
                slots.keys[n, head, slot] = keys[n, head, token]
                slots.values[n, head, slot] = values[n, head, token]
        heads = torch.arange(len(selected))[:, None]
        listed = slots.listed[n, :, : slots.counts[n, 0]].long()
        cached = (x[n][heads, listed].float() for x in (slots.keys, slots.values))
        everything = torch.ones(len(selected), 1, listed.shape[1], dtype=torch.bool, device=listed.device)
        attended = double_sparsity.attend_selected(q, *cached, everything, shape.scale, shape.cap, layer.sinks)[0]
        out[n] = attended * gates


def rotated(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Queries or keys [.., head_dim], normed where their layer norms them."""
    return reference_attention.rotate(x if norm is None else reference.rms_norm(x, norm, eps), cos, sin, neighbours)


def new_rows(of: AttentionParameters, qkv: Tensor, n: int, here: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [heads, 1, head_dim], k and v [kv_heads, head_dim] of a sequence's new position, normed and rotated, and what
    its result is multiplied by."""
    shape, layer = of.shape, of.layer
    cos, sin = (rows[n if of.rope_stride else 0, here] for rows in of.table)
    rows = qkv[n].view(-1, shape.head_dim)
    rows = torch.cat([rows, rows[-shape.kv_heads :]]) if layer.k_eq_v else rows
    if layer.source is not None:
        rows = torch.cat([rows, rows.new_zeros(2 * shape.kv_heads, shape.head_dim)])
    queries, keys, v = rows.split([(1 + layer.gated) * shape.heads, shape.kv_heads, shape.kv_heads])
    v = v if of.v_norm is None else reference.rms_norm(v, of.v_norm, shape.eps)
    q, gates = queries.view(shape.heads, -1, shape.head_dim).split([1, int(layer.gated)], dim=1)
    q = rotated(q, layer.q_norm, shape.eps, cos, sin, shape.neighbours)
    q = q if shape.query_scale is None else q * shape.query_scale[here]
    k = rotated(keys, layer.k_norm, shape.eps, cos, sin, shape.neighbours)
    return q, k, v, gates.flatten().sigmoid() if layer.gated else torch.ones(())
