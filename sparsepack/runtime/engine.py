"""The decoder: a packed model, run token by token, skipping the columns that its rules call inactive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.packed import PackedModel
from sparsepack.models.skipped import Skipped, skipped_weights
from sparsepack.runtime.backends import backend_for, backend_named
from sparsepack.runtime.hybrid.decoder import HybridDecoder, Places
from sparsepack.runtime.hybrid.served import Served
from sparsepack.runtime.sampling import Sampler

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Counts:
    """How many positions were decoded, and how many columns were active in them, per (layer, site)."""

    stepped: int = 0
    active: Mapping[tuple[int, str], int] = field(default_factory=dict)


class Engine:
    """A packed model ready to run, with its static KV cache; one text at a time.

    packed   -- the artifact, as `read_packed` returns it
    device   -- where everything but the embedding lies
    context  -- positions the cache has room for; at most what the model was made for, 4096 of them unless given
    dense    -- never skip: the baseline; may be changed between calls
    backend  -- who computes, a name of `runtime.backends.BACKENDS`; None: the one that is made for the device where
                what it needs is there, "reference" otherwise
    threads  -- of the processor; None: torch's, one for each core unless told otherwise
    offload  -- keys and values lie in the host's memory, so that longer texts fit on the device, which has their
                labels and the tokens that were read last. For models with sparse attention, which then select tokens
                wherever the policy says, also where reading all would be faster on the device
    places   -- how many neurons have places, computed by one half of the processor, all others by the other half; for
                models by neurons. The result is the same but for rounding
    cache_type -- of keys and values, one that the backend has: "bf16", "f16", or "f32" for comparisons; None: its first

    The reference backend computes in float32 and holds every matrix decoded, 4 bytes a weight (7.1 times the stored
    size of a zigzag matrix); the cpu and cuda backends hold them at their stored size (`runtime/cpu/decoder.py`,
    `runtime/cuda/decoder.py`). `backend` is the one that was taken, `notes` says why where that is not the best one,
    `description` what runs in a few words.

    Raises `UserError` for an unknown backend or device, a backend that cannot run there or not run this model, a cache
    type that it does not have, a context the model was not made for, or an offload or places that the backend or the
    model does not know.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device | str = "cpu",
        context: int | None = None,
        *,
        dense: bool = False,
        backend: str | None = None,
        threads: int | None = None,
        cache_type: str | None = None,
        offload: bool = False,
        places: Places | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise UserError(f"threads {threads}: expected at least 1")
        self.packed = packed
        self.architecture = packed.architecture
        self.device = torch.device(device)
        self.context = checked_context(context, packed.architecture.context)
        self.dense = dense
        self.backend, self.notes = _chosen(backend, self.device, packed)
        row = backend_named(self.backend)
        cache_type = row.checked_cache_type(cache_type)
        self.offload = offload
        more: dict[str, Any] = row.offloading(packed, offload)
        self._module = row.open()
        if places is not None:
            row.check_places(packed)
            more["places"] = places
        self._decoder = self._module.decoder(packed, self.device, self.context, threads, cache_type, **more)
        self._ids: list[int] = []

    @property
    def position(self) -> int:
        """How many tokens the cache holds: the position of the next one."""
        return self._decoder.position

    @property
    def threads(self) -> int:
        """On how many threads of the processor it runs."""
        return self._decoder.threads

    @property
    def cache_type(self) -> str:
        """The type of keys and values in the cache: "f32", "f16" or "bf16"."""
        return self._decoder.cache_type

    @property
    def description(self) -> str:
        """What runs: `cpu, avx512, 2 threads`."""
        attention = described_attention(self._decoder.attention_from, self.context, self.offload)
        return f"{self.backend}, {self._decoder.description}{attention}"

    def synchronise(self) -> None:
        """Wait until the device has done what it was given."""
        self._module.synchronise(self.device)

    @property
    def served(self) -> Served | None:
        """What decoded tokens needed since the reset, and how much of it had places; None: there are no places."""
        return self._decoder.served if isinstance(self._decoder, HybridDecoder) else None

    def reset(self) -> None:
        """Forget the text and the activity counted so far."""
        self._ids.clear()
        self._decoder.reset()

    def truncate(self, length: int) -> None:
        """Forget what the text has beyond its first `length` tokens; the activity counted stays. Raises `UserError`
        where it has fewer."""
        if not 0 <= length <= self.position:
            raise UserError(f"length {length}: expected 0 to {self.position}, the tokens in the context")
        if length < self.position:
            self._decoder.truncate(length)
            del self._ids[length:]

    def counts(self) -> Counts:
        """What was counted since the last reset; positions of `prefill` do not count."""
        return Counts(self._decoder.stepped, dict(self._decoder.active()))

    def activity(self, since: Counts | None = None) -> dict[tuple[int, str], float]:
        """Share of active columns per (layer, site) over the positions decoded since the last reset, or since what
        `counts` returned then.

        Positions of `prefill` do not count; dense sites are wholly active. Empty before the first step.
        """
        now, since = self.counts(), since or Counts()
        active = {key: count - since.active.get(key, 0) for key, count in now.active.items()}
        return shares(self.packed, active, now.stepped - since.stepped)

    def skipped(self, since: Counts | None = None) -> Skipped | None:
        """What decoded tokens skipped, over the positions of `activity`; None where there were none."""
        activity = self.activity(since)
        return skipped_weights(self.packed, activity) if activity else None

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Append tokens, every site dense. Returns the logits after the last: float32 [vocabulary].

        Raises `UserError` for no tokens, an id the model does not have, or more tokens than the cache has room for.
        """
        if not len(ids):
            raise UserError("prefill of 0 tokens; expected at least one")
        logits = self._decoder.prefill(self._checked(ids))
        self._ids += ids
        return logits

    def keep(self, ids: Sequence[int]) -> int:
        """Forget what the text does not have in common with `ids`, so that `prefill` can go on from there. Returns how
        many tokens are kept, as they were prefilled or decoded: at most all but the last, whose logits are wanted."""
        common = 0
        if self.position == len(self._ids):  # otherwise a call was interrupted, and what lies in the cache is not known
            for known, id in zip(self._ids, ids[:-1], strict=False):
                if known != id:
                    break
                common += 1
        self.truncate(common)
        return common

    @torch.no_grad()
    def step(self, id: int) -> Tensor:
        """Append one token, skipping inactive columns. Returns the logits after it: float32 [vocabulary].

        Raises `UserError` for an id the model does not have, or a full cache.
        """
        self._check(1, id, id)
        logits = self._decoder.step(id, not self.dense)
        self._ids.append(id)
        return logits

    @torch.no_grad()
    def decode_next(self, id: int, sampler: Sampler) -> int:
        """Append one token as `step` does, and choose the next: `sampler.choose` of the logits, without the detour
        through torch where the backend can. Raises `UserError` as `step`, `ArtifactError` as the sampler does."""
        if sampler.sampling.penalises:
            return sampler.choose(self.step(id))
        self._check(1, id, id)
        chosen = self._decoder.decode_next(id, not self.dense, sampler)
        self._ids.append(id)
        return chosen

    @torch.no_grad()
    def teacher_forced(self, ids: Sequence[int], sparse_from: int) -> Tensor:
        """Logits after every token of a text, given to an empty cache: float32 [S, vocabulary].

        Positions before `sparse_from` run dense, the others as `step` would run them, many at once; with sparse
        attention they read what its policy says, also where `step` would read everything because that is faster.
        Forgets the text before, and leaves the engine as prefill and steps would. Raises `UserError` as those do.

        Where the backend adds in another order than in `step`, that is a matter of the last bits until an input comes
        so close to its threshold that they decide; from there on the two are different, equally good, approximations.
        """
        if not 0 <= sparse_from <= len(ids):
            raise ValueError(f"sparse_from {sparse_from} of {len(ids)} positions")
        self.reset()
        logits = self._decoder.teacher_forced(self._checked(ids), sparse_from, not self.dense)
        self._ids += ids
        return logits

    def _checked(self, ids: Sequence[int]) -> Tensor:
        if len(ids):
            self._check(len(ids), min(ids), max(ids))
        return torch.as_tensor(ids, dtype=torch.int64, device="cpu").contiguous()

    def _check(self, count: int, lowest: int, highest: int) -> None:
        check_ids(self.architecture.vocabulary, lowest, highest)
        check_room(self.context, self.position, count)


def described_attention(first: int | None, context: int, offload: bool) -> str:
    """What an engine says of attention that is sparse from so many tokens of a text on; empty: it never is.

    offload -- keys and values lie in the host's memory
    """
    if first is None:
        return ""
    if offload:
        return f", keys and values in the host's memory, sparse attention from {first:,} tokens on"
    if first > context:
        return f", sparse attention not in use: reading every token is faster here below {first:,} of them"
    return f", sparse attention from {first:,} tokens on"


def check_ids(vocabulary: int, lowest: int, highest: int) -> None:
    """Raise `UserError` where an id, of which these are two, is not the model's."""
    for id in (lowest, highest):
        if not 0 <= id < vocabulary:
            raise UserError(f"token id {id}: expected 0 to {vocabulary - 1}; is the tokenizer this model's?")


