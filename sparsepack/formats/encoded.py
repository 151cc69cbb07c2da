"""A site's matrix as an artifact will have it: for who chooses its values before the artifact is planned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsepack.reconstruction import Inputs


@dataclass(frozen=True)
class EncodedSite:
    """One site, its projections' rows stacked.

    tensors -- the bytes that are stored, by the names of the artifact's tensors: uint8, of any shape; none of a matrix
               that the format keeps as it is
    weight  -- what is stored, decoded: float32 [rows, columns]
    rows    -- which rows of `weight` each tensor that holds weights has, by its name: a slice, or their numbers
    """

    tensors: Mapping[str, Tensor]
    weight: Tensor
    rows: Mapping[str, slice | Tensor]


SiteEncoder = Callable[[int, str, Tensor, Inputs | None], EncodedSite]
"""The function takes (layer, site, weight float32 [rows, columns], inputs). With inputs, weights make up for each
other's errors; with None each is rounded by itself.

It raises `PackingError` for weights that cannot be encoded, `SingularError` as `Inputs.inverse_factor`."""

Encoded = Mapping[str, Callable[[], Tensor]]
"""By the names of an artifact's tensors, what gives their bytes."""
