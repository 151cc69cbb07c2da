"""Choose the next token from the logits.

Draw the next token on the device: the host need not wait for the logits.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError, UserError
from sparsepack.option import LARGEST_COUNT

LARGEST_PENALTY = 100.0
"""A frequency or presence penalty is at most so large, either way; OpenAI takes up to 2."""

LEAST_LOGPROB = -9999.0
"""What is told of tokens that are less likely, as at OpenAI: JSON has no infinity."""


class Constraint(Protocol):
    """What a text may be, told token by token; made anew for each text. Its methods may raise `UserError`."""

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [vocabulary] on the host, of which at least one is true."""

    def take(self, id: int) -> None:
        """Go on after a token, one of those that were allowed."""


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token, before temperature, penalties and constraint.

    logprob -- the natural logarithm of the probability; None: of the first token of a text, which nothing predicts
    top     -- the likeliest tokens in its place, each with its logarithm, the likeliest first
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def token_logprobs(ids: Sequence[int], logits: Tensor, count: int) -> list[TokenLogprob]:
    """Return how likely tokens were, and the `count` likeliest in the place of each.

    logits -- [tokens, vocabulary], each row of the token before
    """
    found = logits.double().log_softmax(-1).clamp(min=LEAST_LOGPROB)
    top = found.topk(min(count, found.shape[-1]))
    own = found.gather(-1, torch.tensor(ids, device=found.device)[:, None])[:, 0]
    rows = zip(ids, own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(id, each, tuple(zip(likeliest, values, strict=True))) for id, each, likeliest, values in rows]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature -- divides the logits; 0 always takes the likeliest token (the lowest id of equals)
    top_k       -- only the k likeliest may be chosen; None: all
    top_p       -- only the fewest likeliest that together have this probability; None: all
    min_p       -- only tokens that are at least this share as likely as the likeliest; None: all
    seed        -- of the random numbers
    repeat_penalty -- what makes tokens less likely that stand in the text already, as llama.cpp defines it: a positive
                   logit is divided by it, another one multiplied, once for each token however often it stands there;
                   1: nothing is done
    repeat_last_n -- how many of the last tokens count as there, those of the prompt included; -1: all, 0: none
    frequency_penalty -- what the logit of a token loses for each time that the token was chosen, as OpenAI defines it
    presence_penalty  -- what the logit of a token loses, once, where the token was chosen
    logit_bias  -- what the logit of a token gains: (id, bias) for each
    min_tokens  -- before so many tokens none that ends the text is chosen, unless the constraint allows no other
    logprobs    -- how many of the likeliest tokens are told in each place, with how likely they are; None: nothing is
    constraint  -- makes what the text must keep to; None: nothing

    Raises `UserError` for a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    constraint: Callable[[], Constraint] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: expected 0 (always the likeliest token) or more")
        if self.top_k is not None and not 1 <= self.top_k <= LARGEST_COUNT:
            raise UserError(f"top-k {self.top_k}: expected 1 to {LARGEST_COUNT}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: expected more than 0 and at most 1")
        if not 0 < self.repeat_penalty < float("inf"):
            raise UserError(f"repeat penalty {self.repeat_penalty}: expected more than 0; 1 does nothing")
        if not -1 <= self.repeat_last_n <= LARGEST_COUNT:
            raise UserError(f"repeat-last-n {self.repeat_last_n}: expected 0 (none) to {LARGEST_COUNT}, or -1 (all)")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min-p {self.min_p}: expected 0 (all) to 1 (only the likeliest)")
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(value := getattr(self, name)) <= LARGEST_PENALTY:
                raise UserError(
                    f"{name.replace('_', '-')} {value}: expected -{LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}"
                )

    @property
    def repeats_less(self) -> bool:
        """Whether the repeat penalty changes anything."""
        return self.repeat_penalty != 1 and self.repeat_last_n != 0

    @property
    def on_host(self) -> bool:
        """Whether every choice is `Sampler.choose`'s. A device knows temperature, top-k and top-p, but neither which
        tokens were there before, nor what else there is here."""
        changes = (self.min_p, self.frequency_penalty, self.presence_penalty, self.logit_bias, self.min_tokens)
        return self.repeats_less or any(changes) or self.constraint is not None or self.logprobs is not None


