"""What stands between the products of a step in plain torch: attention and norms. Each function stands in for the one
of its name."""

import torch
from simulated_double_sparsity import new_rows
from simulated_launches import put_together
from simulated_products import gated
from simulated_words import BUFFERS, assert_written, write
from torch import Tensor

from sparsepack.models import activations
from sparsepack.models.blocks import Latent
from sparsepack.runtime.cuda.attention.attention import AttentionParameters
from sparsepack.runtime.cuda.attention.latents import LatentWeights
from sparsepack.runtime.cuda.products import gemm_fp16 as dense
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference


def attend(
    parameters: AttentionParameters, qkv: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    if flag_in_data:
        assert_written(qkv)
    shape, layer, keys, values = parameters.shape, parameters.layer, parameters.keys, parameters.values
    if shape.latents is not None:
        write(
            out,
            torch.stack([of_latents(parameters, *one) for one in enumerate(zip(qkv, positions.tolist(), strict=True))]),
        )
        return
    attn_output = torch.empty_like(out)
    for n, here in enumerate(positions.tolist()):
        q, k, v, gates = new_rows(parameters, qkv, n, here)
        if layer.source is None:
            keys[n, :, here], values[n, :, here] = k, v
        oldest = max(0, here + 1 - layer.window) if layer.window else 0
        cached = (x[n, :, oldest : here + 1].float() for x in (keys, values))
        seen = torch.ones(1, here + 1 - oldest, dtype=torch.bool)
        attended = reference_attention.attention(q, *cached, seen, shape.scale, shape.cap, layer.sinks)[0]
        by_head = torch.unflatten(attended * gates, -1, (shape.heads, -1))
        attn_output[n] = by_head[..., : shape.value_dim or None].flatten()
    write(out, attn_output)


def of_latents(parameters: AttentionParameters, n: int, new: tuple[Tensor, int]) -> Tensor:
    """What attention gives of the cached latents of a sequence, and of a new row."""
    shape, (row, here) = parameters.shape, new
    assert shape.latents is not None
    cos, sin = (of[n if len(of) > 1 else 0, here : here + 1] for of in parameters.table)
    turned = reference_attention.rotate(row.view(shape.heads + 1, 1, -1), cos, sin, shape.neighbours)
    parameters.keys[n, 0, here] = turned[-1, 0]
    cached = parameters.keys[n, :, : here + 1].float()
    seen = torch.ones(1, here + 1, dtype=torch.bool, device=row.device)
    mixed = reference_attention.attention(turned[:-1], cached, cached, seen, shape.scale)[0]
    return torch.unflatten(mixed, -1, (shape.heads, -1))[..., shape.latents.turning :].flatten()


def latent_queries(
    of: LatentWeights,
    q: Tensor,
    latents: Tensor,
    turning: Tensor,
    qkv: Tensor,
    *,
    active: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    if flag_in_data:
        for each in (q, latents, turning):
            assert_written(each)
    heads, texts = len(of.keys), len(qkv)
    plain, turned = torch.unflatten(q, -1, (heads, -1)).split([of.latent.plain, of.latent.turning], dim=-1)
    absorbed = torch.einsum("bhp,hpr->bhr", plain, of.keys.float() * of.inverse)
    rows = torch.cat([torch.cat([turned, absorbed], -1).view(texts, -1), turning, latents], -1)
    write(qkv, rows)
    if active is not None:
        active += of.units


def latent_outputs(of: LatentWeights, mixed: Tensor, out: Tensor, *, flag_in_data: bool = False) -> None:
    if flag_in_data:
        assert_written(mixed)
    made = torch.einsum(
        "bhr,hvr->bhv", torch.unflatten(mixed, -1, (len(of.values), -1)), of.values.float() * of.inverse
    )
    if of.bias is not None:
        made = made + of.bias.view(len(of.values), -1)[:, of.latent.plain :]
    write(out, made.flatten(1))


def post_norm(
    update: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    y: Tensor,
    *,
    squares: Tensor | None = None,
    flag_in_data: bool = False,
    scale: float = 1.0,
    sums: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    if flag_in_data:
        assert_written(update)
    of_words = update.untyped_storage().data_ptr() in BUFFERS
    assert flag_in_data == of_words or y.untyped_storage().data_ptr() not in BUFFERS, "who waits for the kernel before"
    if sums is not None:
        if flag_in_data:
            assert_written(sums[0])
        update = reference.rms_norm(update, sums[1], eps) + reference.rms_norm(sums[0], sums[2], eps)
    added = (residual + reference.rms_norm(update, norm, eps)) * scale
    write(y, added)
    if squares is not None:
        write(squares.view(-1), added.square().sum(1))


def layer_norm(x: Tensor, norm: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    if flag_in_data:
        assert_written(x)
    write(y, reference.norm(x, *norm, eps))


def activation_norm(
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int | None = None,
    xielu: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    if flag_in_data:
        assert_written(x)
    made = activations.xielu(x, xielu) if xielu is not None else x if activation is None else gated(activation, x)
    write(y, made if norm is None else reference.rms_norm(made, norm, eps))


def norm_rows(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    if flag_in_data:
        assert_written(qkv)
    q, k, v = qkv.split([len(norms[0]), len(norms[1]), len(norms[1])], dim=1)
    normed = [reference.rms_norm(x, norm, eps) for x, norm in zip((q, k), norms, strict=True)]
    write(y, torch.cat([*normed, v], dim=1))


def norm_latents(
    rows: Tensor | dense.Product,
    norms: tuple[Tensor | None, Tensor],
    widths: tuple[int, int, int],
    eps: float,
    y: Tensor,
    *,
    flag_in_data: bool = False,
) -> None:
    if isinstance(rows, dense.Product):
        rows = put_together(rows.sums, rows.factor, rows.inverse, rows.bias)
    if flag_in_data:
        assert_written(rows)
    parts = zip(rows.split([*widths], dim=1), (*norms, None), strict=True)
    normed = [part if norm is None else reference.rms_norm(part, norm, eps) for part, norm in parts]
    write(y, torch.cat([part.flatten() for part in normed]).view_as(y))


def join_latents(
    of: Latent,
    heads: int,
    q: dense.Product,
    kv: dense.Product,
    turning: Tensor,
    qkv: Tensor,
    *,
    flag_in_data: bool = False,
) -> None:
    if flag_in_data:
        for each in (q.sums, kv.sums, turning):
            assert_written(each)
    queries, keys = (
        torch.unflatten(put_together(x.sums, x.factor, x.inverse, x.bias), -1, (heads, -1)) for x in (q, kv)
    )
    k, v = keys.split([of.plain, of.value], dim=-1)
    queries = torch.cat([queries[..., of.plain :], queries[..., : of.plain]], -1)
    k = torch.cat([turning[:, None].expand(-1, heads, -1), k], -1)
    padded = [torch.nn.functional.pad(x, (0, of.head_dim - x.shape[-1])).flatten(1) for x in (queries, k, v)]
    write(qkv, torch.cat(padded, -1))


def norm_prefill_rows(qkv: dense.Product, norms: tuple[Tensor, Tensor], eps: float) -> dense.Product:
    x, y = put_together(qkv.sums, qkv.factor, qkv.inverse, qkv.bias), torch.empty_like(qkv.sums)
    norm_rows(x, norms, eps, y)
    return dense.Product(y, torch.ones(len(y)), 1.0, None)
