"""The blocks of a model in order, for a step and for prefill.

Step     one token of each sequence: five kernels a layer (more where attention takes more than one, or
         the basis of the residual stream changes first; two more with post norms or LayerNorms, one with norms of all
         heads together or of experts apart), which wait for no host
Prefill  many positions of a sequence at once, every site dense. Short prompts, which would wait for the host, are CUDA
         graphs from their second time on
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import LATENT_EPS, Attention
from sparsepack.runtime.cuda.attention.attention import BACKENDS
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache, CudaLatentKvCache
from sparsepack.runtime.cuda.attention.latents import latent_parts, of_ones
from sparsepack.runtime.cuda.attention.states import States
from sparsepack.runtime.cuda.decoder.buffers import (
    Buffers,
    FilledUp,
    LatentBuffers,
    Launch,
    MlpPrompt,
    MlpStep,
    batch_buffers,
    single_buffers,
)
from sparsepack.runtime.cuda.decoder.model import CudaLayer, CudaModel
from sparsepack.runtime.cuda.decoder.sites import CudaExpertsSite, CudaSite
from sparsepack.runtime.cuda.decoder.step_end import CudaThresholdController, new_cuda_controller
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag import SCRATCH_BYTES
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output
from sparsepack.runtime.threshold_controller import ThresholdController


class Step:
    """The kernels of a step, put together once, when a model is loaded.

    ids    -- int32 [B]: the tokens to append; when a step has run, the likeliest next ones
    best   -- float32 [B]: their logits
    logits -- float32 [B, vocabulary]
    active -- int64 [layers, names]: of each matrix the units that were active (in any sequence), summed over steps;
              units as `PackedMatrix` has them
    controller -- of the thresholds of each sequence; None: they are not controlled
    state  -- int64 [layers * names + 2 B]: active, ids, best and what lasts of `controller` together, which one copy
              brings to the host

    together -- products of any number of sequences at once, each after the kernel before has ended. False: there is one
                sequence, MLPs have `flag_in_data`, and a kernel reads what the one before leaves as soon as it is
                written (`driver/memory.py`)
    """

    def __init__(self, model: CudaModel, cache: CudaKvCache, states: States, kernels: Kernels, together: bool) -> None:
        a, sequences = model.architecture, len(cache.lengths)
        self._model, self._cache, self._states, self._kernels = model, cache, states, kernels
        self._cached, self._together = _cached_layers(a), together
        self._multiply: Callable[..., None] = kernels.batch if together else kernels.gemv
        self.state = torch.zeros(a.layers * len(model.names) + 2 * sequences, dtype=torch.int64, device=model.device)
        self.active, self.ids, self.best, self.lasting = state_parts(self.state, sequences)
        self.active = self.active.view(a.layers, -1)
        self.controller: CudaThresholdController | None = None
        self.logits = torch.empty(sequences, a.vocabulary, device=model.device)
        embedded = torch.empty(sequences, a.hidden, device=model.device)
        candidates = kernels.new_candidates(model.output, sequences)
        self._workspace = model.layers[0].mlp.new_workspace(sequences, kernels)
        self._buffers = (batch_buffers if together else single_buffers)(model, embedded, kernels)
        self._zeros = torch.zeros(sequences, a.hidden, device=model.device) if model.post_norms else None
        self._first = partial(kernels.embed, model.embedding, self.ids, embedded, a.embedding_scale)
        last, norm = self._buffers[-1].y.view(sequences, -1), model.output_norm
        product = partial(kernels.product, model.output, cap=float(a.logit_cap), candidates=candidates)
        self._last: list[Launch] = [partial(product, last, self.logits, norm=norm, eps=float(a.norm_eps))]
        if model.output_norm_bias is not None:
            centred, norms = torch.empty_like(last), (norm, model.output_norm_bias)
            self._last = [
                partial(kernels.layer_norm, last, norms, float(a.norm_eps), centred),
                partial(product, centred, self.logits),
            ]
        self._end = partial(kernels.pick_likeliest, candidates, self.ids, self.best, cache.positions.there)
        self._launches = {sparse: self._put_together(sparse) for sparse in (False, True)}

    def control_thresholds(self, controller: ThresholdController) -> CudaThresholdController:
        """Control thresholds from the first sparse step on."""
        block = self._model.layers[0].attention["attn_in"].matrix.block
        self.controller = new_cuda_controller(controller, self.lasting, block)
        self._launches[True] = self._put_together(sparse=True)
        return self.controller

    def _put_together(self, sparse: bool) -> list[Launch]:
        layers = [self._layer(number, of, sparse) for number, of in enumerate(self._buffers)]
        end = partial(self._end, controller=self.controller) if sparse else self._end
        return [self._first, *(launch for layer in layers for launch in layer), *self._last, end]

    def run(self, sparse: bool) -> None:
        """Put the kernels of a step on the current stream. Sites without a rule are dense in sparse steps, too."""
        for launch in self._launches[sparse]:
            launch()

    def _layer(self, number: int, of: Buffers, sparse: bool) -> Iterator[Launch]:
        """The kernels of a decoder block."""
        layer, cache = self._model.layers[number], self._cache
        sequences, eps = len(cache.lengths), float(self._model.architecture.norm_eps)
        product = partial(self._product, number, of, sparse)
        if layer.basis is not None and of.before is not None:
            before, changed = of.before.view(sequences, -1), of.x.view(sequences, -1)
            yield partial(self._kernels.product, layer.basis, before, changed)
        squares = None if layer.attn_norm is None else of.squares
        x = Input(of.x, layer.attn_norm, eps, squares, flag_in_data=of.flag_in_data and of.squares is not None)
        if layer.layer_norms is not None and of.layer_normed is not None:
            yield self._layer_norm(x, layer.layer_norms[0], of.layer_normed[0])
            x = Input(of.layer_normed[0], eps=eps, flag_in_data=of.flag_in_data)
        yield product("attn_in", layer.attention["attn_in"], x, of.qkv)
        mixer = self._states.blocks.get(number)
        flag_in_data = of.flag_in_data and (mixer is not None or cache.flag_in_data)
        qkv, attn_output = (x.view(sequences, -1) for x in (of.qkv, of.attn_output))
        if layer.row_norms is not None and of.normed is not None:
            normed = of.normed.view(sequences, -1)
            yield partial(self._kernels.norm_rows, qkv, layer.row_norms, eps, normed, flag_in_data=of.flag_in_data)
            qkv = normed
        if of.latent is not None:
            yield from self._latents(layer, of, of.latent, product, self._active(number, "attn_kv_b"))
            qkv = of.latent.qkv.view(sequences, -1)
        if layer.latents is not None and of.latent is not None:
            mixed = of.latent.kv.view(sequences, -1)
            yield partial(cache.step, self._cached[number], qkv, sparse, mixed, flag_in_data)
            yield partial(self._kernels.latent_outputs, layer.latents, mixed, attn_output, flag_in_data=of.flag_in_data)
        elif mixer is None:
            yield partial(cache.step, self._cached[number], qkv, sparse, attn_output, flag_in_data)
        else:
            positions, flagged = cache.positions.there, of.flag_in_data
            yield partial(mixer.step, self._kernels, qkv, x, positions, attn_output, flag_in_data=flagged)
        attended, out = Input(of.attn_output, eps=eps, flag_in_data=flag_in_data), layer.attention["attn_out"]
        between_squares = None if layer.mlp_norm is None else of.between_squares
        between = Input(of.between, layer.mlp_norm, eps, between_squares, flag_in_data=of.flag_in_data)
        of_mlp = MlpStep(of, between, product, partial(self._active, number), layer.activation, sparse)
        if layer.post_norms is None or of.updates is None or self._zeros is None:
            yield product("attn_out", out, attended, of.between, residual=of.x, squares=of.between_squares)
            if layer.layer_norms is not None and of.layer_normed is not None:
                yield self._layer_norm(between, layer.layer_norms[1], of.layer_normed[1])
                centred = Input(of.layer_normed[1], eps=eps, flag_in_data=of.flag_in_data)
                of_mlp = replace(of_mlp, input=centred)
            yield from layer.mlp.step(of_mlp, self._workspace, self._kernels)
            return
        after_attention, after_mlp = layer.post_norms
        of_attention, of_the_mlp, *of_shared = of.updates
        yield product("attn_out", out, attended, of_attention)
        flag_in_data = of.flag_in_data
        yield self._post_norm(of_attention, of.x, after_attention, of.between, between_squares, flag_in_data)
        # The MLP adds what it makes to nothing.
        alone = replace(of, between=self._zeros.view_as(of.between), y=of_the_mlp, squares_of_y=None)
        yield from layer.mlp.step(replace(of_mlp, of=alone), self._workspace, self._kernels)
        flag_in_data = flag_in_data and layer.mlp.parts(sequences, self._kernels) is not None
        squares_of_y = None if layer.attn_norm is None else of.squares_of_y  # blocks are alike in that
        launch = self._post_norm(of_the_mlp, of.between, after_mlp, of.y, squares_of_y, flag_in_data)
        if layer.expert_norms is not None:
            launch = partial(launch, sums=(of_shared[0].view(sequences, -1), *layer.expert_norms))
        yield partial(launch, scale=layer.scalar)

    def _latents(
        self, layer: CudaLayer, of: Buffers, to: LatentBuffers, product: Callable[..., Launch], active: Tensor
    ) -> Iterator[Launch]:
        """The kernels that make queries, keys and values of what attn_in leaves."""
        a, norms, count, flag = self._model.architecture, layer.latent_norms, len(self.ids), of.flag_in_data
        assert a.latent is not None
        assert norms is not None
        q, kv, turning = latent_parts(a.latent, a.heads, to.normed, count)
        widths = (q.shape[1], kv.shape[1], turning.shape[1])
        normed = partial(self._kernels.norm_latents, of.qkv.view(count, -1), norms, widths, LATENT_EPS, to.normed)
        yield partial(normed, flag_in_data=flag)
        if to.queries is not None:
            x = Input(q if self._together else q[0], flag_in_data=flag)
            yield product("attn_q_b", layer.attention["attn_q_b"], x, to.queries)
            q = to.queries.view(count, -1)
        if layer.latents is not None:
            queries = partial(self._kernels.latent_queries, layer.latents, q, kv, turning, to.qkv.view(count, -1))
            yield partial(queries, active=active, flag_in_data=flag)
            return
        x = Input(kv if self._together else kv[0], flag_in_data=flag)
        yield product("attn_kv_b", layer.attention["attn_kv_b"], x, to.kv)
        join = partial(
            self._kernels.join_latents, a.latent, a.heads, of_ones(q), of_ones(to.kv.view(count, -1)), turning
        )
        yield partial(join, to.qkv.view(count, -1), flag_in_data=flag)

    def _layer_norm(self, x: Input, norm: tuple[Tensor, Tensor], y: Tensor) -> Launch:
        """The launch that makes y the LayerNorm of x."""
        rows = len(self.ids)
        launch = partial(self._kernels.layer_norm, x.x.view(rows, -1), norm, x.eps, y.view(rows, -1))
        return partial(launch, flag_in_data=x.flag_in_data)

    def _post_norm(
        self, update: Tensor, x: Tensor, norm: Tensor, y: Tensor, squares: Tensor | None, flag_in_data: bool
    ) -> partial[None]:
        """The launch that adds an update to x, normed."""
        rows, eps = len(self.ids), float(self._model.architecture.norm_eps)
        update, x, y = (of.view(rows, -1) for of in (update, x, y))
        launch = partial(self._kernels.post_norm, update, x, norm, eps, y, squares=squares)
        return partial(launch, flag_in_data=flag_in_data)

    def _product(
        self,
        number: int,
        of: Buffers,
        sparse: bool,
        name: str,
        site: CudaSite | CudaExpertsSite,
        input: Input,
        y: Tensor,
        by: Callable[..., None] | None = None,
        **more: Any,
    ) -> Launch:
        """The launch of a site's product, which also counts the site's active columns under a name. by: what launches
        it; None: what launches products with one matrix"""
        columns = site.sparse if sparse else site.dense
        input = replace(input, threshold=columns.threshold, offset=columns.offset)
        if self.controller is not None and not input.dense:
            input = replace(input, scales=self.controller.scales, skipped=self.controller.skipped)
        output = Output(y, columns.bias, active=self._active(number, name), reset=of.reset.get(name), **more)
        if isinstance(site, CudaSite) and site.offloaded is not None:
            return partial(self._kernels.multiply_offloaded, site.offloaded, self._multiply, input, output)
        return partial(by or self._multiply, site.matrix, input, output)

    def _active(self, number: int, name: str) -> Tensor:
        return self.active[number, self._model.names.index(name)]


def state_parts(state: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The views `active` (flat), `ids`, `best` and `lasting` of a step's state, or of a copy of such a state. lasting:
    float32 [2, B], scales and steps of the threshold controller."""
    active, chosen, lasting = state[: -2 * sequences], state[-2 * sequences : -sequences], state[-sequences:]
    ids, best = chosen.view(torch.int32)[:sequences], chosen.view(torch.float32)[sequences:]
    return active, ids, best, lasting.view(torch.float32).view(2, sequences)


