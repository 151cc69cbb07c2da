"""Many positions through the model at once, every site dense."""

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from sparsepack.runtime.cuda.attention.attention import BACKENDS
from sparsepack.runtime.cuda.attention.kv_cache import CudaKvCache
from sparsepack.runtime.cuda.decoder.model import CudaLayer, CudaModel
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag import SCRATCH_BYTES


class Prefill:
    """The blocks of a model over many positions at once. Every position takes about 15 bytes * intermediate of memory,
    and weights in float16 take at most so many bytes (None: `zigzag.SCRATCH_BYTES`, or of a mixture of experts about a
    sixteenth of what all of these take where that is more), which are kept."""

    def __init__(self, model: CudaModel, cache: CudaKvCache, kernels: Kernels, most: int | None = None) -> None:
        self._model, self._cache, self._kernels = model, cache, kernels
        matrices = [site.matrix for layer in model.layers for site in layer.attention.values()]
        matrices += [matrix for layer in model.layers for matrix in layer.mlp.matrices]
        decoded = model.layers[0].mlp.decoded
        if most is None and model.architecture.experts is not None:
            # Groups of experts are launched one after the other, and short prompts wait for the launches.
            most = max(SCRATCH_BYTES, len(model.layers) * decoded // 16)
        self._scratch = kernels.new_scratch(matrices, model.device, decoded, most)

    def run(self, ids: Tensor, sequence: int) -> Tensor:
        """Append tokens int32 [S], on the GPU, to one of the cache's sequences. Returns what the last block leaves,
        before the output norm: float32 [S, hidden]."""
        model, kernels, eps = self._model, self._kernels, self._model.architecture.norm_eps
        x = torch.empty(len(ids), model.architecture.hidden, device=model.device)
        kernels.embed(model.embedding, ids, x, model.architecture.embedding_scale)
        update: Product | None = None  # that x still lacks
        update_norm: Tensor | None = None  # which comes before
        with sdpa_kernel(BACKENDS):
            for number, layer in enumerate(model.layers):
                if layer.basis is not None:
                    if update is not None:
                        kernels.add(x, update, update_norm, eps)
                    x, update, update_norm = kernels.matmul(layer.basis, x), None, None
                after_attention, after_mlp = layer.post_norms or (None, None)
                normed = kernels.to_scaled_fp16(x, update, layer.attn_norm, eps, update_norm)
                attn_output = self._attention(number, normed, sequence)
                update = self._product(layer, "attn_out", kernels.to_scaled_fp16(attn_output))
                normed = kernels.to_scaled_fp16(x, update, layer.mlp_norm, eps, after_attention)
                update, update_norm = self._mlp(layer, normed, x), after_mlp
        if update is not None:
            kernels.add(x, update, update_norm, eps)
        self._cache.advance(len(ids), sequence)
        return x

    def _attention(self, number: int, x: ScaledFp16, sequence: int) -> Tensor:
        """Append q, k and v to the cache. Returns attention's outputs: float32 [S, heads * head_dim]."""
        layer = self._model.layers[number]
        qkv = self._product(layer, "attn_in", x)
        if layer.row_norms is not None:
            qkv = self._kernels.normed_rows(qkv, layer.row_norms, self._model.architecture.norm_eps)
        q = self._cache.append(number, qkv, sequence)
        return self._cache.attend(number, q, sequence)

    def _mlp(self, layer: CudaLayer, normed: ScaledFp16, x: Tensor) -> Product:
        """What the MLP adds to x that it has not added itself: all of it where that is normed first."""
        if layer.post_norms is None:
            return layer.mlp.prefill(normed, x, self._model.activation, self._scratch, self._kernels)
        output = torch.zeros_like(x)
        update = layer.mlp.prefill(normed, output, self._model.activation, self._scratch, self._kernels)
        self._kernels.add(output, update)
        return Product(output, torch.ones(len(x), device=x.device), 1.0, None)

    def _product(self, layer: CudaLayer, name: str, x: ScaledFp16) -> Product:
        site = layer.attention[name]
        return self._kernels.multiply(site.matrix, x, self._scratch, site.dense.bias)
