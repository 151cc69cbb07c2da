"""A decoder that computes whole tokens natively (`native/decoder/decoder.h`)."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import DENSE, NEURONS, PLAIN_NEURONS, MatrixFormat, MlpKind
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.packed import DenseMlp, ExpertMlp, NeuronMlp, PackedModel, PackedSite
from sparsepack.models.activations import xielu_coefficients
from sparsepack.models.blocks import EXPERT_NORMS, SUB_NORMS, XIELU, DeltaNet, Mamba, ShortConv
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES, SITES
from sparsepack.models.parts import LATENT_NORMS
from sparsepack.models.sites import SiteRule
from sparsepack.progress import format_count
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cpu.kv_cache import NativeKvCache, vector
from sparsepack.runtime.cpu.machine import default_threads, instruction_set, native
from sparsepack.runtime.cpu.operations import load_experts, load_gates, load_neurons, load_rows, load_zigzag
from sparsepack.runtime.decoder import GivenTokens, among_all, attention_of, moving_sequences
from sparsepack.runtime.generation.sampling import Sampler, not_finite
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.threshold_controller import ThresholdController

PREFILL_TOKENS = 512
"""Prefill takes this many positions at once, and about 16 * intermediate bytes of memory for each."""

_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm", "q_row_norm", "k_row_norm")
"""The norms of a layer that the decoder has itself, in the order in which its builder takes them."""

_LATENT_SITES = ("attn_kv_b", "attn_q_b")
_NUMBERS = (*SITES, *_LATENT_SITES)
"""The sites in the order in which native/decoder/decoder.h has them."""

_ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "relu2": 5, "swiglu_oai": 4}
_PLAIN = {**_ACTIVATIONS, "relu2": 1, XIELU: 1}
"""Numbers as in kernels.h, `Activation`; an MLP without a gate takes its rows for both, and relu(h) h is relu2(h). A
block with xIELU has its coefficients in place of a number."""


class NativeDecoder:
    """See `runtime.decoder.Decoder`.

    Matrices keep the size that they have in the file. Sums are float32, with multipliers of 16 bits within a tile of
    columns; keys and values are kept as float16: 4 bytes * layers * kv_heads * head_dim a position. The same sequence
    gives the same bits every run at the same number of threads, until `tune` finds other layouts.

    A step of several sequences reads every weight once for all of them, and skips the columns that are inactive in all
    of them; its sums have another order than those of one sequence. A sequence that is stepped alone has the bits of a
    decoder of one sequence.

    threads   -- None: as `machine.default_threads`
    new_cache -- what attends: `cpu.kv_cache.NativeKvCache`, or a cache with other native ones
    sequences -- how many, each with a cache of its own

    Raises `UserError` where the kernels were not built, or for a device other than the CPU.
    """

    hit_counts = None
    traffic_stats = None

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        threads: int | None,
        new_cache: Callable[[AttentionShape], NativeKvCache] = NativeKvCache,
        sequences: int = 1,
    ) -> None:
        find_backend("cpu").check_device(device)
        self.threads = threads or default_threads()
        self.instruction_set = instruction_set()
        self._counted = (*ATTENTION_SITES, *packed.mlp_kind.counted, *_LATENT_SITES)
        self._sites = [{*layer.matrices} for layer in packed.layers]
        self._vocabulary = packed.architecture.vocabulary
        self.cache = new_cache(attention_of(packed, context, device, sequences))
        try:
            self.native = native().Decoder(
                _build_model(packed, self.cache, self.threads), self.instruction_set, self.threads
            )
        except RuntimeError as error:
            if os.strerror(errno.EAGAIN) not in str(error):
                raise
            raise UserError(f"{self.threads} threads: the system does not start so many; give fewer") from error

    @property
    def description(self) -> str:
        return f"{self.instruction_set}, {format_count(self.threads, 'thread')}"

    @property
    def stepped(self) -> int:
        return int(self.native.stepped)

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(self.native.scales())

    def control_thresholds(self, controller: ThresholdController) -> None:
        self.native.control_thresholds(**asdict(controller))

    def active(self) -> dict[tuple[int, str], int]:
        names = self._counted
        found = {(n // len(names), names[n % len(names)]): count for n, count in enumerate(self.native.active())}
        return {(layer, name): count for (layer, name), count in found.items() if name in self._sites[layer]}

    def reset(self) -> None:
        self.native.reset()

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(length, sequence)
        self.native.reset_scale(sequence)

    def copy(self, source: int, to: int, length: int) -> None:
        self.cache.copy(source, to, length)
        self.native.copy_states(source, to)
        self.native.reset_scale(to)

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        self.cache.set_rope(sequence, first, cos, sin)

    def prefill(self, sequence: int, ids: Tensor, every: bool = False) -> Tensor:
        logits = torch.empty(len(ids) if every else 1, self._vocabulary)
        self.native.prefill(sequence, ids.numpy(), every, logits.numpy())
        return logits if every else logits[0]

    def prepare(self, sparse: bool) -> None:
        """Do nothing: steps on a processor compile no kernels and record no graph."""

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        moving = moving_sequences(ids)
        logits = torch.empty(len(moving), self._vocabulary)
        self.native.step([*moving], [*moving.values()], sparse, logits.numpy())
        return among_all(logits, moving, len(ids))

    def step_positions(self, sequence: int, ids: Sequence[int], sparse: bool) -> Tensor:
        logits = torch.empty(len(ids), self._vocabulary)
        self.native.step([sequence] * len(ids), [*ids], sparse, logits.numpy())
        return logits

    def choose(self, logits: Tensor, sampler: Sampler) -> int:
        id, best = self.native.choose(logits.numpy(), _to_native(sampler))
        if id < 0:
            raise not_finite(best)
        return int(id)

    def decode_next(
        self, ids: Sequence[int | None], sparse: bool, samplers: Sequence[Sampler | None]
    ) -> list[int | None]:
        moving, chosen = moving_sequences(ids), list[int | None](ids)
        how = [_to_native(sampler) for sampler in (samplers[n] for n in moving) if sampler is not None]
        found = self.native.decode_next([*moving], [*moving.values()], sparse, how)
        for n, (id, best) in zip(moving, found, strict=True):
            if id < 0:
                raise not_finite(best)
            chosen[n] = int(id)
        return chosen

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        if not self.scales or not sparse:
            return self.teacher_forced_rows({0: GivenTokens(ids.tolist(), sparse_from)}, sparse)[0]
        logits = torch.empty(len(ids), self._vocabulary)
        if sparse_from:
            self.native.prefill(0, ids[:sparse_from].numpy(), True, logits[:sparse_from].numpy())
        for row, id in zip(logits[sparse_from:], ids[sparse_from:].tolist(), strict=True):
            self.native.step([0], [id], sparse, row[None].numpy())
        return logits

    def teacher_forced_rows(self, rows: Mapping[int, GivenTokens], sparse: bool) -> list[Tensor]:
        scored = [len(row.ids) - row.scored_from for row in rows.values()]
        logits = torch.empty(sum(scored), self._vocabulary)
        self.native.teacher_forced(
            [(sequence, len(row.ids), row.sparse_from, row.scored_from) for sequence, row in rows.items()],
            torch.tensor([id for row in rows.values() for id in row.ids]).numpy(),
            sparse,
            logits.numpy(),
        )
        return list(torch.split(logits, scored))


def _to_native(sampler: Sampler) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p and a draw, as native/decoder/sampling.h takes them."""
    how = sampler.sampling
    draw = sampler.draw() if how.temperature else 0.0
    return how.temperature, how.top_k or 0, 1.0 if how.top_p is None else how.top_p, draw


