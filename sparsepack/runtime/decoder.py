"""The seam between the engine and a backend: what a decoder and a backend's module offer, and which backend runs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Latent
from sparsepack.placement.traffic import HitCounts, TrafficStats
from sparsepack.runtime.backends import Backend, backend_for, find_backend
from sparsepack.runtime.features import check_features, lacks, requested_backend
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.runtime.kv_cache import AttentionShape, CacheState, attention_shape
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference.attention import rotary_table
from sparsepack.runtime.threshold_controller import ThresholdController
from sparsepack.runtime.tuning import Shape


class Decoder(Protocol):
    """A packed model with the caches of one sequence or several, filled position by position. Its caller checks ids and
    room, gives no more sequences than there are, and steps at least one.

    A step takes an id for each sequence, or None for one that stands still: its text and its length stay as they are,
    and what it costs the others is the backend's matter, little or nothing.

    description -- what runs, for people: instruction set or device, threads
    threads     -- of the processor
    cache       -- keys and values of each sequence
    """

    @property
    def description(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def cache(self) -> CacheState: ...

    @property
    def stepped(self) -> int:
        """How many steps were made since the reset; prefilled positions do not count."""

    @property
    def hit_counts(self) -> HitCounts | None:
        """What decoded tokens needed since the reset, and how much of it had slots; None: there are no slots."""

    @property
    def traffic_stats(self) -> TrafficStats | None:
        """By which way neurons were computed in the steps since the reset; None: there are no slots."""

    @property
    def scales(self) -> tuple[float, ...]:
        """What the thresholds of each sequence are multiplied by; empty: they are not controlled."""

    def control_thresholds(self, controller: ThresholdController) -> None:
        """Keep the share that sparse steps of each sequence skip at a target. Called once, before any token, of
        backends alone whose row `scales_thresholds`."""

    def active(self) -> Mapping[tuple[int, str], int]:
        """Columns that were active in any sequence, per (layer, site), summed over those steps."""

    def reset(self) -> None:
        """Forget the sequences and what was counted."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what a sequence has beyond its first tokens; what was counted stays, the scale of its thresholds is
        reset."""

    def copy(self, source: int, to: int, length: int) -> None:
        """Let a sequence have the first tokens of another, and nothing else; the scale of its thresholds is reset."""

    def prefill(self, sequence: int, ids: Tensor, every: bool = False) -> Tensor:
        """Append int64 [S > 0] to a sequence, dense. Returns the logits after the last: float32 [vocabulary]; or after
        every token: float32 [S, vocabulary]."""

    def prepare(self, sparse: bool) -> None:
        """Make what the first of such steps would make, kernels and their order, so that it takes as long as the
        others; whoever steps need not have asked for it."""

    def step(self, ids: Sequence[int | None], sparse: bool) -> Tensor:
        """Append a token to each sequence with an id. Returns the logits after them: float32 [sequences, vocabulary];
        rows of sequences that stand still mean nothing."""

    def decode_next(
        self, ids: Sequence[int | None], sparse: bool, samplers: Sequence[Sampler | None]
    ) -> list[int | None]:
        """What each sampler chooses from the logits of `step`; None where the sequence stands still."""

    def teacher_forced(self, ids: Tensor, sparse_from: int, sparse: bool) -> Tensor:
        """Append int64 [S] to the one sequence that there is, dense up to `sparse_from`, the others as steps. Returns
        all logits: float32 [S, vocabulary]."""


@dataclass(frozen=True)
class GivenTokens:
    """Tokens that a sequence is given. Positions before `sparse_from` are dense, the others run as steps; logits are
    computed from `scored_from` on."""

    ids: Sequence[int]
    sparse_from: int
    scored_from: int = 0

    def after(self, length: int) -> "GivenTokens":
        """Return what follows the first `length` tokens."""
        return GivenTokens(self.ids[length:], max(0, self.sparse_from - length), max(0, self.scored_from - length))


def shared_prefixes(rows: Sequence[GivenTokens], least: int = 8) -> list[tuple[range, int]]:
    """Return groups of neighbouring rows, and how many tokens those of a group begin with alike that are dense and not
    scored: `least` or more, or 0."""
    groups: list[tuple[range, int]] = []
    for number, row in enumerate(rows):
        group, shared = groups[-1] if groups else (range(0), 0)
        most = min(shared, row.sparse_from, row.scored_from)
        pairs = zip(rows[group.start].ids[:most], row.ids, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if alike >= least:
            groups[-1] = (range(group.start, number + 1), alike)
        else:
            groups.append((range(number, number + 1), min(row.sparse_from, row.scored_from)))
    return [(group, shared if len(group) > 1 else 0) for group, shared in groups]


class RowsDecoder(Decoder, Protocol):
    """A decoder of a backend whose row says that it scores rows together."""

    def teacher_forced_rows(self, rows: Mapping[int, GivenTokens], sparse: bool) -> list[Tensor]:
        """Append tokens to sequences by their numbers, many at once. Returns the logits that are scored of each:
        float32 [N, vocabulary]. Not where thresholds are controlled, which follow from the token before."""


class PositionsDecoder(Decoder, Protocol):
    """A decoder of a backend whose row `steps_positions`."""

    def step_positions(self, sequence: int, ids: Sequence[int], sparse: bool) -> Tensor:
        """Append tokens to a sequence in one step, each of which skips what it would skip in a step of its own. Returns
        the logits after each: float32 [tokens, vocabulary]."""

    def choose(self, logits: Tensor, sampler: Sampler) -> int:
        """What a sampler that does not choose on the host chooses from a row of them."""


class LongTextDecoder(Decoder, Protocol):
    """A decoder of a backend that computes `traits.LONG_TEXTS`."""

    def set_rope(self, sequence: int, first: int, cos: Tensor, sin: Tensor) -> None:
        """Let positions of a sequence turn by other rows, as `KvCache.set_rope` says."""


def moving_sequences(ids: Sequence[int | None]) -> dict[int, int]:
    """The id of each sequence that does not stand still, by its number, in ascending order."""
    return {sequence: id for sequence, id in enumerate(ids) if id is not None}


def among_all(logits: Tensor, sequences: Collection[int], count: int) -> Tensor:
    """The logits of some sequences [sequences, vocabulary] at their numbers among `count`, zeros between."""
    if len(sequences) == count:
        return logits
    return logits.new_zeros(count, logits.shape[1]).index_copy_(
        0, torch.tensor([*sequences], device=logits.device), logits
    )


def kept_latents(packed: PackedModel, row: Backend) -> Latent | None:
    """The latents that a backend keeps in place of keys and values, which its steps read: attn_kv_b is dense, since
    what is skipped of it would be another part for every cached token, and a row is one that its kernels know. None: it
    keeps keys and values."""
    a, sites = packed.architecture, [layer.attention.get("attn_kv_b") for layer in packed.layers]
    if a.latent is None or a.long_texts is not None:
        return None
    width = a.latent.kv_rank + a.latent.turning
    dense = all(site is not None and site.rule is None for site in sites)
    return a.latent if width % 2 == 0 and width <= row.latent_width and dense else None


def attention_of(packed: PackedModel, context: int, device: torch.device, sequences: int = 1) -> AttentionShape:
    """What a model's cache is made for, on the device that attends."""
    architecture = packed.architecture
    norms = [
        (packed.layers[n].norms["q_norm"], packed.layers[n].norms.get("k_norm"))
        if architecture.blocks[n].qk_norm == "heads"
        else (None, None)
        for n in architecture.attention_layers
    ]
    # On the CPU: of large angles a GPU's cosine need not be as exact.
    tables = [
        reference_attention.rotary_table(torch.tensor(inv_freq), scale, context)
        for inv_freq, scale in architecture.rotary_tables
    ]
    (cos, sin), *more = [(cos.to(device), sin.to(device)) for cos, sin in tables]
    sinks = [packed.layers[n].sinks for n in architecture.attention_layers]
    return attention_shape(architecture, norms, cos, sin, sequences, packed.attention, more, sinks)


