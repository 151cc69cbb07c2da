"""Launches computed in plain torch from the macros and arguments that the kernels would get, in the order in which they
would get them: of `kernels/decoder/prefill.cu`, `kernels/products/zigzag_batch.cu` and, by `simulated_neurons.py`, of
`kernels/neurons`."""

from typing import Any

import simulated_neurons
import torch
from simulated_double_sparsity import rotated
from simulated_products import gated, gated_by
from torch import Tensor

from sparsepack.runtime.reference import products as reference


def put_together(product: Tensor, factor: Tensor, inverse: float, bias: Tensor | None) -> Tensor:
    y = product * factor[:, None] * inverse
    return y if bias is None else y + bias


def _leave(x: Tensor, half: Tensor, factor: Tensor) -> None:
    exponent = torch.frexp(x.abs().amax(1)).exponent - 15
    factor.copy_(torch.ldexp(torch.ones(len(x)), exponent))
    half.copy_(x / factor[:, None])


def _add_rows(defines: Any, grid: Any, x: Tensor, width: int, product: Any, *rest: Any) -> None:
    product_factor, inverse, bias, product_norm, scale, norm, norm_bias, eps, half, factor = rest
    assert (grid, x.shape[1]) == ((len(x),), width)
    if product is not None:
        update = put_together(product, product_factor, inverse, bias)
        assert int(defines["NORMED"]) == (product_norm is not None)
        x += update if product_norm is None else reference.rms_norm(update, product_norm, eps)
        x *= scale
    if half is not None:
        assert int(defines["CENTRED"]) == (norm_bias is not None)
        _leave(x if norm is None else reference.norm(x, norm, norm_bias, eps), half, factor)


def _gate_rows(defines: Any, grid: Any, gate: Tensor, *rest: Any) -> None:
    gate_pitch, gate_inverse, gate_bias, up, up_pitch, up_inverse, up_bias, width, product_factor, half, factor = rest
    assert grid == (len(gate),)
    assert gate.shape == up.shape == (len(gate), width)
    assert (gate_pitch, up_pitch) == (gate.stride(0), up.stride(0))
    gate = put_together(gate, product_factor, gate_inverse, gate_bias)
    up = put_together(up, product_factor, up_inverse, up_bias)
    _leave(gated_by(int(defines["ACTIVATION"]), gate, up), half, factor)


