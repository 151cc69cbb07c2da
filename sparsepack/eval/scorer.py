"""A stock transformers model with some positions of each row running sparse."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparsepack.models.families import Family
from sparsepack.models.hooks import site_hooks
from sparsepack.models.rule import Rules, SiteKey, active_channels, sparsify


class SparseScorer:
    """Runs `model` with `rules` on the positions that are asked to be sparse, and counts what they skipped.

    A site without a rule always runs dense. Counts add up until `reset`; padding is never counted.
    """

    def __init__(self, model: Any, family: Family, rules: Rules, context: int) -> None:
        self.model, self.context = model, context
        self.device: torch.device = model.lm_head.weight.device
        self._family = family
        self._rules = {key: rule.to(self.device) for key, rule in rules.items() if not rule.dense}
        self._inactive: dict[SiteKey, torch.Tensor] = {}
        self._seen: dict[SiteKey, torch.Tensor] = {}

    def logits(self, input_ids: torch.Tensor, lengths: torch.Tensor, sparse_from: torch.Tensor) -> torch.Tensor:
        """Next-token logits [B, S, V] of right-padded rows; see `eval.protocols.Scorer`."""
        return self.output(self.hidden(input_ids, lengths, sparse_from))

    @torch.inference_mode()
    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of what enters the output matrix: [..., H] -> [..., V]."""
        return self.model.lm_head(hidden)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def hidden(self, input_ids: torch.Tensor, lengths: torch.Tensor | None, sparse_from: torch.Tensor) -> torch.Tensor:
        """What enters the output matrix: [B, S, H]. `lengths` None means that there is no padding."""
        ids = input_ids.to(self.device)
        with self._sparse(ids.shape[1], lengths, sparse_from):
            # Right padding needs no attention mask: no real position looks at a later one.
            return self.model.model(ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    @contextmanager
    def _sparse(self, width: int, lengths: torch.Tensor | None, sparse_from: torch.Tensor) -> Iterator[None]:
        positions = torch.arange(width, device=self.device)
        sparse = positions >= sparse_from.to(self.device)[:, None]  # [B, S]
        counted = sparse if lengths is None else sparse & (positions < lengths.to(self.device)[:, None])
        if not self._rules or not bool(sparse.any()):
            yield
            return

        def function(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            rule = self._rules.get((layer, site))
            if rule is None:
                return None
            inactive = ~active_channels(x, rule) & counted[..., None]
            key = (layer, site)
            self._inactive[key] = self._inactive.get(key, 0) + inactive.sum()
            self._seen[key] = self._seen.get(key, 0) + counted.sum() * x.shape[-1]
            return torch.where(sparse[..., None], sparsify(x, rule), x)

        with site_hooks(list(enumerate(self.model.model.layers)), self._family, function):
            yield

    def reset(self) -> None:
        """Forget the counts."""
        self._inactive.clear()
        self._seen.clear()

    def realised(self) -> dict[SiteKey, float]:
        """Share of inactive channels per site over all sparse positions so far; sites never sparse are absent."""
        return {key: float(self._inactive[key]) / max(float(seen), 1.0) for key, seen in self._seen.items()}
