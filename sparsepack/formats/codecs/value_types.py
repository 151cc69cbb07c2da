"""The types of slid values, a row each, for whoever stores, multiplies, checks or measures slid weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ValueType:
    """A type of slid values.

    name          -- a row of the table of formats gives it in `matrices`
    kind          -- of numbers, as benchmarks call it
    dtype         -- torch's type
    error_bound   -- largest relative Frobenius error of weights that the type itself can cause (`formats.verify`)
    output_bound  -- largest relative Frobenius error of a product's outputs whose inputs are rounded to the type, too
    steps         -- what the largest value of a row becomes where rows are quantised; None: values are kept as they are
    stored_as     -- the type in safetensors, one of `types.BLOCKS`; empty: the name
    """

    name: str
    kind: str
    dtype: torch.dtype
    error_bound: float
    output_bound: float
    steps: float | None = None
    stored_as: str = ""

    @property
    def stored(self) -> str:
        """The type of the values in safetensors."""
        return self.stored_as or self.name

    @property
    def scaled(self) -> bool:
        """Whether the values are quantised, with a scale for each row."""
        return self.steps is not None


VALUE_TYPES: Mapping[str, ValueType] = {
    type.name: type
    for type in (
        ValueType("I8", "INT8", torch.int8, 0.1, 0.03, steps=127.0),
        ValueType("F8_E4M3", "FP8", torch.float8_e4m3fn, 0.06, 0.06, steps=448.0),
        ValueType("BF16", "BF16", torch.bfloat16, 2**-8, 0.01),
    )
}
"""The types of slid values, by their names."""