def _split_heads(defines: Any, grid: Any, product: Tensor, *rest: Any) -> None:
    factor, inverse, bias, q_norm, k_norm, v_norm, eps, cos, sin, growth, *more = rest
    first, context, heads, kv_heads, q, keys, values = more
    gated, neighbours, same = (int(defines[name]) for name in ("OUTPUT_GATES", "NEIGHBOURS", "K_EQ_V"))
    shared = int(defines.get("SHARED_KV", 0))
    assert grid == (len(q), -(-(heads + 2 * kv_heads * (1 - shared)) // 8))
    assert (keys.shape[1], int(defines["HEAD_DIM"])) == (context, keys.shape[2])
    assert int(defines["ROTARY_DIM"]) == 2 * cos.shape[1]
    here = slice(first, first + len(q))
    rows = put_together(product, factor, inverse, bias).view(len(q), -1, keys.shape[2])
    rows = torch.cat([rows, rows[:, -kv_heads:]], 1) if same else rows
    queries, *of_keys = (x.transpose(0, 1) for x in rows.tensor_split([(1 + gated) * heads, -kv_heads], dim=1))
    turned = rotated(queries[:: 1 + gated], q_norm, eps, cos[here], sin[here], neighbours > 0)
    q.copy_((turned if growth is None else turned * growth[here, None]).transpose(0, 1))
    if shared:
        assert rows.shape[1] == heads
        return
    k, v = of_keys
    v = v if v_norm is None else reference.rms_norm(v, v_norm, eps)
    keys[:, here], values[:, here] = rotated(k, k_norm, eps, cos[here], sin[here], neighbours > 0), v


def _gate_inputs(defines: Any, grid: Any, gates: Tensor, inputs: Tensor, width: int, stride: int, y: Tensor) -> None:
    assert (grid, width, stride) == ((-(-width // 256), len(gates)), gates.shape[1], inputs.stride(0))
    y.copy_(gated_by(int(defines["ACTIVATION"]), gates, inputs))


def _zigzag_batch(
    defines: Any, grid: Any, blocks: Tensor, columns: int, rows: int, largest_d: float, *rest: Any
) -> None:
    row_scale, elsewhere, _, _, _, x, norm, eps, squares, parts, threshold, offset, scales, *outputs = rest
    assert row_scale is None  # `blocks` have it
    assert elsewhere is None
    y, bias, residual, squares_of_y, active, skipped, workspace = outputs
    macros = {name: int(value) for name, value in defines.items() if name != "BLOCK"}
    inputs, tile_bands, each = macros["INPUTS"], macros["TILE_BANDS"], 2 if macros["GATE"] else 1
    assert grid == (macros["SPLITS"], len(blocks))
    x = gated(macros["ACTIVATION"], x, macros["GATED"] == 2) if macros["GATED"] else x
    assert (x.shape, blocks.shape[1:3]) == ((inputs, columns), (columns, tile_bands))
    assert workspace.dtype == torch.int32
    if macros["NORM"]:
        if macros["SQUARES"]:
            assert squares.shape == (inputs, parts)
            assert (macros["SQUARES"] - 1) * 32 * macros["WARPS"] < parts <= macros["SQUARES"] * 32 * macros["WARPS"]
            torch.testing.assert_close(squares.sum(1), x.square().sum(1))
        sums = squares.sum(1) if macros["SQUARES"] else x.square().sum(1)
        x = x * torch.rsqrt(sums / columns + eps)[:, None] * norm
    x = x - offset if macros["OFFSET"] else x
    assert macros["DENSE"] or len(threshold) == (columns if macros["PER_CHANNEL"] else 1)
    on = torch.ones(columns, dtype=torch.bool)
    assert not macros["SCALED"] or not macros["DENSE"]
    if not macros["DENSE"]:
        active_in = x.abs() > (scales[:, None] * threshold if macros["SCALED"] else threshold)
        on = active_in.any(0)
        if macros["SCALED"] and skipped is not None:
            skipped += rows * (~active_in).sum(1)
    product = torch.einsum("bk,gksr->bgsr", torch.where(on, x, 0), blocks)
    # Of a group the first half of the bands, then the second, where rows are of gate and up.
    product = product.view(inputs, len(blocks), each, -1).transpose(1, 2).reshape(inputs, each, -1)
    product = product[:, :, : rows // each].reshape(inputs, rows)
    product = product if bias is None else product + bias
    if macros["GATE"]:
        product = gated(macros["ACTIVATION"], product)
    else:
        product = product if residual is None else product + residual
    assert y.shape == product.shape
    y.copy_(product)
    if squares_of_y is not None:
        assert squares_of_y.shape == (inputs, macros["SPLITS"] * len(blocks))
        squares_of_y.copy_(torch.nn.functional.pad(y.square().sum(1)[:, None], (0, squares_of_y.shape[1] - 1)))
    if active is not None:
        active += on.sum()


LAUNCHED = {
    "add_rows": _add_rows,
    "gate_rows": _gate_rows,
    "split_heads": _split_heads,
    "gate_inputs": _gate_inputs,
    "zigzag_batch": _zigzag_batch,
    **simulated_neurons.LAUNCHED,
}


def kernel(file: str, name: str, defines: tuple[str, ...], device: int) -> tuple[str, dict[str, str]]:
    return name, dict(define.split("=") for define in defines)


def launch(
    compiled: tuple[str, dict[str, str]], grid: tuple[int, ...], threads: int, *arguments: Any, shared: int = 0
) -> None:
    LAUNCHED[compiled[0]](compiled[1], grid, *arguments)
