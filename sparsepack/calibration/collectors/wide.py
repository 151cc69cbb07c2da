"""Products whose sums are wider than their factors."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices, or of stacks of as many, in float32: [.., M, K] @ [.., K, N] -> [.., M, N].

    Factors of 16 bits on a GPU stay what they are, and tensor cores multiply them; else both become float32 before.
    """
    if a.device.type == "cuda" and a.dtype.itemsize == 2:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
