"""A decoder out of the operations of a backend (`runtime/operations.py`), chained by torch; on any device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sparsepack.models.packed import MLP_GATE, MLP_RECORDS, PackedLayer, PackedModel, PackedSite
from sparsepack.models.rule import SiteRule
from sparsepack.runtime import reference
from sparsepack.runtime.decoder import attention_of
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.operations import Operations
from sparsepack.runtime.sampling import Sampler

CHUNK = 512
"""Positions that pass at once: attention needs heads * CHUNK * context scores."""


class _Mode(Enum):
    """How the sites treat the positions at hand; all but the first are counted in the activity."""

    PREFILL = "dense, not counted"
    DENSE = "dense, counted"
    STEP = "one position, inactive columns and neurons not read"
    MASKED = "several positions, what is inactive read but zero: the same sums as STEP"


@dataclass(frozen=True)
class _Site:
    """A loaded site. `sparse_bias` is what its sparse product lacks: bias + W offset, None where both are absent."""

    matrix: Any
    bias: Tensor | None
    rule: SiteRule | None
    sparse_bias: Tensor | None


@dataclass(frozen=True)
class _Neurons:
    """A loaded MLP by neurons."""

    gate: Any
    records: Any


@dataclass(frozen=True)
class _Layer:
    sites: dict[str, _Site]
    norms: dict[str, Tensor]
    neurons: _Neurons | None


class OperationsDecoder:
    """See `runtime.decoder.Decoder`.

    All arithmetic outside of the operations is float32. The embedding stays in the mapped file, rows decoded as they
    are looked up.

    threads      -- that torch runs on during calls; None: as many as it has
    cache_type   -- as `operations.new_kv_cache` takes it
    new_kv_cache -- what attends, instead of that
    """

    def __init__(
        self,
        packed: PackedModel,
        operations: Operations,
        device: torch.device,
        context: int,
        threads: int | None,
        cache_type: str | None = None,
        new_kv_cache: Callable[[AttentionShape, torch.device, str | None], KvCache] | None = None,
    ) -> None:
        self._packed, self._architecture, self._device = packed, packed.architecture, device
        self._attention_from = packed.attention.policy.min_context if packed.attention else None
        self._operations = operations
        self._threads = threads
        self._layers = [_loaded(layer, operations, device) for layer in packed.layers]
        self._output_norm = packed.output_norm.to(device)
        self._output = operations.load_rows(packed.output, device)
        new_kv_cache = new_kv_cache or operations.new_kv_cache
        self._cache = new_kv_cache(attention_of(packed, context, device), device, cache_type)
        self.reset()

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    @property
    def description(self) -> str:
        return f"{self.threads} threads" if self._device.type == "cpu" else str(self._device)

    @property
    def attention_from(self) -> int | None:
        return self._attention_from

    @property
    def cache_type(self) -> str:
        return self._cache.type

    @property
    def position(self) -> int:
        return self._cache.lengths[0]

    @property
    def stepped(self) -> int:
        return self._stepped

    def active(self) -> dict[tuple[int, str], int]:
        return {key: int(count) for key, count in self._active.items()}

    def reset(self) -> None:
        self._cache.reset()
        self._stepped = 0
        self._active = {
            (number, name): torch.zeros((), dtype=torch.int64, device=self._device)
            for number, layer in enumerate(self._packed.layers)
            for name in layer.units
        }

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def prefill(self, ids: Tensor) -> Tensor:
        with torch_threads(self._threads):
            return self._logits(self._run(ids, _Mode.PREFILL)[-1:])[0]

    def step(self, id: int, sparse: bool) -> Tensor:
        with torch_threads(self._threads):
            return self._logits(self._run(torch.tensor([id]), _Mode.STEP if sparse else _Mode.DENSE))[0]

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        return sampler.choose(self.step(id, sparse))

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        with torch_threads(self._threads):
            dense = self._run(ids[:sparse_from], _Mode.PREFILL)
            stepped = self._run(ids[sparse_from:], _Mode.MASKED if sparse else _Mode.DENSE)
            return self._logits(torch.cat([dense, stepped]))

    def _run(self, ids: Tensor, mode: _Mode) -> Tensor:
        """Append tokens; the normed output of the last block: [S, hidden]."""
        hidden = [self._output_norm.new_empty(0, self._architecture.hidden)]
        hidden += [self._blocks(chunk, mode) for chunk in torch.split(ids, CHUNK) if len(chunk)]
        return torch.cat(hidden)

    def _blocks(self, tokens: Tensor, mode: _Mode) -> Tensor:
        eps = self._architecture.norm_eps
        x = reference.embed(self._packed.embedding, tokens).to(self._device)  # [S, hidden]
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, reference.rms_norm(x, layer.norms["attn_norm"], eps), mode)
            x = x + self._mlp(number, reference.rms_norm(x, layer.norms["mlp_norm"], eps), mode)
        self._cache.advance(len(tokens))
        if mode is not _Mode.PREFILL:
            self._stepped += len(tokens)
        return reference.rms_norm(x, self._output_norm, eps)

    def _attention(self, number: int, x: Tensor, mode: _Mode) -> Tensor:
        queries = self._cache.append(number, self._product(number, "attn_in", x, mode))
        sparse = mode in (_Mode.STEP, _Mode.MASKED)
        return self._product(number, "attn_out", self._cache.attend(number, queries, sparse=sparse), mode)

    def _mlp(self, number: int, x: Tensor, mode: _Mode) -> Tensor:
        activation = reference.ACTIVATION_FUNCTIONS[self._architecture.activation]
        neurons = self._layers[number].neurons
        if neurons is not None:
            gate = activation(self._operations.zigzag_matmul(neurons.gate, x))
            return self._by_neurons(number, neurons.records, x, gate, mode)
        gate, up = self._product(number, "mlp_in", x, mode).chunk(2, dim=-1)
        return self._product(number, "mlp_mid", activation(gate) * up, mode)

    def _by_neurons(self, number: int, records: Any, x: Tensor, gate: Tensor, mode: _Mode) -> Tensor:
        """What an MLP makes of x [S, hidden], whose gate is known [S, neurons]: [S, hidden]."""
        if mode is not _Mode.PREFILL:
            self._active[number, MLP_GATE] += x.numel()
        if mode is _Mode.STEP:
            indices, count = self._operations.collect(gate[0], torch.zeros((), device=gate.device))
            self._active[number, MLP_RECORDS] += count
            return self._operations.neuron_ffn(records, x[0], gate[0], indices, count)[None]
        if mode is _Mode.DENSE:
            self._active[number, MLP_RECORDS] += gate.numel()
        elif mode is _Mode.MASKED:
            self._active[number, MLP_RECORDS] += gate.count_nonzero()
        return self._operations.neuron_matmul(records, x, gate)

    def _product(self, number: int, name: str, x: Tensor, mode: _Mode) -> Tensor:
        """The output rows of a site for x [S, columns]: [S, rows]."""
        site = self._layers[number].sites[name]
        if mode in (_Mode.PREFILL, _Mode.DENSE) or site.rule is None:
            if mode is not _Mode.PREFILL:
                self._active[number, name] += x.numel()
            return _plus(self._operations.zigzag_matmul(site.matrix, x), site.bias)
        threshold, offset = site.rule.limits, site.rule.offset
        d = x if offset is None else x - offset
        if mode is _Mode.STEP:
            indices, count = self._operations.collect(d[0], threshold)
            y = self._operations.zigzag_gemv(site.matrix, d[0], indices, count)[None]
        else:
            active = d.abs() > threshold
            count = active.sum()
            y = self._operations.zigzag_matmul(site.matrix, torch.where(active, d, 0))
        self._active[number, name] += count
        return _plus(y, site.sparse_bias)

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


def _loaded(layer: PackedLayer, operations: Operations, device: torch.device) -> _Layer:
    sites = {name: _loaded_site(site, operations, device) for name, site in layer.sites.items()}
    neurons = None
    if (of := layer.neurons) is not None:
        neurons = _Neurons(operations.load_zigzag(of.gate, device), operations.load_neurons(of.records, device))
    return _Layer(sites, {name: norm.to(device) for name, norm in layer.norms.items()}, neurons)


def _loaded_site(site: PackedSite, operations: Operations, device: torch.device) -> _Site:
    matrix = operations.load_zigzag(site.matrix, device)
    bias = None if site.bias is None else site.bias.to(device)
    rule = None if site.rule is None else site.rule.to(device)
    sparse_bias = bias
    if rule is not None and rule.offset is not None:
        sparse_bias = _plus(operations.zigzag_matmul(matrix, rule.offset[None])[0], bias)
    return _Site(matrix, bias, rule, sparse_bias)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
