"""A block's step as its MLP sees it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparsepack.runtime.cuda.decoder.block_buffers import Buffers
from sparsepack.runtime.cuda.products.zigzag_products import Input

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
