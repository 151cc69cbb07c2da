"""How many of the tokens that they see the decoded positions of an evaluation read (Double Sparsity)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from sparsepack.models.records.sparse_attention import SparseAttention
from sparsepack.workers.workers import Workers


class TokensRead:
    """Counts what sparse positions see and read. Every implementation reads exactly the policy's budget, so that the
    positions are all that must be known.

    attention -- of the model; None: every position reads all that it sees
    windows   -- per layer, tokens that a position sees at most; 0: all
    """

    def __init__(self, attention: SparseAttention | None, windows: Sequence[int]) -> None:
        self._attention, self._windows = attention, windows
        self.reset()

    def reset(self) -> None:
        """Forget the counts."""
        self._seen: Counter[int] = Counter()
        self._read: Counter[int] = Counter()

    def count(self, width: int, lengths: torch.Tensor | None, sparse_from: torch.Tensor) -> None:
        """Count rows of `width` positions, of which row b is sparse from sparse_from[b] on; `lengths` [B] are those
        without padding, None where there is none."""
        if self._attention is None:
            return
        stops = [width] * len(sparse_from) if lengths is None else lengths.tolist()
        for (start, stop), times in Counter(zip(sparse_from.tolist(), stops, strict=True)).items():
            for window in set(self._windows):
                seen = [min(n, window or n) for n in range(start + 1, stop + 1)]
                self._seen[window] += times * sum(seen)
                self._read[window] += times * sum(map(self._attention.policy.budget, seen))

    def share(self, workers: Workers) -> None:
        """Count what all workers have counted, at all of them."""
        said = workers.told([[*self._seen.items()], [*self._read.items()]])
        self.reset()
        for seen, read in said:
            self._seen.update(dict(seen))
            self._read.update(dict(read))

    def result(self) -> dict[str, Any] | None:
        """For results: the shares of the tokens seen that were read, beside the policy's `target`; None where the model
        reads all, or no position was sparse.

        of_sparse_layers, overall -- without dense layers, and with them
        """
        if self._attention is None or not self._seen.total():
            return None
        layers = list(zip(self._attention.channels, self._windows, strict=True))
        seen = [self._seen[window] for _, window in layers]
        read = [(self._seen if channels is None else self._read)[window] for channels, window in layers]
        sparse = [n for n, (channels, _) in enumerate(layers) if channels is not None]
        of_sparse = sum(read[n] for n in sparse) / sum(seen[n] for n in sparse) if sparse else 1.0
        return {
            "target": float(self._attention.policy.tokens),
            "of_sparse_layers": of_sparse,
            "overall": sum(read) / sum(seen),
        }
