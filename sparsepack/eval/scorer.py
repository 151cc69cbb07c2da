"""Scorers: run a transformers model, some of its positions sparse, and count what these skipped and read.

`SparseScorer` has the whole model in memory. `StreamedScorer` runs it block by block: rows of tokens wait as hidden
states while one decoder block is at work. It needs two blocks in the type of the arithmetic, the hidden states of the
rows of a call (`HIDDEN_BYTES` at most unless a single batch has more), and for the logits the output matrix as it is
stored. Both give the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from sparsepack.eval.protocols import CountingScorer, Done, Logits, TokensRead, ignored
from sparsepack.files.tensors import brought
from sparsepack.formats.orders.slide import dequantised, quantise_rows
from sparsepack.integration.transformers import double_sparsity
from sparsepack.models.activations import soft_capped
from sparsepack.models.family import MLP_SITES, Family
from sparsepack.models.hf_config import multipliers, sliding_windows
from sparsepack.models.hf_model.found_blocks import open_blocks
from sparsepack.models.hf_model.hooks import expert_hooks, site_hooks
from sparsepack.models.hf_model.model import BlockSource, backbone_of
from sparsepack.models.sites import Rules, SiteKey, SiteRule, active_channels, levels_read, sparsify
from sparsepack.models.sparse_attention import SparseAttention
from sparsepack.workers.exchange import AllGather


def wide(values: torch.Tensor) -> torch.Tensor:
    """In float64: the divergence of two sure models is a small difference of large sums. Metal knows no float64."""
    return values if values.device.type == "mps" else values.double()


class RunningSoftmax:
    """The sums of N positions over the words seen so far, all on the CPU:

    largest -- float64 [N], the largest logit;  top -- int64 [N], its word, the first of equal ones
    total   -- float64 [N], the sum of exp(logit - largest)
    """

    def __init__(self, targets: torch.Tensor) -> None:
        self._targets = targets.cpu()  # int64 [N], the words whose likelihood is asked for
        self._picked = torch.full((len(targets),), torch.nan, dtype=torch.float64)
        self.largest = torch.full((len(targets),), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros(len(targets), dtype=torch.float64)
        self.top = torch.zeros(len(targets), dtype=torch.int64)

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
        place = self._targets[part] - first
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
    each token (`formats.orders.slide`): what the kernels multiply, but for the order in which they add."""

    def rounded(layer: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
        dtype = types.get((layer, site))
        return None if dtype is None else dequantised(*quantise_rows(x, dtype)).to(x.dtype)

    if not types:
        yield
        return
    with site_hooks(blocks, family, rounded):
        yield


OfLevels = Callable[[int, str, int | None, torch.device], tuple[Sequence[torch.Tensor], Sequence[int]]]
"""The stacked matrix of a site, by block and name, as each level of its planes but the last has it: float32 [rows,
columns], on a device; and the bytes of a superblock up to the end of each plane. At a site of experts that of one of
them, as `hooks.ExpertProduct` numbers them, else None."""


def _kept(of_levels: OfLevels | None, sites: int | None) -> OfLevels | None:
    """The same function, which keeps what so many sites had last, None: all of them. Of experts it keeps nothing: they
    are too many, and decoded where they are multiplied."""
    if of_levels is None:
        return None
    kept = lru_cache(sites)(of_levels)
    return lambda *asked: (kept if asked[2] is None else of_levels)(*asked)


class SparsePositions:
    """Makes some positions of stock decoder blocks run by `rules`, and counts what they skipped.

    A site without a rule always runs dense. Counts add up until `reset`; padding is never counted. Where rules have
    levels, which `of_levels` knows the weights of, what is counted is bytes in place of channels.
    """

    def __init__(
        self, family: Family, rules: Rules, device: torch.device | str = "cpu", of_levels: OfLevels | None = None
    ) -> None:
        self.family, self._device, self._of_levels = family, torch.device(device), of_levels
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
            if rule is None or rule.of_levels:
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

        handles = [handle for layer, block in blocks for handle in self._level_hooks(layer, block, sparse, counted)]
        try:
            with site_hooks(blocks, self.family, function), ExitStack() as stack:
                for layer, block in blocks:
                    if any(self._of_experts(layer, site) for site in MLP_SITES):
                        product = partial(self._expert_product, layer, block, sparse, counted)
                        stack.enter_context(expert_hooks(block, self.family, product, layer))
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _level_hooks(
        self, layer: int, block: nn.Module, sparse: torch.Tensor, counted: torch.Tensor
    ) -> Iterator[RemovableHandle]:
        """Make the Linears of sites whose rules have levels read each channel of sparse positions at its level."""
        for site, names in self.family.of_block(block).projections_of(layer).items():
            rule = self._rules.get((layer, site))
            if rule is None or not rule.of_levels or self._of_experts(layer, site):
                continue
            assert self._of_levels is not None
            lower, ends = self._of_levels(layer, site, None, torch.device("cpu"))
            first_row = 0
            for number, name in enumerate(names):
                linear = block.get_submodule(name)
                assert isinstance(linear.weight, torch.Tensor)
                rows = slice(first_row, first_row + len(linear.weight))
                weights = [each[rows].to(linear.weight) for each in lower]
                counts = ((layer, site), ends, counted) if number == 0 else None
                yield linear.register_forward_hook(partial(self._read_levels, rule, weights, sparse, counts))
                first_row = rows.stop

    def _read_levels(
        self,
        rule: SiteRule,
        lower: Sequence[torch.Tensor],
        sparse: torch.Tensor,
        counts: tuple[SiteKey, Sequence[int], torch.Tensor] | None,
        linear: nn.Linear,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> torch.Tensor:
        """The product of a Linear, of sparse positions by the levels of its input; a forward hook."""
        x = inputs[0].view(*sparse.shape, -1)  # some stock blocks join rows and positions before their MLP
        levels = levels_read(x, rule.to(x.device).limits)
        if counts is not None:
            key, ends, counted = counts
            self._count_levels(key, levels, ends, counted.to(x.device))
        here = sparse.to(x.device)
        found = _by_levels(x[here], levels[here], [*lower, linear.weight])
        made = output.view(*sparse.shape, -1).clone()  # of dense positions it is right
        made[here] = found if linear.bias is None else found + linear.bias
        return made.view_as(output)

    def _of_experts(self, layer: int, site: str) -> bool:
        """Whether a site is of experts, by a rule that has levels."""
        rule = self._rules.get((layer, site))
        return rule is not None and rule.of_levels and self.family.of_experts(layer, site)

    def _expert_product(
        self,
        layer: int,
        block: nn.Module,
        sparse: torch.Tensor,
        counted: torch.Tensor,
        site: str,
        expert: int,
        token: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor | None:
        """The product of an expert, of sparse positions by the levels of its input (`hooks.ExpertProduct`)."""
        if not self._of_experts(layer, site):
            return None
        assert self._of_levels is not None
        names = [self.family.weight(projection) for projection in self.family.projections_of(layer)[site]]
        of_each = block.get_parameter(names[0])
        of_shared = expert == len(of_each)
        weight = torch.cat([*map(block.get_parameter, names[1:])]) if of_shared else of_each[expert]
        limits = self._rules[layer, site].limits.to(x.device)
        if limits.dim() == 3:  # the parts of a shared expert lie side by side
            limits = limits[expert:].transpose(0, 1).flatten(1) if of_shared else limits[expert]
        lower, ends = self._of_levels(layer, site, expert, x.device)
        levels = levels_read(x, limits)
        self._count_levels((layer, site), levels, ends, counted.to(x.device).flatten()[token])
        here, made = sparse.to(x.device).flatten()[token], y.clone()
        made[here] = _by_levels(x[here], levels[here], [*(each.to(weight) for each in lower), weight])
        return made

    def _count_levels(self, key: SiteKey, levels: torch.Tensor, ends: Sequence[int], counted: torch.Tensor) -> None:
        """Count the bytes that levels [..., columns] leave unread, of the vectors that are counted [...]."""
        read = torch.tensor([0, *ends], device=levels.device)[levels.long()]
        unread = torch.where(counted[..., None], ends[-1] - read, 0).sum()
        self._inactive[key] = self._inactive.get(key, 0) + unread
        self._seen[key] = self._seen.get(key, 0) + counted.sum() * levels.shape[-1] * ends[-1]

    def reset(self) -> None:
        """Forget the counts."""
        self._inactive.clear()
        self._seen.clear()

    def share(self, all_gather: AllGather) -> None:
        """Count what all workers have counted, at all of them."""
        here = [[*key, int(self._inactive[key]), int(seen)] for key, seen in self._seen.items()]
        self.reset()
        for layer, site, inactive, seen in (row for rows in all_gather(here) for row in rows):
            key = (layer, site)
            self._inactive[key] = self._inactive.get(key, 0) + torch.tensor(inactive)
            self._seen[key] = self._seen.get(key, 0) + torch.tensor(seen)

    def realised(self) -> dict[SiteKey, float]:
        """Share of inactive channels per site over all sparse positions so far; sites never sparse are absent."""
        return {key: float(self._inactive[key]) / max(float(seen), 1.0) for key, seen in self._seen.items()}


def _by_levels(x: torch.Tensor, levels: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """x W^T with each column of W as its level has it, weights[level - 1]: [n, columns] -> [n, rows]."""
    found = torch.zeros((), device=x.device, dtype=x.dtype)
    for level, weight in enumerate(weights, 1):
        found = found + functional.linear(torch.where(levels == level, x, 0), weight)
    return found


class TransformersScorer(CountingScorer):
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

    def share(self, all_gather: AllGather) -> None:
        self._positions.share(all_gather)
        self.tokens_read.share(all_gather)

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


class SparseScorer(TransformersScorer):
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
        of_levels: OfLevels | None = None,
    ) -> None:
        self.model, self.device = model, model.lm_head.weight.device
        positions = SparsePositions(family, rules, self.device, _kept(of_levels, None))
        super().__init__(model.config, positions, context, inputs, attention)
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
        scored_from: torch.Tensor | None = None,
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
        return linear(self.model.lm_head.weight[words], multipliers(self.model.config).logit_cap)


def linear(weight: torch.Tensor, cap: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with `weight` [V, H], soft-capped (`soft_capped`): [..., H] -> [..., V]."""

    @torch.inference_mode()
    def product(hidden: torch.Tensor) -> torch.Tensor:
        return soft_capped(functional.linear(hidden, weight), cap)

    return product


HIDDEN_BYTES = 128 << 20
"""The hidden states of the rows that wait together take this many bytes. Each such group reads the model once: with 128
MiB, a model 2048 wide reads its weights for 16,384 tokens, whose products take far longer than reading."""


class StreamedScorer(TransformersScorer):
    """Runs the model of `source` on a device with `rules` on the positions that are asked to be sparse; hidden states
    wait on the CPU."""

    def __init__(
        self,
        source: BlockSource,
        rules: Rules,
        context: int,
        dtype: torch.dtype = torch.float32,
        inputs: Mapping[SiteKey, torch.dtype] | None = None,
        attention: SparseAttention | None = None,
        device: str = "cpu",
        of_levels: OfLevels | None = None,
    ) -> None:
        positions = SparsePositions(source.family, rules, device, _kept(of_levels, len(source.family.projections)))
        super().__init__(source.config, positions, context, inputs, attention)
        self.source, self.steps, self.device = source, source.layers, torch.device(device)
        self._attention = attention
        self._stream = open_blocks(source, device, dtype, None if attention is None else double_sparsity.NAME)
        self._output: torch.Tensor | None = None

    def rows_at_once(self, width: int, batch: int) -> int:
        """How many rows of `width` tokens may wait together in `HIDDEN_BYTES`: one batch at least."""
        row = width * int(self.source.config.hidden_size) * self._stream.dtype.itemsize
        return max(batch, HIDDEN_BYTES // row)

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
        scored_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What enters the output matrix, [B, S, H]."""
        self._output = None
        stream, width = self._stream, input_ids.shape[1]
        parts = [slice(at, at + (batch or len(input_ids))) for at in range(0, len(input_ids), batch or len(input_ids))]
        hidden = stream.embed(input_ids)
        self.tokens_read.count(width, lengths, sparse_from)
        for layer in range(self.source.layers):
            stream.load(layer)
            if self._attention is not None:
                double_sparsity.attach_layer(stream.block, self._attention, layer)
            for part in parts:
                real = None if lengths is None else lengths[part]
                with self._sparse([(layer, stream.block)], width, real, sparse_from[part]):
                    hidden[part] = stream(hidden[part])
                done(len(hidden[part]))
        stream.unload()
        finished = hidden  # in place, unless what enters the output matrix has another width
        for number, row in enumerate(hidden):
            end = stream.finish(row)
            if end.shape[-1] != finished.shape[-1]:
                finished = hidden.new_empty(*hidden.shape[:2], end.shape[-1])
            finished[number] = end
        return finished

    def head(self, words: slice) -> Logits:
        """The output matrix stays as it is stored until `hidden` is called again."""
        if self._output is None:
            self._output = self._stream.head()
        weight = brought(self._output[words], self.device, self._stream.dtype)
        product = linear(weight, multipliers(self.source.config).logit_cap)
        return lambda hidden: product(hidden.to(self.device))
