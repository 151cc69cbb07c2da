"""One token through the model: nine kernels a block (two more where the basis of the residual stream changes), and four
beside them, which wait for no host.

    embedding row    embed
    for each block   attn_in     collect: the residual and what mlp_mid left, norm, active columns; zigzag_gemv
                     attention   attend: norms of heads, rotary, into the cache; chunks of the positions
                     attn_out    collect_attended: the chunks put together, active columns; zigzag_gemv
                     mlp_in      collect; zigzag_gemv
                     mlp_mid     collect_gated: activation(gate) * up, active columns; zigzag_gemv
    output matrix    collect: the last norm; rows_product
    next token       pick_likeliest

A product leaves the sums of its splits, which the next kernel adds, in a fixed order: there is no atomic sum, and no
threadgroup that waits for others.

The thresholds of a model lie side by side, so that one kernel scales them all for the threshold controller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.models.architecture import Architecture
from sparsepack.models.family import SITES
from sparsepack.runtime.chained.layer import LoadedDenseMlp, LoadedLayer, LoadedSite
from sparsepack.runtime.decoder import Columns, load_vector
from sparsepack.runtime.metal import products
from sparsepack.runtime.metal.kv_cache import MetalKvCache
from sparsepack.runtime.metal.library import Launch, new_submitter
from sparsepack.runtime.metal.products import MetalRows, MetalZigzag, Sums


class Thresholds:
    """The thresholds of sites, times a scale.

    sparse -- the columns that each site's product reads in sparse steps, in order; their thresholds are parts of one
              tensor
    scale  -- what the thresholds are multiplied by at present
    """

    def __init__(self, sites: Sequence[LoadedSite], device: torch.device) -> None:
        own = [torch.empty(0, device=device) if s.rule is None else load_vector(s.rule.limits, device) for s in sites]
        self._own = torch.cat(own)
        self._scaled = self._own.clone()
        self.scale = 1.0
        parts = torch.split(self._scaled, [len(part) for part in own])
        self.sparse = [_sparse(site, part) for site, part in zip(sites, parts, strict=True)]

    def multiply(self, scale: float) -> None:
        """Let the thresholds be the file's times a scale, compared in float32. The host waits for nothing."""
        if scale != self.scale:
            torch.mul(self._own, scale, out=self._scaled)
            self.scale = scale


def _sparse(site: LoadedSite, threshold: Tensor) -> Columns:
    if site.rule is None:
        return Columns(bias=site.bias)
    device = threshold.device
    if site.rule.of_levels:
        threshold = threshold.view(site.rule.limits.shape)
    offset = None if site.rule.offset is None else load_vector(site.rule.offset, device)
    return Columns(threshold, offset, site.sparse_bias)


BLOCKS_SUBMITTED = 8
"""After so many blocks the GPU is given what is on the stream, so that it begins while the host goes on. Nobody has
measured yet which number is best."""


@dataclass(frozen=True)
class MetalModel:
    """The loaded parts of a model. `output` is the embedding itself where the two are tied."""

    architecture: Architecture
    layers: tuple[LoadedLayer, ...]
    embedding: MetalRows
    output: MetalRows
    output_norm: Tensor

    def sites(self, number: int) -> dict[str, LoadedSite]:
        """The sites of a block, in order of execution."""
        layer = self.layers[number]
        assert isinstance(layer.mlp, LoadedDenseMlp)  # the backend's row has no other
        sites = {**layer.attention, **layer.mlp.sites}
        return {name: sites[name] for name in SITES}


