"""A model that is scored block by block: rows of tokens wait as hidden states while one decoder block is at work.

Memory: two blocks in the type that they are computed in, the hidden states of the rows of a call (`HIDDEN_BYTES` at
most unless a single batch has more), and for the logits the output matrix as it is stored. The numbers are those of the
whole model in memory.
"""

from collections.abc import Mapping

import torch

from sparsepack.eval.protocols import Done, Logits, ignored
from sparsepack.eval.scorer import SparsePositions, StockScorer, linear
from sparsepack.integration.transformers import double_sparsity
from sparsepack.models.architecture import logit_cap
from sparsepack.models.precision import brought
from sparsepack.models.records.rule import Rules, SiteKey
from sparsepack.models.records.sparse_attention import SparseAttention
from sparsepack.models.stock.blocks import BlockSource, BlockStream

HIDDEN_BYTES = 128 << 20
"""The hidden states of the rows that wait together take this many bytes. Each such group reads the model once: with 128
MiB, a model 2048 wide reads its weights for 16,384 tokens, whose products take far longer than reading."""


class StreamedScorer(StockScorer):
    """Runs the model of `source` on a device with `rules` on the positions that are asked to be sparse; hidden states
    wait on the CPU."""

    def __init__(
        self,
        source: BlockSource,
        rules: Rules,
        context: int,
        dtype: torch.dtype = torch.float32,
        inputs: Mapping[SiteKey, torch.dtype] | None = None,
        attention: SparseAttention | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(source.config, SparsePositions(source.family, rules, device), context, inputs, attention)
        self.source, self.steps, self.device = source, source.layers, torch.device(device)
        self._attention = attention
        self._stream = BlockStream(source, device, dtype, None if attention is None else double_sparsity.NAME)
        self._output: torch.Tensor | None = None

    def rows_at_once(self, width: int, batch: int) -> int:
        """How many rows of `width` tokens may wait together in `HIDDEN_BYTES`: one batch at least."""
        row = width * int(self.source.config.hidden_size) * self._stream.dtype.itemsize
        return max(batch, HIDDEN_BYTES // row)

    @torch.inference_mode()
    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
    ) -> torch.Tensor:
        """What enters the output matrix, [B, S, H]."""
        self._output = None
        stream, width = self._stream, input_ids.shape[1]
        parts = [slice(at, at + (batch or len(input_ids))) for at in range(0, len(input_ids), batch or len(input_ids))]
        hidden = stream.embed(input_ids)
        self.tokens_read.count(width, lengths, sparse_from)
        for layer in range(self.source.layers):
            stream.load(layer)
            if self._attention is not None:
                double_sparsity.attach_layer(stream.block, self._attention, layer)
            for part in parts:
                real = None if lengths is None else lengths[part]
                with self._sparse([(layer, stream.block)], width, real, sparse_from[part]):
                    hidden[part] = stream(hidden[part])
                done(len(hidden[part]))
        stream.unload()
        finished = hidden  # in place, unless what enters the output matrix has another width
        for number, row in enumerate(hidden):
            end = stream.finish(row)
            if end.shape[-1] != finished.shape[-1]:
                finished = hidden.new_empty(*hidden.shape[:2], end.shape[-1])
            finished[number] = end
        return finished

    def head(self, words: slice) -> Logits:
        """The output matrix stays as it is stored until `hidden` is called again."""
        if self._output is None:
            self._output = self._stream.head()
        weight = brought(self._output[words], self.device, self._stream.dtype)
        product = linear(weight, logit_cap(self.source.config))
        return lambda hidden: product(hidden.to(self.device))
