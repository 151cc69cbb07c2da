"""One token through the model: five kernels a layer, which wait for no host and allocate nothing."""

import torch
from torch import Tensor

from sparsepack.models.families import SITES
from sparsepack.runtime.cuda.attention import attend
from sparsepack.runtime.cuda.choose import advance
from sparsepack.runtime.cuda.elementwise import gate
from sparsepack.runtime.cuda.model import Cache, Model, Site
from sparsepack.runtime.cuda.rows import embed, new_candidates, product
from sparsepack.runtime.cuda.words import empty_words
from sparsepack.runtime.cuda.zigzag import Input, blocks, gemv


class Sequences:
    """A token of each of B sequences: what their steps share.

    ids       -- int32 [B]: the tokens to append; when a step has run, the likeliest next ones
    best      -- float32 [B]: their logits
    result    -- int32 [2 * B]: the bits of these two together
    positions -- int32 [B]: how many positions are cached of each; a step adds one
    logits    -- float32 [B, vocabulary]
    active    -- int64 [layers, sites]: columns that were active (in any sequence), summed over steps
    """

    def __init__(self, model: Model, cache: Cache, sequences: int) -> None:
        a, device = model.architecture, model.device
        self._model, self._cache, self._eps = model, cache, float(a.norm_eps)
        self.result = torch.zeros(2 * sequences, dtype=torch.int32, device=device)
        self.ids, self.best = self.result[:sequences], self.result[sequences:].view(torch.float32)
        self.positions = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.logits = torch.empty(sequences, a.vocabulary, device=device)
        self.active = torch.zeros(a.layers, len(SITES), dtype=torch.int64, device=device)
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
        advance(self._candidates, self.ids, self.best, self.positions)

    def _block(self, number: int, hidden: Tensor, sparse: bool) -> Tensor:
        """A decoder block: what it makes of float32 [B, hidden]."""
        raise NotImplementedError

    def _attend(self, number: int, qkv: Tensor, mixed: Tensor, handed: bool = False) -> None:
        a, layer = self._model.architecture, self._model.layers[number]
        attend(
            qkv,
            self._cache.keys[number],
            self._cache.values[number],
            self.positions,
            self._model.cos,
            self._model.sin,
            mixed,
            heads=a.heads,
            kv_heads=a.kv_heads,
            window=layer.window,
            q_norm=layer.norms.get("q_norm"),
            k_norm=layer.norms.get("k_norm"),
            eps=self._eps,
            handed=handed,
        )


class Step(Sequences):
    """The kernels of a decoded token of one sequence.

    What they hand on lies in words (`words.py`), so that a kernel reads it as soon as it is written, while the kernel
    before still ends. What each of them empties, `kernels/words.cuh` allows.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        super().__init__(model, cache, 1)
        a, device = model.architecture, model.device
        heads = a.heads * a.head_dim
        parts = {name: blocks(site.matrix) for name, site in model.layers[0].sites.items()}  # as in all layers
        self._heads, (self._qkv,) = empty_words([heads + 2 * a.kv_heads * a.head_dim], device)
        self._inside, (self._between, self._between_squares, self._mid) = empty_words(
            [a.hidden, parts["attn_out"], a.intermediate], device
        )
        # What a block takes and mixes, and what the next one does: in turns.
        self._turns = [empty_words([a.hidden, parts["mlp_mid"], heads], device) for _ in range(2)]
        self._last = torch.empty(a.hidden, device=device)
        self._stacked = torch.empty(2 * a.intermediate, device=device)

    def _block(self, number: int, hidden: Tensor, sparse: bool) -> Tensor:
        layer = self._model.layers[number]
        words, (x, squares, mixed) = self._turns[number % 2]
        y, squares_of_y = self._turns[(number + 1) % 2][1][:2]
        first, last = number == 0, number == len(self._model.layers) - 1
        self._product(
            number,
            "attn_in",
            hidden[0] if first else x,
            self._qkv,
            sparse,
            handed=not first,
            norm=layer.norms["attn_norm"],
            squares=None if first else squares,
            emptied=self._inside,
        )
        self._attend(number, self._qkv[None], mixed[None], handed=True)
        self._product(
            number,
            "attn_out",
            mixed,
            self._between,
            sparse,
            added=hidden[0] if first else x,
            squares_of_y=self._between_squares,
            emptied=self._heads,
        )
        fused = layer.sites["mlp_in"].matrix.half > 0
        self._product(
            number,
            "mlp_in",
            self._between,
            self._mid if fused else self._stacked,
            sparse,
            norm=layer.norms["mlp_norm"],
            squares=self._between_squares,
            activation=self._model.activation if fused else None,
            emptied=words,
        )
        if not fused:
            gate(self._stacked[None], self._model.activation, self._mid[None])
        self._product(
            number,
            "mlp_mid",
            self._mid,
            self._last if last else y,
            sparse,
            handed=fused,
            added=self._between,
            squares_of_y=None if last else squares_of_y,
        )
        return self._last[None] if last else y[None]

    def _product(
        self,
        number: int,
        name: str,
        x: Tensor,
        y: Tensor,
        sparse: bool,
        *,
        handed: bool = True,
        norm: Tensor | None = None,
        squares: Tensor | None = None,
        added: Tensor | None = None,
        activation: int | None = None,
        squares_of_y: Tensor | None = None,
        emptied: Tensor | None = None,
    ) -> None:
        """A site's output rows; its active columns are counted."""
        site: Site = self._model.layers[number].sites[name]
        skips = sparse and site.threshold is not None
        gemv(
            site.matrix,
            Input(
                x,
                norm=norm,
                eps=self._eps,
                squares=squares,
                threshold=site.threshold if skips else None,
                offset=site.offset if skips else None,
                handed=handed,
            ),
            y,
            constant=site.constant if skips else site.bias,
            added=added,
            activation=activation,
            squares=squares_of_y,
            active=self.active[number, SITES.index(name)],
            emptied=emptied,
        )
