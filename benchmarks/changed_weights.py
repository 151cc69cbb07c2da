"""A model's weights with some of them replaced, as what an evaluation reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ChangedWeights:
    """A source of weights, such as a checkpoint, with other tensors for those in `changed`, by Hugging Face name."""

    source: Any
    changed: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name."""
        found = self.changed.get(name)
        own: Tensor = self.source.tensor(name) if found is None else found
        return own