def count_active(
    active: Tensor, names: Sequence[str], per_sequence: Collection[tuple[int, str]] = (), sequences: int = 1
) -> dict[tuple[int, str], int]:
    """The number of active units of each (layer, name), from `active` of a step or of its state.

    per_sequence -- of which those of each of so many sequences are counted: the mean is taken
    """
    counts = enumerate(active.flatten().tolist())
    found = {(n // len(names), names[n % len(names)]): count for n, count in counts}
    return {key: count // sequences if key in per_sequence else count for key, count in found.items()}


FILLED_UP = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""A sequence's first prompt is filled up to so many positions, and recorded when one of that size comes again: the host
takes longer to launch its kernels than a GPU to compute them. What comes first is filled up, too: it has the same
bits."""
_ROOMS = (4, 16)
"""There is room for so many times as many positions of an expert as each has in the mean, and where one has more, for
the next number. If even that is too little, the host waits for how many they are."""


@dataclass
class _FilledUp:
    """A prompt of a size: `run` makes hidden, float32 [S, hidden], of ids, int32 [S]."""

    ids: Tensor
    filled: FilledUp
    hidden: Tensor
    run: Callable[[], None]
    ran: bool = False
    graph: torch.cuda.CUDAGraph | None = None


class Prefill:
    """The blocks of a model over many positions at once. Every position takes about 15 bytes * intermediate of memory,
    of a mixture 4 bytes * (3 * width + hidden) for each of its experts. Weights in float16 take at most so many bytes
    (None: `zigzag.SCRATCH_BYTES`, or of a mixture of experts about a sixteenth of what all of these take where that is
    more), which are kept.

    record -- whether short prompts are recorded, whose memory is kept, too
    """

    def __init__(
        self,
        model: CudaModel,
        cache: CudaKvCache,
        states: States,
        kernels: Kernels,
        most: int | None = None,
        record: bool = False,
    ) -> None:
        self._model, self._cache, self._states, self._kernels = model, cache, states, kernels
        self._cached = _cached_layers(model.architecture)
        matrices = [site.matrix for layer in model.layers for site in layer.attention.values()]
        matrices += [matrix for layer in model.layers for matrix in layer.mlp.matrices]
        decoded = max(layer.mlp.decoded for layer in model.layers)
        if most is None and model.architecture.experts is not None:
            # Groups of experts are launched one after the other, and short prompts wait for the launches.
            most = max(SCRATCH_BYTES, len(model.layers) * decoded // 16)
        self._scratch = kernels.new_scratch(matrices, model.device, decoded, most)
        self._longest = cache.filled_up if record else 0
        self._prompts: dict[tuple[int, int, int], _FilledUp] = {}  # by positions, sequence and room
        self._memory = (kernels.new_stream(), kernels.new_graph_pool()) if self._longest else None

    def run(self, ids: Tensor, sequence: int) -> Tensor:
        """Append tokens int32 [S], on the GPU, to one of the cache's sequences. Returns what the last block leaves,
        before the output norm: float32 [S, hidden], which lasts until the next run."""
        self._states.check(self._cache.lengths, [sequence])
        self._states.begin_prefill(sequence)
        size = next((size for size in FILLED_UP if len(ids) <= size <= self._longest), None)
        if size is None or self._cache.lengths[sequence]:
            hidden = self._blocks(ids, sequence)
        else:
            hidden = self._short(ids, size, sequence)
        self._cache.advance(len(ids), sequence)
        self._states.prefilled(sequence, self._cache.lengths[sequence])
        return hidden

    def _short(self, ids: Tensor, size: int, sequence: int) -> Tensor:
        for room in self._rooms(size):
            key = size, sequence, room
            made = self._prompts.get(key) or self._prompts.setdefault(key, self._filled_up(ids, *key))
            made.ids[: len(ids)].copy_(ids)
            made.filled.count.fill_(len(ids))
            if made.graph is not None:
                self._kernels.replay(made.graph)
            elif made.ran and self._memory is not None:
                made.graph = self._kernels.capture_graph(made.run, *self._memory)  # which runs it, too
            else:
                made.run()
                made.ran = True
            if not room or not made.filled.missed:
                return made.hidden[: len(ids)]
        return self._blocks(ids, sequence)

    def _rooms(self, size: int) -> list[int]:
        """For how many positions of an expert there is room; 0: nobody asks."""
        experts = self._model.architecture.experts
        if experts is None or not any(layer.mlp.has_rooms for layer in self._model.layers):
            return [0]
        return [min(size, max(16, -(-times * size * experts.used // experts.count))) for times in _ROOMS]

    def _filled_up(self, ids: Tensor, size: int, sequence: int, room: int) -> _FilledUp:
        padded, count = ids.new_zeros(size), ids.new_zeros(1)
        filled = FilledUp(count, room, torch.zeros_like(count, dtype=torch.bool))
        hidden = torch.empty(size, self._model.architecture.hidden, device=ids.device)

        def run() -> None:
            filled.missed.zero_()
            hidden.copy_(self._blocks(padded, sequence, filled))

        return _FilledUp(padded, filled, hidden, run)

    def _blocks(self, ids: Tensor, sequence: int, filled: FilledUp | None = None) -> Tensor:
        model, kernels, eps = self._model, self._kernels, self._model.architecture.norm_eps
        x = torch.empty(len(ids), model.architecture.hidden, device=model.device)
        kernels.embed(model.embedding, ids, x, model.architecture.embedding_scale)
        update: Product | None = None  # that x still lacks
        update_norm: Tensor | None = None  # which comes before
        scalar = 1.0  # which comes behind
        with sdpa_kernel(BACKENDS):
            for number, layer in enumerate(model.layers):
                if layer.basis is not None:
                    if update is not None:
                        kernels.add(x, update, update_norm, eps, scalar)
                    x, update, update_norm = kernels.matmul(layer.basis, x), None, None
                after_attention, after_mlp = layer.post_norms or (None, None)
                (attn_norm, attn_bias), (mlp_norm, mlp_bias) = layer.layer_norms or (
                    (layer.attn_norm, None),
                    (layer.mlp_norm, None),
                )
                normed = kernels.to_scaled_fp16(x, update, attn_norm, eps, update_norm, attn_bias, scalar)
                attn_output = self._attention(number, normed, sequence, filled)
                update = self._product(layer, "attn_out", kernels.to_scaled_fp16(attn_output))
                normed = kernels.to_scaled_fp16(x, update, mlp_norm, eps, after_attention, mlp_bias)
                update, update_norm, scalar = self._mlp(layer, normed, x, filled), after_mlp, layer.scalar
        if update is not None:
            kernels.add(x, update, update_norm, eps, scalar)
        return x

    def _attention(self, number: int, x: ScaledFp16, sequence: int, filled: FilledUp | None) -> Tensor:
        """Append q, k and v to the cache, or go on with a state. Returns what attn_out takes: float32 [S, columns]."""
        layer = self._model.layers[number]
        qkv, keeps = self._product(layer, "attn_in", x), self._states.blocks.get(number)
        if keeps is not None:
            first, counted = self._cache.lengths[sequence], None if filled is None else filled.count
            return keeps.prefill(self._kernels, qkv, x, first, sequence, counted)
        if layer.row_norms is not None:
            qkv = self._kernels.norm_prefill_rows(qkv, layer.row_norms, self._model.architecture.norm_eps)
        if layer.latent_norms is not None:
            latents = self._latents(layer, layer.latent_norms, qkv)
            if isinstance(self._cache, CudaLatentKvCache):
                return self._latent_prompt(layer, self._cache, self._cached[number], latents, sequence)
            qkv = of_ones(self._heads(layer, *latents))
        cached, mixer = self._cached[number], self._model.architecture.blocks[number].mixer
        q = self._cache.append(cached, qkv, sequence)
        attended = self._cache.attend(cached, q, sequence)
        gated = isinstance(mixer, Attention) and mixer.gated
        return attended * _gates(qkv, self._model.architecture) if gated else attended

    def _latents(
        self, layer: CudaLayer, norms: tuple[Tensor | None, Tensor], rows: Product
    ) -> tuple[Product, Tensor, Tensor]:
        """Queries, latents of keys and values, normed, and the part of keys that turns, of what attn_in gives."""
        a, kernels, count = self._model.architecture, self._kernels, len(rows.sums)
        assert a.latent is not None
        normed = torch.empty_like(rows.sums)
        q, kv, turning = latent_parts(a.latent, a.heads, normed, count)
        kernels.norm_latents(rows, norms, (q.shape[1], kv.shape[1], turning.shape[1]), LATENT_EPS, normed)
        queries = of_ones(q)
        if "attn_q_b" in layer.attention:
            queries = self._product(layer, "attn_q_b", kernels.to_scaled_fp16(q))
        return queries, kv, turning

    def _heads(self, layer: CudaLayer, queries: Product, latents: Tensor, turning: Tensor) -> Tensor:
        """Queries, keys and values of all heads: float32 [S, 3 * heads * head_dim]."""
        a = self._model.architecture
        assert a.latent is not None
        of_kv = self._product(layer, "attn_kv_b", self._kernels.to_scaled_fp16(latents))
        qkv = torch.empty(len(latents), 3 * a.heads * a.head_dim, device=latents.device)
        self._kernels.join_latents(a.latent, a.heads, queries, of_kv, turning, qkv)
        return qkv

    def _latent_prompt(
        self,
        layer: CudaLayer,
        cache: CudaLatentKvCache,
        number: int,
        latents: tuple[Product, Tensor, Tensor],
        sequence: int,
    ) -> Tensor:
        """Append latents, and attend by the keys and values that attn_kv_b makes of all of them."""
        before = None
        if cache.lengths[sequence]:
            cached, turned = cache.latents(number, sequence)
            none = of_ones(latents[0].sums.new_zeros(len(cached), latents[0].sums.shape[1]))
            before = self._heads(layer, none, cached, turned)
        cache.append_latents(number, *latents[1:], sequence)
        return cache.attend_prompt(number, of_ones(self._heads(layer, *latents)), before, sequence)

    def _mlp(self, layer: CudaLayer, normed: ScaledFp16, x: Tensor, filled: FilledUp | None) -> Product:
        """What the MLP adds to x that it has not added itself: all of it where that is normed first."""
        output = x if layer.post_norms is None else torch.zeros_like(x)
        prompt = MlpPrompt(normed, output, layer.activation, self._scratch, filled)
        update = layer.mlp.prefill(prompt, self._kernels)
        if layer.post_norms is None:
            return update
        self._kernels.add(output, update)
        return Product(output, torch.ones(len(x), device=x.device), 1.0, None)

    def _product(self, layer: CudaLayer, name: str, x: ScaledFp16) -> Product:
        site = layer.attention[name]
        return self._kernels.multiply(site.matrix, x, self._scratch, site.dense.bias)


def _cached_layers(architecture: Architecture) -> dict[int, int]:
    """The number that each layer with keys and values has among those."""
    return {layer: number for number, layer in enumerate(architecture.attention_layers)}


def _gates(qkv: Product, architecture: Architecture) -> Tensor:
    """What the outputs of attention are multiplied by: float32 [S, heads * head_dim]."""
    heads, head_dim = architecture.heads, architecture.head_dim
    of_heads = qkv.part(0, 2 * heads * head_dim)
    rows = of_heads.sums * (of_heads.factor * of_heads.inverse)[:, None]
    rows = rows if of_heads.bias is None else rows + of_heads.bias
    gates: Tensor = torch.unflatten(rows, 1, (heads, 2, head_dim))[:, :, 1]
    return gates.flatten(1).sigmoid()
