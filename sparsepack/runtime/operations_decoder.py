"""A decoder out of the operations of a backend (`runtime/operations.py`), chained by torch; on any device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.placement.counts import HitCounts
from sparsepack.progress import counted
from sparsepack.runtime.decoder import attention_of
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.operations import Operations
from sparsepack.runtime.operations_layer import Mode, load_layer
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.sampling import Sampler

PREFILL_TOKENS = 512
"""This many positions pass at once: attention needs heads * PREFILL_TOKENS * context scores."""


class OperationsDecoder:
    """See `runtime.decoder.Decoder`; of one sequence.

    All arithmetic outside of the operations is float32. The embedding stays in the mapped file, rows decoded as they
    are looked up.

    threads      -- that torch runs on during calls; None: as many as it has
    cache_type   -- as `operations.new_cache` takes it
    new_cache    -- what attends, instead of that
    """

    def __init__(
        self,
        packed: PackedModel,
        operations: Operations,
        device: torch.device,
        context: int,
        threads: int | None,
        cache_type: str | None = None,
        new_cache: Callable[[AttentionShape, str | None, torch.device], KvCache] | None = None,
    ) -> None:
        self._packed, self._architecture, self._device = packed, packed.architecture, device
        self._operations = operations
        self._threads = threads
        self._layers = [load_layer(layer, operations, device) for layer in packed.layers]
        self._output_norm = packed.output_norm.to(device)
        self._output = operations.load_rows(packed.output, device)
        new_cache = new_cache or operations.new_cache
        self.cache = new_cache(attention_of(packed, context, device), cache_type, device)
        self.stepped = 0

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    @property
    def description(self) -> str:
        return counted(self.threads, "thread") if self._device.type == "cpu" else str(self._device)

    @property
    def hit_counts(self) -> HitCounts | None:
        return None

    def active(self) -> dict[tuple[int, str], int]:
        layers = enumerate(self._layers)
        return {(number, name): int(count) for number, layer in layers for name, count in layer.active.items()}

    def reset(self) -> None:
        self.cache.reset()
        self.stepped = 0
        for layer in self._layers:
            for count in layer.active.values():
                count.zero_()

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(length, sequence)

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        with torch_threads(self._threads):
            return self._logits(self._run(ids, Mode.PREFILL)[-1:])[0]

    def step(self, ids: Sequence[int], sparse: bool) -> Tensor:
        with torch_threads(self._threads):
            return self._logits(self._run(torch.tensor(ids), Mode.STEP if sparse else Mode.DENSE))

    def decode_next(self, ids: Sequence[int], sparse: bool, samplers: Sequence[Sampler]) -> list[int]:
        return [samplers[0].choose(self.step(ids, sparse)[0])]

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        with torch_threads(self._threads):
            dense = self._run(ids[:sparse_from], Mode.PREFILL)
            stepped = self._run(ids[sparse_from:], Mode.MASKED if sparse else Mode.DENSE)
            return self._logits(torch.cat([dense, stepped]))

    def _run(self, ids: Tensor, mode: Mode) -> Tensor:
        """Append tokens; the normed output of the last block: [S, hidden]."""
        hidden = [self._output_norm.new_empty(0, self._architecture.hidden)]
        hidden += [self._blocks(chunk, mode) for chunk in torch.split(ids, PREFILL_TOKENS) if len(chunk)]
        return torch.cat(hidden)

    def _blocks(self, tokens: Tensor, mode: Mode) -> Tensor:
        eps = self._architecture.norm_eps
        activation = reference.ACTIVATION_FUNCTIONS[self._architecture.activation]
        x = reference.embed(self._packed.embedding, tokens).to(self._device)  # [S, hidden]
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, reference.rms_norm(x, layer.norms["attn_norm"], eps), mode)
            x = x + layer.mlp.output(reference.rms_norm(x, layer.norms["mlp_norm"], eps), activation, mode)
        self.cache.advance(len(tokens))
        if mode is not Mode.PREFILL:
            self.stepped += len(tokens)
        return reference.rms_norm(x, self._output_norm, eps)

    def _attention(self, number: int, x: Tensor, mode: Mode) -> Tensor:
        sites = self._layers[number].attention
        queries = self.cache.append(number, sites["attn_in"].product(x, mode))
        sparse = mode in (Mode.STEP, Mode.MASKED)
        return sites["attn_out"].product(self.cache.attend(number, queries, sparse=sparse), mode)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._operations.matmul(self._output, hidden)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch run on so many threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
