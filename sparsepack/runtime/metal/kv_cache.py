"""Keys and values on an Apple GPU as float16, and attention to all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.metal.library import Launch, launch
from sparsepack.runtime.metal.products import SEGMENT, ActiveColumns, Sums, limits, segments
from sparsepack.runtime.reference.attention import DenseKvCache

MOST_GQA_RATIO, MOST_HEAD_DIM = 16, 256
CHUNK = 256
"""A threadgroup of `attend` attends to so many positions, or to more of them where a sequence is long."""
MOST_CHUNKS = 32
"""A sequence is shared by at most so many threadgroups: what they leave has to be put together."""

_BIAS, _Q_NORM, _K_NORM = 2, 64, 128


@dataclass(frozen=True, eq=False)
class Attended:
    """Attention before its chunks are put together.

    outputs -- float32 [chunks, heads * head_dim]: each chunk's sum of weights times values
    softmax -- float32 [chunks, heads, 2]: its largest score, and its sum of weights
    """

    outputs: Tensor
    softmax: Tensor


class MetalKvCache(DenseKvCache):
    """See `runtime.kv_cache.KvCache`; many positions attend by torch, as in the reference, one by kernels.

    Raises `UserError` for heads that the kernels do not know.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        ratio = shape.heads / shape.kv_heads
        if ratio > MOST_GQA_RATIO or shape.head_dim > MOST_HEAD_DIM or shape.head_dim % 2:
            raise UserError(
                f"a model with heads of {shape.head_dim} channels, {ratio:g} for each key head: the metal backend "
                f"runs an even number up to {MOST_HEAD_DIM}, and up to {MOST_GQA_RATIO}; use the reference backend"
            )
        super().__init__(shape, "f16", device)
        self._attended = torch.empty(MOST_CHUNKS * shape.heads * shape.head_dim, device=device)
        self._softmax = torch.empty(MOST_CHUNKS * shape.heads * 2, device=device)

    def chunks(self, layer: int, position: int) -> tuple[int, int, int]:
        """How a token at a position attends: the first position that it sees, the chunks, the positions of each."""
        window = self._shape.layers[layer].window
        first = max(0, position + 1 - window) if window else 0
        seen = position + 1 - first
        chunk = max(CHUNK, -(-seen // MOST_CHUNKS))
        return first, -(-seen // chunk), chunk

    def attended(self, chunks: int) -> Attended:
        """The memory where so many chunks leave what they attend to; every layer takes the same memory."""
        shape, width = self._shape, self._shape.heads * self._shape.head_dim
        softmax = self._softmax[: chunks * shape.heads * 2].view(chunks, shape.heads, 2)
        return Attended(self._attended[: chunks * width].view(chunks, width), softmax)

    def step(self, layer: int, qkv: Sums, position: int) -> Launch:
        """`append` and `attend` of one token, at a position, from the product that makes q, k and v; see `attended`."""
        shape, norms = self._shape, self._shape.layers[layer]
        first, chunks, chunk = self.chunks(layer, position)
        to = self.attended(chunks)
        with_ = (_BIAS if qkv.bias is not None else 0) | (_Q_NORM if norms.q_norm is not None else 0)
        with_ |= _K_NORM if norms.k_norm is not None else 0
        parts = qkv.parts
        given = (parts if x is None else x for x in (qkv.bias, norms.q_norm, norms.k_norm))
        return launch(
            "attend",
            *(parts, *given, shape.cos, shape.sin, self._keys[layer][0], self._values[layer][0]),
            *(to.outputs, to.softmax, *parts.shape, shape.heads, shape.kv_heads, shape.head_dim, shape.context),
            *(position, first, chunk, with_, float(shape.eps)),
            groups=(chunks, shape.kv_heads),
            threads=256,
        )

    def collect(
        self,
        layer: int,
        position: int,
        found: ActiveColumns,
        *,
        offset: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> Launch:
        """Put together what the chunks of `step` left, and list the active columns, as `products.collect` does."""
        shape, (_, chunks, _) = self._shape, self.chunks(layer, position)
        of, columns = self.attended(chunks), shape.heads * shape.head_dim
        return launch(
            "collect_attended",
            *(of.outputs, of.softmax, *(of.outputs if x is None else x for x in (offset, threshold))),
            *(found.values, found.indices, found.counts, columns, shape.head_dim, chunks),
            limits(threshold, offset),
            groups=segments(columns),
            threads=SEGMENT,
        )
