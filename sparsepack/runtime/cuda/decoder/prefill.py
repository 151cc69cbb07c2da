"""The blocks of a model in order for prefill: many positions of a sequence at once, every site dense. Short prompts,
which would wait for the host, are CUDA graphs from their second time on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from sparsepack.runtime.cuda.attention.attention import BACKENDS
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache
from sparsepack.runtime.cuda.attention.states import States
from sparsepack.runtime.cuda.decoder.buffers import FilledUp, MlpPrompt
from sparsepack.runtime.cuda.decoder.mlps import CudaMlp
from sparsepack.runtime.cuda.decoder.model import CudaLayer, CudaModel
from sparsepack.runtime.cuda.decoder.sites import CudaSite
from sparsepack.runtime.cuda.decoder.token_mixers import MixerPrompt, token_mixers
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag import SCRATCH_BYTES

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
        self._mixers = token_mixers(model, cache, states, kernels)
        matrices = [site.matrix for layer in model.layers for site in layer.attention.values()]
        matrices += [matrix for mlp in model.mlps for matrix in mlp.matrices]
        decoded = max(mlp.decoded for mlp in model.mlps)
        if most is None and model.architecture.experts is not None:
            # Groups of experts are launched one after the other, and short prompts wait for the launches.
            most = max(SCRATCH_BYTES, len(model.layers) * decoded // 16)
        self._scratch = kernels.new_scratch(matrices, model.device, decoded, most)
        self._longest = cache.filled_up if record else 0
        self._prompts: dict[tuple[int, int, int], _FilledUp] = {}  # by positions, sequence and room
        self._memory = (kernels.new_stream(), kernels.new_graph_pool()) if self._longest else None

    def run(self, ids: Tensor, sequence: int, last: bool = False) -> Tensor:
        """Append tokens int32 [S], on the GPU, to one of the cache's sequences. Returns what the last block leaves,
        before the output norm: float32 [S, hidden], which lasts until the next run.

        last -- the last position is enough: [1, hidden] may be returned
        """
        self._states.check(self._cache.lengths, [sequence])
        self._states.begin_prefill(sequence)
        size = next((size for size in FILLED_UP if len(ids) <= size <= self._longest), None)
        if size is None or self._cache.lengths[sequence]:
            hidden = self._blocks(ids, sequence, last=last)
        else:
            hidden = self._short(ids, size, sequence)
        self._cache.advance(len(hidden), sequence)
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
        if experts is None or not any(mlp.has_rooms for mlp in self._model.mlps):
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

    def _blocks(self, ids: Tensor, sequence: int, filled: FilledUp | None = None, last: bool = False) -> Tensor:
        """As `run`, which counts the positions that are returned; the others are counted here."""
        model, kernels, eps = self._model, self._kernels, self._model.architecture.norm_eps
        x = torch.empty(len(ids), model.architecture.hidden, device=model.device)
        kernels.embed(model.embedding, ids, x, model.architecture.embedding_scale)
        inputs = None if model.per_layer is None else model.per_layer.prefill(ids, x, kernels)
        update: Product | None = None  # that x still lacks
        update_norm: Tensor | None = None  # which comes before
        scalar = 1.0  # which comes behind
        with sdpa_kernel(BACKENDS):
            for number, layer in enumerate(model.layers):
                if last and number == model.own_layers and len(x) > 1:
                    # Layers from here on leave nothing behind.
                    if update is not None:
                        kernels.add(x, update, update_norm, eps, scalar)
                    self._cache.advance(len(x) - 1, sequence)
                    x, inputs = x[-1:].clone(), None if inputs is None else inputs[-1:]
                    update, update_norm, scalar = None, None, 1.0
                if layer.basis is not None:
                    if update is not None:
                        kernels.add(x, update, update_norm, eps, scalar)
                    x, update, update_norm = kernels.matmul(layer.basis, x), None, None
                after_attention, after_mlp = layer.post_norms or (None, None)
                (attn_norm, attn_bias), (mlp_norm, mlp_bias) = layer.layer_norms or (
                    (layer.attn_norm, None),
                    (layer.mlp_norm, None),
                )
                mixer, mlp = self._mixers[number], layer.mlp
                if mixer is not None:
                    normed = kernels.to_scaled_fp16(x, update, attn_norm, eps, update_norm, attn_bias, scalar)
                    mixed = mixer.prefill(self._prompt(layer, normed, sequence, filled))
                    update = self._multiply(
                        layer.attention["attn_out"], kernels.to_scaled_fp16(mixed, None, layer.sub_norm, eps)
                    )
                    update_norm, scalar = after_attention, layer.scalar if mlp is None else 1.0
                if mlp is not None and layer.parallel:
                    if update is not None:
                        kernels.add(x, update)
                    update, update_norm, scalar = self._mlp(layer, mlp, normed, x, filled), None, 1.0
                elif mlp is not None:
                    normed = kernels.to_scaled_fp16(x, update, mlp_norm, eps, update_norm, mlp_bias, scalar)
                    update = self._mlp(layer, mlp, normed, x, filled)
                    update_norm, scalar = after_mlp, layer.scalar
                if inputs is not None and layer.per_layer is not None and update is not None:
                    kernels.add(x, update, update_norm, eps)
                    update, update_norm = layer.per_layer.prefill(x, inputs, kernels), layer.per_layer.norm
        if update is not None:
            kernels.add(x, update, update_norm, eps, scalar)
        return x

    def _prompt(self, layer: CudaLayer, x: ScaledFp16, sequence: int, filled: FilledUp | None) -> MixerPrompt:
        """What a block's token mixer has of a prompt, x being what attn_in takes."""
        rows, counted = self._multiply(layer.attention["attn_in"], x), None if filled is None else filled.count
        return MixerPrompt(rows, x, self._multiply, sequence, counted)

    def _mlp(self, layer: CudaLayer, mlp: CudaMlp, normed: ScaledFp16, x: Tensor, filled: FilledUp | None) -> Product:
        """What the MLP adds to x that it has not added itself: all of it where that is normed first."""
        output = x if layer.post_norms is None else torch.zeros_like(x)
        prompt = MlpPrompt(normed, output, layer.activation, self._scratch, filled)
        update = mlp.prefill(prompt, self._kernels)
        if layer.post_norms is None:
            return update
        self._kernels.add(output, update)
        return Product(output, torch.ones(len(x), device=x.device), 1.0, None)

    def _multiply(self, site: CudaSite, x: ScaledFp16) -> Product:
        return self._kernels.multiply(site.matrix, x, self._scratch, site.dense.bias)
