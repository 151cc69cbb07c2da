"""Keys, values and labels on the GPU, and attention to the tokens that the labels rank best."""

from dataclasses import replace

import torch
from torch import Tensor

from sparsepack.runtime.cuda.attention.double_sparsity import DoubleSparsityParameters
from sparsepack.runtime.cuda.attention.kv_cache import CudaDenseKvCache
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention


class CudaDoubleSparsityKvCache(CudaDenseKvCache):
    """See `CudaKvCache` and `reference.double_sparsity.DoubleSparsityKvCache`, whose labels these are.

    Steps select and attend in one kernel from `sparse_from` on, in layers whose window is not shorter than that, and
    read everything before. Labels are kept in any case, kv_heads * (R / 2 + 2) bytes for a position of a layer that is
    not dense.

    break_even -- tokens of a text below which steps read everything, whatever the policy says

    Raises `UserError` as `CudaDenseKvCache` does, and for a context that the kernel has no room for.
    """

    flag_in_data = False

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        break_even: int = 0,
    ) -> None:
        if shape.policy is None:
            raise ValueError("the shape has no policy")
        self._policy = shape.policy
        super().__init__(shape, type, device, kernels)
        self.sparse_from = first = replace(shape.policy.sparse_from, break_even=break_even)
        # The kernel reads a whole text below the break-even point only where longer ones run beside it.
        whole = (first.tokens if shape.sequences > 1 else first.min_context) - 1
        self._double_sparsity = [self._parameters(number, whole) for number in range(len(shape.layers))]

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (of := self._double_sparsity[layer]) is not None:
            self._kernels.label_append(of, self.lengths[sequence], len(queries), sequence)
        return queries

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        of, from_tokens = self._double_sparsity[layer], self.selecting(sparse)
        if of is None:
            super().step(layer, qkv, sparse, out, flag_in_data)
        elif from_tokens is None or 0 < of.dense.layer.window < from_tokens:
            super().step(layer, qkv, sparse, out, flag_in_data)
            self._kernels.label_append(of, 0, 1, positions=self.positions.there)
        else:
            self._kernels.attend_double_sparsity(of, qkv, self.positions.there, out, min_context=from_tokens)

    def copy(self, source: int, to: int, length: int) -> None:
        super().copy(source, to, length)
        for kept in (kept for of in self._double_sparsity if of is not None for kept in (of.codes, of.scales)):
            kept[to, :, :length].copy_(kept[source, :, :length])

    def _is_sparse(self, layer: LayerAttention) -> bool:
        """Whether a step ever reads a part of the tokens that it sees."""
        return layer.channels is not None and self._policy.sparse_from.within(layer.window)

    def _parameters(self, layer: int, largest_whole: int) -> DoubleSparsityParameters | None:
        dense = self._layers[layer]
        if dense.layer.channels is None or not self._is_sparse(dense.layer):
            return None
        return self._kernels.double_sparsity_parameters(dense, dense.layer.channels, self._policy, largest_whole)
