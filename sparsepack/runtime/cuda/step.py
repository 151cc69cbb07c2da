"""One token through the model: five kernels a layer, which wait for no host and allocate nothing."""

import torch
from torch import Tensor

from sparsepack.models.families import SITES
from sparsepack.runtime.cuda.attention import attend
from sparsepack.runtime.cuda.choose import advance
from sparsepack.runtime.cuda.elementwise import CHUNK, count_active, gate
from sparsepack.runtime.cuda.model import Cache, Layer, Model, Site
from sparsepack.runtime.cuda.rows import embed, new_candidates, product
from sparsepack.runtime.cuda.zigzag import Gate, Input, gemv


class Step:
    """The kernels of a decoded token of each of B sequences, one here, with the memory that they share.

    ids       -- int32 [B]: the tokens to append; when a step has run, the likeliest next ones
    best      -- float32 [B]: their logits
    result    -- int32 [2 * B]: the bits of these two together
    positions -- int32 [B]: how many positions are cached of each; a step adds one
    logits    -- float32 [B, vocabulary]
    active    -- int64 [layers, sites]: columns that were active (in any sequence), summed over steps
    """

    def __init__(self, model: Model, cache: Cache, sequences: int = 1) -> None:
        a, device = model.architecture, model.device
        self._model, self._cache, self._eps = model, cache, float(a.norm_eps)
        self.result = torch.zeros(2 * sequences, dtype=torch.int32, device=device)
        self.ids, self.best = self.result[:sequences], self.result[sequences:].view(torch.float32)
        self.positions = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.logits = torch.empty(sequences, a.vocabulary, device=device)
        self.active = torch.zeros(a.layers, len(SITES), dtype=torch.int64, device=device)
        self._candidates = new_candidates(model.output, sequences)
        self._hidden = torch.empty(sequences, a.hidden, device=device)
        self._qkv = torch.empty(sequences, (a.heads + 2 * a.kv_heads) * a.head_dim, device=device)
        self._mixed = torch.empty(sequences, a.heads * a.head_dim, device=device)
        self._stacked = torch.empty(sequences, 2 * a.intermediate, device=device)
        self._mid = torch.empty(sequences, a.intermediate, device=device)
        widest = max(a.hidden, a.heads * a.head_dim, a.intermediate)
        self._counts = torch.empty(-(-widest // CHUNK), dtype=torch.int32, device=device)

    def run(self, sparse: bool) -> None:
        """Put the kernels of a step on the current stream. Sites without a policy are dense in sparse steps, too."""
        model = self._model
        embed(model.embedding, self.ids, self._hidden)
        for number, layer in enumerate(model.layers):
            self._attention(number, layer, sparse)
            self._mlp(number, layer, sparse)
        product(
            model.output,
            self._hidden,
            self.logits,
            norm=model.output_norm,
            eps=self._eps,
            candidates=self._candidates,
        )
        advance(self._candidates, self.ids, self.best, self.positions)

    def _attention(self, number: int, layer: Layer, sparse: bool) -> None:
        hidden = self._hidden[0]
        self._product(number, "attn_in", hidden, self._qkv[0], sparse, norm=layer.norms["attn_norm"])
        self._attend(number, layer)
        self._product(number, "attn_out", self._mixed[0], hidden, sparse, added=hidden)

    def _attend(self, number: int, layer: Layer) -> None:
        a = self._model.architecture
        attend(
            self._qkv,
            self._cache.keys[number],
            self._cache.values[number],
            self.positions,
            self._model.cos,
            self._model.sin,
            self._mixed,
            heads=a.heads,
            kv_heads=a.kv_heads,
            window=layer.window,
            q_norm=layer.norms.get("q_norm"),
            k_norm=layer.norms.get("k_norm"),
            eps=self._eps,
        )

    def _mlp(self, number: int, layer: Layer, sparse: bool) -> None:
        hidden, stacked, mid, down = self._hidden[0], self._stacked[0], self._mid[0], layer.sites["mlp_mid"]
        counts = self._counts[: -(-len(mid) // CHUNK)] if sparse and down.threshold is not None else None
        norm = layer.norms["mlp_norm"]
        if layer.sites["mlp_in"].matrix.half:
            after = Gate(self._model.activation)
            if counts is not None:
                after = Gate(self._model.activation, down.threshold, down.offset, counts)
            self._product(number, "mlp_in", hidden, mid, sparse, norm=norm, gate=after)
        else:
            self._product(number, "mlp_in", hidden, stacked, sparse, norm=norm)
            gate(stacked, self._model.activation, mid)
            if counts is not None and down.threshold is not None:
                count_active(mid, down.threshold, down.offset, counts)
        self._product(number, "mlp_mid", mid, hidden, sparse, added=hidden, counts=counts)

    def _product(
        self,
        number: int,
        name: str,
        x: Tensor,
        y: Tensor,
        sparse: bool,
        *,
        norm: Tensor | None = None,
        counts: Tensor | None = None,
        added: Tensor | None = None,
        gate: Gate | None = None,
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
                threshold=site.threshold if skips else None,
                offset=site.offset if skips else None,
                counts=counts,
            ),
            y,
            constant=site.constant if skips else site.bias,
            added=added,
            gate=gate,
            active=self.active[number, SITES.index(name)],
        )
