"""The buffers in which the kernels of a step leave results for each other, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparsepack.runtime.cuda.decoder.model import CudaModel
from sparsepack.runtime.cuda.driver.kernel_set import Kernels


@dataclass(frozen=True)
class Buffers:
    """The buffers of a layer, float32: [width] each in a step of one sequence, [B, width] of several.

    x       -- what the layer takes; squares: partial sums of x^2, None where the product has to add them up
    before  -- what the layer's change of basis makes x of; None: the basis stays
    qkv     -- the rows of attn_in; attn_output: what attention makes of them
    between -- x and the rows of attn_out; between_squares: as squares
    stacked -- the rows of mlp_in, where no product finishes gate and up; mid: what the two make
    y       -- between and the rows of mlp_mid: the next layer's x; squares_of_y: its squares, None for the last layer's
               and for what a change of basis follows
    reset   -- site -> the words that its product resets, as `kernels/common/flag_in_data.cuh` allows

    flag_in_data -- all are read as soon as they are stored (`flag_in_data.py`), but for stacked, before, an x without
                    squares and a y without squares_of_y: these are read when the kernel that stores them has ended
    """

    x: Tensor
    squares: Tensor | None
    qkv: Tensor
    attn_output: Tensor
    between: Tensor
    between_squares: Tensor
    stacked: Tensor
    mid: Tensor
    y: Tensor
    squares_of_y: Tensor | None
    before: Tensor | None = None
    flag_in_data: bool = False
    reset: Mapping[str, Tensor] = field(default_factory=dict)


def flag_in_data_of_one(model: CudaModel, embedded: Tensor, kernels: Kernels) -> list[Buffers]:
    """The buffers of one sequence, each read as soon as it is written, while the kernel before still ends.

    embedded -- float32 [1, hidden]: the first layer's x
    """
    a, device = model.architecture, model.device
    heads, ends = a.heads * a.head_dim, _ends_of_segments(model)
    parts = {name: kernels.blocks(site.matrix) for name, site in model.layers[0].sites.items()}  # as in all layers
    qkv_words, (qkv,) = kernels.flag_in_data_buffers([heads + 2 * a.kv_heads * a.head_dim], device)
    inside, (between, between_squares, mid) = kernels.flag_in_data_buffers(
        [a.hidden, parts["attn_out"], a.intermediate], device
    )
    # What a layer takes and mixes, and what the next one does: in turns.
    turns = [kernels.flag_in_data_buffers([a.hidden, parts["mlp_mid"], heads], device) for _ in range(2)]
    # In plain memory: what the last layer of a segment leaves, and that in the next segment's basis.
    result, changed = torch.empty(a.hidden, device=device), torch.empty(a.hidden, device=device)
    stacked = torch.empty(2 * a.intermediate, device=device)
    made = []
    for number in range(a.layers):
        words, (x, squares, attn_output) = turns[number % 2]
        y, squares_of_y, _ = turns[(number + 1) % 2][1]
        before = None
        if model.layers[number].basis is not None:
            x, before = changed, result if number else embedded[0]
        elif number == 0:
            x = embedded[0]
        begins = number == 0 or ends[number - 1]
        made.append(
            Buffers(
                x=x,
                squares=None if begins else squares,
                qkv=qkv,
                attn_output=attn_output,
                between=between,
                between_squares=between_squares,
                stacked=stacked,
                mid=mid,
                y=result if ends[number] else y,
                squares_of_y=None if ends[number] else squares_of_y,
                before=before,
                flag_in_data=True,
                reset={"attn_in": inside, "attn_out": qkv_words, "mlp_in": words},
            )
        )
    return made


def memory_of_several(model: CudaModel, embedded: Tensor, kernels: Kernels) -> list[Buffers]:
    """The buffers of several sequences. What lies there is read when the kernel before has ended, and written again
    only when its readers have (`kernels/common/common.cuh`). So one buffer of a kind is enough, and what a layer makes
    of x takes its place; a change of basis takes turns between two.

    embedded -- float32 [B, hidden]: the first layer's x
    """
    a, sequences = model.architecture, len(embedded)
    parts = {name: kernels.blocks(site.matrix) for name, site in model.layers[0].sites.items()}  # as in all layers

    def memory(width: int) -> Tensor:
        return torch.empty(sequences, width, device=model.device)

    heads = a.heads * a.head_dim
    squares = memory(parts["mlp_mid"])
    one = Buffers(
        x=embedded,
        squares=squares,
        qkv=memory(heads + 2 * a.kv_heads * a.head_dim),
        attn_output=memory(heads),
        between=embedded,
        between_squares=memory(parts["attn_out"]),
        stacked=memory(2 * a.intermediate),
        mid=memory(a.intermediate),
        y=embedded,
        squares_of_y=squares,
    )
    ends, made = _ends_of_segments(model), []
    for number, layer in enumerate(model.layers):
        if layer.basis is not None:
            other = memory(a.hidden) if one.before is None else one.before
            one = replace(one, x=other, between=other, y=other, before=one.x)
        begins = number == 0 or ends[number - 1]
        made.append(
            replace(
                one,
                squares=None if begins else squares,
                squares_of_y=None if ends[number] else squares,
                before=None if layer.basis is None else one.before,
            )
        )
    return made


def _ends_of_segments(model: CudaModel) -> list[bool]:
    """Whether each layer is the last one of all, or before a change of basis."""
    return [layer.basis is not None for layer in model.layers[1:]] + [True]