def _build_model(packed: PackedModel, cache: NativeKvCache, threads: int) -> Any:
    """The model as native/bind/decoder.cpp takes it."""
    a = packed.architecture
    builder = native().DecoderBuilder(
        hidden=a.hidden,
        intermediate=max(a.intermediate, a.dense_intermediate, a.shared_intermediate),
        vocabulary=a.vocabulary,
        prefill_tokens=PREFILL_TOKENS,
        eps=a.norm_eps,
        activation=(_ACTIVATIONS if a.row.gated else _PLAIN)[a.activation],
        embedding_scale=a.embedding_scale,
        logit_cap=a.logit_cap,
    )
    for block, layer in zip(a.blocks, packed.layers, strict=True):
        builder.add_layer(*(_norm(layer.norms, name) if name in block.norms else None for name in _NORMS))
        if layer.basis is not None:
            builder.set_basis(load_rows(layer.basis))
        if layer.xielu is not None:
            builder.set_xielu(vector(xielu_coefficients(layer.xielu)))
        if block.parallel:
            builder.set_parallel()
        if block.sub_norms:
            builder.set_sub_norms(*(vector(layer.norms[name]) for name in SUB_NORMS))
        if layer.scalar is not None:
            builder.set_scalar(float(layer.scalar))
        if (own := layer.per_layer) is not None:
            builder.set_per_layer(load_rows(own.gate), load_rows(own.out), vector(own.norm))
        if isinstance(block.mixer, DeltaNet):
            _add_delta_net(builder, block.mixer, layer.delta_net)
        elif isinstance(block.mixer, ShortConv):
            builder.set_short_conv(**asdict(block.mixer), conv=vector(layer.delta_net["short_conv"].T))
        elif isinstance(block.mixer, Mamba):
            _add_mamba(builder, block.mixer, layer.delta_net, a.mamba_eps or a.norm_eps)
        elif block.mixer is None:
            pass  # an MLP alone
        elif block.mixer.gated:
            builder.set_gated()
        elif block.mixer.k_eq_v:
            builder.set_k_eq_v()
        elif block.mixer.latent is not None:
            q_norm, kv_norm = (vector(layer.norms.get(name)) for name in LATENT_NORMS)
            builder.set_latent(**asdict(block.mixer.latent), q_norm=q_norm, kv_norm=kv_norm)
        _add_sites(builder, layer.attention, threads)
        if isinstance(layer.mlp, ExpertMlp):
            _add_experts(builder, layer.mlp, threads, layer.norms)
        else:
            _ADD_MLP[layer.mlp.kind](builder, layer.mlp, threads)
    builder.set_embedding(
        packed.embedding.blocks.contiguous(), packed.embedding.columns, BLOCKS[packed.embedding.format.block].gguf
    )
    if (inputs := packed.per_layer) is not None:
        builder.set_per_layer_inputs(
            bytes=inputs.embedding.blocks.contiguous(),
            columns=inputs.embedding.columns,
            type=BLOCKS[inputs.embedding.format.block].gguf,
            projection=load_rows(inputs.projection),
            norm=vector(inputs.sum_norm),
            scale=inputs.row_scale,
            eps=inputs.norm_eps(a.norm_eps),
        )
    builder.set_output(load_rows(packed.output), _with_bias(packed.scaled_output_norm, packed.scaled_output_norm_bias))
    for of_one in cache.native:
        builder.add_cache(of_one)
    return builder


