"""The buffers in which the kernels of a step leave results for each other, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsepack.runtime.cuda.products.gemm_fp16 import ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.decoder.model import CudaLayer, CudaModel
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels


@dataclass(frozen=True)
class LatentBuffers:
    """What stands between attn_in and attention by latents, float32, [width] each or [B, width].

    normed  -- the rows of attn_in, latents normed
    queries -- what attn_q_b makes of its latents; None: these are the first rows of attn_in
    kv      -- what attn_kv_b makes of its latents; where these are cached, the latents that attention gives
    qkv     -- queries, keys and values of all heads, which attention takes, or queries of latents and the new row
    """

    normed: Tensor
    queries: Tensor | None
    kv: Tensor
    qkv: Tensor


@dataclass(frozen=True)
class Buffers:
    """The buffers of a layer, float32: [width] each in a step of one sequence, [B, width] of several.

    x       -- what the layer takes; squares: partial sums of x^2, None where the product has to add them up
    before  -- what the layer's change of basis makes x of; None: the basis stays
    qkv     -- the rows of attn_in; attn_output: what attention makes of them
    between -- x and the rows of attn_out, or of models with post norms the norm of these; between_squares: as squares.
               Of a layer that is an MLP alone they are x, of one without an MLP y
    mid     -- what the gate and up of mlp_in make, or both, gate first, where the product does not finish them; of an
               MLP by neurons the rows of the gate, of a mixture those of each of the token's experts
    logits  -- of a mixture's router; None: no experts
    y       -- between and what the MLP adds: the next layer's x; squares_of_y: its squares, None for the last layer's,
               for what a change of basis follows, and where the MLP leaves none
    normed  -- the rows of attn_in, queries and keys normed, which attention takes where the model norms them over all
               heads together; None: it takes qkv
    latent  -- of models with latents, what stands between attn_in and attention; None: nothing
    layer_normed -- of models with LayerNorms, what attn_in and the MLP take; None: they take x and between
    second_inputs -- what enters attn_out and mlp_mid, of models in which no product makes it of attn_output and mid;
               None: it does
    updates -- of models with post norms, what attention and the MLP add before it is normed, and where experts are
               normed apart, what the shared ones make; None: it is not
    reset   -- name of a matrix -> the words that its product resets, as `kernels/common/flag_in_data.cuh` allows

    flag_in_data -- all are read as soon as they are stored (`driver/memory.py`), but for before, an x without squares
                    and a y without squares_of_y: these are read when the kernel that stores them has ended
    """

    x: Tensor
    squares: Tensor | None
    qkv: Tensor
    attn_output: Tensor
    between: Tensor
    between_squares: Tensor | None
    mid: Tensor
    y: Tensor
    squares_of_y: Tensor | None
    logits: Tensor | None = None
    before: Tensor | None = None
    updates: tuple[Tensor, ...] | None = None
    normed: Tensor | None = None
    layer_normed: tuple[Tensor, Tensor] | None = None
    latent: LatentBuffers | None = None
    second_inputs: tuple[Tensor, Tensor] | None = None
    flag_in_data: bool = False
    reset: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FilledUp:
    """What the GPU knows of a prompt that is filled up to a number of positions, when the host does not wait for it.

    count  -- int32 [1]: so many positions are the prompt's
    room   -- an expert has room for so many positions
    missed -- bool [1]: whether one had more, which it then lacks
    """

    count: Tensor
    room: int
    missed: Tensor


@dataclass(frozen=True)
class MlpPrompt:
    """What an MLP has of a prompt.

    x          -- its input [S, hidden]; residual: what its output is added to, float32 [S, hidden]
    activation -- number of the function, see `kernels/common/activations.cuh`
    scratch    -- of `gemm_fp16.new_scratch`
    filled     -- says that the host must not wait, and which positions count; None: it may, and all do
    """

    x: ScaledFp16
    residual: Tensor
    activation: int
    scratch: Tensor
    filled: FilledUp | None


Launch = Callable[[], object]
"""The function launches a kernel with all that the kernel takes."""


@dataclass(frozen=True)
class MlpStep:
    """A block's step as its MLP sees it.

    of         -- the block's buffers; what the MLP makes is added to `between`
    input      -- of the first product: what attention left, with its norm
    product    -- given the name under which a matrix is counted, its site, an input and y: the launch of its product
    active     -- given such a name: int64 [], where it is counted
    activation -- the number of the gate's function
    sparse     -- whether inactive units are left out
    """

    of: Buffers
    input: Input
    product: Callable[..., Launch]
    active: Callable[[str], Tensor]
    activation: int
    sparse: bool


def single_buffers(model: CudaModel, embedded: Tensor, kernels: Kernels) -> list[Buffers]:
    """The buffers of one sequence, each read as soon as it is written, while the kernel before still ends.

    embedded -- float32 [1, hidden]: the first layer's x
    """
    if model.alone:
        return _buffers_alone(model, embedded, kernels)
    a, device = model.architecture, model.device
    heads, ends = _mixed(model), _ends_of_segments(model, kernels)
    of_between, of_y = _parts(model, 1, kernels)
    rows = _rows(model)
    centred = [a.hidden] * model.layer_norms
    within = [a.intermediate] * model.activation_norms
    qkv_words, (qkv, *normed) = kernels.flag_in_data_buffers(
        [rows] * (1 + model.row_norms) + centred + _latent_widths(model), device
    )
    numbers, of_router = _numbers(model), _of_router(model)
    inside, (between, between_squares, mid, logits, *updates) = kernels.flag_in_data_buffers(
        [a.hidden, of_between, numbers, of_router, *[a.hidden] * _updates(model), *within, *centred], device
    )
    # What a layer takes and mixes, and what the next one does: in turns.
    mixed = [heads] * (1 + model.activation_norms)
    alternating = [kernels.flag_in_data_buffers([a.hidden, of_y, *mixed], device) for _ in range(2)]
    read_twice = torch.empty(a.hidden, device=device)  # in plain memory: attention and MLP both read it
    # In plain memory: what the last layer of a segment leaves, and that in the next segment's basis. (Each layer of
    # neurons is such a segment.)
    result, changed = torch.empty(a.hidden, device=device), torch.empty(a.hidden, device=device)
    buffers = []
    for number in range(a.layers):
        begins = number == 0 or ends[number - 1]
        words, (x, squares, attn_output, *of_attention) = alternating[number % 2]
        y, squares_of_y, *_ = alternating[(number + 1) % 2][1]
        before = None
        if model.layers[number].basis is not None:
            x, before = changed, result if number else embedded[0]
        elif begins:
            x = result if number else embedded[0]
        buffers.append(
            Buffers(
                x=x,
                squares=None if begins else squares,
                qkv=qkv,
                attn_output=attn_output,
                between=between,
                between_squares=between_squares,
                mid=mid,
                logits=logits if of_router else None,
                y=result if ends[number] else y,
                squares_of_y=None if ends[number] else squares_of_y,
                before=before,
                updates=tuple(updates[: _updates(model)]) if model.post_norms else None,
                normed=normed[0] if model.row_norms else None,
                layer_normed=(read_twice if model.parallel else normed[-1], updates[-1]) if model.layer_norms else None,
                second_inputs=(of_attention[0], updates[_updates(model)]) if model.activation_norms else None,
                latent=_latent(model, normed),
                flag_in_data=True,
                reset=dict(zip(model.names, (inside, qkv_words, words), strict=False)),
            )
        )
    return _of_layers(buffers, model, kernels)


LEAST_ALONE = 3
"""So many layers that are a mixer or an MLP alone are needed for words to be reset in time."""


def reads_flags(model: CudaModel) -> bool:
    """Whether steps of one sequence can read what the kernel before leaves as soon as it is stored."""
    return model.mlps[0].flag_in_data and not (model.alone and len(model.layers) < LEAST_ALONE)


def _buffers_alone(model: CudaModel, embedded: Tensor, kernels: Kernels) -> list[Buffers]:
    """The same where layers are a mixer or an MLP alone, so that a layer may have as few as two kernels, and the next
    one the same two. What the first of these takes, and what stands between them, lies in one of three sets of words,
    that of the last layer in a fourth, so that the next step finds it reset. The first product of the next layer resets
    a set: its readers have ended. Two layers later it is written again. The rows of attn_in, which attn_out resets,
    take turns."""
    a, device = model.architecture, model.device
    _, of_y = _parts(model, 1, kernels)
    sizes = [a.hidden, of_y, _mixed(model), _numbers(model), _of_router(model)]
    sets = [kernels.flag_in_data_buffers(sizes, device) for _ in range(4)]
    of_rows = [kernels.flag_in_data_buffers([_rows(model)], device) for _ in range(2)]
    which = [number % 3 for number in range(a.layers - 1)] + [3]
    result, buffers, mixers = torch.empty(a.hidden, device=device), list[Buffers](), 0
    for number, layer in enumerate(model.layers):
        _, (x, squares, attn_output, mid, logits) = sets[which[number]]
        before, (qkv_words, (qkv,)) = sets[which[number - 1]][0], of_rows[mixers % 2]
        mixers += bool(layer.attention)
        y, squares_of_y = (result, None) if number + 1 == a.layers else sets[which[number + 1]][1][:2]
        buffers.append(
            Buffers(
                x=x if number else embedded[0],
                squares=squares if number else None,
                qkv=qkv,
                attn_output=attn_output,
                between=y,
                between_squares=squares_of_y,
                mid=mid,
                logits=logits if _of_router(model) else None,
                y=y,
                squares_of_y=squares_of_y,
                flag_in_data=True,
                reset={"attn_in": before, "attn_out": qkv_words} if layer.attention else {"mlp_in": before},
            )
        )
    return _of_layers(buffers, model, kernels)


def batch_buffers(model: CudaModel, embedded: Tensor, kernels: Kernels) -> list[Buffers]:
    """The buffers of several sequences. What lies there is read when the kernel before has ended, and written again
    only when its readers have (`kernels/common/common.cuh`). So one buffer of a kind is enough, and what a layer makes
    of x takes its place; a change of basis takes turns between two.

    embedded -- float32 [B, hidden]: the first layer's x
    """
    a, sequences = model.architecture, len(embedded)
    of_between, of_y = _parts(model, sequences, kernels)
    of_router = _of_router(model)

    def memory(width: int) -> Tensor:
        return torch.empty(sequences, width, device=model.device)

    heads, rows = _mixed(model), _rows(model)
    squares = memory(of_y)
    one = Buffers(
        x=embedded,
        squares=squares,
        qkv=memory(rows),
        attn_output=memory(heads),
        between=embedded,
        between_squares=memory(of_between),
        mid=memory(_numbers(model)),
        logits=memory(of_router) if of_router else None,
        y=embedded,
        squares_of_y=squares,
        updates=tuple(memory(a.hidden) for _ in range(_updates(model))) if model.post_norms else None,
        normed=memory(rows) if model.row_norms else None,
        layer_normed=(memory(a.hidden), memory(a.hidden)) if model.layer_norms else None,
        latent=_latent(model, [memory(width) for width in _latent_widths(model)]),
        second_inputs=(memory(heads), memory(a.intermediate)) if model.activation_norms else None,
    )
    ends, buffers = _ends_of_segments(model, kernels), []
    for number, layer in enumerate(model.layers):
        if layer.basis is not None:
            other = memory(a.hidden) if one.before is None else one.before
            one = replace(one, x=other, between=other, y=other, before=one.x)
        begins = number == 0 or ends[number - 1]
        buffers.append(
            replace(
                one,
                squares=None if begins else squares,
                squares_of_y=None if ends[number] else squares,
                before=None if layer.basis is None else one.before,
            )
        )
    return _of_layers(buffers, model, kernels)


def _parts(model: CudaModel, sequences: int, kernels: Kernels) -> tuple[int, int]:
    """How many parts the squares of between and of y have, the most of any layer."""
    if model.post_norms:
        return 1, 1
    of_between = max(kernels.blocks(layer.attention["attn_out"].matrix) for layer in model.layers if layer.attention)
    return of_between, max(_parts_of_y(layer, sequences, kernels) or 0 for layer in model.layers)


def _parts_of_y(layer: CudaLayer, sequences: int, kernels: Kernels) -> int | None:
    """How many parts the squares of a layer's y have; None: its MLP leaves none."""
    if layer.mlp is None:
        return kernels.blocks(layer.attention["attn_out"].matrix)
    return layer.mlp.parts(sequences, kernels)


