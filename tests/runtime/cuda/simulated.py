"""Kernels of the cuda backend in plain torch on the CPU, so that the chain of a decoder can be tested without a GPU.

Each function stands in for the one of its name. A launch of `kernels/prefill.cu` or `kernels/collect.cu` is computed
from the arguments that the kernel would get, in the order in which it would get them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepack.formats.matrices import decode_matrix
from sparsepack.formats.packed import PackedMatrix
from sparsepack.runtime import reference
from sparsepack.runtime.cuda import batch as batches
from sparsepack.runtime.cuda import decoder, dense, elementwise, model, prefill, rows, sequences, step
from sparsepack.runtime.cuda.words import EMPTY
from sparsepack.runtime.cuda.words import empty_words as real_empty_words
from sparsepack.runtime.cuda.zigzag import Input

ACTIVATIONS = list(reference.ACTIVATION_FUNCTIONS.values())


@dataclass(frozen=True)
class Matrix:
    """float32 [rows, columns], with what the real ones tell."""

    weight: Tensor
    rows: int
    columns: int
    half: int = 0
    half_scale: float = 4.0


def load_zigzag(matrix: PackedMatrix, device: Any, geometry: Any = None, *, gate: bool = False) -> Matrix:
    assert not gate or matrix.rows % 512 == 0
    return Matrix(decode_matrix(matrix), matrix.rows, matrix.columns, half=matrix.rows // 512 if gate else 0)


def load_rows(matrix: PackedMatrix, device: Any) -> Matrix:
    return Matrix(decode_matrix(matrix), matrix.rows, matrix.columns)


def gemv(
    matrix: Matrix,
    input: Input,
    y: Tensor,
    *,
    constant: Tensor | None = None,
    added: Tensor | None = None,
    activation: int | None = None,
    squares: Tensor | None = None,
    active: Tensor | None = None,
    emptied: Tensor | None = None,
) -> None:
    if input.handed:
        _assert_written(input.x)
    if input.norm is not None and input.squares is not None:
        _assert_written(input.squares)
        torch.testing.assert_close(input.squares.sum(), input.x.square().sum())
    if emptied is not None:
        emptied.copy_(torch.tensor(EMPTY))
    x = input.x if input.norm is None else reference.rms_norm(input.x, input.norm, input.eps)
    x = x if input.offset is None else x - input.offset
    on = torch.ones_like(x, dtype=torch.bool) if input.threshold is None else x.abs() > input.threshold
    assert activation is None or added is None
    assert bool(matrix.half) == (activation is not None), "rows of gate and up lie side by side for products of both"
    product = matrix.weight @ torch.where(on, x, 0)
    product = product if constant is None else product + constant
    if activation is not None:
        first, second = product.chunk(2)
        product = ACTIVATIONS[activation](first) * second
    product = product if added is None else product + added
    _write(y, product)
    if squares is not None:
        _write(squares, torch.nn.functional.pad(product.square().sum()[None], (0, len(squares) - 1)))
    if active is not None:
        active += on.sum()


def blocks(matrix: Matrix) -> int:
    return 3


WORDS: dict[int, Tensor] = {}
"""The words of `empty_words` by where they lie; kept, so that nothing else lies there."""


def empty_words(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    words, parts = real_empty_words(sizes, device)
    WORDS[words.untyped_storage().data_ptr()] = words
    return words, parts


def _assert_written(x: Tensor) -> None:
    assert not (x.view(torch.int32) == EMPTY).any(), "a kernel would wait for ever"


def _write(to: Tensor, x: Tensor) -> None:
    """Words must be empty before."""
    if to.untyped_storage().data_ptr() in WORDS:
        assert bool((to.view(torch.int32) == EMPTY).all()), "who reads these words would take what was there before"
    to.copy_(x)


def batch(
    matrix: Matrix,
    x: Tensor,
    y: Tensor,
    *,
    threshold: Tensor | None = None,
    offset: Tensor | None = None,
    constant: Tensor | None = None,
    added: Tensor | None = None,
    active: Tensor | None = None,
) -> None:
    x = x if offset is None else x - offset
    on = torch.ones(x.shape[1], dtype=torch.bool) if threshold is None else (x.abs() > threshold).any(0)
    product = torch.where(on, x, 0) @ matrix.weight.t()
    product = product if constant is None else product + constant
    y.copy_(product if added is None else product + added)
    if active is not None:
        active += on.sum()


def most_inputs(matrix: Matrix) -> int:
    return 8


def dequantise(matrix: Matrix, out: Tensor, first: int, bands: int) -> None:
    part = matrix.weight[256 * first : 256 * (first + bands)]
    out.zero_()
    out[:, : len(part)] = part.t() * matrix.half_scale


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    window: int = 0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    handed: bool = False,
) -> None:
    if handed:
        _assert_written(qkv)
    mixed = torch.empty_like(out)
    for n, here in enumerate(positions.tolist()):
        q, k, v = qkv[n].view(1, -1, keys.shape[-1]).split([heads, kv_heads, kv_heads], dim=1)
        q, k = (_turned(x, norm, eps, cos[here], sin[here]) for x, norm in ((q, q_norm), (k, k_norm)))
        keys[n, :, here], values[n, :, here] = k[0], v[0]
        oldest = max(0, here + 1 - window) if window else 0
        cached = (x[n, :, oldest : here + 1].float() for x in (keys, values))
        seen = torch.ones(1, here + 1 - oldest, dtype=torch.bool)
        mixed[n] = reference.attention(q.transpose(0, 1), *cached, seen)[0]
    _write(out, mixed)


def _turned(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return reference.rotate(x if norm is None else reference.rms_norm(x, norm, eps), cos, sin)


def embed(matrix: Matrix, ids: Tensor, out: Tensor) -> None:
    out.copy_(matrix.weight[ids.long()])


def product(
    matrix: Matrix,
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    candidates: Tensor | None = None,
) -> None:
    y.copy_((x if norm is None else reference.rms_norm(x, norm, eps)) @ matrix.weight.t())
    if candidates is not None:
        logits = y.double()
        candidates.copy_(torch.stack([logits.argmax(1), logits.amax(1).float().view(torch.int32).long()], dim=1))


def matmul(matrix: Matrix, x: Tensor) -> Tensor:
    return x @ matrix.weight.t()


def new_candidates(matrix: Matrix, vectors: int) -> Tensor:
    return torch.zeros(vectors, 2, dtype=torch.int64)


def advance(candidates: Tensor, ids: Tensor, best: Tensor, positions: Tensor | None = None) -> None:
    ids.copy_(candidates[:, 0])
    best.copy_(candidates[:, 1].int().view(torch.float32))
    if positions is not None:
        positions += 1


# kernels/prefill.cu and kernels/collect.cu


def _finished(product: Tensor, factor: Tensor, inverse: float, bias: Tensor | None) -> Tensor:
    y = product * factor[:, None] * inverse
    return y if bias is None else y + bias


def _leave(x: Tensor, half: Tensor, factor: Tensor) -> None:
    exponent = torch.frexp(x.abs().amax(1)).exponent - 15
    factor.copy_(torch.ldexp(torch.ones(len(x)), exponent))
    half.copy_(x / factor[:, None])


def _add_rows(defines: Any, grid: Any, x: Tensor, width: int, product: Any, *rest: Any) -> None:
    product_factor, inverse, bias, norm, eps, half, factor = rest
    assert (grid, x.shape[1]) == ((len(x),), width)
    if product is not None:
        x += _finished(product, product_factor, inverse, bias)
    if half is not None:
        _leave(x if norm is None else reference.rms_norm(x, norm, eps), half, factor)


def _gate_rows(defines: Any, grid: Any, product: Tensor, width: int, *rest: Any) -> None:
    *finish, half, factor = rest
    assert (grid, product.shape[1]) == ((len(product),), 2 * width)
    gate, up = _finished(product, *finish).chunk(2, dim=1)
    _leave(ACTIVATIONS[int(defines["ACTIVATION"])](gate) * up, half, factor)


def _split_heads(defines: Any, grid: Any, product: Tensor, *rest: Any) -> None:
    factor, inverse, bias, q_norm, k_norm, eps, cos, sin, first, context, heads, kv_heads, q, keys, values = rest
    assert grid == (len(q), -(-(heads + 2 * kv_heads) // 8))
    assert (keys.shape[2], int(defines["HEAD_DIM"])) == (context, keys.shape[3])
    here = slice(first, first + len(q))
    rows = _finished(product, factor, inverse, bias).view(len(q), -1, keys.shape[3])
    queries, k, v = (x.transpose(0, 1) for x in rows.split([heads, kv_heads, kv_heads], dim=1))
    q.copy_(_turned(queries, q_norm, eps, cos[here], sin[here]).transpose(0, 1))
    keys[0, :, here], values[0, :, here] = _turned(k, k_norm, eps, cos[here], sin[here]), v


def _gate(defines: Any, grid: Any, stacked: Tensor, width: int, activation: int, out: Tensor) -> None:
    assert grid == (-(-width // 256), stacked.numel() // (2 * width))
    first, second = stacked.chunk(2, dim=-1)
    out.copy_(ACTIVATIONS[activation](first) * second)


def _norm_rows(defines: Any, grid: Any, x: Tensor, columns: int, weight: Tensor, eps: float, out: Tensor) -> None:
    assert (*grid, columns) == x.shape == out.shape
    out.copy_(reference.rms_norm(x, weight, eps))


LAUNCHED = {
    "add_rows": _add_rows,
    "gate_rows": _gate_rows,
    "split_heads": _split_heads,
    "gate": _gate,
    "norm_rows": _norm_rows,
}


def _kernel(file: str, name: str, defines: tuple[str, ...], device: int) -> tuple[str, dict[str, str]]:
    return name, dict(define.split("=") for define in defines)


def _launch(kernel: tuple[str, dict[str, str]], grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
    LAUNCHED[kernel[0]](kernel[1], grid, *arguments)


class Graph:
    """What was captured runs again, from the memory as it is then."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def captured(run: Callable[[], None], stream: Any, pool: Any = None) -> Graph:
    run()
    return Graph(run)


