"""Run a model block by block: one decoder block of the Hugging Face model at work, and the next one read.

The forward pass is transformers' own: a backbone with a single layer, into which each block's weights are loaded
in turn, so masks, rotary embeddings and sliding windows are never re-implemented here. What comes before the blocks and
after them is done once, by the names that the family gives it, and is taken out of that backbone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.models.checkpoint.config_files import STOCK_ALONE
from sparsepack.models.family import HEAD
from sparsepack.models.hf_config import multipliers
from sparsepack.models.hf_model.attention import Watcher, masks_of_whole_texts, watched_attention
from sparsepack.models.hf_model.extra_inputs import ExtraInputs, per_layer_inputs
from sparsepack.models.hf_model.fused import Parts, norms_by_one_kernel, parts_by
from sparsepack.models.hf_model.hooks import ONE_BY_ONE, check_finite, order_parameters
from sparsepack.models.hf_model.model import (
    BlockSource,
    add_basis,
    backbone_of,
    keep_block,
    layer_kind,
    single_layer,
)
from sparsepack.models.hf_model.prefetch import AT_ONCE, BlocksAhead, run_between_copies
from sparsepack.progress import say

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Such a function records what a function puts on a GPU, without running it there. It gives what repeats that, on what
stands in the same tensors then, and the tensor in which the result is."""

_LEAST = 3
"""Recording is worth while for so many parts."""


def run_recorded(
    parts: Sequence[Tensor], run: Callable[[Tensor], Tensor], record: Record, advance: Callable[[], object]
) -> None:
    """Put `run` of each part in its place; `advance` is called after each.

    The first part is run as it is, which loads kernels and makes what later runs add to. Then one run is recorded and
    repeated for each part of the same shape. Whatever watches the run is called in these two alone: what it counts must
    be added to tensors that stay the same.
    """
    repeat: Callable[[], None] | None = None
    for number, part in enumerate(parts):
        if number == 0 or part.shape != parts[0].shape or len(parts) < _LEAST:
            part.copy_(run(part))
        else:
            if repeat is None:
                entering = part.clone()  # values of a real run: a first run of it on a CPU looks for NaN
                repeat, leaving = record(partial(run, entering))
            entering.copy_(part)
            repeat()
            part.copy_(leaving)
        advance()


RESIDENT = 8
"""Hidden states stay on a GPU where they take at most this part of its memory: one over so many."""


