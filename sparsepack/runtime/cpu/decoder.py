"""A decoder that computes whole tokens natively (`native/decoder.h`)."""

import errno
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import MLP_GATE, MLP_RECORDS, PackedModel, PackedSite
from sparsepack.runtime.backends import backend_named
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.cpu.kv_cache import NativeKvCache
from sparsepack.runtime.cpu.operations import ROW_TYPES, load_neurons, load_rows, load_zigzag
from sparsepack.runtime.decoder import attention_of
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.sampling import Sampler, not_finite

CHUNK = 512
"""Positions that prefill takes at once: what it needs of memory, about 16 * intermediate bytes for each."""

SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
"""In the order in which native/decoder.h has them."""
_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}  # kernels.h, Activation


class NativeDecoder:
    """See `runtime.decoder.Decoder`.

    Matrices keep the size that they have in the file. Sums are float32, with multipliers of 16 bits within a tile of
    columns; keys and values are kept as float16: 4 bytes * layers * kv_heads * head_dim a position. The same text gives
    the same bits every run at the same number of threads, until `sparsepack tune` finds other layouts.

    threads      -- None: as many as torch has, one for each core unless told otherwise
    new_kv_cache -- what attends: `cpu.kv_cache.NativeKvCache`, or a cache with other native ones

    Raises `UserError` where the kernels were not built, or for a device other than the CPU.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        threads: int | None,
        new_kv_cache: Callable[[AttentionShape], NativeKvCache] = NativeKvCache,
    ) -> None:
        backend_named("cpu").check_device(device)
        self.threads = threads or torch.get_num_threads()
        self.instruction_set = instruction_set()
        self._attention_from = packed.attention.policy.min_context if packed.attention else None
        self._counted = (*SITES[:2], MLP_GATE, MLP_RECORDS) if packed.by_neurons else SITES
        self._vocabulary = packed.architecture.vocabulary
        self._cache = new_kv_cache(attention_of(packed, context, device))
        try:
            self.native = native().Decoder(
                _built(packed, self._cache, self.threads), self.instruction_set, self.threads
            )
        except RuntimeError as error:
            if os.strerror(errno.EAGAIN) not in str(error):
                raise
            raise UserError(f"{self.threads} threads: the system does not start so many; give fewer") from error

    @property
    def description(self) -> str:
        return f"{self.instruction_set}, {self.threads} threads"

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
        return int(self.native.stepped)

    def active(self) -> dict[tuple[int, str], int]:
        counts = self.native.active()
        return {(n // len(SITES), self._counted[n % len(SITES)]): count for n, count in enumerate(counts)}

    def reset(self) -> None:
        self.native.reset()

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def prefill(self, ids: Tensor) -> Tensor:
        logits = torch.empty(1, self._vocabulary)
        self.native.prefill(ids.numpy(), False, logits.numpy())
        return logits[0]

    def step(self, id: int, sparse: bool) -> Tensor:
        logits = torch.empty(self._vocabulary)
        self.native.step(id, sparse, logits.numpy())
        return logits

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        how = sampler.sampling
        draw = sampler.draw() if how.temperature else 0.0
        top_p = 1.0 if how.top_p is None else how.top_p
        chosen, best = self.native.decode_next(id, sparse, how.temperature, how.top_k or 0, top_p, draw)
        if chosen < 0:
            raise not_finite(best)
        return int(chosen)

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._vocabulary)
        if sparse_from:
            self.native.prefill(ids[:sparse_from].numpy(), True, logits[:sparse_from].numpy())
        for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
            self.native.step(id, sparse, row.numpy())
        return logits


def _built(packed: PackedModel, cache: NativeKvCache, threads: int) -> Any:
    """The model as native/bind_decoder.cpp takes it."""
    a = packed.architecture
    builder = native().DecoderBuilder(
        hidden=a.hidden,
        intermediate=a.intermediate,
        vocabulary=a.vocabulary,
        chunk=CHUNK,
        eps=a.norm_eps,
        activation=_ACTIVATIONS[a.activation],
    )
    for layer in packed.layers:
        builder.add_layer(_vector(layer.norms["attn_norm"]), _vector(layer.norms["mlp_norm"]))
        for number, name in enumerate(SITES):
            if name in layer.sites:
                _add_site(builder, number, layer.sites[name], threads)
        if layer.neurons is not None:
            gate = load_zigzag(layer.neurons.gate, threads=threads)
            builder.set_site(SITES.index("mlp_in"), gate, None, None, None)
            builder.set_neurons(load_neurons(layer.neurons.records))
    builder.set_embedding(
        packed.embedding.blocks.contiguous(), packed.embedding.columns, ROW_TYPES[packed.embedding.type]
    )
    builder.set_output(load_rows(packed.output), _vector(packed.output_norm))
    builder.set_cache(cache.native[0])
    return builder


def _add_site(builder: Any, number: int, site: PackedSite, threads: int) -> None:
    threshold, offset = (None, None) if site.rule is None else (site.rule.limits, site.rule.offset)
    matrix = load_zigzag(site.matrix, threads=threads)
    builder.set_site(number, matrix, _vector(site.bias), _vector(threshold), _vector(offset))


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().reshape(-1).contiguous()