def _norm(norms: Mapping[str, Tensor], name: str) -> Any:
    return _with_bias(norms[name], norms.get(f"{name}_bias"))


def _with_bias(weight: Tensor, bias: Tensor | None) -> Any:
    """The weights of a norm as native/decoder/decoder.h has them: of LayerNorm with its bias behind."""
    return vector(weight if bias is None else torch.cat([weight, bias]))


def _add_delta_net(builder: Any, mixer: DeltaNet, of: Mapping[str, Tensor]) -> None:
    gates = torch.cat([of["delta_beta"], of["delta_alpha"]]).contiguous()
    builder.set_delta_net(
        **asdict(mixer),
        gates=load_rows(PackedMatrix(gates.view(torch.uint8), MatrixFormat("F32"), *gates.shape)),
        conv=vector(of["delta_conv"].T),
        rate=vector(of["delta_a_log"].exp()),
        bias=vector(of["delta_dt_bias"]),
        norm=vector(of["delta_norm"]),
    )


def _add_mamba(builder: Any, mixer: Mamba, of: Mapping[str, Tensor], eps: float) -> None:
    builder.set_mamba(
        **asdict(mixer),
        eps=eps,
        conv=vector(of["mamba_conv"].T),
        conv_bias=vector(of["mamba_conv_bias"]),
        rate=vector(of["mamba_a_log"].exp()),
        bias=vector(of["mamba_dt_bias"]),
        skip=vector(of["mamba_skip"]),
        norm=vector(of["mamba_norm"]),
    )