class LongTextRope:
    """The sequences of a decoder, each of which turns as its length means.

    Models whose long sequences turn as a whole have two sets of frequencies; in others the frequencies of a position
    follow from the length that its text has there.
    """

    def __init__(self, architecture: Architecture, context: int, decoder: Decoder) -> None:
        long = architecture.long_texts
        self._architecture, self._context, self._decoder = architecture, context, decoder
        self._long = None if long is None or context <= long.tokens else long
        self._are_long = [False for _ in decoder.cache.lengths]

    def grow(self, sequence: int, ids: Sequence[int], count: int) -> None:
        """Let the next `count` tokens of a sequence, which has these already, turn as its length then means. Where that
        means all of it, a sequence that becomes long, or short again, is computed anew, dense, as transformers does."""
        long = self._long
        if long is None:
            return
        if not long.turns_all:
            first = self._decoder.cache.lengths[sequence]
            self._set_positions(sequence, first, first + count, first + count)
            return
        is_long = len(ids) + count > long.tokens
        if is_long == self._are_long[sequence]:
            return
        self._decoder.truncate(sequence, 0)
        self._set_all(sequence, is_long)
        if ids:
            self._decoder.prefill(sequence, torch.tensor(ids))

    def copied(self, source: int, to: int) -> None:
        """Let a sequence, which another was copied to, turn as that one does."""
        self._set_all(to, self._are_long[source])

    def _set_all(self, sequence: int, is_long: bool) -> None:
        """Let a sequence turn as long ones do, or as short ones, from its first token on."""
        long = self._long
        if long is not None and long.turns_all and is_long != self._are_long[sequence]:
            self._set_positions(sequence, 0, self._context, self._context if is_long else 0)
            self._are_long[sequence] = is_long

    def _set_positions(self, sequence: int, first: int, last: int, length: int) -> None:
        """Let positions `first` .. `last` - 1 of a sequence turn as those of a text of a length."""
        a = self._architecture
        rows = rotary_table(a.frequencies(length), a.rotary_scale, last, first)
        cast(LongTextDecoder, self._decoder).set_rope(sequence, first, *rows)


