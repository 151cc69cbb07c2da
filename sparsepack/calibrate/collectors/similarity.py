"""How alike the residual streams are that enter a block and the next one: their cosine, position by position.

Double Sparsity-Offload guesses the next block's query from what enters this one (section 5, appendix B.2), and fetches
the tokens that it will read; a block whose input is not like that of the one before must not be fetched for so.
"""

import torch
from torch import Tensor

from sparsepack.calibrate.collectors.collector import Collector


def _count(entering: Tensor, leaving: Tensor) -> tuple[Tensor, ...]:
    cosines = torch.cosine_similarity(entering.to(leaving.device).float(), leaving.float(), dim=-1)
    positions = torch.tensor([float(cosines.numel())], dtype=torch.float64)
    return cosines.sum(dtype=torch.float64).cpu()[None], positions


SIMILARITY = Collector(
    "block",
    ("next_similarity", "next_similarity_positions"),
    torch.float64,
    (1,),
    _count,
    signed=True,
    added_later=True,
)
"""float64 [1]: the sum over positions of the cosine, and how many positions."""
