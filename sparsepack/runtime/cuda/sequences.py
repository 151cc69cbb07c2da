"""A step of one sequence or several: what comes before, between and after the products of its blocks."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sparsepack.models.families import SITES
from sparsepack.runtime.cuda.attention import attend
from sparsepack.runtime.cuda.model import Cache, Model, Site, attention_of
from sparsepack.runtime.cuda.rows import embed, new_candidates, product
from sparsepack.runtime.cuda.sampling import pick_likeliest
from sparsepack.runtime.cuda.zigzag import Input


class Sequences(ABC):
    """A token of each of B sequences: what their steps share.

    ids       -- int32 [B]: the tokens to append; when a step has run, the likeliest next ones
    best      -- float32 [B]: their logits
    positions -- int32 [B]: how many positions are cached of each; a step adds one
    logits    -- float32 [B, vocabulary]
    active    -- int64 [layers, sites]: columns that were active (in any sequence), summed over steps
    state     -- int64 [layers * sites + B]: active, ids and best together, which one copy brings to the host
    """

    def __init__(self, model: Model, cache: Cache, sequences: int) -> None:
        a, device = model.architecture, model.device
        self._model, self._eps, self._attention = model, float(a.norm_eps), attention_of(model, cache)
        self.state = torch.zeros(a.layers * len(SITES) + sequences, dtype=torch.int64, device=device)
        self.active, self.ids, self.best = state_parts(self.state, sequences)
        self.positions = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.logits = torch.empty(sequences, a.vocabulary, device=device)
        self._embedded = torch.empty(sequences, a.hidden, device=device)
        self._candidates = new_candidates(model.output, sequences)

    def run(self, sparse: bool) -> None:
        """Put the kernels of a step on the current stream. Sites without a policy are dense in sparse steps, too."""
        model = self._model
        embed(model.embedding, self.ids, self._embedded)
        hidden = self._embedded
        for number in range(len(model.layers)):
            hidden = self._block(number, hidden, sparse)
        product(
            model.output,
            hidden,
            self.logits,
            norm=model.output_norm,
            eps=self._eps,
            candidates=self._candidates,
        )
        pick_likeliest(self._candidates, self.ids, self.best, self.positions)

    @abstractmethod
    def _block(self, number: int, hidden: Tensor, sparse: bool) -> Tensor:
        """A decoder block: what it makes of float32 [B, hidden]."""

    def _taken(
        self,
        site: Site,
        x: Tensor,
        sparse: bool,
        *,
        norm: Tensor | None = None,
        squares: Tensor | None = None,
        handed: bool = False,
    ) -> Input:
        """What a site's product takes: where the step is sparse, by the site's policy."""
        return Input(
            x,
            norm=norm,
            eps=self._eps,
            squares=squares,
            threshold=site.threshold if sparse else None,
            offset=site.offset if sparse and site.threshold is not None else None,
            early_read=handed,
        )

    def _attend(self, number: int, qkv: Tensor, mixed: Tensor, handed: bool = False) -> None:
        attend(self._attention[number], qkv, self.positions, mixed, early_read=handed)


def state_parts(state: Tensor, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """`active`, `ids` and `best` in the state of a step, or in a copy of it."""
    active, chosen = state[:-sequences], state[-sequences:].view(torch.int32)
    return active.view(-1, len(SITES)), chosen[:sequences], chosen[sequences:].view(torch.float32)


def counted(active: Tensor) -> dict[tuple[int, str], int]:
    """Active columns by (layer, site)."""
    counts = enumerate(active.flatten().tolist())
    return {(n // len(SITES), SITES[n % len(SITES)]): count for n, count in counts}
