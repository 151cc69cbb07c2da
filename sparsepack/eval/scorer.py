"""A stock transformers model with some positions of each row running sparse; here the whole of it in memory.

The softmax of logits that come a part of the vocabulary at a time, so that all of them never exist together.

Inputs of sites as a quantised product takes them: rounded, token by token, and back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sparsepack.eval.protocols import CountingScorer, Done, Logits, ignored
from sparsepack.eval.tokens_read import TokensRead
from sparsepack.formats.codecs.slide import dequantised, quantise_rows
from sparsepack.integration.transformers import double_sparsity
from sparsepack.models.architecture import logit_cap, sliding_windows
from sparsepack.models.family import Family
from sparsepack.models.records.rule import Rules, SiteKey, active_channels, sparsify
from sparsepack.models.records.sparse_attention import SparseAttention
from sparsepack.models.soft_caps import soft_capped
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.stock.whole import backbone_of
from sparsepack.workers.workers import Workers


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float64: the divergence of two sure models is a small difference of large sums. Metal knows no float64."""
    return values if values.device.type == "mps" else values.double()


class RunningSoftmax:
    """The sums of N positions over the words seen so far, all on the CPU:

    largest -- float64 [N], the largest logit;  top -- int64 [N], its word, the first of equal ones
    total   -- float64 [N], the sum of exp(logit - largest)
    """

    def __init__(self, wanted: torch.Tensor) -> None:
        self._wanted = wanted.cpu()  # int64 [N], the words whose likelihood is asked for
        self._picked = torch.full((len(wanted),), torch.nan, dtype=torch.float64)
        self.largest = torch.full((len(wanted),), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros(len(wanted), dtype=torch.float64)
        self.top = torch.zeros(len(wanted), dtype=torch.int64)

    def take(self, part: slice, first: int, logits: torch.Tensor) -> torch.Tensor:
        """Add the words from `first` on, float32 [P, words], at the positions `part`.

        Returns exp(logits - largest), the largest of all words seen so far: float32 [P, words].
        """
        values, words = (found.cpu() for found in logits.max(-1))
        before, values = self.largest[part], values.double()
        largest = torch.maximum(before, values)
        grown = torch.exp(logits - largest.to(logits)[:, None])
        self.total[part] = self.total[part] * torch.exp(before - largest) + wide(grown).sum(-1).cpu()
        self.top[part] = torch.where(values > before, words + first, self.top[part])
        self.largest[part] = largest
        place = self._wanted[part] - first
        here = (place >= 0) & (place < logits.shape[-1])
        place = place.clamp(0, logits.shape[-1] - 1).to(logits.device)
        picked = logits.gather(-1, place[:, None])[:, 0].cpu().double()
        self._picked[part] = torch.where(here, picked, self._picked[part])
        return grown

    def log_sum(self) -> torch.Tensor:
        """log of the sum of exp(logit) over the vocabulary: float64 [N]."""
        return self.largest + self.total.log()

    def nll(self) -> torch.Tensor:
        """Negative log-likelihood of the words asked for, in nats: float64 [N]."""
        return self.log_sum() - self._picked


@contextmanager
def quantised_inputs(
    blocks: Sequence[tuple[int, nn.Module]], family: Family, types: Mapping[SiteKey, torch.dtype]
) -> Iterator[None]:
    """Within the context, the (layer, block) pairs see the inputs of sites as values of these types with one scale for
    each token (`formats.codecs.slide`): what the kernels multiply, but for the order in which they add."""

    def rounded(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        dtype = types.get((layer, site))
        return None if dtype is None else dequantised(*quantise_rows(x, dtype)).to(x.dtype)

    if not types:
        yield
        return
    with site_hooks(blocks, family, rounded):
        yield


class SparsePositions:
    """Makes some positions of stock decoder blocks run by `rules`, and counts what they skipped.

    A site without a rule always runs dense. Counts add up until `reset`; padding is never counted.
    """

    def __init__(self, family: Family, rules: Rules, device: torch.device | str = "cpu") -> None:
        self.family, self._device = family, torch.device(device)
        self._rules = {key: rule.to(self._device) for key, rule in rules.items() if not rule.dense}
        self._inactive: dict[SiteKey, torch.Tensor] = {}
        self._seen: dict[SiteKey, torch.Tensor] = {}

    @contextmanager
    def within(
        self,
        blocks: Sequence[tuple[int, nn.Module]],
        width: int,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
    ) -> Iterator[None]:
        """Within the context, rows of `width` positions that pass through the (layer, block) pairs run row b sparse
        from position sparse_from[b] on; `lengths` [B] are those without padding, None where there is none."""
        positions = torch.arange(width, device=self._device)
        sparse = positions >= sparse_from.to(self._device)[:, None]  # [B, S]
        counted = sparse if lengths is None else sparse & (positions < lengths.to(self._device)[:, None])
        if not self._rules or not bool(sparse.any()):
            yield
            return

        def function(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            rule = self._rules.get((layer, site))
            if rule is None:
                return None
            # A position has one vector, or one for each of its experts. A model may be spread over several devices.
            of_each = (*counted.shape, *[1] * (x.dim() - 2))
            if rule.limits.device != x.device:
                rule = self._rules[layer, site] = rule.to(x.device)
            skips, counts = sparse.to(x.device).view(of_each), counted.to(x.device).view(of_each)
            inactive = ~active_channels(x, rule) & counts
            key = (layer, site)
            self._inactive[key] = self._inactive.get(key, 0) + inactive.sum()
            self._seen[key] = self._seen.get(key, 0) + counts.sum() * x[0, 0].numel()
            return torch.where(skips, sparsify(x, rule), x)

        with site_hooks(blocks, self.family, function):
            yield

    def reset(self) -> None:
        """Forget the counts."""
        self._inactive.clear()
        self._seen.clear()

    def share(self, workers: Workers) -> None:
        """Count what all workers have counted, at all of them."""
        here = [[*key, int(self._inactive[key]), int(seen)] for key, seen in self._seen.items()]
        self.reset()
        for layer, site, inactive, seen in (row for rows in workers.told(here) for row in rows):
            key = (layer, site)
            self._inactive[key] = self._inactive.get(key, 0) + torch.tensor(inactive)
            self._seen[key] = self._seen.get(key, 0) + torch.tensor(seen)

    def realised(self) -> dict[SiteKey, float]:
        """Share of inactive channels per site over all sparse positions so far; sites never sparse are absent."""
        return {key: float(self._inactive[key]) / max(float(seen), 1.0) for key, seen in self._seen.items()}


class StockScorer(CountingScorer):
    """What both scorers of stock models share: sparse positions by hooks at the sites, and their counts.

    inputs    -- what the inputs of sites are quantised to; see `quantised_inputs`
    attention -- which tokens those positions read; None: all
    """

    def __init__(
        self,
        config: Any,
        positions: SparsePositions,
        context: int,
        inputs: Mapping[SiteKey, torch.dtype] | None,
        attention: SparseAttention | None,
    ) -> None:
        self.context, self.vocabulary = context, int(config.vocab_size)
        self.tokens_read = TokensRead(attention, sliding_windows(config))
        self._positions, self._inputs = positions, inputs or {}

    def reset(self) -> None:
        self._positions.reset()
        self.tokens_read.reset()

    def share(self, workers: Workers) -> None:
        if workers.count > 1:
            self._positions.share(workers)
            self.tokens_read.share(workers)

    def realised(self) -> dict[SiteKey, float]:
        return self._positions.realised()

    @contextmanager
    def _sparse(
        self,
        blocks: Sequence[tuple[int, nn.Module]],
        width: int,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
    ) -> Iterator[None]:
        """Within the context, the (layer, block) pairs skip and read as deployed; see `SparsePositions.within`."""
        with (
            double_sparsity.sparse_rows(sparse_from),
            self._positions.within(blocks, width, lengths, sparse_from),
            quantised_inputs(blocks, self._positions.family, self._inputs),
        ):
            yield


class SparseScorer(StockScorer):
    """Runs `model`, the whole of it in memory, with `rules` on the positions that are asked to be sparse; the model is
    given `attention` here."""

    def __init__(
        self,
        model: Any,
        family: Family,
        rules: Rules,
        context: int,
        inputs: Mapping[SiteKey, torch.dtype] | None = None,
        attention: SparseAttention | None = None,
    ) -> None:
        self.model, self.device = model, model.lm_head.weight.device
        super().__init__(model.config, SparsePositions(family, rules, self.device), context, inputs, attention)
        if attention is not None:
            double_sparsity.attach(model, attention)

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
    ) -> torch.Tensor:
        """What enters the output matrix, [B, S, H]; all rows together, whatever `batch` is."""
        ids = input_ids.to(self.device)
        blocks = list(enumerate(backbone_of(self.model).layers))
        self.tokens_read.count(ids.shape[1], lengths, sparse_from)
        with self._sparse(blocks, ids.shape[1], lengths, sparse_from):
            # Right padding needs no attention mask: no real position looks at a later one.
            found: torch.Tensor = self.model.base_model(ids, use_cache=False).last_hidden_state
        done(len(ids))
        return found.to(self.device)  # of a model over several GPUs it is where the last block is

    def head(self, words: slice) -> Logits:
        return linear(self.model.lm_head.weight[words], logit_cap(self.model.config))


def linear(weight: torch.Tensor, cap: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with `weight` [V, H], soft-capped (`soft_capped`): [..., H] -> [..., V]."""

    @torch.inference_mode()
    def product(hidden: torch.Tensor) -> torch.Tensor:
        return soft_capped(functional.linear(hidden, weight), cap)

    return product