def _latent_widths(model: CudaModel) -> list[int]:
    """The widths of `LatentBuffers`, in order; empty: the model has no latents."""
    of = model.architecture.latent
    if of is None:
        return []
    heads, rows = model.architecture.heads, _rows(model)
    queries = [heads * of.query] if of.q_rank else []
    if model.layers[0].latents is not None:
        return [rows, *queries, heads * of.kv_rank, (heads + 1) * (of.turning + of.kv_rank)]
    return [rows, *queries, heads * (of.plain + of.value), 3 * heads * of.head_dim]


def _latent(model: CudaModel, made: Sequence[Tensor]) -> LatentBuffers | None:
    """made -- buffers of `_latent_widths`"""
    of = model.architecture.latent
    if of is None:
        return None
    normed, *queries, kv, qkv = made
    return LatentBuffers(normed, queries[0] if queries else None, kv, qkv)


def _rows(model: CudaModel) -> int:
    """The rows of attn_in, the most of any layer: blocks with attention and with a state are of different widths."""
    return max(layer.attention["attn_in"].matrix.rows for layer in model.layers if layer.attention)


def _mixed(model: CudaModel) -> int:
    """The columns of attn_out, likewise."""
    return max(layer.attention["attn_out"].matrix.columns for layer in model.layers if layer.attention)


