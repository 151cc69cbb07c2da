"""The three named protocols - which tokens of a text run sparse - and what each measurement asks of a model.

`dense`: every position dense. `all`: every position sparse. `decode`: context dense, what is scored sparse; in rolling
perplexity the first half of each window is the context, and only the second half is scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from sparsepack.models.sites import SiteKey
    from sparsepack.models.sparse_attention import SparseAttention
    from sparsepack.placement.traffic import HitCounts
    from sparsepack.workers.exchange import AllGather

Logits = Callable[["torch.Tensor"], "torch.Tensor"]
Done = Callable[[int], None]
"""The function is told how many rows have taken another step."""

PROTOCOLS = ("decode", "all", "dense")


def scored_from(protocol: str, width: int, second_half: bool = False) -> int:
    """The first scored position of a window of `width` positions; `second_half`: as under decode, whatever runs."""
    return width // 2 if protocol == "decode" or second_half else 0


def ignored(rows: int) -> None:
    """The `Done` of who needs no progress."""


class WindowScorer(Protocol):
    """What `score_windows` asks of a model: in two steps, so that few logits exist at one time.

    steps -- how often `hidden` tells `done` of each row
    """

    steps: int = 1
    device: torch.device
    vocabulary: int

    def rows_at_once(self, width: int, batch: int) -> int:
        """How many rows of `width` positions `hidden` takes at best, of which `batch` run together."""
        return batch

    @abstractmethod
    def hidden(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        sparse_from: torch.Tensor,
        batch: int | None = None,
        done: Done = ignored,
        scored_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What logits are made of: [B, S, ...]; row b sparse from position sparse_from[b] on.

        `lengths` None means that there is no padding; `batch` rows run together, None: all. What is there of positions
        before scored_from[b] means nothing; None: all count.
        """

    @abstractmethod
    def head(self, words: slice) -> Logits:
        """A function from `hidden` [..., S, ...] to the logits of a range of the vocabulary [..., S, words]."""


class Scorer(Protocol):
    """A causal language model that can run some positions sparse, for lm-eval.

    context -- the most input tokens in one row
    """

    device: torch.device
    context: int

    def logits(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        sparse_from: torch.Tensor,
        scored_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Next-token logits `[B, S, V]` of right-padded rows.

        `input_ids` int64 `[B, S]`; `lengths` int64 `[B]`, tokens of each row before the padding; `sparse_from`
        int64 `[B]`: in row b the positions `>= sparse_from[b]` run sparse, the others dense; `scored_from` int64 `[B]`:
        what is there of positions before means nothing, None: all count.
        """


class TokensRead:
    """Counts what sparse positions see and read. Every implementation reads exactly the policy's budget, so that the
    positions are all that must be known.

    attention -- of the model; None: every position reads all that it sees
    windows   -- per layer, tokens that a position sees at most; 0: all
    """

    def __init__(self, attention: SparseAttention | None, windows: Sequence[int]) -> None:
        self._attention, self._windows = attention, windows
        self.reset()

    def reset(self) -> None:
        """Forget the counts."""
        self._seen: Counter[int] = Counter()
        self._read: Counter[int] = Counter()

    def count(self, width: int, lengths: torch.Tensor | None, sparse_from: torch.Tensor) -> None:
        """Count rows of `width` positions, of which row b is sparse from sparse_from[b] on; `lengths` [B] are those
        without padding, None where there is none."""
        if self._attention is None:
            return
        stops = [width] * len(sparse_from) if lengths is None else lengths.tolist()
        for (start, stop), times in Counter(zip(sparse_from.tolist(), stops, strict=True)).items():
            for window in set(self._windows):
                seen = [min(n, window or n) for n in range(start + 1, stop + 1)]
                self._seen[window] += times * sum(seen)
                self._read[window] += times * sum(map(self._attention.policy.budget, seen))

    def share(self, all_gather: AllGather) -> None:
        """Count what all workers have counted, at all of them."""
        said = all_gather([[*self._seen.items()], [*self._read.items()]])
        self.reset()
        for seen, read in said:
            self._seen.update(dict(seen))
            self._read.update(dict(read))

    def result(self) -> dict[str, Any] | None:
        """For results: the shares of the tokens seen that were read, beside the policy's `target`; None where the model
        reads all, or no position was sparse.

        of_sparse_layers, overall -- without dense layers, and with them
        """
        if self._attention is None or not self._seen.total():
            return None
        layers = list(zip(self._attention.channels, self._windows, strict=True))
        seen = [self._seen[window] for _, window in layers]
        read = [(self._seen if channels is None else self._read)[window] for channels, window in layers]
        sparse = [n for n, (channels, _) in enumerate(layers) if channels is not None]
        of_sparse = sum(read[n] for n in sparse) / sum(seen[n] for n in sparse) if sparse else 1.0
        return {
            "target": float(self._attention.policy.tokens),
            "of_sparse_layers": of_sparse,
            "overall": sum(read) / sum(seen),
        }


class CountingScorer(WindowScorer, Protocol):
    """A scorer of windows and of rows of tasks that counts what its sparse positions skipped and read, until `reset`.

    tokens_read -- the tokens that these positions read
    """

    context: int
    tokens_read: TokensRead

    @property
    def hit_counts(self) -> HitCounts | None:
        """What all sparse positions so far needed, and how much of it had slots; None: there are no slots."""
        return None

    @abstractmethod
    def reset(self) -> None:
        """Forget the counts."""

    @abstractmethod
    def share(self, all_gather: AllGather) -> None:
        """Count what all workers have counted, at all of them."""

    @abstractmethod
    def realised(self) -> dict[SiteKey, float]:
        """The share of inactive channels per site over all sparse positions so far; sites never sparse are absent."""

    def logits(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        sparse_from: torch.Tensor,
        scored_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Scorer`."""
        return self.head(slice(None))(self.hidden(input_ids, lengths, sparse_from, scored_from=scored_from))


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """A model under evaluation.

    kind          -- "checkpoint", or the name of a format
    context       -- positions the model was made for
    source_sha256 -- hash of the checkpoint it is, or was made from
    made_from     -- hashes of the checkpoints that this one was made from by other verbs
    sparse_sites  -- (layer, site) of those that may be sparse
    attention     -- which tokens decoded positions read; None: all
    end_tokens    -- that end a text, beside the tokenizer's own
    """

    skips_neurons: ClassVar[bool] = False
    """Whether what runs the model leaves out inactive neurons of a format that stores MLPs by neurons."""

    name: str
    kind: str
    tokenizer: Any
    context: int
    source_sha256: str
    made_from: tuple[str, ...]
    sparsity: float
    sparse_sites: Collection[Any]
    attention: SparseAttention | None
    end_tokens: tuple[int, ...] = ()

    @property
    @abstractmethod
    def sparse(self) -> bool:
        """Whether any site, any attention or any MLP skips anything."""

    @property
    @abstractmethod
    def precision(self) -> dict[str, str]:
        """For results: the type of the matrices as `weights`, and that of the arithmetic as `dtype`."""

    @abstractmethod
    def scorer(self) -> CountingScorer:
        """What scores windows of text, counts at zero."""

    @abstractmethod
    def task_scorer(self) -> CountingScorer:
        """What scores the many short rows of tasks, counts at zero."""

    @abstractmethod
    def parameters(self) -> Mapping[SiteKey, int]:
        """How many parameters each site's matrices have, and each change of basis between blocks."""

    def parameter_shares(self) -> dict[SiteKey, float]:
        """The share that each of these has of all."""
        sizes = self.parameters()
        total = sum(sizes.values())
        return {key: size / total for key, size in sizes.items()}
