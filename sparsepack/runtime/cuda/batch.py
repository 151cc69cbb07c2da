"""A decoder of several sequences on an NVIDIA GPU, which read every weight once for all of them.

A step appends a token to each sequence. A column is skipped where it is inactive in all of them: what is read, and
multiplied for every sequence, is the union of the columns that are active in any.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.families import SITES
from sparsepack.models.packed import PackedModel
from sparsepack.runtime.cuda import decoder
from sparsepack.runtime.cuda.decoder import DEFAULT_CACHE_TYPE, check_heads
from sparsepack.runtime.cuda.device import usable
from sparsepack.runtime.cuda.elementwise import gate
from sparsepack.runtime.cuda.graph import captured, replay
from sparsepack.runtime.cuda.model import Cache, Model, load_model, new_cache
from sparsepack.runtime.cuda.prefill import Prefill
from sparsepack.runtime.cuda.rows import product
from sparsepack.runtime.cuda.sequences import Sequences, counted, state_parts
from sparsepack.runtime.cuda.zigzag import batch, blocks, most_inputs
from sparsepack.runtime.sampling import Sampler, not_finite


class BatchStep(Sequences):
    """The kernels of a token of each of several sequences: five a layer, or six, as `Step` has them.

    What they hand on is read when the kernel before has ended, and written again only when its readers have
    (`kernels/common.cuh`). So one buffer of a kind is enough, and what a block makes of `hidden` takes its place.
    """

    def __init__(self, model: Model, cache: Cache, sequences: int) -> None:
        super().__init__(model, cache, sequences)
        a, device = model.architecture, model.device
        heads = a.heads * a.head_dim
        parts = {name: blocks(site.matrix) for name, site in model.layers[0].sites.items()}  # as in all layers
        self._qkv = torch.empty(sequences, heads + 2 * a.kv_heads * a.head_dim, device=device)
        self._mixed = torch.empty(sequences, heads, device=device)
        self._between_squares = torch.empty(sequences, parts["attn_out"], device=device)
        self._stacked = torch.empty(sequences, 2 * a.intermediate, device=device)
        self._mid = torch.empty(sequences, a.intermediate, device=device)
        self._squares = torch.empty(sequences, parts["mlp_mid"], device=device)

    def _block(self, number: int, hidden: Tensor, sparse: bool) -> Tensor:
        layer = self._model.layers[number]
        first, last = number == 0, number == len(self._model.layers) - 1
        self._product(
            number,
            "attn_in",
            hidden,
            self._qkv,
            sparse,
            norm=layer.norms["attn_norm"],
            squares=None if first else self._squares,
        )
        self._attend(number, self._qkv, self._mixed)
        self._product(number, "attn_out", self._mixed, hidden, sparse, added=hidden, squares_of_y=self._between_squares)
        fused = layer.sites["mlp_in"].matrix.half > 0
        self._product(
            number,
            "mlp_in",
            hidden,
            self._mid if fused else self._stacked,
            sparse,
            norm=layer.norms["mlp_norm"],
            squares=self._between_squares,
            activation=self._model.activation if fused else None,
        )
        if not fused:
            gate(self._stacked, self._model.activation, self._mid)
        self._product(
            number,
            "mlp_mid",
            self._mid,
            hidden,
            sparse,
            added=hidden,
            squares_of_y=None if last else self._squares,
        )
        return hidden

    def _product(
        self,
        number: int,
        name: str,
        x: Tensor,
        y: Tensor,
        sparse: bool,
        *,
        norm: Tensor | None = None,
        squares: Tensor | None = None,
        added: Tensor | None = None,
        activation: int | None = None,
        squares_of_y: Tensor | None = None,
    ) -> None:
        """A site's output rows of all sequences; its active columns are counted."""
        site = self._model.layers[number].sites[name]
        input = self._taken(site, x, sparse, norm=norm, squares=squares)
        batch(
            site.matrix,
            input,
            y,
            constant=site.bias if input.dense else site.constant,
            added=added,
            activation=activation,
            squares=squares_of_y,
            active=self.active[number, SITES.index(name)],
        )


