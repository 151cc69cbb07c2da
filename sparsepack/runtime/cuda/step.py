"""One token through the model: five kernels a layer (six where gate and up do not fill whole bands), which wait for no
host and allocate nothing."""

import torch
from torch import Tensor

from sparsepack.models.families import SITES
from sparsepack.runtime.cuda.elementwise import gate
from sparsepack.runtime.cuda.handoff import handoff_buffers
from sparsepack.runtime.cuda.model import Cache, Model
from sparsepack.runtime.cuda.sequences import Sequences
from sparsepack.runtime.cuda.zigzag import blocks, gemv


class Step(Sequences):
    """The kernels of a decoded token of one sequence.

    What they hand on lies in words (`handoff.py`), so that a kernel reads it as soon as it is written, while the kernel
    before still ends. What each of them empties, `kernels/handoff.cuh` allows.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        super().__init__(model, cache, 1)
        a, device = model.architecture, model.device
        heads = a.heads * a.head_dim
        parts = {name: blocks(site.matrix) for name, site in model.layers[0].sites.items()}  # as in all layers
        self._heads, (self._qkv,) = handoff_buffers([heads + 2 * a.kv_heads * a.head_dim], device)
        self._inside, (self._between, self._between_squares, self._mid) = handoff_buffers(
            [a.hidden, parts["attn_out"], a.intermediate], device
        )
        # What a block takes and mixes, and what the next one does: in turns.
        self._turns = [handoff_buffers([a.hidden, parts["mlp_mid"], heads], device) for _ in range(2)]
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
        fused = layer.sites["mlp_in"].matrix.gate_bands > 0
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
        site = self._model.layers[number].sites[name]
        input = self._taken(site, x, sparse, norm=norm, squares=squares, handed=handed)
        gemv(
            site.matrix,
            input,
            y,
            bias=site.bias if input.dense else site.constant,
            residual=added,
            activation=activation,
            squares=squares_of_y,
            active=self.active[number, SITES.index(name)],
            reset=emptied,
        )