class Sampler:
    """Chooses tokens one after the other; the same logits and seed give the same tokens, on every device.

    before -- ids of the text so far, for the repeat penalty
    ends   -- ids of the tokens that end the text, for `min_tokens`

    Where `sampling.on_host`, tokens that something else than `choose` chose are not counted.
    """

    def __init__(self, sampling: Sampling, before: Iterable[int] = (), ends: Iterable[int] = ()) -> None:
        self.sampling, self._ends = sampling, [*ends]
        self._generator = torch.Generator().manual_seed(sampling.seed)
        last = sampling.repeat_last_n
        self._recent = deque(before, maxlen=None if last < 0 else last)
        self._made = Counter[int]()
        self._constraint = None if sampling.constraint is None else sampling.constraint()
        self._logprobs: list[TokenLogprob] = []
        self._failure: UserError | None = None

    def choose(self, logits: Tensor) -> int:
        """A token id from the logits, [vocabulary] of any device. Raises `ArtifactError` where they are not numbers."""
        logits = logits.detach().to("cpu", torch.float64)
        if not (best := logits.max()).isfinite():
            raise not_finite(float(best))
        try:
            id = self._chosen(self._changed(logits))
            if self.sampling.on_host:
                self._took(id, logits)
        except UserError as error:
            self._failure = error
            return 0
        return id

    def check(self) -> None:
        """Raise the `UserError` of the constraint where it has failed. What `choose` returned is no token then. The
        error waits here, so that of several texts that are decoded together only one fails."""
        if self._failure is not None:
            raise self._failure

    def taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens chosen since the last call, in order; none unless `sampling` asks."""
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def _changed(self, logits: Tensor) -> Tensor:
        """The logits with penalties, bias and constraint, at least one of them finite."""
        how = self.sampling
        if how.repeats_less:
            logits = penalised(logits, self._recent, how.repeat_penalty)
        if self._made and (how.frequency_penalty or how.presence_penalty):
            lost = {id: how.frequency_penalty * count + how.presence_penalty for id, count in self._made.items()}
            logits = _added(logits, lost, -1)
        if how.logit_bias:
            logits = _added(logits, dict(how.logit_bias), 1)
        if self._ends and self._made.total() < how.min_tokens:
            logits = logits.index_fill(0, torch.tensor(self._ends), torch.finfo(logits.dtype).min)
        if self._constraint is not None:
            possible = logits.clamp(min=torch.finfo(logits.dtype).min)
            logits = possible.masked_fill(~self._constraint.allowed(), float("-inf"))
        return logits

    def _took(self, id: int, logits: Tensor) -> None:
        """Remember a choice for those to come."""
        self._recent.append(id)
        self._made[id] += 1
        if self._constraint is not None:
            self._constraint.take(id)
        if self.sampling.logprobs is not None:
            self._logprobs += token_logprobs([id], logits[None], self.sampling.logprobs)

    def _chosen(self, logits: Tensor) -> int:
        best = logits.max()
        if self.sampling.temperature == 0:
            return int((logits == best).nonzero()[0])
        ordered, ids = ((logits - best) / self.sampling.temperature).sort(descending=True, stable=True)
        if self.sampling.top_k is not None:
            ordered = ordered[: self.sampling.top_k]
        # The largest is 0 now, so that no exponential overflows.
        cumulative = ordered.exp().cumsum(0)
        total = cumulative[-1]
        if self.sampling.top_p is not None:
            kept = int((cumulative < self.sampling.top_p * total).sum()) + 1
            total = cumulative[min(kept, len(cumulative)) - 1]
        if self.sampling.min_p:
            kept = int((ordered.exp() >= self.sampling.min_p).sum())
            total = torch.minimum(total, cumulative[kept - 1])
        return int(ids[int(torch.searchsorted(cumulative, self.draw() * total))])

    def draw(self) -> float:
        """The next random number in [0, 1), of which a choice takes one unless the temperature is 0."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def _added(logits: Tensor, amounts: Mapping[int, float], sign: int) -> Tensor:
    """The logits with an amount added to those of some tokens, or taken from them."""
    ids = torch.tensor(list(amounts), dtype=torch.int64)
    return logits.index_add(0, ids, sign * torch.tensor(list(amounts.values()), dtype=logits.dtype))


def penalised(logits: Tensor, recent: Iterable[int], penalty: float) -> Tensor:
    """The logits with those of recent tokens made smaller: divided by the penalty where positive, else multiplied.

    They stay finite whatever the penalty: among infinite ones none could be drawn.
    """
    ids = torch.tensor(sorted(set(recent)), dtype=torch.int64)
    found, limits = logits[ids], torch.finfo(logits.dtype)
    changed = torch.where(found > 0, found / penalty, found * penalty)
    return logits.index_put((ids,), changed.clamp(limits.min, limits.max))


def not_finite(best: float) -> ArtifactError:
    """The error where the largest logit is no number."""
    return ArtifactError(f"the model's largest logit is {best}; its weights overflowed or are damaged")


def sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """What `Sampler.choose` chooses from the same logits and draw, by operations that no host waits for.

    logits      -- float32 [vocabulary]
    draw        -- scalar in [0, 1), on the logits' device: float64, or float32 where the device has no other; sums of
                   probabilities have its type
    temperature -- more than 0
    top_k, top_p -- as in `Sampling`

    Returns the id, int64 scalar; any id where the largest logit is not finite (`pick_likeliest` tells). The operations
    can be captured in a CUDA graph, with the three settings as constants.

    Sums of probabilities run in another order than on the CPU: a draw within about 1e-15 (float32: 1e-6) of where one
    token ends and the next begins may choose its neighbour, and so may top_p. Logits are sorted before the largest is
    taken from them and they are divided; where that makes two of them equal (1e-17 and 0 beside 20), the CPU sorts them
    by id.
    """
    ordered, ids = torch.sort(logits + 0.0, descending=True, stable=True)  # -0 becomes 0
    # A scalar divisor would be multiplied by its reciprocal.
    divisor = torch.full((), temperature, dtype=draw.dtype, device=logits.device)
    exponents = (ordered.to(draw.dtype) - ordered[0].to(draw.dtype)) / divisor
    if top_k is not None:
        exponents = exponents[:top_k]
    # The largest exponent is 0, so that no exponential overflows.
    cumulative = exponents.exp().cumsum(0)
    last = len(cumulative) - 1
    total = cumulative[last:]
    if top_p is not None:
        kept = (cumulative < top_p * total).sum(0, keepdim=True)  # without the one that reaches top_p
        total = cumulative.gather(0, kept.clamp(max=last))
    place = torch.searchsorted(cumulative, draw * total)
    return ids.gather(0, place.clamp(max=last))[0]