def check_room(context: int, position: int, count: int) -> None:
    """Raise `UserError` where so many more tokens do not fit."""
    if position + count > context:
        raise UserError(
            f"context of {context} tokens: {position} are in it and {count} more do not fit; "
            "shorten the text or give a larger context"
        )


def shares(packed: PackedModel, active: Mapping[tuple[int, str], int], stepped: int) -> dict[tuple[int, str], float]:
    """Share of active columns per (layer, site), from their sum over so many positions; empty for none."""
    if not stepped:
        return {}
    return {
        (layer, name): count / (stepped * packed.layers[layer].units[name]) for (layer, name), count in active.items()
    }


def _chosen(asked: str | None, device: torch.device, packed: PackedModel) -> tuple[str, tuple[str, ...]]:
    """The backend to run, and why where it is not the best for the device."""
    if asked is not None:
        backend_named(asked).check_model(packed)
        return asked, ()
    best = backend_for(device)
    try:
        best.check_model(packed)
        best.open().usable(device)
    except UserError as error:
        return "reference", (f"note: the reference backend runs: {error}",)
    return best.name, ()


def checked_context(asked: int | None, made_for: int) -> int:
    """The context to make room for; raises `UserError` for one that the model was not made for."""
    context = min(made_for, DEFAULT_CONTEXT) if asked is None else asked
    if not 1 <= context <= made_for:
        raise UserError(f"context {context}: the model was made for {made_for} positions; give 1 to {made_for}")
    return context
