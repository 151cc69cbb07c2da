"""Keys and values in the host's memory; on the GPU their labels, and those that were read last."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.dense import Product
from sparsepack.runtime.cuda.double.kv_cache import DoubleKvCache
from sparsepack.runtime.cuda.double.offload import PLACES
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.kv_cache import AttentionShape


class OffloadedKvCache(DoubleKvCache):
    """See `DoubleKvCache`; sparse steps select tokens wherever the policy says, and have the bits of its steps that
    select. `double/offload.py` says how.

    Layers that read every token stay on the GPU whole. Of the others a sequence takes there, for each position and key
    head, a label and 4 bytes, for each place a key, a value and 8 bytes, and for each token that a step reads 12 bytes.
    Prefill brings a layer's keys and values over in one piece for each chunk, into room for one layer's whole cache of
    a sequence that all share; dense steps read them over the bus.

    places -- for each token that a step reads at most, at least 1

    Raises `UserError` as `DoubleKvCache` does, and where the host has no room.
    """

    def __init__(
        self,
        shape: AttentionShape,
        type: str,
        device: torch.device,
        kernels: Kernels = KERNELS,
        places: float = PLACES,
    ) -> None:
        super().__init__(shape, type, device, kernels)
        self._places = [None if of is None else kernels.token_places(of, places) for of in self._double]
        room = (2, shape.kv_heads, shape.context, shape.head_dim)
        self._brought = torch.empty(room, dtype=self._layers[0].keys.dtype, device=device)

    def fetched(self) -> list[int]:
        """How many tokens of key heads the last step brought from the host, in each layer."""
        return [0 if of is None else int(of.missed_counts.sum()) for of in self._places]

    def selects(self, sparse: bool) -> bool:
        return sparse

    def append(self, layer: int, qkv: Product | Tensor, sequence: int = 0) -> Tensor:
        queries = super().append(layer, qkv, sequence)
        if (places := self._places[layer]) is not None:
            places.forget(sequence, self.lengths[sequence], len(queries))
        return queries

    def attend(self, layer: int, queries: Tensor, sequence: int = 0, sparse: bool = False) -> Tensor:
        of = self._layers[layer]
        if self._places[layer] is None or sparse:
            return super().attend(layer, queries, sequence, sparse)
        first, window = self.lengths[sequence], of.layer.window
        seen = slice(max(0, first + 1 - window) if window else 0, first + len(queries))
        for here, cached in zip(self._brought, (of.keys, of.values), strict=True):
            here[:, seen].copy_(cached[sequence, :, seen])
        keys, values = self._brought
        return self._kernels.prefill_attention(queries, keys, values, first, window)

    def step(
        self, layer: int, qkv: Tensor, sparse: bool = False, out: Tensor | None = None, early_read: bool = False
    ) -> Tensor:
        double, places = self._double[layer], self._places[layer]
        if double is None or places is None:
            return super().step(layer, qkv, sparse, out, early_read)
        if not sparse:
            out = super().step(layer, qkv, sparse, out, early_read)
            places.forget_next(self.positions.there)
            return out
        out = self._ready(double.dense, qkv, out)
        self._kernels.attend_offloaded(double, places, qkv, self.positions.there, out)
        return out

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