class BackendModule(Protocol):
    """What a backend's module offers."""

    def usable(self, device: torch.device) -> None:
        """Raise `UserError` where it cannot run on a device, saying what is missing."""

    def decoder(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        cache_type: str,
        options: EngineOptions,
    ) -> Decoder:
        """What runs one sequence or several. Raises `UserError` as `usable`, and for a model that it does not know.

        device, context, cache_type -- what the engine made of those in the options, of which the others count here
        options                     -- they ask for nothing that the row does not have
        """

    def synchronise(self, device: torch.device) -> None:
        """Wait until the device has done what it was given."""

    def describe(self, device: torch.device) -> str:
        """The accelerator's name; empty for the CPU."""

    def tune(
        self, shapes: Iterable[Shape], device: torch.device, threads: int | None, gates: Collection[Shape], block: str
    ) -> dict[str, Any]:
        """Measure what suits the machine for products of these shapes, keep it, and return it as JSON-able values.
        Asked of backends alone whose row `tunes`.

        gates -- of the shapes, those of gate and up
        block -- the type of the superblocks, one of the row's
        """

    def tune_bandwidth(self, widths: Iterable[int], device: torch.device, threads: int | None) -> list[dict[str, Any]]:
        """Measure how fast neurons with slots and without are computed, for records of so many channels, keep it, and
        return it as JSON-able values. Asked of backends alone whose row `tunes` and has `slots`."""


def load_backend_module(row: Backend) -> BackendModule:
    """The module that does a backend's work."""
    return cast(BackendModule, import_module(row.module))


def choose_backend(options: EngineOptions, packed: PackedModel) -> tuple[str, tuple[str, ...]]:
    """The name of the backend to run: the one that is asked for, or the one that is made for the device, where what it
    needs is there. Notes say why where that is not the best for the device.

    Raises `UserError`, saying what is missing, where the reference does not do what is asked for.
    """
    if options.backend is not None or (options.sequences or 1) > 1:
        return requested_backend(options).name, ()
    best = backend_for(options.device)
    try:
        check_features(best, EngineOptions(), packed)
        load_backend_module(best).usable(torch.device(options.device))
    except UserError as error:
        reference = find_backend("reference")
        if lacks(reference, options, packed):
            raise
        return reference.name, (f"note: the reference backend runs: {error}",)
    return best.name, ()


@dataclass(frozen=True)
class Columns:
    """The columns that a site's product reads, and what the product lacks without the others.

    threshold -- float32 [1] or [columns], or with planes [levels, columns]; None: every column, all of it
    offset    -- taken from the input first: float32 [columns] or None
    bias      -- to add to the product: the site's own and, with an offset, W offset; float32 [rows] or None
    """

    threshold: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None


def load_vector(x: Tensor, device: torch.device) -> Tensor:
    """float32 [n] on a device."""
    return x.detach().to(device, torch.float32).reshape(-1).contiguous()
