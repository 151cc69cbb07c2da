"""Keys, values and labels on the GPU, and attention to the tokens that the labels rank best."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.dense import Product
from sparsepack.runtime.cuda.double.attention import DoubleParameters, pays_from
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.kv_cache import CACHE_TYPES, DenseKvCache
from sparsepack.runtime.double.reference import attend_sparse
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention


class DoubleKvCache(DenseKvCache):
    """See `CudaKvCache` and `double.reference.DoubleKvCache`, whose labels these are.

    Steps select and attend in one kernel from `from_tokens` on, in layers whose window is not shorter than that, and
    read everything before. Labels are kept in any case, kv_heads * (R / 2 + 2) bytes for a position of a layer that is
    not dense.

    where_it_pays -- steps read everything while that takes no longer, whatever the policy says

    Raises `UserError` as `DenseKvCache` does, and for a context that the kernel has no room for.
    """

    early = False

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        where_it_pays: bool = False,
    ) -> None:
        if shape.policy is None:
            raise ValueError("the shape has no policy")
        self._policy = shape.policy
        super().__init__(shape, type, device, kernels)
        self._pays_from = 0
        if where_it_pays:
            channels = max(layer.channels.shape[1] for layer in shape.layers if layer.channels is not None)
            self._pays_from = pays_from(shape, channels, CACHE_TYPES[type])
        self._double = [self._parameters(number) for number in range(len(shape.layers))]

    @property
    def from_tokens(self) -> int:
        return max(self._policy.min_context, 0 if self.exact else self._pays_from)

    def append(self, layer: int, qkv: Product | Tensor, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (of := self._double[layer]) is not None:
            self._kernels.label_append(of, self.lengths[sequence], len(queries), sequence)
        return queries

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        of = self._double[layer]
        if not sparse or of is None:
            return super().attend(layer, queries, sequence)
        return self._attend_decoded(of, queries, sequence)

    def step(
        self, layer: int, qkv: Tensor, sparse: bool = False, out: Tensor | None = None, early_read: bool = False
    ) -> Tensor:
        of = self._double[layer]
        if of is None:
            return super().step(layer, qkv, sparse, out, early_read)
        if not self.selects(sparse) or 0 < of.dense.layer.window < self.from_tokens:
            out = super().step(layer, qkv, sparse, out, early_read)
            self._kernels.label_append(of, 0, 1, positions=self.positions.there)
            return out
        out = self._ready(of.dense, qkv, out)
        self._kernels.attend_double(of, qkv, self.positions.there, out, from_tokens=self.from_tokens)
        return out

    def _is_sparse(self, layer: LayerAttention) -> bool:
        """Whether steps ever read a part of what they see."""
        return layer.channels is not None and self._policy.selects_within(layer.window)

    def _parameters(self, layer: int) -> DoubleParameters | None:
        dense = self._layers[layer]
        if dense.layer.channels is None or not self._is_sparse(dense.layer):
            return None
        several = self._pays_from if len(self.lengths) > 1 else 0  # a text by itself is not read whole by this kernel
        return self._kernels.double_parameters(dense, dense.layer.channels, self._policy, several)

    def _attend_decoded(self, of: DoubleParameters, queries: Tensor, sequence: int) -> Tensor:
        """Of several decoded positions at once, by torch: for comparisons; engines decode one by one."""
        first, channels = self.lengths[sequence], of.dense.layer.channels
        assert channels is not None
        here = slice(first + len(queries))
        keys, values, codes, scales = (
            x[sequence, :, here] for x in (of.dense.keys, of.dense.values, of.codes, of.scales)
        )
        q = queries.float().transpose(0, 1)
        return attend_sparse(q, keys, values, (codes, scales), channels, of.policy, first, of.dense.layer.window)
