"""Kernels of the cuda backend in plain torch on the CPU, so that the chain of a decoder can be tested without a GPU.

`KERNELS` is what a decoder takes; each function stands in for the one of its name. Those that it leaves as they are run
under `launches`: a launch of `kernels/decoder/prefill.cu`, `kernels/products/zigzag_batch.cu` or `kernels/neurons` is
computed from the macros and arguments that the kernel would get, in the order in which it would get them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import simulated_neurons
import torch
from simulated_double_sparsity import (
    attend_double_sparsity,
    attend_offloaded,
    double_sparsity_parameters,
    label_append,
    rotated,
)
from torch import Tensor

from sparsepack.formats.codecs.matrices import PackedExperts, PackedMatrix, decode_matrix
from sparsepack.models.soft_caps import soft_capped
from sparsepack.runtime.cuda.attention.attention import AttentionParameters
from sparsepack.runtime.cuda.decoder.held import CudaHeld
from sparsepack.runtime.cuda.driver import kernel_set, shared_memory
from sparsepack.runtime.cuda.driver.flag_in_data import SENTINEL, WORKSPACE_WORDS
from sparsepack.runtime.cuda.driver.flag_in_data import flag_in_data_buffers as real_flag_in_data_buffers
from sparsepack.runtime.cuda.products import far, neurons, tile_config, zigzag
from sparsepack.runtime.cuda.products import gemm_fp16 as dense
from sparsepack.runtime.cuda.products.tile_config import BAND_ROWS, COLUMNS_AT_ONCE, CudaTileConfig
from sparsepack.runtime.cuda.products.zigzag import Input, Together
from sparsepack.runtime.hold import HeldText
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import experts as reference_experts
from sparsepack.runtime.reference import products as reference

ACTIVATIONS = list(reference.ACTIVATION_FUNCTIONS.values())
ONE_SPLIT = CudaTileConfig(2, 8, 8, 1)
CPU = torch.device("cpu")
MULTIPROCESSORS, SHARED_MEMORY = 132, 227 << 10  # as an H100 has them


@dataclass(frozen=True)
class Matrix:
    """float32 [rows, columns], with what the real ones tell."""

    weight: Tensor
    rows: int
    columns: int
    gate_bands: int = 0
    fp16_scale: float = 4.0
    config: CudaTileConfig = ONE_SPLIT
    largest_d: float = 1.0

    @cached_property
    def blocks(self) -> Tensor:
        """The weights where the real ones have their superblocks: float32 [tiles, columns, tile_bands, 256]."""
        padded = torch.nn.functional.pad(self.weight, (0, 0, 0, -len(self.weight) % BAND_ROWS))
        bands = padded.view(-1, BAND_ROWS, self.columns).transpose(1, 2)
        return zigzag.tiled(bands, self.config.tile_bands, self.gate_bands > 0)


def load_zigzag(
    matrix: PackedMatrix, device: Any, config: Any = None, *, gate: bool = False, place: Any = None
) -> Matrix:
    assert not gate or matrix.rows % 512 == 0
    return Matrix(
        decode_matrix(matrix),
        matrix.rows,
        matrix.columns,
        gate_bands=matrix.rows // 512 if gate else 0,
        config=replace(ONE_SPLIT, splits=min(3, -(-matrix.columns // COLUMNS_AT_ONCE))),
    )


def first_bands(matrix: Matrix, bands: int) -> Matrix:
    rows = min(matrix.rows, BAND_ROWS * bands)
    return replace(matrix, weight=matrix.weight[:rows], rows=rows)


def load_rows(matrix: PackedMatrix, device: Any, *, place: Any = None) -> Matrix:
    return Matrix(decode_matrix(matrix), matrix.rows, matrix.columns)


def gemv(
    matrix: Matrix,
    input: Input,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: int | None = None,
    squares: Tensor | None = None,
    active: Tensor | None = None,
    reset: Tensor | None = None,
) -> None:
    if input.flag_in_data:
        _assert_written(input.x)
    if input.norm is not None and input.squares is not None:
        _assert_written(input.squares)
        torch.testing.assert_close(input.squares.sum(), input.x.square().sum())
    if reset is not None:
        reset.copy_(torch.tensor(SENTINEL))
    x = input.x if input.norm is None else reference.rms_norm(input.x, input.norm, input.eps)
    x = x if input.gated is None else _gated(input.gated, x)
    assert x.shape == (matrix.columns,)
    x = x if input.offset is None else x - input.offset
    on = torch.ones_like(x, dtype=torch.bool) if input.threshold is None else x.abs() > _scaled(input)[0]
    if input.skipped is not None:
        input.skipped.add_(matrix.rows * (~on).sum())
    assert activation is None or residual is None
    assert bool(matrix.gate_bands) == (activation is not None), "gate and up lie side by side for products of both"
    product = matrix.weight @ torch.where(on, x, 0)
    product = product if bias is None else product + bias
    if activation is not None:
        product = _gated(activation, product)
    product = product if residual is None else product + residual
    _write(y, product)
    if squares is not None:
        _write(squares, torch.nn.functional.pad(product.square().sum()[None], (0, len(squares) - 1)))
    if active is not None:
        active += on.sum()


def _gated(activation: int, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _scaled(input: Input) -> Tensor:
    """The thresholds of each input."""
    return input.threshold[None] if input.scales is None else input.scales[:, None] * input.threshold


BUFFERS: dict[int, Tensor] = {}
"""The words of `flag_in_data_buffers` by where they lie; kept, so that nothing else lies there."""


def flag_in_data_buffers(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    words, parts = real_flag_in_data_buffers(sizes, device)
    BUFFERS[words.untyped_storage().data_ptr()] = words
    return words, parts


def _assert_written(x: Tensor) -> None:
    assert not (x.view(torch.int32) == SENTINEL).any(), "a kernel would wait for ever"


def _write(to: Tensor, x: Tensor) -> None:
    """Words must be empty before."""
    if to.untyped_storage().data_ptr() in BUFFERS:
        assert bool((to.view(torch.int32) == SENTINEL).all()), "who reads these words would take what was there before"
    to.copy_(x)


def dequantise(matrix: Matrix, out: Tensor, first: int, bands: int) -> None:
    part = matrix.weight[256 * first : 256 * (first + bands)]
    out.zero_()
    out[:, : len(part)] = part.t() * matrix.fp16_scale


def attend(
    parameters: AttentionParameters, qkv: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    if flag_in_data:
        _assert_written(qkv)
    shape, layer, keys, values = parameters.shape, parameters.layer, parameters.keys, parameters.values
    attn_output = torch.empty_like(out)
    for n, here in enumerate(positions.tolist()):
        q, k, v = qkv[n].view(1, -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cos, sin = (of[n if parameters.rope_stride else 0, here] for of in parameters.table)
        q = rotated(q, layer.q_norm, shape.eps, cos, sin)
        k = rotated(k, layer.k_norm, shape.eps, cos, sin)
        keys[n, :, here], values[n, :, here] = k[0], v[0]
        oldest = max(0, here + 1 - layer.window) if layer.window else 0
        cached = (x[n, :, oldest : here + 1].float() for x in (keys, values))
        seen = torch.ones(1, here + 1 - oldest, dtype=torch.bool)
        attn_output[n] = reference_attention.attention(q.transpose(0, 1), *cached, seen, shape.scale, shape.cap)[0]
    _write(out, attn_output)


@dataclass(frozen=True)
class Experts:
    """float32 matrices of one shape, with what the real ones tell."""

    each: list[Matrix]
    together: Together

    @cached_property
    def all(self) -> Matrix:
        missing = (0, 0, 0, -self.each[0].rows % (ONE_SPLIT.tile_bands * BAND_ROWS))
        padded = [torch.nn.functional.pad(matrix.weight, missing) for matrix in self.each]
        return replace(self.each[0], weight=torch.cat(padded))

    def expert(self, number: int) -> Matrix:
        return self.each[number]


def load_experts(
    matrix: PackedExperts,
    used: int,
    normalised: bool,
    device: Any,
    config: Any = None,
    *,
    gate: bool,
    added: bool,
    shared: int = 0,
) -> Experts:
    each = [load_zigzag(matrix.expert(number), device, gate=gate) for number in range(matrix.experts)]
    return Experts(each, Together(matrix.experts - shared, used, normalised, added, shared))


def decode_experts(experts: Experts, first: int, count: int, parts: int, scratch: Tensor) -> list[Tensor]:
    assert count * experts.all.rows * experts.all.columns <= len(scratch)
    weights = torch.stack([matrix.weight.t() * matrix.fp16_scale for matrix in experts.each[first : first + count]])
    return [part.half() for part in weights.chunk(parts, dim=2)]


def expert_blocks(experts: Experts, texts: int = 1) -> int:
    return zigzag.blocks(experts.expert(0)) * experts.together.of_token


def route(router: Tensor, input: Input, logits: Tensor) -> None:
    if input.flag_in_data:
        _assert_written(input.x)
        _assert_written(input.squares)
    x = input.x.view(-1, router.shape[1])
    torch.testing.assert_close(input.squares.view(len(x), -1).sum(1), x.square().sum(1))
    _write(logits, (reference.rms_norm(x, input.norm, input.eps) @ router.t()).view_as(logits))


def multiply_experts(experts: Experts, input: Input, y: Tensor, *, logits: Tensor, **how: Any) -> None:
    together = experts.together
    if logits.dim() > 1:
        for text, row in enumerate(logits):
            own = {name: how[name][text] for name in ("residual", "squares") if how.get(name) is not None}
            of = input.of_texts(slice(text, text + 1), len(logits))
            of = replace(of, x=of.x[0], squares=None if of.squares is None else of.squares[0])
            multiply_experts(experts, of, y[text], logits=row, **{**how, **own})
        return
    if input.flag_in_data:
        _assert_written(logits)
    assert len(logits) == together.logits
    of_router, of_shared = logits[None, : together.experts], logits[None, together.experts :]
    one = torch.eye(together.experts)
    chosen, weights = reference_experts.route(of_router, one, together.used, together.normalised)
    if together.shared:
        every = range(together.experts, together.stored)
        chosen, weights = reference_experts.with_shared(of_shared, torch.eye(1), every, chosen, weights)
    inputs = input.x.view(together.of_token, -1) if together.added else [input.x] * together.of_token
    residual, squares, reset = (how.pop(name, None) for name in ("residual", "squares", "reset"))
    rows = experts.all.rows // (1 if how.get("activation") is None else 2)
    made = torch.zeros(together.of_token, rows)
    for number, x, of in zip(chosen[0].tolist(), inputs, made, strict=True):
        gemv(experts.expert(number), replace(input, x=x), of, **how)
    if reset is not None:
        reset.copy_(torch.tensor(SENTINEL))
    if not together.added:
        _write(y, made.view_as(y))
        return
    assert residual is not None
    product = weights[0] @ made + residual
    _write(y, product)
    if squares is not None:
        assert len(squares) == expert_blocks(experts)  # of any number of texts
        _write(squares, torch.nn.functional.pad(product.square().sum()[None], (0, len(squares) - 1)))


def post_norm(
    update: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    y: Tensor,
    *,
    squares: Tensor | None = None,
    flag_in_data: bool = False,
) -> None:
    if flag_in_data:
        _assert_written(update)
    of_words = update.untyped_storage().data_ptr() in BUFFERS
    assert flag_in_data == of_words or y.untyped_storage().data_ptr() not in BUFFERS, "who waits for the kernel before"
    added = residual + reference.rms_norm(update, norm, eps)
    _write(y, added)
    if squares is not None:
        _write(squares.view(-1), added.square().sum(1))


def norm_rows(qkv: Tensor, norms: tuple[Tensor, Tensor], eps: float, y: Tensor, *, flag_in_data: bool = False) -> None:
    if flag_in_data:
        _assert_written(qkv)
    q, k, v = qkv.split([len(norms[0]), len(norms[1]), len(norms[1])], dim=1)
    normed = [reference.rms_norm(x, norm, eps) for x, norm in zip((q, k), norms, strict=True)]
    _write(y, torch.cat([*normed, v], dim=1))


def normed_rows(qkv: dense.Product, norms: tuple[Tensor, Tensor], eps: float) -> dense.Product:
    x, y = _finished(qkv.sums, qkv.factor, qkv.inverse, qkv.bias), torch.empty_like(qkv.sums)
    norm_rows(x, norms, eps, y)
    return dense.Product(y, torch.ones(len(y)), 1.0, None)


def embed(matrix: Matrix, ids: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(matrix.weight[ids.long()] * scale)


def product(
    matrix: Matrix,
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    cap: float = 0.0,
    candidates: Tensor | None = None,
) -> None:
    y.copy_(soft_capped((x if norm is None else reference.rms_norm(x, norm, eps)) @ matrix.weight.t(), cap))
    if candidates is not None:
        logits = y.double()
        candidates.copy_(torch.stack([logits.argmax(1), logits.amax(1).float().view(torch.int32).long()], dim=1))


def matmul(matrix: Matrix, x: Tensor) -> Tensor:
    return x @ matrix.weight.t()


def new_candidates(matrix: Matrix, vectors: int) -> Tensor:
    return torch.zeros(vectors, 2, dtype=torch.int64)


def pick_likeliest(
    candidates: Tensor, ids: Tensor, best: Tensor, positions: Tensor | None = None, held: CudaHeld | None = None
) -> None:
    ids.copy_(candidates[:, 0])
    best.copy_(candidates[:, 1].int().view(torch.float32))
    if positions is not None:
        positions += 1
    if held is None:
        return
    for n, (scale, steps, skipped) in enumerate(zip(held.scales, held.steps, held.skipped, strict=True)):
        if held.moving is None or held.moving[n]:
            text = held.hold.after(HeldText(float(scale), int(steps)), int(skipped))
            scale.copy_(torch.tensor(text.scale))
            steps.copy_(torch.tensor(text.steps))
    held.skipped.zero_()


# kernels/decoder/prefill.cu and kernels/products/zigzag_batch.cu


def _finished(product: Tensor, factor: Tensor, inverse: float, bias: Tensor | None) -> Tensor:
    y = product * factor[:, None] * inverse
    return y if bias is None else y + bias


def _leave(x: Tensor, half: Tensor, factor: Tensor) -> None:
    exponent = torch.frexp(x.abs().amax(1)).exponent - 15
    factor.copy_(torch.ldexp(torch.ones(len(x)), exponent))
    half.copy_(x / factor[:, None])


def _add_rows(defines: Any, grid: Any, x: Tensor, width: int, product: Any, *rest: Any) -> None:
    product_factor, inverse, bias, product_norm, norm, eps, half, factor = rest
    assert (grid, x.shape[1]) == ((len(x),), width)
    if product is not None:
        update = _finished(product, product_factor, inverse, bias)
        assert int(defines["NORMED"]) == (product_norm is not None)
        x += update if product_norm is None else reference.rms_norm(update, product_norm, eps)
    if half is not None:
        _leave(x if norm is None else reference.rms_norm(x, norm, eps), half, factor)


def _gate_rows(defines: Any, grid: Any, gate: Tensor, *rest: Any) -> None:
    gate_pitch, gate_inverse, gate_bias, up, up_pitch, up_inverse, up_bias, width, product_factor, half, factor = rest
    assert grid == (len(gate),)
    assert gate.shape == up.shape == (len(gate), width)
    assert (gate_pitch, up_pitch) == (gate.stride(0), up.stride(0))
    gate = _finished(gate, product_factor, gate_inverse, gate_bias)
    up = _finished(up, product_factor, up_inverse, up_bias)
    _leave(ACTIVATIONS[int(defines["ACTIVATION"])](gate) * up, half, factor)


def _split_heads(defines: Any, grid: Any, product: Tensor, *rest: Any) -> None:
    factor, inverse, bias, q_norm, k_norm, eps, cos, sin, first, context, heads, kv_heads, q, keys, values = rest
    assert grid == (len(q), -(-(heads + 2 * kv_heads) // 8))
    assert (keys.shape[1], int(defines["HEAD_DIM"])) == (context, keys.shape[2])
    assert int(defines["ROTARY_DIM"]) == 2 * cos.shape[1]
    here = slice(first, first + len(q))
    rows = _finished(product, factor, inverse, bias).view(len(q), -1, keys.shape[2])
    queries, k, v = (x.transpose(0, 1) for x in rows.split([heads, kv_heads, kv_heads], dim=1))
    q.copy_(rotated(queries, q_norm, eps, cos[here], sin[here]).transpose(0, 1))
    keys[:, here], values[:, here] = rotated(k, k_norm, eps, cos[here], sin[here]), v


def _zigzag_batch(
    defines: Any, grid: Any, blocks: Tensor, columns: int, rows: int, largest_d: float, *rest: Any
) -> None:
    x, norm, eps, squares, parts, threshold, offset, scales, *outputs = rest
    y, bias, residual, squares_of_y, active, skipped, workspace = outputs
    macros = {name: int(value) for name, value in defines.items()}
    inputs, tile_bands, each = macros["INPUTS"], macros["TILE_BANDS"], 2 if macros["GATE"] else 1
    assert grid == (macros["SPLITS"], len(blocks))
    x = _gated(macros["ACTIVATION"], x) if macros["GATED"] else x
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
    assert not macros["HOLD"] or not macros["DENSE"]
    if not macros["DENSE"]:
        active_in = x.abs() > (scales[:, None] * threshold if macros["HOLD"] else threshold)
        on = active_in.any(0)
        if macros["HOLD"]:
            skipped += rows * (~active_in).sum(1)
    product = torch.einsum("bk,gksr->bgsr", torch.where(on, x, 0), blocks)
    # Of a group the first half of the bands, then the second, where rows are of gate and up.
    product = product.view(inputs, len(blocks), each, -1).transpose(1, 2).reshape(inputs, each, -1)
    product = product[:, :, : rows // each].reshape(inputs, rows)
    product = product if bias is None else product + bias
    if macros["GATE"]:
        product = _gated(macros["ACTIVATION"], product)
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
    "zigzag_batch": _zigzag_batch,
    **simulated_neurons.LAUNCHED,
}


def _kernel(file: str, name: str, defines: tuple[str, ...], device: int) -> tuple[str, dict[str, str]]:
    return name, dict(define.split("=") for define in defines)


def _launch(
    kernel: tuple[str, dict[str, str]], grid: tuple[int, ...], threads: int, *arguments: Any, shared: int = 0
) -> None:
    LAUNCHED[kernel[0]](kernel[1], grid, *arguments)


class Graph:
    """What was captured runs again, from the memory as it is then."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Event:
    """All that ran before it is over when it is recorded."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def wait(self) -> None:
        """For one that was never recorded nobody waits."""

    def query(self) -> bool:
        return self.at > 0

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


def captured(run: Callable[[], None], stream: Any, pool: Any = None) -> Graph:
    run()
    return Graph(run)


class SimulatedKernels(kernel_set.Kernels):
    usable = staticmethod(lambda device: CPU)
    on_device = staticmethod(nullcontext)
    device_name = staticmethod(lambda device: "simulated")
    synchronize = staticmethod(lambda device: None)
    new_stream = new_step_stream = new_graph_pool = wait_for_step = staticmethod(lambda: None)
    on_stream = staticmethod(lambda stream: nullcontext())
    on_card = in_host_memory = staticmethod(lambda loaded: loaded)
    new_event = staticmethod(lambda enable_timing=False: Event())
    host_memory = staticmethod(torch.empty_like)
    host_values = staticmethod(lambda values: torch.tensor(values, dtype=torch.int32))
    captured = staticmethod(captured)
    replay = staticmethod(lambda graph: graph.replay())
    load_zigzag = staticmethod(load_zigzag)
    first_bands = staticmethod(first_bands)
    load_rows = staticmethod(load_rows)
    flag_in_data_buffers = staticmethod(flag_in_data_buffers)
    new_candidates = staticmethod(new_candidates)
    embed = staticmethod(embed)
    gemv = staticmethod(gemv)
    load_experts = staticmethod(load_experts)
    route = staticmethod(route)
    decode_experts = staticmethod(decode_experts)
    new_products = staticmethod(lambda x, weights: x.float() @ weights.float())
    expert_blocks = staticmethod(expert_blocks)
    multiply_experts = staticmethod(multiply_experts)
    attend = staticmethod(attend)
    post_norm = staticmethod(post_norm)
    norm_rows = staticmethod(norm_rows)
    normed_rows = staticmethod(normed_rows)
    double_sparsity_parameters = staticmethod(double_sparsity_parameters)
    label_append = staticmethod(label_append)
    attend_double_sparsity = staticmethod(attend_double_sparsity)
    attend_offloaded = staticmethod(attend_offloaded)
    host_tensors = staticmethod(lambda count, shape, *of: [torch.zeros(shape, dtype=of[0]) for _ in range(count)])
    shared_memory = staticmethod(lambda size, *of: ((memory := np.zeros(size, np.uint8)), torch.from_numpy(memory)))
    product = staticmethod(product)
    pick_likeliest = staticmethod(pick_likeliest)
    matmul = staticmethod(matmul)


KERNELS = SimulatedKernels()
WORKSPACE = real_flag_in_data_buffers([MULTIPROCESSORS * WORKSPACE_WORDS], CPU)[0]


@contextmanager
def launches() -> Iterator[None]:
    """Let functions that launch what is in `LAUNCHED` run on the CPU."""
    BUFFERS.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (dense, far, neurons, zigzag):
            patch.setattr(module, "kernel", _kernel)
            patch.setattr(module, "launch", _launch)
        for module in (shared_memory, tile_config, zigzag):
            patch.setattr(module, "shared_limit", lambda device: SHARED_MEMORY)
        for module in (neurons, tile_config, zigzag):
            patch.setattr(module, "multiprocessors", lambda device: MULTIPROCESSORS)
        patch.setattr(neurons, "architecture", lambda device: 90)
        patch.setattr(zigzag, "workspace", lambda device: WORKSPACE)
        patch.setattr(dense, "dequantise", dequantise)
        patch.setattr(dense, "_fp16_product", lambda x, weights, out: out.copy_(x.float() @ weights.float()))
        yield
