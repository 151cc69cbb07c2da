"""A model that is scored block by block: rows of tokens wait as hidden states while one decoder block is in memory.

Memory: one block in the type that it is computed in, the hidden states of the rows of a call (`HIDDEN_BYTES` at most
unless a single batch has more), and for the logits the output matrix as it is stored. The numbers are those of the
whole model in memory.
"""

from collections.abc import Mapping

import torch

from sparsepack.eval.protocols import Done, Logits, ignored
from sparsepack.eval.quantised_inputs import quantised_inputs
from sparsepack.eval.scorer import SparsePositions, linear
from sparsepack.eval.tokens_read import TokensRead
from sparsepack.integration.transformers import double_sparsity
from sparsepack.models.architecture import sliding_windows
from sparsepack.models.records.rule import Rules, SiteKey
from sparsepack.models.records.sparse_attention import SparseAttention
from sparsepack.models.stock.blocks import BlockSource, BlockStream

HIDDEN_BYTES = 128 << 20
"""The hidden states of the rows that wait together take this many bytes. Each such group reads the model once: with 128
MiB, a model 2048 wide reads its weights for 16,384 tokens, whose products take far longer than reading."""


class StreamedScorer:
    """Runs the model of `source` on the CPU with `rules` on the positions that are asked to be sparse.

    inputs    -- what the inputs of sites are quantised to; see `quantised_inputs`
    attention -- which tokens those positions read; None: all
    """

    def __init__(
        self,
        source: BlockSource,
        rules: Rules,
        context: int,
        dtype: torch.dtype = torch.float32,
        inputs: Mapping[SiteKey, torch.dtype] | None = None,
        attention: SparseAttention | None = None,
    ) -> None:
        self.source, self.context, self._inputs = source, context, inputs or {}
        self.device = torch.device("cpu")
        self.vocabulary, self.steps = int(source.config.vocab_size), source.layers
        self._attention = attention
        self._stream = BlockStream(source, "cpu", dtype, "sdpa" if attention is None else double_sparsity.NAME)
        self.tokens_read = TokensRead(attention, sliding_windows(source.config))
        self._positions = SparsePositions(source.family, rules)
        self._output: torch.Tensor | None = None
        self.realised = self._positions.realised

    def reset(self) -> None:
        """Forget the counts."""
        self._positions.reset()
        self.tokens_read.reset()

    def rows_at_once(self, width: int, batch: int) -> int:
        """The number of rows that may wait together, a batch at least; see `eval.protocols.WindowScorer`."""
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
        """What enters the output matrix, [B, S, H]; see `eval.protocols.WindowScorer`."""
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
                blocks = [(layer, stream.block)]
                with (
                    double_sparsity.sparse_rows(sparse_from[part]),
                    self._positions.within(blocks, width, real, sparse_from[part]),
                    quantised_inputs(blocks, self.source.family, self._inputs),
                ):
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
        """See `eval.protocols.WindowScorer`. The output matrix stays as it is stored until `hidden` is called again."""
        if self._output is None:
            self._output = self._stream.head()
        return linear(self._output[words].to(self._stream.dtype))
