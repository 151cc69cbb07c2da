"""The blocks of a model in order for a step: one token of each sequence.

Five kernels a layer (more where attention takes more than one, or the basis of the residual stream changes first; two
more with post norms or LayerNorms, one with norms of all heads together or of experts apart, four with an input of the
layer), which wait for no host.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache
from sparsepack.runtime.cuda.attention.states import States
from sparsepack.runtime.cuda.decoder.buffers import Buffers, Launch, MlpStep, batch_buffers, single_buffers
from sparsepack.runtime.cuda.decoder.model import CudaModel
from sparsepack.runtime.cuda.decoder.per_layer import PerLayerStep
from sparsepack.runtime.cuda.decoder.sites import CudaExpertsSite, CudaSite
from sparsepack.runtime.cuda.decoder.step_end import CudaThresholdController, new_cuda_controller
from sparsepack.runtime.cuda.decoder.token_mixers import MixerStep, token_mixers
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
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
        self._model, self._kernels = model, kernels
        self._mixers = token_mixers(model, cache, states, kernels)
        self._multiply: Callable[..., None] = kernels.batch if together else kernels.gemv
        self.state = torch.zeros(a.layers * len(model.names) + 2 * sequences, dtype=torch.int64, device=model.device)
        self.active, self.ids, self.best, self.lasting = state_parts(self.state, sequences)
        self.active = self.active.view(a.layers, -1)
        self.controller: CudaThresholdController | None = None
        self.logits = torch.empty(sequences, a.vocabulary, device=model.device)
        embedded = torch.empty(sequences, a.hidden, device=model.device)
        candidates = kernels.new_candidates(model.output, sequences)
        self._workspace = model.mlps[0].new_workspace(sequences, kernels)
        self._buffers = (batch_buffers if together else single_buffers)(model, embedded, kernels)
        self._zeros = torch.zeros(sequences, a.hidden, device=model.device) if model.post_norms else None
        self._first: list[Launch] = [partial(kernels.embed, model.embedding, self.ids, embedded, a.embedding_scale)]
        inputs = model.per_layer
        self._per_layer = None if inputs is None else PerLayerStep(inputs, self.ids, embedded, kernels)
        if self._per_layer is not None:
            self._first += self._per_layer.begin()
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
        block = next(site.matrix.block for layer in self._model.layers for site in layer.attention.values())
        self.controller = new_cuda_controller(controller, self.lasting, block)
        self._launches[True] = self._put_together(sparse=True)
        return self.controller

    def _put_together(self, sparse: bool) -> list[Launch]:
        layers = [self._layer(number, of, sparse) for number, of in enumerate(self._buffers)]
        end = partial(self._end, controller=self.controller) if sparse else self._end
        return [*self._first, *(launch for layer in layers for launch in layer), *self._last, end]

    def run(self, sparse: bool) -> None:
        """Put the kernels of a step on the current stream. Sites without a rule are dense in sparse steps, too."""
        for launch in self._launches[sparse]:
            launch()

    def _layer(self, number: int, of: Buffers, sparse: bool) -> Iterator[Launch]:
        """The kernels of a decoder block."""
        layer, mixer = self._model.layers[number], self._mixers[number]
        sequences, eps = len(self.ids), float(self._model.architecture.norm_eps)
        product = partial(self._product, number, of, sparse)
        if layer.basis is not None and of.before is not None:
            before, changed = of.before.view(sequences, -1), of.x.view(sequences, -1)
            yield partial(self._kernels.product, layer.basis, before, changed)
        squares, flag_of_x = None if layer.attn_norm is None else of.squares, of.flag_in_data and of.squares is not None
        x = Input(of.x, layer.attn_norm, eps, squares, flag_in_data=flag_of_x)
        if layer.layer_norms is not None and of.layer_normed is not None:
            yield self._layer_norm(x, layer.layer_norms[0], of.layer_normed[0])
            x = Input(of.layer_normed[0], eps=eps, flag_in_data=of.flag_in_data and not layer.parallel)
        add: Callable[..., Launch] | None = None  # what the mixer gives
        if mixer is not None:
            yield product("attn_in", layer.attention["attn_in"], x, of.qkv)
            yield from mixer.step(MixerStep(of, x, product, partial(self._active, number), sparse))
            attended = Input(of.attn_output, eps=eps, flag_in_data=of.flag_in_data and mixer.flag_in_data)
            if layer.sub_norm is not None and of.second_inputs is not None:
                rows = of.attn_output.view(sequences, -1), of.second_inputs[0].view(sequences, -1)
                launch = partial(self._kernels.activation_norm, *rows, norm=layer.sub_norm, eps=eps)
                yield partial(launch, flag_in_data=attended.flag_in_data)
                attended = Input(of.second_inputs[0], eps=eps, flag_in_data=of.flag_in_data)
            add = partial(product, "attn_out", layer.attention["attn_out"], attended)
        between_squares = None if layer.mlp_norm is None else of.between_squares
        flag_of_between = flag_of_x if mixer is None else of.flag_in_data
        between = Input(of.between, layer.mlp_norm, eps, between_squares, flag_in_data=flag_of_between)
        of_mlp = MlpStep(of, between, product, partial(self._active, number), layer.activation, sparse)
        if layer.post_norms is None or of.updates is None or self._zeros is None:
            if add is not None:
                yield add(of.between, residual=of.x, squares=of.between_squares)
            if layer.parallel:
                of_mlp = replace(of_mlp, input=x)
            elif layer.layer_norms is not None and of.layer_normed is not None:
                yield self._layer_norm(between, layer.layer_norms[1], of.layer_normed[1])
                centred = Input(of.layer_normed[1], eps=eps, flag_in_data=of.flag_in_data)
                of_mlp = replace(of_mlp, input=centred)
            if layer.mlp is not None:
                yield from layer.mlp.step(of_mlp, self._workspace, self._kernels)
            return
        assert add is not None  # what norms it adds has both parts
        assert layer.mlp is not None
        after_attention, after_mlp = layer.post_norms
        of_attention, of_the_mlp, *of_shared = of.updates
        yield add(of_attention)
        flag_in_data = of.flag_in_data
        yield self._post_norm(of_attention, of.x, after_attention, of.between, between_squares, flag_in_data)
        # The MLP adds what it makes to nothing.
        alone = replace(of, between=self._zeros.view_as(of.between), y=of_the_mlp, squares_of_y=None)
        yield from layer.mlp.step(replace(of_mlp, of=alone), self._workspace, self._kernels)
        flag_in_data = flag_in_data and layer.mlp.parts(sequences, self._kernels) is not None
        squares_of_y = None if layer.attn_norm is None else of.squares_of_y  # blocks are alike in that
        inputs, own = self._per_layer, layer.per_layer
        y, squares = (of.y, squares_of_y) if inputs is None else (inputs.unadded, None)
        launch = self._post_norm(of_the_mlp, of.between, after_mlp, y, squares, flag_in_data)
        if layer.expert_norms is not None:
            launch = partial(launch, sums=(of_shared[0].view(sequences, -1), *layer.expert_norms))
        if inputs is None or own is None:
            yield partial(launch, scale=layer.scalar)
            return
        yield launch
        yield from inputs.add(own, of.y.view(sequences, -1), squares_of_y, layer.scalar)

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
    active: Tensor,
    names: Sequence[str],
    per_sequence: Collection[tuple[int, str]] = (),
    sequences: int = 1,
    absent: Collection[tuple[int, str]] = (),
) -> dict[tuple[int, str], int]:
    """The number of active units of each (layer, name), from `active` of a step or of its state.

    per_sequence -- of which those of each of so many sequences are counted: the mean is taken
    absent       -- which there are not
    """
    counts = enumerate(active.flatten().tolist())
    found = {(n // len(names), names[n % len(names)]): count for n, count in counts}
    counted = {key: count for key, count in found.items() if key not in absent}
    return {key: count // sequences if key in per_sequence else count for key, count in counted.items()}