def _add_sites(builder: Any, sites: Mapping[str, PackedSite], threads: int) -> None:
    for name, site in sites.items():
        offset = None if site.rule is None else site.rule.offset
        matrix = load_zigzag(site.matrix, threads=threads)
        builder.set_site(_NUMBERS.index(name), matrix, vector(site.bias), _thresholds(site.rule), vector(offset))


def _thresholds(rule: SiteRule | None) -> Any:
    """As native/decoder/decoder.h has them: with levels the steps after those of the columns."""
    if rule is None or rule.steps is None:
        return None if rule is None else vector(rule.limits)
    return vector(torch.cat([rule.unit.flatten(), rule.steps]))


def _add_dense(builder: Any, mlp: DenseMlp, threads: int) -> None:
    _add_sites(builder, mlp.sites, threads)


def _add_neurons(builder: Any, mlp: NeuronMlp, threads: int) -> None:
    by_rows = mlp.gate.format.order != "zigzag"
    if not by_rows:
        builder.set_site(_NUMBERS.index("mlp_in"), load_zigzag(mlp.gate, threads=threads), None, None, None)
    builder.set_neurons(load_neurons(mlp.records, gated=mlp.gated), load_gates(mlp.gate) if by_rows else None)


def _add_experts(builder: Any, mlp: ExpertMlp, threads: int, norms: Mapping[str, Tensor]) -> None:
    gate = () if mlp.shared_gate is None else (mlp.shared_gate,)
    router = torch.cat([mlp.router, *gate]).contiguous()  # what says how much of shared experts is its last row
    into, mid = (mlp.sites[name] for name in MLP_SITES)
    builder.set_experts(
        router=load_rows(PackedMatrix(router.view(torch.uint8), MatrixFormat("F32"), *router.shape)),
        used=mlp.used,
        shared=mlp.shared,
        normalised=mlp.normalised,
        mlp_in=load_experts(into.matrix, threads),
        mlp_in_threshold=_thresholds(into.rule),
        mlp_mid=load_experts(mid.matrix, threads),
        mlp_mid_threshold=_thresholds(mid.rule),
        router_bias=vector(mlp.router_bias),
        mlp_in_bias=vector(into.bias),
        mlp_mid_bias=vector(mid.bias),
        shared_gated=mlp.shared_gate is not None,
        scale=vector(mlp.scale),
        norm=vector(norms.get(EXPERT_NORMS[0])),
        shared_norm=vector(norms.get(EXPERT_NORMS[1])),
    )
    if mlp.routing is not None:
        builder.set_routing(**asdict(mlp.routing), correction=vector(mlp.correction))


_ADD_MLP: Mapping[MlpKind, Callable[[Any, Any, int], None]] = {
    DENSE: _add_dense,
    NEURONS: _add_neurons,
    PLAIN_NEURONS: _add_neurons,
}
