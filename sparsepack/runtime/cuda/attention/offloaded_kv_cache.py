"""Keys and values in the host's memory; on the GPU their labels, and those that were read last."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.attention.double_sparsity_kv_cache import CudaDoubleSparsityKvCache
from sparsepack.runtime.cuda.attention.offload import SLOTS
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.cuda.products.gemm_fp16 import Product
from sparsepack.runtime.kv_cache import AttentionShape


class OffloadedKvCache(CudaDoubleSparsityKvCache):
    """See `CudaDoubleSparsityKvCache`; sparse steps select tokens wherever the policy says, and have the bits of its
    steps that select. `offload.py` says how.

    Layers that read every token stay on the GPU whole. Of the others a sequence takes there, for each position and key
    head, a label and 4 bytes, for each slot a key, a value and 8 bytes, and for each token that a step reads 12 bytes.
    Prefill brings a layer's keys and values over in one piece for every `PREFILL_TOKENS` positions, into room for one
    layer's whole cache of a sequence, which all layers share; dense steps read them over the bus.

    slots -- for each token that a step reads at most, at least 1

    Raises `UserError` as `CudaDoubleSparsityKvCache` does, and where the host has no room.
    """

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        slots: float = SLOTS,
    ) -> None:
        super().__init__(shape, type, device, kernels)
        self._slots = [None if of is None else kernels.token_slots(of, slots) for of in self._double_sparsity]
        room = (2, shape.kv_heads, shape.context, shape.head_dim)
        self._brought = torch.empty(room, dtype=self._layers[0].keys.dtype, device=device)

    def fetched(self) -> list[int]:
        """The number of tokens of all key heads that the last step brought from the host, for each layer."""
        return [0 if of is None else int(of.missed_counts.sum()) for of in self._slots]

    def selecting(self, sparse: bool) -> int | None:
        return self._policy.min_context if sparse else None

    def append(self, layer: int, qkv: Product, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (slots := self._slots[layer]) is not None:
            slots.forget(sequence, self.lengths[sequence], len(queries))
        return queries

    def attend(self, layer: int, queries: Tensor, sequence: int = 0) -> Tensor:
        of = self._layers[layer]
        if self._slots[layer] is None:
            return super().attend(layer, queries, sequence)
        first, window = self.lengths[sequence], of.layer.window
        seen = slice(max(0, first + 1 - window) if window else 0, first + len(queries))
        for here, cached in zip(self._brought, (of.keys, of.values), strict=True):
            here[:, seen].copy_(cached[sequence, :, seen])
        keys, values = self._brought
        return self._prefill(queries, keys, values, first, of)

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        double_sparsity, slots = self._double_sparsity[layer], self._slots[layer]
        if double_sparsity is None or slots is None:
            super().step(layer, qkv, sparse, out, flag_in_data)
        elif sparse:
            self._kernels.attend_offloaded(double_sparsity, slots, qkv, self.positions.there, out)
        else:
            super().step(layer, qkv, sparse, out, flag_in_data)
            slots.forget_next(self.positions.there)

    def copy(self, source: int, to: int, length: int) -> None:
        super().copy(source, to, length)
        for slots in (slots for slots in self._slots if slots is not None):
            slots.forget(to, 0, length)

    def _room(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        sparse = [self._is_sparse(layer) for layer in shape.layers]
        room = (shape.sequences, shape.kv_heads, shape.context, shape.head_dim)
        there = iter(self._kernels.host_tensors(2 * sum(sparse), room, dtype, device))
        keys, values = (
            [next(there) if of else torch.zeros(room, dtype=dtype, device=device) for of in sparse] for _ in range(2)
        )
        return keys, values