class BlockStream:
    """Holds one decoder block of a model on a device, and reads the next one while that is used.

    `load(i)` replaces the block in memory, `block` is its module to hook, calling the stream runs it:
    hidden [B, S, H] -> [B, S, H]. `embed` reads the embedding and lets it go again. After the last block come
    `finish` and `head`. Further inputs of blocks travel with hidden states, in columns behind theirs (`ExtraInputs`).

    attention -- transformers' name of the implementation that the blocks use; None: the family's
    ahead     -- where blocks come from, and how long that took
    passed    -- how many tokens `pass_on` has taken through a block so far, those of each block counted
    """

    def __init__(
        self,
        source: BlockSource,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str | None = None,
    ) -> None:
        self.source, self._attention = source, attention or source.family.attention
        self.device, self.dtype = torch.device(device), dtype
        self._backbones: dict[Any, Any] = {}  # by the kind of the layer, and whether it has a basis
        self._backbone: Any = None
        self._layer = 0
        self._after: dict[str, Any] = {}
        self._extra = ExtraInputs(source.config, source.family)
        self.ahead = BlocksAhead(self._stored, self.device, dtype, AT_ONCE if self.device.type == "cuda" else 1)
        self.passed = 0

    def load(self, layer: int, tensors: Mapping[str, torch.Tensor] | None = None, step: int = 1) -> None:
        """Let go of the block in memory, then read block `layer`, or take all its tensors as given, by their names
        within it. Of blocks that are read, the next one, `layer + step`, is begun."""
        self.unload()
        self._backbone, self._layer = self._backbone_like(layer), layer
        placed = self.ahead.take(layer) if tensors is None else self._placed(tensors)
        self.block.load_state_dict(placed, strict=True, assign=True)
        if tensors is None and 0 <= layer + step < self.source.layers:
            self._backbone_like(layer + step)
            self.ahead.begin(layer + step)

    def _stored(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a block as they are stored, by their names within it. Its backbone is there already."""
        prefix = self.source.family.block(layer)
        for name in list(self._backbone_like(layer).layers[0].state_dict()):
            yield name, self.source.tensor(f"{prefix}.{name}")

    def _backbone_like(self, layer: int) -> Any:
        """The backbone that runs a block: one for all blocks of a kind."""
        kind = tuple(layer_kind(self.source.config, layer).values()), layer in self.source.bases
        if kind not in self._backbones:
            self._backbones[kind] = self._empty(layer)
        return self._backbones[kind]

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put other tensors into the block in memory, by their names within it."""
        self.block.load_state_dict(self._placed(tensors), strict=False, assign=True)

    def unload(self) -> None:
        """Let go of the block in memory."""
        if self._backbone is not None:
            self._backbone.layers.to("meta")

    def _placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device, self.dtype) for name, value in tensors.items()}

    def _tensor(self, name: str) -> torch.Tensor:
        return self.source.tensor(name).to(self.device, self.dtype)

    @property
    def block(self) -> nn.Module:
        """The decoder block in memory."""
        module = self._backbone.layers[0]
        assert isinstance(module, nn.Module)
        return module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the loaded block on hidden states [B, S, H]."""
        placed = hidden.to(self.device, self.dtype, non_blocking=self.device.type == "cuda")
        with masks_of_whole_texts():
            given = self._extra.arguments(placed, self._layer)
            output = self._backbone(**given, use_cache=False).last_hidden_state
        if self._extra.width:
            output = self._extra.after_block(output, placed, given.get("shared_kv_states", {}))
        if self.device.type == "cpu":
            check_finite(output, self._where)
        return output  # type: ignore[no-any-return]

    @property
    def _where(self) -> str:
        return f"a {self.source.family.model_type} model, the output of block {self._layer}"

    def pass_on(
        self, hidden: torch.Tensor, batch: int, advance: Callable[[], object], record: Record | None = None
    ) -> None:
        """Run the loaded block on hidden states [N, S, H], `batch` rows at a time, after each of which `advance` is
        called. The results take the place of what was there, so that the states of all windows are there once. A GPU
        is waited for at the end: until then `advance` may find that it has not come so far.

        record -- see `run_recorded`; for states that are where the block is and in its type, else nothing is recorded.
                  Of a GPU the last parts are not waited for then
        """
        parts = torch.split(hidden, batch)
        self.passed += hidden.shape[0] * hidden.shape[1]
        if self.device.type == "cuda" and hidden.device.type == "cpu":
            run_between_copies(parts, self, self.device, self.dtype, advance)
            check_finite(hidden, self._where)
            return
        if record is not None and hidden.device.type == self.device.type and hidden.dtype == self.dtype:
            self._pass_on_recorded(parts, record, advance)
            return
        for part in parts:
            part.copy_(self(part))
            advance()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.device.type != "cpu":
            check_finite(hidden, self._where)

    def _pass_on_recorded(self, parts: Sequence[torch.Tensor], record: Record, advance: Callable[[], object]) -> None:
        """`pass_on`, which leaves a GPU the last parts to do while the next block is taken, launched and recorded."""
        ended: deque[torch.cuda.Event] = deque(maxlen=_UNFINISHED + 1)

        def passed() -> None:
            advance()
            if self.device.type == "cuda":
                ended.append(torch.cuda.current_stream(self.device).record_event())

        run_recorded(parts, self, record, passed)
        if ended:
            ended[0].synchronize()
            check_finite(parts[0], self._where)  # of one part alone, which is done: the others are not waited for

    def watched(self, watcher: Watcher) -> AbstractContextManager[None]:
        """Within the context, the loaded block's attention shows its queries and keys to `watcher`."""
        return watched_attention(self._backbone, watcher)

    def with_parts(self, parts: Parts | None) -> AbstractContextManager[object]:
        """Within the context, the loaded block runs with such parts in the place of its own code; None: with none."""
        return nullcontext() if parts is None else parts_by(self.block, parts)

    def states(self, ids: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """The hidden states [N, S, H] of windows of token ids that a run goes on with: those that were `kept`, or what
        `embed` gives. They are on the CPU, or on a GPU of which they take little (`RESIDENT`). Else they are
        page-locked for it, since each block takes them there and back."""
        hidden = self.embed(ids) if kept is None else kept
        if self.device.type != "cuda":
            return hidden
        free, whole = torch.cuda.mem_get_info(self.device)
        if hidden.nbytes <= min(whole // RESIDENT, free // 2):
            return hidden.to(self.device)
        try:
            return hidden.pin_memory()
        except RuntimeError:
            say(f"note: {hidden.nbytes / 1e9:.1f} GB of hidden states cannot be page-locked and move more slowly")
            return hidden

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [N, S] -> hidden states [N, S, H], on the CPU: the windows of a whole run may not fit elsewhere.

        Each row is a text from its first token on.
        """
        family, tensor = self.source.family, self.source.tensor
        hidden = nn.functional.embedding(ids.cpu(), tensor(family.embedding)).to(self.dtype)
        if (scale := multipliers(self.source.config).embedding) != 1:
            hidden *= torch.tensor(scale).to(self.dtype)  # rounded as the stock model rounds it
        if family.widening and hidden.shape[-1] != self.source.config.hidden_size:
            widening = tensor(f"{family.backbone}.{family.widening}.weight").to(self.dtype)
            hidden = nn.functional.linear(hidden, widening)
        if family.positions is not None:
            rows = tensor(f"{family.backbone}.{family.positions.module}.weight")[family.positions.first :]
            hidden += rows[: ids.shape[1]].to(self.dtype)
        if not self._extra.width:
            return hidden
        inputs = None
        if self._extra.per_layer:
            inputs = per_layer_inputs(self.source.config, family, tensor, ids.cpu(), hidden)
        return self._extra.append(hidden, inputs)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes after the last block, which must have been run: [B, S, H] -> [B, S, columns of the head]."""
        hidden = hidden[..., : self._extra.hidden].to(self.device, self.dtype)
        check_finite(hidden, self._where)
        for prefix, module in self._after.items():
            if any(parameter.is_meta for parameter in module.parameters()):
                tensors = {name: self._tensor(f"{prefix}.{name}") for name in module.state_dict()}
                module.load_state_dict(tensors, strict=True, assign=True)
            hidden = module(hidden)
        return hidden * multipliers(self.source.config).logits if self.source.family.divides_logits else hidden

    def head(self) -> torch.Tensor:
        """The output matrix [V, H] as the source gives it, on the CPU."""
        tied = self.source.config.tie_word_embeddings
        return self.source.tensor(self.source.family.embedding if tied else HEAD)

    def _empty(self, layer: int) -> Any:
        """A stock backbone of one block like `layer`, still without weights."""
        from transformers import AutoModel

        config, family = single_layer(self.source.config, layer), self.source.family
        config.dtype = self.dtype
        with torch.device("meta"):
            how = {"attn_implementation": self._attention, "experts_implementation": ONE_BY_ONE}
            backbone = backbone_of(AutoModel.from_config(config, **how, **STOCK_ALONE))
        keep_block(backbone, config, layer_kind(self.source.config, layer))
        order_parameters(backbone.layers, family)
        if layer in self.source.bases:
            add_basis(backbone.layers[0], config.hidden_size)
        backbone.eval().requires_grad_(False)
        if self.device.type == "cuda":
            norms_by_one_kernel(backbone.layers[0])
        after = {name: module for name in family.after if (module := getattr(backbone, name)) is not None}
        self._after = self._after or {f"{family.backbone}.{name}": module for name, module in after.items()}
        outside = () if family.per_layer is None else family.per_layer.outside
        for name in (family.embedding_module, *after, *outside):
            setattr(backbone, name, nn.Identity())
        if family.widening and getattr(backbone, family.widening) is not None:
            setattr(backbone, family.widening, nn.Identity())
        if family.positions is not None:
            setattr(backbone, family.positions.module, _Nowhere())
        if (rotary := getattr(backbone, family.rotary_module, None)) is not None:
            # Its frequencies are computed, not loaded: made again off the meta device.
            setattr(backbone, family.rotary_module, type(rotary)(config).to(self.device))
        return backbone


_UNFINISHED = 6
"""A GPU may have so many recorded parts to do when the next block begins, whose first part Python launches slowly."""


class _Nowhere(nn.Module):
    """In the place of learned positions, which `embed` has added already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())