class CudaBatch:
    """A packed model with the caches of B sequences, 1 to 8. Its caller checks ids and room.

    As `CudaDecoder`: matrices keep the size that they have in the file, a step is a CUDA graph, the same texts give the
    same bits every run. The cache takes B times as much. The sequences may have different lengths, and their logits are
    those of sequences alone but for the order of sums and, in sparse steps, for the columns of the others.

    Raises `UserError` as `CudaDecoder` does, and where the GPU has too little shared memory for so many.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device,
        context: int,
        sequences: int,
        cache_type: str = DEFAULT_CACHE_TYPE,
    ) -> None:
        self._device = usable(device)
        check_heads(packed.architecture)
        self.cache_type = cache_type
        with torch.cuda.device(self._device):
            cache = new_cache(packed.architecture, context, cache_type, self._device, sequences)
            self._model = load_model(packed, self._device, context)
            most = min(most_inputs(site.matrix) for layer in self._model.layers for site in layer.sites.values())
            if sequences > most:
                raise UserError(
                    f"{sequences} sequences: this GPU's shared memory takes {most} of this model at once; take fewer"
                )
            self._step = BatchStep(self._model, cache, sequences)
            self._prefill = Prefill(self._model, cache)
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._steps: dict[bool, torch.cuda.CUDAGraph] = {}
        self._positions = [0] * sequences
        self._stepped = 0
        # What the GPU has as the ids to append and as their positions, where that is known here.
        self._ids_there: list[int] | None = None
        self._positions_there: list[int] | None = None

    @property
    def description(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def positions(self) -> tuple[int, ...]:
        """How many tokens the cache holds of each sequence."""
        return tuple(self._positions)

    @property
    def stepped(self) -> int:
        """How many steps since the reset."""
        return self._stepped

    def active(self) -> dict[tuple[int, str], int]:
        """Columns that were active in any sequence, per (layer, site), summed over those steps."""
        return counted(self._step.active)

    def reset(self) -> None:
        """Forget the texts and what was counted."""
        self._positions = [0] * len(self._positions)
        self._stepped = 0
        self._step.active.zero_()

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what a sequence has beyond its first tokens."""
        self._positions[sequence] = length

    def prefill(self, sequence: int, ids: Tensor) -> Tensor:
        """Append int64 [S > 0] to a sequence, dense. Returns the logits after the last: float32 [vocabulary]."""
        with torch.cuda.device(self._device):
            for chunk in torch.split(ids.to(self._device, torch.int32), decoder.CHUNK):
                hidden = self._prefill.run(chunk, self._positions[sequence], sequence)
                self._positions[sequence] += len(chunk)
            logits = torch.empty_like(self._step.logits[:1])
            norm, eps = self._model.output_norm, self._model.architecture.norm_eps
            # A copy begins at a multiple of 16 bytes.
            product(self._model.output, hidden[-1:].clone(), logits, norm=norm, eps=eps)
        return logits[0]

    def step(self, ids: Sequence[int], sparse: bool) -> Tensor:
        """Append a token to each sequence. Returns the logits after them: float32 [B, vocabulary]."""
        with torch.cuda.device(self._device):
            self._append(ids, sparse)
            return self._step.logits.clone()

    def decode_next(self, ids: Sequence[int], sparse: bool, samplers: Sequence[Sampler]) -> list[int]:
        """What each sampler chooses from the logits of `step`; the likeliest tokens are found on the device."""
        with torch.cuda.device(self._device):
            self._append(ids, sparse)
            _, likeliest, bests = state_parts(self._step.state.cpu(), len(ids))
        chosen = likeliest.tolist()
        self._ids_there = list(chosen)
        for n, best in enumerate(bests.tolist()):
            if not math.isfinite(best):
                raise not_finite(best)
            if samplers[n].sampling.temperature:
                chosen[n] = samplers[n].choose(self._step.logits[n])
        return chosen

    def _append(self, ids: Sequence[int], sparse: bool) -> None:
        """A step, on the current stream."""
        graph = self._steps.get(sparse) or self._captured(sparse)
        if self._ids_there != list(ids):
            self._step.ids.copy_(host_memory(ids), non_blocking=True)
        if self._positions_there != self._positions:
            self._step.positions.copy_(host_memory(self._positions), non_blocking=True)
        self._ids_there = self._positions_there = None  # should what follows be interrupted
        replay(graph)
        self._positions = [position + 1 for position in self._positions]
        self._stepped += 1
        self._positions_there = list(self._positions)

    def _captured(self, sparse: bool) -> torch.cuda.CUDAGraph:
        before = self._step.active.clone()
        self._ids_there = self._positions_there = None
        self._step.ids.zero_()
        # What is cached at these positions now is written again by the step itself.
        self._step.positions.copy_(host_memory(self._positions), non_blocking=True)
        self._steps[sparse] = captured(lambda: self._step.run(sparse), self._stream)
        self._step.active.copy_(before)
        return self._steps[sparse]


def host_memory(values: Sequence[int]) -> Tensor:
    """int32 that a GPU copies without the host waiting; torch keeps the memory until that is done."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)