def _of_layers(buffers: Sequence[Buffers], model: CudaModel, kernels: Kernels) -> list[Buffers]:
    """The buffers of each layer, each of as many numbers as the layer has there."""
    sequences = buffers[0].qkv.numel() // _rows(model)
    parts = [1 if model.post_norms else _parts_of_y(layer, sequences, kernels) for layer in model.layers]
    each = zip(buffers, model.layers, [None, *parts], parts, strict=False)
    return [_of_layer(of, layer, before, after, kernels) for of, layer, before, after in each]


def _of_layer(of: Buffers, layer: CudaLayer, before: int | None, after: int | None, kernels: Kernels) -> Buffers:
    """before, after -- in how many parts the layer before and this one leave squares"""

    def narrow(all: Tensor | None, parts: int | None) -> Tensor | None:
        return all if all is None or parts is None else first_numbers(all, parts)

    squares, squares_of_y = narrow(of.squares, before), narrow(of.squares_of_y, after)
    of = replace(of, squares=squares, squares_of_y=squares_of_y)
    if layer.mlp is not None:
        of = replace(of, mid=first_numbers(of.mid, layer.mlp.numbers))
    if not layer.attention:
        return replace(of, between=of.x, between_squares=squares)
    into, out = (layer.attention[name].matrix for name in ("attn_in", "attn_out"))
    of = replace(of, qkv=first_numbers(of.qkv, into.rows), attn_output=first_numbers(of.attn_output, out.columns))
    if layer.mlp is None:
        return replace(of, between=of.y, between_squares=squares_of_y)
    if layer.post_norms is not None:
        return of
    return replace(of, between_squares=narrow(of.between_squares, kernels.blocks(out)))


def first_numbers(buffer: Tensor, width: int) -> Tensor:
    """Room for rows of a smaller width in a buffer [width] or [B, width], contiguous."""
    count = buffer.numel() // buffer.shape[-1]
    return buffer.view(-1)[: count * width].view(*buffer.shape[:-1], width)


def _numbers(model: CudaModel) -> int:
    """How many numbers the first product of an MLP leaves for each sequence, at most."""
    return max(mlp.numbers for mlp in model.mlps)


def _updates(model: CudaModel) -> int:
    """How many vectors are normed before they are added."""
    return (2 + model.normed_experts) * model.post_norms


def _of_router(model: CudaModel) -> int:
    """How many logits a router has; 0: there is none."""
    return max(mlp.logits for mlp in model.mlps)


def _ends_of_segments(model: CudaModel, kernels: Kernels) -> list[bool]:
    """Whether the y of each layer lies in plain memory: it is the last of all, a change of basis follows, or the MLP
    leaves it there."""
    of_basis = [layer.basis is not None for layer in model.layers[1:]] + [True]
    return [ends or _parts_of_y(layer, 1, kernels) is None for ends, layer in zip(of_basis, model.layers, strict=True)]
