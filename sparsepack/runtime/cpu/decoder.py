"""A decoder that computes whole tokens natively (`native/decoder.h`)."""

import errno
import os
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel, PackedSite
from sparsepack.runtime.cpu.dispatch import instruction_set, native
from sparsepack.runtime.cpu.operations import ROW_TYPES, load_rows, load_zigzag
from sparsepack.runtime.reference import rotary_table
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
    the same bits every run at the same number of threads, until `sparsepack profile` finds other geometries.

    threads -- None: as many as torch has, one for each core unless told otherwise

    Raises `UserError` where the kernels were not built, or for a device other than the CPU.
    """

    cache_type = "f16"

    def __init__(self, packed: PackedModel, device: torch.device, context: int, threads: int | None) -> None:
        if device.type != "cpu":
            raise UserError(
                f"device {device}: the cpu backend runs on the CPU; use device cpu or the reference backend"
            )
        self.threads = threads or torch.get_num_threads()
        self.instruction_set = instruction_set()
        self._vocabulary = packed.architecture.vocabulary
        try:
            self.native = native().Decoder(_built(packed, context, self.threads), self.instruction_set, self.threads)
        except RuntimeError as error:
            if os.strerror(errno.EAGAIN) not in str(error):
                raise
            raise UserError(f"{self.threads} threads: the system does not start so many; give fewer") from error

    @property
    def description(self) -> str:
        return f"{self.instruction_set}, {self.threads} threads"

    @property
    def position(self) -> int:
        return int(self.native.position)

    @property
    def stepped(self) -> int:
        return int(self.native.stepped)

    def active(self) -> dict[tuple[int, str], int]:
        counts = self.native.active()
        return {(n // len(SITES), SITES[n % len(SITES)]): count for n, count in enumerate(counts)}

    def reset(self) -> None:
        self.native.reset()

    def prefill(self, ids: Tensor) -> Tensor:
        logits = torch.empty(1, self._vocabulary)
        self.native.prefill(ids, False, logits)
        return logits[0]

    def step(self, id: int, sparse: bool) -> Tensor:
        logits = torch.empty(self._vocabulary)
        self.native.step(id, sparse, logits)
        return logits

    def decode_next(self, id: int, sparse: bool, sampler: Sampler) -> int:
        how = sampler.sampling
        draw = sampler.draw() if how.temperature else 0.0
        top_p = 1.0 if how.top_p is None else how.top_p
        chosen, best = self.native.step_choose(id, sparse, how.temperature, how.top_k or 0, top_p, draw)
        if chosen < 0:
            raise not_finite(best)
        return int(chosen)

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._vocabulary)
        if sparse_from:
            self.native.prefill(ids[:sparse_from], True, logits[:sparse_from])
        for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
            self.native.step(id, sparse, row)
        return logits


def _built(packed: PackedModel, context: int, threads: int) -> Any:
    """The model as native/bind_decoder.cpp takes it."""
    a = packed.architecture
    builder = native().DecoderBuilder(
        hidden=a.hidden,
        intermediate=a.intermediate,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        vocabulary=a.vocabulary,
        context=context,
        chunk=CHUNK,
        eps=a.norm_eps,
        activation=_ACTIVATIONS[a.activation],
    )
    for layer, window in zip(packed.layers, a.sliding_windows, strict=True):
        norms = [layer.norms.get(name) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")]
        builder.add_layer(window, *map(_vector, norms))
        for number, name in enumerate(SITES):
            _add_site(builder, number, layer.sites[name], threads)
    builder.set_embedding(
        packed.embedding.blocks.contiguous(), packed.embedding.columns, ROW_TYPES[packed.embedding.type]
    )
    builder.set_output(load_rows(packed.output), _vector(packed.output_norm))
    builder.set_rotary(*rotary_table(torch.tensor(a.inv_freq), a.rotary_scale, context))
    return builder


def _add_site(builder: Any, number: int, site: PackedSite, threads: int) -> None:
    threshold, offset = (None, None) if site.rule is None else (site.rule.limits, site.rule.offset)
    matrix = load_zigzag(site.matrix, threads=threads)
    builder.set_site(number, matrix, _vector(site.bias), _vector(threshold), _vector(offset))


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().reshape(-1).contiguous()
