"""The buffers of a block: what its kernels leave for each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Buffers:
    """The buffers of a layer, float32: [width] each in a step of one sequence, [B, width] of several.

    x       -- what the layer takes; squares: partial sums of x^2, None where the product has to add them up
    before  -- what the layer's change of basis makes x of; None: the basis stays
    qkv     -- the rows of attn_in; attn_output: what attention makes of them
    between -- x and the rows of attn_out, or of models with post norms the norm of these; between_squares: as squares
    mid     -- what the gate and up of mlp_in make, or both, gate first, where the product does not finish them; of an
               MLP by neurons the rows of the gate, of a mixture those of each of the token's experts
    logits  -- of a mixture's router; None: no experts
    y       -- between and what the MLP adds: the next layer's x; squares_of_y: its squares, None for the last layer's,
               for what a change of basis follows, and where the MLP leaves none
    normed  -- the rows of attn_in, queries and keys normed, which attention takes where the model norms them over all
               heads together; None: it takes qkv
    updates -- of models with post norms, what attention and the MLP add before it is normed; None: it is not
    reset   -- name of a matrix -> the words that its product resets, as `kernels/common/flag_in_data.cuh` allows

    flag_in_data -- all are read as soon as they are stored (`flag_in_data.py`), but for before, an x without squares
                    and a y without squares_of_y: these are read when the kernel that stores them has ended
    """

    x: Tensor
    squares: Tensor | None
    qkv: Tensor
    attn_output: Tensor
    between: Tensor
    between_squares: Tensor
    mid: Tensor
    y: Tensor
    squares_of_y: Tensor | None
    logits: Tensor | None = None
    before: Tensor | None = None
    updates: tuple[Tensor, Tensor] | None = None
    normed: Tensor | None = None
    flag_in_data: bool = False
    reset: Mapping[str, Tensor] = field(default_factory=dict)
