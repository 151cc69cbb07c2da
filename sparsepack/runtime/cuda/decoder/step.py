"""One token of each sequence through the model: five kernels a layer (more where gate and up do not fill whole bands,
attention takes more than one, or the basis of the residual stream changes first), which wait for no host."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.families import SITES
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache
from sparsepack.runtime.cuda.decoder.buffers import Buffers, flag_in_data_of_one, memory_of_several
from sparsepack.runtime.cuda.decoder.model import CudaModel
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.zigzag import Input

Launch = Callable[[], object]
"""The function launches a kernel with all that the kernel takes."""


class Step:
    """The kernels of a step, put together once, when a model is loaded.

    ids    -- int32 [B]: the tokens to append; when a step has run, the likeliest next ones
    best   -- float32 [B]: their logits
    logits -- float32 [B, vocabulary]
    active -- int64 [layers, sites]: columns that were active (in any sequence), summed over steps
    state  -- int64 [layers * sites + B]: active, ids and best together, which one copy brings to the host

    together -- products of any number of sequences at once, each after the kernel before has ended. False: there is one
                sequence, and a kernel reads what the one before leaves as soon as it is written (`flag_in_data.py`)
    """

    def __init__(self, model: CudaModel, cache: CudaKvCache, kernels: Kernels, together: bool) -> None:
        a, sequences = model.architecture, len(cache.lengths)
        self._model, self._cache, self._kernels = model, cache, kernels
        self._multiply: Callable[..., None] = kernels.batch if together else kernels.gemv
        self.state = torch.zeros(a.layers * len(SITES) + sequences, dtype=torch.int64, device=model.device)
        self.active, self.ids, self.best = state_parts(self.state, sequences)
        self.logits = torch.empty(sequences, a.vocabulary, device=model.device)
        embedded = torch.empty(sequences, a.hidden, device=model.device)
        candidates = kernels.new_candidates(model.output, sequences)
        buffers = (memory_of_several if together else flag_in_data_of_one)(model, embedded, kernels)
        first = partial(kernels.embed, model.embedding, self.ids, embedded)
        last = partial(
            kernels.product,
            model.output,
            buffers[-1].y.view(sequences, -1),
            self.logits,
            norm=model.output_norm,
            eps=float(a.norm_eps),
            candidates=candidates,
        )
        end = partial(kernels.pick_likeliest, candidates, self.ids, self.best, cache.positions.there)
        self._launches: dict[bool, list[Launch]] = {}
        for sparse in (False, True):
            layers = [self._layer(number, of, sparse) for number, of in enumerate(buffers)]
            self._launches[sparse] = [first, *(launch for layer in layers for launch in layer), last, end]

    def run(self, sparse: bool) -> None:
        """Put the kernels of a step on the current stream. Sites without a rule are dense in sparse steps, too."""
        for launch in self._launches[sparse]:
            launch()

    def _layer(self, number: int, of: Buffers, sparse: bool) -> Iterator[Launch]:
        """The kernels of a decoder block."""
        layer, cache, activation = self._model.layers[number], self._cache, self._model.activation
        sequences, eps = len(cache.lengths), float(self._model.architecture.norm_eps)
        product = partial(self._product, number, of, sparse)
        if layer.basis is not None and of.before is not None:
            before, changed = of.before.view(sequences, -1), of.x.view(sequences, -1)
            yield partial(self._kernels.product, layer.basis, before, changed)
        x = Input(of.x, layer.attn_norm, eps, of.squares, flag_in_data=of.flag_in_data and of.squares is not None)
        yield product("attn_in", x, of.qkv)
        flag_in_data = of.flag_in_data and cache.flag_in_data
        attn_output = of.attn_output.view(sequences, -1)
        yield partial(cache.step, number, of.qkv.view(sequences, -1), sparse, attn_output, flag_in_data)
        attended = Input(of.attn_output, eps=eps, flag_in_data=flag_in_data)
        yield product("attn_out", attended, of.between, residual=of.x, squares=of.between_squares)
        between = Input(of.between, layer.mlp_norm, eps, of.between_squares, flag_in_data=of.flag_in_data)
        fused = layer.sites["mlp_in"].matrix.gate_bands > 0
        if fused:
            yield product("mlp_in", between, of.mid, activation=activation)
        else:
            yield product("mlp_in", between, of.stacked)
            yield partial(self._kernels.gate, of.stacked, activation, of.mid)
        mid = Input(of.mid, eps=eps, flag_in_data=of.flag_in_data and fused)
        yield product("mlp_mid", mid, of.y, residual=of.between, squares=of.squares_of_y)

    def _product(
        self, number: int, of: Buffers, sparse: bool, name: str, input: Input, y: Tensor, **more: Any
    ) -> Launch:
        """The launch of a site's product, which also counts the active columns of the site."""
        site = self._model.layers[number].sites[name]
        columns = site.sparse if sparse else site.dense
        if name in of.reset:
            more["reset"] = of.reset[name]
        return partial(
            self._multiply,
            site.matrix,
            replace(input, threshold=columns.threshold, offset=columns.offset),
            y,
            bias=columns.bias,
            active=self.active[number, SITES.index(name)],
            **more,
        )


def state_parts(state: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three views `active`, `ids` and `best` of a step's state, or of a copy of such a state."""
    active, chosen = state[:-sequences], state[-sequences:].view(torch.int32)
    return active.view(-1, len(SITES)), chosen[:sequences], chosen[sequences:].view(torch.float32)


def counted(active: Tensor) -> dict[tuple[int, str], int]:
    """The number of active columns of each (layer, site)."""
    counts = enumerate(active.flatten().tolist())
    return {(n // len(SITES), SITES[n % len(SITES)]): count for n, count in counts}
