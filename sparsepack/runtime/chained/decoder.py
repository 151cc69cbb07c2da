"""A decoder out of the operations of a backend (`runtime/chained/layer.py`), chained by torch; on any device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsepack.formats.packed import PackedModel
from sparsepack.models.activations import soft_capped
from sparsepack.models.blocks import LATENT_EPS, Attention, Latent
from sparsepack.placement.traffic import HitCounts, TrafficStats
from sparsepack.progress import format_count
from sparsepack.runtime.chained.layer import LoadedLayer, Mode, Operations, load_layer
from sparsepack.runtime.decoder import among_all, attention_of, moving_sequences
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.runtime.kv_cache import AttentionShape, KvCache
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.delta_net import states_of
from sparsepack.runtime.threshold_controller import SequenceScales, StepScales, ThresholdController

PREFILL_TOKENS = 512
"""This many positions pass at once: attention needs heads * PREFILL_TOKENS * context scores."""


class OperationsDecoder:
    """See `runtime.decoder.Decoder`.

    All arithmetic outside of the operations is float32. The embedding stays in the mapped file, rows decoded as they
    are looked up.

    Of several sequences, a step multiplies the columns that are active in any with what each of them has there.

    threads      -- that torch runs on during calls; None: as many as it has
    cache_type   -- as `operations.new_cache` takes it
    new_cache    -- what attends, instead of that
    sequences    -- how many, each with a cache of its own
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
        sequences: int = 1,
    ) -> None:
        self._packed, self._architecture, self._device = packed, packed.architecture, device
        self._operations = operations
        self._threads = threads
        self._layers = [load_layer(of, operations, device, packed.architecture.norm_eps) for of in packed.layers]
        self._output_norm = packed.scaled_output_norm.to(device)
        bias = packed.scaled_output_norm_bias
        self._output_norm_bias = None if bias is None else bias.to(device)
        self._output = operations.load_rows(packed.output, device)
        inputs = packed.per_layer
        self._projection = None if inputs is None else operations.load_rows(inputs.projection, device)
        new_cache = new_cache or operations.new_cache
        self.cache = new_cache(attention_of(packed, context, device, sequences), cache_type, device)
        a = packed.architecture
        self._cached = {layer: number for number, layer in enumerate(a.attention_layers)}
        self._states = states_of(
            a.delta_net or a.mamba, [layer.delta_net for layer in self._layers], a.mamba_eps or a.norm_eps, sequences
        )
        self.stepped = 0
        self._scales: SequenceScales | None = None

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    @property
    def description(self) -> str:
        return format_count(self.threads, "thread") if self._device.type == "cpu" else str(self._device)

    @property
    def hit_counts(self) -> HitCounts | None:
        return None

    @property
    def traffic_stats(self) -> TrafficStats | None:
        return None

    @property
    def scales(self) -> tuple[float, ...]:
        return () if self._scales is None else self._scales.scales

    def control_thresholds(self, controller: ThresholdController) -> None:
        self._scales = SequenceScales(controller, len(self.cache.lengths), self._device)

    def active(self) -> dict[tuple[int, str], int]:
        layers = enumerate(self._layers)
        return {(number, name): int(count) for number, layer in layers for name, count in layer.active.items()}

    def reset(self) -> None:
        self.cache.reset()
        self.stepped = 0
        for layer in self._layers:
            for count in layer.active.values():
                count.zero_()
        if self._scales is not None:
            self._scales.reset_all()

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(length, sequence)
        if self._scales is not None:
            self._scales.reset(sequence)

    def copy(self, source: int, to: int, length: int) -> None:
        self.cache.copy(source, to, length)
        if self._states is not None:
            self._states.copy(source, to)
        if self._scales is not None:
            self._scales.reset(to)

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        self.cache.set_rope(sequence, first, cos, sin)

    def prefill(self, sequence: int, ids: Tensor, every: bool = False) -> Tensor:
        with torch_threads(self._threads):
            hidden = self._run(ids, Mode.PREFILL, sequence)
            return self._logits(hidden) if every else self._logits(hidden[-1:])[0]

    def prepare(self, sparse: bool) -> None:
        """Do nothing: steps on a processor compile no kernels and record no graph."""

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        moving = moving_sequences(ids)
        with torch_threads(self._threads):
            mode = Mode.STEP if sparse else Mode.DENSE_STEP
            logits = self._logits(self._blocks(torch.tensor([*moving.values()]), mode, [*moving]))
        self.stepped += 1
        return among_all(logits, moving, len(ids))

    def decode_next(
        self, ids: Sequence[int | None], sparse: bool, samplers: Sequence[Sampler | None]
    ) -> list[int | None]:
        logits = self.step(ids, sparse)
        return [
            None if id is None or sampler is None else sampler.choose(row)
            for id, sampler, row in zip(ids, samplers, logits, strict=True)
        ]

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        with torch_threads(self._threads):
            dense = self._run(ids[:sparse_from], Mode.PREFILL)
            stepped = self._run(ids[sparse_from:], Mode.MASKED if sparse else Mode.DENSE)
            return self._logits(torch.cat([dense, stepped]))

    def _run(self, ids: Tensor, mode: Mode, sequence: int = 0) -> Tensor:
        """Append tokens to a sequence; the normed output of the last block: [S, hidden]."""
        if mode is not Mode.PREFILL:
            self.stepped += len(ids)
        hidden = [self._output_norm.new_empty(0, self._architecture.hidden)]
        # A token with controlled thresholds depends on the one before.
        at_once = 1 if self._scales is not None and mode is Mode.MASKED else PREFILL_TOKENS
        hidden += [self._blocks(chunk, mode, [sequence]) for chunk in torch.split(ids, at_once) if len(chunk)]
        return torch.cat(hidden)

    def _blocks(self, tokens: Tensor, mode: Mode, sequences: Sequence[int]) -> Tensor:
        """Append as many tokens to each of some sequences, those of the first one first."""
        eps = self._architecture.norm_eps
        controlled = self._scales if mode in (Mode.STEP, Mode.MASKED) else None
        scales = None if controlled is None else controlled.begin_step(sequences)
        x = reference.embed(self._packed.embedding, tokens).to(self._device)  # [S, hidden]
        x = x * self._architecture.embedding_scale
        inputs = self._per_layer_inputs(tokens, x)
        for number, (block, layer) in enumerate(zip(self._architecture.blocks, self._layers, strict=True)):
            if layer.basis is not None:
                x = self._operations.matmul(layer.basis, x)
            norm = partial(self._norm, layer)
            if block.mixer is not None:
                read = norm("attn_norm", x) if block.norms_before else x
                update = self._mixed(number, read, mode, sequences, scales)
                x = x + (norm("attn_post_norm", update) if block.norms_after else update)
            if block.mlp is not None:
                if not block.parallel:
                    read = norm("mlp_norm", x) if block.norms_before else x
                update = layer.mlp.output(read, block.mlp.activation, mode, scales)
                x = x + (norm("mlp_post_norm", update) if block.norms_after else update)
            if layer.per_layer is not None and inputs is not None:
                x = x + layer.per_layer.output(x, inputs[:, number], self._architecture.activation)
            if layer.scalar is not None:
                x = x * layer.scalar
        if controlled is not None and scales is not None:
            controlled.end_step(sequences, scales)
        for sequence in sequences:
            self.cache.advance(len(tokens) // len(sequences), sequence)
        return reference.norm(x, self._output_norm, self._output_norm_bias, eps)

    def _per_layer_inputs(self, tokens: Tensor, x: Tensor) -> Tensor | None:
        """What each layer is given of tokens, whose embeddings are x [S, hidden], beside their hidden states: float32
        [S, layers, width]; None: nothing."""
        of = self._packed.per_layer
        if of is None:
            return None
        a = self._architecture
        rows = reference.embed(of.embedding, tokens).to(self._device) * of.row_scale
        made, table = (y.view(-1, a.layers, a.per_layer) for y in (self._operations.matmul(self._projection, x), rows))
        return reference.rms_norm(made, of.sum_norm.to(self._device), of.norm_eps(a.norm_eps)) + table

    def _norm(self, layer: LoadedLayer, name: str, x: Tensor) -> Tensor:
        """RMSNorm(x), or LayerNorm(x), by one of a block's norms."""
        return reference.norm(x, layer.norms[name], layer.norms.get(f"{name}_bias"), self._architecture.norm_eps)

    def _mixed(self, number: int, x: Tensor, mode: Mode, sequences: Sequence[int], scales: StepScales | None) -> Tensor:
        """What a block's mixer adds."""
        sites, mixer = self._layers[number].attention, self._architecture.blocks[number].mixer
        rows = sites["attn_in"].product(x, mode, scales)
        if isinstance(mixer, Attention):
            if mixer.latent is not None:
                rows = self._from_latents(number, mixer.latent, rows, mode, scales)
            mixed = self._attended(number, mixer, rows, mode, sequences)
            if mixer.latent is not None:  # channels that values have not are zeros
                heads = torch.unflatten(mixed, -1, (self._architecture.heads, -1))
                mixed = heads[..., : mixer.latent.value].flatten(1)
        else:
            assert self._states is not None
            of_each = zip(sequences, rows.tensor_split(len(sequences)), x.tensor_split(len(sequences)), strict=True)
            lengths = self.cache.lengths
            mixed = torch.cat([self._states.mix(number, y, x, of, lengths[of]) for of, y, x in of_each])
        if self._architecture.blocks[number].sub_norms:
            mixed = self._norm(self._layers[number], "attn_sub_norm", mixed)
        return sites["attn_out"].product(mixed, mode, scales)

    def _from_latents(self, number: int, latent: Latent, rows: Tensor, mode: Mode, scales: StepScales | None) -> Tensor:
        """Queries, keys and values as the cache takes them, of what attn_in gives where that are latents."""
        a, layer = self._architecture, self._layers[number]

        def expanded(site: str, norm: str, x: Tensor) -> Tensor:
            x = reference.rms_norm(x, layer.norms[norm], LATENT_EPS)
            return torch.unflatten(layer.attention[site].product(x, mode, scales), -1, (a.heads, -1))

        q, kv, turning = torch.split(rows, [latent.into(a.heads)[0], latent.kv_rank, latent.turning], -1)
        q = expanded("attn_q_b", "q_a_norm", q) if latent.q_rank else torch.unflatten(q, -1, (a.heads, -1))
        k, v = torch.split(expanded("attn_kv_b", "kv_a_norm", kv), [latent.plain, latent.value], -1)
        q = torch.cat([q[..., latent.plain :], q[..., : latent.plain]], -1)
        k = torch.cat([turning[:, None].expand(-1, a.heads, -1), k], -1)
        return torch.cat([pad(each, (0, a.head_dim - each.shape[-1])).flatten(1) for each in (q, k, v)], -1)

    def _attended(self, number: int, mixer: Attention, rows: Tensor, mode: Mode, sequences: Sequence[int]) -> Tensor:
        """What attention makes of what attn_in gives."""
        a, cached, sparse = self._architecture, self._cached[number], mode in (Mode.STEP, Mode.MASKED)
        gates = None
        if mixer.k_eq_v:
            rows = torch.cat([rows, rows[:, a.heads * mixer.head_dim :]], -1)
        if mixer.gated:  # of each head its queries, then its gates
            queries, rest = rows.tensor_split([2 * a.heads * mixer.head_dim], dim=-1)
            q, gates = torch.unflatten(queries, -1, (a.heads, 2, mixer.head_dim)).unbind(-2)
            rows, gates = torch.cat([q.flatten(1), rest], -1), gates.flatten(1)
        of_each = self._norm_rows(number, mixer, rows).tensor_split(len(sequences))
        attended = torch.cat(
            [
                self.cache.attend(cached, self.cache.append(cached, qkv, sequence), sequence, sparse)
                for sequence, qkv in zip(sequences, of_each, strict=True)
            ]
        )
        return attended if gates is None else attended * gates.sigmoid()

    def _norm_rows(self, number: int, mixer: Attention, qkv: Tensor) -> Tensor:
        """What attn_in gives, queries and keys of all heads normed together where the model does that."""
        norm = partial(self._norm, self._layers[number])
        if mixer.qk_norm != "rows":
            return qkv
        heads = (self._architecture.heads, mixer.kv_heads, mixer.kv_heads)
        q, k, v = torch.split(qkv, [count * mixer.head_dim for count in heads], dim=-1)
        return torch.cat([norm("q_row_norm", q), norm("k_row_norm", k), v], dim=-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return soft_capped(self._operations.matmul(self._output, hidden), self._architecture.logit_cap)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch run on so many threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