class Step:
    """The kernels of a token, put together once.

    id     -- int32 [1]: the token to append; when a step has run, the likeliest next one
    best   -- float32 [1]: its logit
    active -- int32 [layers * sites]: of each site the columns that were active, summed over steps
    state  -- int32 [2 + layers * sites]: the three together, which one copy brings to the host
    logits -- float32 [vocabulary]
    """

    def __init__(self, model: MetalModel, cache: MetalKvCache) -> None:
        a, device = model.architecture, model.output_norm.device
        self._model, self._cache = model, cache
        sites = [site for number in range(a.layers) for site in model.sites(number).values()]
        matrices: list[MetalZigzag] = [site.matrix for site in sites]
        self.state = torch.zeros(2 + len(sites), dtype=torch.int32, device=device)
        self.id, self.best, self.active = state_parts(self.state)
        self.logits = torch.empty(a.vocabulary, device=device)
        # Each kernel reads what the one before it wrote, and nothing older but the residual: one of a kind is enough,
        # and two of the residual, between which it goes to and fro.
        self._residual = torch.empty(2, a.hidden, device=device)
        self._found = products.new_active_columns(max(matrix.columns for matrix in matrices), device)
        self._parts = torch.empty(max(of.config.splits * of.bands for of in matrices) * BAND_ROWS, device=device)
        self._candidates = products.new_candidates(model.output)
        self._thresholds = Thresholds(sites, device)
        self._position = 0
        self._submit = new_submitter()
        self._kernels = {sparse: [*self._token(sparse)] for sparse in (False, True)}

    @property
    def dispatches(self) -> int:
        """How many kernels a token takes."""
        return sum(kernel is not self._submit for kernel in self._kernels[True])

    def run(self, position: int, sparse: bool, scale: float = 1.0) -> None:
        """Put the kernels of a token on torch's stream. Sites without a rule are dense in sparse steps, too.

        position -- of the token
        scale    -- what thresholds are multiplied by
        """
        self._position = position
        self._thresholds.multiply(scale)
        for kernel in self._kernels[sparse]:
            kernel()

    def read(self, x: Tensor) -> None:
        """Leave the logits for what the last block makes of a position, float32 [hidden], and the likeliest token."""
        for kernel in self._end(x, None):
            kernel()

    def _token(self, sparse: bool) -> Iterator[Launch]:
        x, other = self._residual
        added: Sums | None = None  # that x lacks
        yield products.embed(self._model.embedding, self.id, x[None])
        for number, layer in enumerate(self._model.layers):
            if layer.basis is not None:
                if added is not None:
                    yield products.collect(x, self._found, added=added, total=other)
                    x, other, added = other, x, None
                yield products.rows_product(layer.basis, x, other)
                x, other = other, x
            yield from self._into(number, "attn_in", "attn_norm", x, added, other, sparse)
            if added is not None:
                x, other = other, x
            qkv = self._sums(number, "attn_in", sparse)
            yield self._attend(number, qkv)
            yield self._collect_attended(number, self._columns(number, "attn_out", sparse))
            yield self._product(number, "attn_out")
            yield from self._into(
                number, "mlp_in", "mlp_norm", x, self._sums(number, "attn_out", sparse), other, sparse
            )
            x, other = other, x
            mid, mlp = self._columns(number, "mlp_mid", sparse), self._model.architecture.blocks[number].mlp
            stacked = self._sums(number, "mlp_in", sparse)
            assert mlp is not None  # this backend lacks `ALONE`
            yield products.collect_gated(stacked, mlp.width, mlp.activation, self._found, **_which(mid))
            yield self._product(number, "mlp_mid")
            added = self._sums(number, "mlp_mid", sparse)
            if number % BLOCKS_SUBMITTED == 0:
                yield self._submit
        yield from self._end(x, added)

    def _into(
        self, number: int, name: str, norm: str, x: Tensor, added: Sums | None, total: Tensor, sparse: bool
    ) -> Iterator[Launch]:
        """The product of a site whose input is the residual x, and what is added to it, which `total` then has."""
        yield products.collect(
            x,
            self._found,
            added=added,
            norm=self._model.layers[number].norms[norm],
            eps=self._model.architecture.norm_eps,
            total=None if added is None else total,
            **_which(self._columns(number, name, sparse)),
        )
        yield self._product(number, name)

    def _end(self, x: Tensor, added: Sums | None) -> Iterator[Launch]:
        """What follows the last block."""
        norm, eps = self._model.output_norm, self._model.architecture.norm_eps
        yield products.collect(x, self._found, added=added, norm=norm, eps=eps)
        yield products.rows_product(self._model.output, self._found.values, self.logits, self._candidates)
        yield products.pick_likeliest(self._candidates, self.id, self.best)

    def _attend(self, number: int, qkv: Sums) -> Launch:
        return lambda: self._cache.step(number, qkv, self._position)()

    def _collect_attended(self, number: int, columns: Columns) -> Launch:
        which = _which(columns)
        return lambda: self._cache.collect(number, self._position, self._found, **which)()

    def _product(self, number: int, name: str) -> Launch:
        """The product of a site with the list that is there."""
        place = number * len(SITES) + SITES.index(name)
        matrix = self._model.sites(number)[name].matrix
        return products.zigzag_gemv(matrix, self._found, self._parts_of(matrix), self.active[place : place + 1])

    def _sums(self, number: int, name: str, sparse: bool) -> Sums:
        """What the product of a site left."""
        return Sums(self._parts_of(self._model.sites(number)[name].matrix), self._columns(number, name, sparse).bias)

    def _parts_of(self, matrix: MetalZigzag) -> Tensor:
        splits = matrix.config.splits
        return self._parts[: splits * matrix.bands * BAND_ROWS].view(splits, -1)

    def _columns(self, number: int, name: str, sparse: bool) -> Columns:
        if sparse:
            return self._thresholds.sparse[number * len(SITES) + SITES.index(name)]
        return Columns(bias=self._model.sites(number)[name].bias)


def _which(columns: Columns) -> dict[str, Tensor | None]:
    """What a kernel that lists active columns is told of them."""
    return {"offset": columns.offset, "threshold": columns.threshold}


def state_parts(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The views `id`, `best` and `active` of a step's state, or of a copy of such a state."""
    return state[:1], state[1:2].view(torch.float32), state[2:]
