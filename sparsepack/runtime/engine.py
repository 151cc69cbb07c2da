"""The decoder: a packed model, run token by token, skipping the columns that its rules call inactive."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.models.activity import Skipped, bits_read
from sparsepack.models.sparse_attention import SparseFrom
from sparsepack.placement.traffic import HitCounts, TrafficStats
from sparsepack.runtime.backends import Backend, find_backend
from sparsepack.runtime.decoder import (
    Decoder,
    GivenTokens,
    LongTextRope,
    PositionsDecoder,
    RowsDecoder,
    choose_backend,
    kept_latents,
    load_backend_module,
    moving_sequences,
    shared_prefixes,
)
from sparsepack.runtime.features import check_features
from sparsepack.runtime.free_memory import cache_bytes, count_sequences, free_bytes
from sparsepack.runtime.generation.sampling import Sampler
from sparsepack.runtime.hybrid.plan import context_within
from sparsepack.runtime.options import EngineOptions, usual_context
from sparsepack.runtime.threshold_controller import new_controller


@dataclass(frozen=True)
class Counts:
    """How many positions were decoded, and how many columns were active in them, per (layer, site)."""

    stepped: int = 0
    active: Mapping[tuple[int, str], int] = field(default_factory=dict)


class Engine:
    """A packed model ready to run, with a static KV cache for one sequence, or for each of several that are decoded
    together, a token of each at a time: every weight is read once for all of them.

    packed  -- the artifact, as `read_packed` returns it
    options -- device, context and so on; where no backend is asked for, the one that is made for the device runs where
               what it needs is there, and "reference" otherwise
    changes -- fields of the options that are different: `Engine(packed, context=64)`

    `dense` of the options may be changed between calls. With `offload`, models with sparse attention select tokens
    wherever the policy says, also where reading all would be faster on the device. With `cached`, the result is the
    same but for rounding. A model that keeps a state in some layers (gated delta nets) cannot forget some tokens of it:
    `truncate` and `copy` to fewer tokens than there are compute these anew, dense, and `keep` keeps all or none. With
    `hold`, each sequence's thresholds are scaled from token to token
    (`runtime/threshold_controller.py`), as they are in the file at first, and again once the sequence has lost tokens.

    The reference backend computes in float32 and holds every matrix decoded, 4 bytes a weight (7.1 times the stored
    size of a zigzag matrix); the cpu and cuda backends hold them at their stored size (`runtime/cpu/decoder.py`,
    `runtime/cuda/decoder/decoder.py`). `backend` is the one that was taken, `notes` says why where that is not the best
    one, `description` what runs in a few words.

    Raises `UserError` for an unknown backend or device, a backend that cannot run there or not run this model, a cache
    type that it does not have, a context the model was not made for, an offload, slots or a share to hold that the
    backend or the model does not know, or more sequences than the backend decodes together.
    """

    def __init__(self, packed: PackedModel, options: EngineOptions | None = None, **changes: Any) -> None:
        options = replace(options or EngineOptions(), **changes)
        self.packed = packed
        self.architecture = packed.architecture
        self.device = torch.device(options.device)
        self.dense = options.dense
        self.backend, self.notes = choose_backend(options, packed)
        row = find_backend(self.backend)
        check_features(row, options, packed)
        cache_type = row.choose_cache_type(options.cache_type)
        self.context = choose_context(options.context, packed.architecture.context)
        self._fit_context(options, cache_type)
        self._offload = options.offload
        self._module = load_backend_module(row)
        self._decoder = self._load_decoder(row, cache_type, options)
        self._controller = new_controller(packed) if options.hold else None
        if self._controller is not None:
            self._decoder.control_thresholds(self._controller)
        self._ids: list[list[int]] = [[] for _ in self.positions]
        self._long_text_rope = LongTextRope(self.architecture, self.context, self._decoder)
        self.lock = threading.RLock()
        self._owner: weakref.ref[object] | None = None
        self._owner_thread = threading.current_thread()

    def _fit_context(self, options: EngineOptions, cache_type: str) -> None:
        """Take a context that leaves room for the model, where a budget was given and no context; the notes say so."""
        if options.context is None and options.vram_bytes is not None:
            requested = self.context
            self.context = context_within(
                self.packed, requested, cache_type, options.sequences or 1, options.vram_bytes
            )
            if self.context < requested:
                self.notes += (
                    f"note: context of {self.context:,} tokens, whose keys and values take at most a quarter of "
                    f"{options.vram}; --context takes more",
                )

    def _load_decoder(self, row: Backend, cache_type: str, options: EngineOptions) -> Decoder:
        """The decoder of as many sequences as are asked for; for None, of as many as have room."""
        new_decoder = partial(self._module.decoder, self.packed, self.device, self.context, cache_type)
        if options.sequences is not None:
            return new_decoder(options)
        most = 1 if options.divided_by else row.sequences
        of_one = cache_bytes(self.architecture, self.context, cache_type, kept_latents(self.packed, row))
        sequences = count_sequences(most, of_one, free_bytes(self.device))
        while sequences > 1:
            try:
                return new_decoder(replace(options, sequences=sequences))
            except (UserError, MemoryError, torch.OutOfMemoryError):
                sequences //= 2
        return new_decoder(replace(options, sequences=1))

    @property
    def positions(self) -> tuple[int, ...]:
        """How many tokens the cache holds of each sequence."""
        return tuple(self._decoder.cache.lengths)

    @property
    def position(self) -> int:
        """How many tokens the cache holds of the first sequence: the position of the next one."""
        return self.positions[0]

    @property
    def threads(self) -> int:
        """On how many threads of the processor it runs."""
        return self._decoder.threads

    @property
    def cache_type(self) -> str:
        """The type of keys and values in the cache: "f32", "f16" or "bf16"."""
        return self._decoder.cache.type

    @property
    def description(self) -> str:
        """What runs: `cpu, avx512, 2 threads`, `cuda, NVIDIA H100 80GB HBM3, 4 sequences, 50 % held`."""
        attention = _described_attention(self._decoder.cache.sparse_from, self.context, self._offload)
        sequences = f", {len(self.positions)} sequences" if len(self.positions) > 1 else ""
        target = self._described_target()
        return f"{self.backend}, {self._decoder.description}{sequences}{target}{attention}"

    def _described_target(self) -> str:
        """What the threshold controller keeps a text at: the share that is skipped. Of planes the bits that are read,
        without a controller, too."""
        packed, held = self.packed, self._controller is not None
        if packed.plane_bits is None:
            return f", {100 * packed.sparsity:.3g} % held" if held else ""
        if self.dense or not packed.rules:
            return ""
        return f", {'held at ' if held else 'target '}{bits_read(packed.plane_bits, packed.target)}"

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        self._module.synchronise(self.device)

    @property
    def hit_counts(self) -> HitCounts | None:
        """What decoded tokens needed since the reset, and how much of it had slots; None: there are no slots."""
        return self._decoder.hit_counts

    @property
    def traffic_stats(self) -> TrafficStats | None:
        """By which way the neurons of steps since the reset were computed; None: there are no slots."""
        return self._decoder.traffic_stats

    @property
    def scales(self) -> tuple[float, ...]:
        """What the thresholds of each sequence are multiplied by in its next step; empty: they are not controlled."""
        return self._decoder.scales

    def claim(self, owner: object = None) -> None:
        """Let `owner` alone, or nobody, go on with the sequences. Whoever claims and works holds `lock` meanwhile.

        Raises `UserError` where the owner before began in another thread that lives, and has not released them.
        """
        before = None if self._owner is None else self._owner()
        here = threading.current_thread()
        if before is not None and self._owner_thread is not here and self._owner_thread.is_alive():
            raise UserError(
                f"thread {self._owner_thread.name!r} makes a text with this model; let it end or close it first, ask "
                "for its result() at once, or load the model for each thread"
            )
        self._owner = None if owner is None else weakref.ref(owner)
        self._owner_thread = here

    def owned_by(self, owner: object) -> bool:
        """Whether the sequences are those of `owner`."""
        return self._owner is not None and self._owner() is owner

    def release(self, owner: object) -> None:
        """Let others claim the sequences, which stay."""
        if self.owned_by(owner):
            self._owner = None

    def reset(self) -> None:
        """Forget the sequences, whoever owns them, and the activity counted so far."""
        self._owner = None
        for ids in self._ids:
            ids.clear()
        self._decoder.reset()

    def truncate(self, length: int, sequence: int = 0) -> None:
        """Forget what a sequence has beyond its first `length` tokens; the activity counted stays, and the scale of its
        thresholds is reset. Raises `UserError` where it has fewer."""
        self._check_sequence(sequence)
        position = self.positions[sequence]
        if not 0 <= length <= position:
            which = f" of sequence {sequence}" if len(self.positions) > 1 else ""
            raise UserError(f"length {length}{which}: expected 0 to {position}, the tokens in the context")
        if length == position:
            return
        if self.reusable(length, sequence) < length:
            ids = self._ids[sequence][:length]
            self.truncate(0, sequence)
            self.prefill(ids, sequence)
            return
        self._decoder.truncate(sequence, length)
        del self._ids[sequence][length:]

    def reusable(self, length: int, sequence: int = 0) -> int:
        """How many of the first `length` tokens of a sequence can be had without computing them again: all of them, but
        of a model that keeps a state all tokens or none."""
        return length if not self.architecture.state_layers or length == self.positions[sequence] else 0

    def copy(self, source: int, to: int, length: int) -> None:
        """Let a sequence be the first `length` tokens of another, with the same bits in the cache; the scale of its
        thresholds is reset. Raises `UserError` where the other has fewer."""
        for sequence in (source, to):
            self._check_sequence(sequence)
        if not 0 <= length <= (position := min(self.positions[source], len(self._ids[source]))):
            raise UserError(
                f"length {length} of sequence {source}: expected 0 to {position}, the tokens in the context"
            )
        ids = self._ids[source][:length]
        if self.reusable(length, source) < length:
            self.truncate(0, to)
            self.prefill(ids, to)
            return
        self._ids[to] = []  # until all is there, nobody knows what is
        self._decoder.copy(source, to, length)
        self._long_text_rope.copied(source, to)
        self._ids[to] = ids

    def counts(self) -> Counts:
        """What was counted since the last reset; positions of `prefill` do not count."""
        return Counts(self._decoder.stepped, dict(self._decoder.active()))

    def activity(self, since: Counts | None = None) -> dict[tuple[int, str], float]:
        """Share of columns per (layer, site) that were active, in any sequence, over the steps since the last reset, or
        since what `counts` returned then.

        Positions of `prefill` do not count; dense sites are wholly active. Empty before the first step.
        """
        now, since = self.counts(), since or Counts()
        active = {key: count - since.active.get(key, 0) for key, count in now.active.items()}
        return _shares(self.packed, active, now.stepped - since.stepped)

    def skipped(self, since: Counts | None = None) -> Skipped | None:
        """What decoded tokens skipped, over the positions of `activity`; None where there were none."""
        activity = self.activity(since)
        return skipped_weights(self.packed, activity) if activity else None

    @torch.no_grad()
    def prefill(self, ids: Sequence[int], sequence: int = 0, every: bool = False) -> Tensor:
        """Append tokens to one sequence, every site dense. Returns the logits after the last: float32 [vocabulary]; or
        after every token: float32 [tokens, vocabulary].

        Raises `UserError` for no tokens, an id the model does not have, more tokens than the cache has room for, or a
        sequence that there is not.
        """
        self._check_sequence(sequence)
        if not len(ids):
            raise UserError("prefill of 0 tokens; expected at least one")
        checked = self._checked(ids, self.positions[sequence])
        self._long_text_rope.grow(sequence, self._ids[sequence], len(ids))
        logits = self._decoder.prefill(sequence, checked, every)
        self._ids[sequence] += ids
        return logits

    def common(self, ids: Sequence[int], sequence: int = 0) -> int:
        """How many tokens `keep` would keep. Raises `UserError` for a sequence that there is not."""
        self._check_sequence(sequence)
        there = self._ids[sequence]
        if self.positions[sequence] != len(there):  # a call was interrupted, and the cache is not known
            return 0
        pairs = zip(there, ids[:-1], strict=False)
        same = next((n for n, (known, id) in enumerate(pairs) if known != id), min(len(there), max(0, len(ids) - 1)))
        return self.reusable(same, sequence)

    def keep(self, ids: Sequence[int], sequence: int = 0) -> int:
        """Forget what a sequence does not have in common with `ids`, so that `prefill` can go on from there. Returns
        how many tokens are kept, as they were prefilled or decoded: at most all but the last, whose logits are
        wanted."""
        common = self.common(ids, sequence)
        self.truncate(common, sequence)
        return common

    @torch.no_grad()
    def prepare(self) -> None:
        """Make what the first step would make: kernels that are compiled where they run, and their order. Whoever times
        steps calls it before; the steps are the same."""
        self._decoder.prepare(not self.dense)

    def step(self, id: int) -> Tensor:
        """Append one token to the one sequence. Returns the logits after it: float32 [vocabulary]; see `step_all`."""
        return self.step_all([id])[0]

    @torch.no_grad()
    def step_all(self, ids: Sequence[int | None]) -> Tensor:
        """Append a token to each sequence, or none where the id is None, skipping the columns that are inactive in all
        of them. Returns the logits after them: float32 [sequences, vocabulary], of which the rows of sequences that
        stand still mean nothing.

        Raises `UserError` for another number of ids, none at all, one that the model does not have, or a full cache.
        """
        self._begin_step(ids)
        logits = self._decoder.step(ids, not self.dense)
        self._appended(ids)
        return logits

    def decode_next(self, id: int, sampler: Sampler) -> int:
        """Append one token to the one sequence, and choose the next; see `decode_all`."""
        (chosen,) = self.decode_all([id], [sampler])
        assert chosen is not None
        return chosen

    @torch.no_grad()
    def decode_all(self, ids: Sequence[int | None], samplers: Sequence[Sampler | None]) -> list[int | None]:
        """Append tokens as `step_all` does, and choose the next of each sequence: `Sampler.choose` of the logits,
        without the detour through torch where the backend can; None for sequences that stand still, which need no
        sampler. Raises `UserError` as `step_all`, `ArtifactError` as the samplers do."""
        if len(samplers) != len(self._ids):
            raise ValueError(f"{len(samplers)} samplers for {len(self._ids)} sequences")
        if any(sampler is None for sampler, id in zip(samplers, ids, strict=True) if id is not None):
            raise ValueError("a text that does not stand still has no sampler")
        if any(sampler.sampling.on_host for sampler in samplers if sampler is not None):
            logits = self.step_all(ids)
            return [
                None if id is None or sampler is None else sampler.choose(row)
                for id, sampler, row in zip(ids, samplers, logits, strict=True)
            ]
        self._begin_step(ids)
        chosen = self._decoder.decode_next(ids, not self.dense, samplers)
        self._appended(ids)
        return chosen

    @property
    def positions_unsupported(self) -> str:
        """Why a step cannot compute several positions of a sequence as steps of one would; empty: it can."""
        packed, a = self.packed, self.architecture
        sparse = bool(packed.rules) and not self.dense
        if find_backend(self.backend).steps_positions == 1:
            return f"the {self.backend} backend computes one position of a text at a time"
        if a.state_layers:
            return "the model keeps a state, which cannot go back"
        if a.latent is not None:
            return "the model attends by latents"
        if a.long_texts is not None and self.context > a.long_texts.tokens:
            return "what the model's positions turn by follows from the length of the text"
        if self._controller is not None and sparse:
            return "thresholds that are held follow from the token before"
        if packed.plane_bits is not None and sparse:
            return "each position would read the bits that another one needs; with --dense it can"
        if a.experts is not None and sparse:
            return "the experts of each position skip columns of their own; with --dense it can"
        return ""

    @torch.no_grad()
    def step_positions(self, ids: Sequence[int], sequence: int = 0) -> Tensor:
        """Append tokens to one sequence in one step, each of which skips the columns that it would skip in a step of
        its own; a column that any of them needs is read once. Returns the logits after each: float32 [tokens,
        vocabulary].

        It counts as one step. Raises `UserError` where `positions_unsupported` says why, for more tokens than the
        backend takes, and as `step_all`.
        """
        self._check_sequence(sequence)
        most = find_backend(self.backend).steps_positions
        if reason := self.positions_unsupported:
            raise UserError(f"a step of several positions: {reason}")
        if not 1 <= len(ids) <= most:
            raise UserError(f"a step of {len(ids)} positions: expected 1 to {most}")
        self._checked(ids, self.positions[sequence])
        logits = cast(PositionsDecoder, self._decoder).step_positions(sequence, ids, not self.dense)
        self._ids[sequence] += ids
        return logits

    def choose(self, logits: Tensor, sampler: Sampler) -> int:
        """`Sampler.choose` of a row that `step_positions` gave, without the detour through torch where that can be."""
        if sampler.sampling.on_host:
            return sampler.choose(logits)
        return cast(PositionsDecoder, self._decoder).choose(logits, sampler)

    @torch.no_grad()
    def teacher_forced(self, ids: Sequence[int], sparse_from: int) -> Tensor:
        """Logits after every token of a sequence, given to an empty cache: float32 [S, vocabulary].

        Positions before `sparse_from` run dense, the others as `step` would run them, many at once; with sparse
        attention they read what its policy says, also where `step` would read everything because that is faster.
        Forgets the sequence before, and leaves the engine as prefill and steps would. Raises `UserError` as those do,
        and where there are several sequences.

        Where the backend adds in another order than in `step`, that is a matter of the last bits until an input comes
        so close to its threshold that they decide; from there on the two are different, equally good, approximations.
        """
        if not 0 <= sparse_from <= len(ids):
            raise ValueError(f"sparse_from {sparse_from} of {len(ids)} positions")
        if len(self._ids) > 1:
            raise UserError(f"{len(self._ids)} sequences: all logits of a text come from an engine for one")
        self.reset()
        checked = self._checked(ids, 0)
        self._long_text_rope.grow(0, self._ids[0], len(ids))
        logits = self._decoder.teacher_forced(checked, sparse_from, not self.dense)
        self._ids[0] += ids
        return logits

    @torch.no_grad()
    def teacher_forced_rows(self, rows: Sequence[GivenTokens]) -> list[Tensor]:
        """The logits that are scored of a row in each sequence, from empty caches: float32 [N, vocabulary]; what is
        counted adds up over the rows. See `teacher_forced`; rows are computed together, and what neighbours begin with
        alike, dense and not scored, once. Of backends alone whose row `scores_rows`, without a controller."""
        self.reset()
        decoder, groups = cast(RowsDecoder, self._decoder), shared_prefixes(rows)
        begins = {group.start: GivenTokens(rows[group.start].ids[:shared], shared, shared) for group, shared in groups}
        self._append_rows(decoder, {sequence: row for sequence, row in begins.items() if row.ids})
        for group, shared in groups:
            for sequence in group[1:] if shared else ():
                self.copy(group.start, sequence, shared)
        ends = {number: row.after(self.positions[number]) for number, row in enumerate(rows)}
        return self._append_rows(decoder, ends)

    def _append_rows(self, decoder: RowsDecoder, rows: Mapping[int, GivenTokens]) -> list[Tensor]:
        for sequence, row in rows.items():
            self._checked(row.ids, self.positions[sequence])
            self._long_text_rope.grow(sequence, self._ids[sequence], len(row.ids))
        logits = decoder.teacher_forced_rows(rows, not self.dense) if rows else []
        for sequence, row in rows.items():
            self._ids[sequence] += row.ids
        return logits

    def _appended(self, ids: Sequence[int | None]) -> None:
        for sequence, id in moving_sequences(ids).items():
            self._ids[sequence].append(id)

    def _checked(self, ids: Sequence[int], position: int) -> Tensor:
        if len(ids):
            _check_ids(self.architecture.vocabulary, ids)
            _check_capacity(self.context, position, len(ids))
        return torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()

    def _begin_step(self, ids: Sequence[int | None]) -> None:
        if len(ids) != len(self._ids):
            raise UserError(f"{len(ids)} tokens for {len(self._ids)} sequences; expected one for each")
        if not (moving := moving_sequences(ids)):
            raise UserError("a step of no sequence; expected a token for at least one")
        _check_ids(self.architecture.vocabulary, [*moving.values()])
        positions = self.positions
        _check_capacity(self.context, max(positions[sequence] for sequence in moving), 1)
        for sequence in moving:
            self._long_text_rope.grow(sequence, self._ids[sequence], 1)

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < len(self._ids):
            raise UserError(f"sequence {sequence}: expected 0 to {len(self._ids) - 1}")


def _described_attention(sparse_from: SparseFrom | None, context: int, offload: bool) -> str:
    """What an engine says of attention that is sparse from so many tokens of a sequence on; empty: it never is.

    offload -- keys and values lie in the host's memory
    """
    if sparse_from is None:
        return ""
    first = sparse_from.tokens
    if offload:
        return f", keys and values in the host's memory, sparse attention from {first:,} tokens on"
    if first > context:
        return f", sparse attention not in use: reading every token is faster here below {first:,} of them"
    return f", sparse attention from {first:,} tokens on"


def _check_ids(vocabulary: int, ids: Sequence[int]) -> None:
    """Raise `UserError` where an id is not the model's."""
    for id in (min(ids), max(ids)):
        if not 0 <= id < vocabulary:
            raise UserError(f"token id {id}: expected 0 to {vocabulary - 1}; is the tokenizer this model's?")


def _check_capacity(context: int, position: int, count: int) -> None:
    """Raise `UserError` where so many more tokens do not fit."""
    if position + count > context:
        raise UserError(
            f"context of {context} tokens: {position} are in it and {count} more do not fit; "
            "shorten the text or give a larger context"
        )


def _shares(packed: PackedModel, active: Mapping[tuple[int, str], int], stepped: int) -> dict[tuple[int, str], float]:
    """Share of active columns per (layer, site), from their sum over so many positions; empty for none."""
    if not stepped:
        return {}
    units = [layer.units for layer in packed.layers]
    return {(layer, name): count / (stepped * units[layer][name]) for (layer, name), count in active.items()}


def choose_context(requested: int | None, made_for: int) -> int:
    """The context to make room for; raises `UserError` for one that the model was not made for."""
    context = usual_context(made_for) if requested is None else requested
    if not 1 <= context <= made_for:
        raise UserError(f"context {context}: the model was made for {made_for} positions; give 1 to {made_for}")
    return context