def use(patch: pytest.MonkeyPatch) -> None:
    """Let `CudaDecoder` and `CudaBatch` run on the CPU, by the functions above."""
    WORDS.clear()
    cpu = torch.device("cpu")
    for name, stand_in in {
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: None,
        "current_stream": lambda: SimpleNamespace(synchronize=lambda: None),
        "Stream": type("Stream", (), {}),  # others have it in annotations
        "Event": type("Event", (), {"record": lambda event: None, "synchronize": lambda event: None}),
        "graph_pool_handle": lambda: None,
        "get_device_name": lambda device: "simulated",
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(decoder, "usable", lambda device: cpu)
    for module in (decoder, batches):
        patch.setattr(module, "captured", captured)
        patch.setattr(module, "replay", lambda graph: graph.replay())
    patch.setattr(decoder, "host_memory", torch.empty_like)
    patch.setattr(batches, "usable", lambda device: cpu)
    patch.setattr(batches, "host_memory", lambda values: torch.tensor(values, dtype=torch.int32))
    for module, names in {
        model: (load_zigzag, load_rows, gemv),
        sequences: (attend, embed, product, new_candidates, advance),
        step: (gemv, blocks, empty_words),
        batches: (batch, most_inputs, product),
        prefill: (embed,),
        dense: (dequantise,),
        rows: (product, matmul),
    }.items():
        for function in names:
            patch.setattr(module, function.__name__, function)
    for module in (dense, elementwise):
        patch.setattr(module, "kernel", _kernel)
        patch.setattr(module, "launch", _launch)
    patch.setattr(dense, "_half_product", lambda x, weights, out: out.copy_(x.float() @ weights.float()))
