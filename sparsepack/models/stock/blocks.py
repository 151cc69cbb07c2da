"""Run a model block by block: one decoder block of the stock transformers model at work, and the next one read.

The forward pass is transformers' own: a backbone with a single layer, into which each block's weights are loaded
in turn, so masks, rotary embeddings and sliding windows are never re-implemented here. What comes before the blocks and
after them is done once, by the names that the family gives it, and is taken out of that backbone.

Read a block while the one before it computes.
"""

import mmap
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparsepack.files.transfer import stacked_on
from sparsepack.models.architecture import multipliers
from sparsepack.models.checkpoint.checkpoint import HEAD
from sparsepack.models.family import Family
from sparsepack.models.own_code import STOCK_ALONE
from sparsepack.models.stock.attention import Watcher, masks_of_whole_texts, watched_attention
from sparsepack.models.stock.basis import add_basis
from sparsepack.models.stock.copies import run_between_copies
from sparsepack.models.stock.experts import ONE_BY_ONE
from sparsepack.models.stock.hooks import Record, check_finite, run_recorded
from sparsepack.models.stock.norms import norms_by_one_kernel
from sparsepack.models.stock.parts import Parts, parts_by
from sparsepack.models.stock.skeleton import layer_kind, single_layer
from sparsepack.models.stock.whole import backbone_of
from sparsepack.progress import say

Read = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Such a function reads the tensors of a block, by its number, one after the other: name, and what is stored, on the
CPU."""
AT_ONCE = 1
"""So many tensors of a block move to a GPU side by side; more have not been timed on one yet."""
_PAGES_FROM = 1 << 20
"""Tensors of so many bytes get pages of their own."""


class BlocksAhead:
    """The blocks of a model on a device, in the type that is computed in: one is read and moved ahead, never more.

    That is done on a thread, and on a GPU on a stream, of its own, by way of page-locked memory. On a CPU a block that
    is stored in a narrower type waits as it is stored: turning it into the other takes little time, and no memory then.

    at_once                    -- so many tensors move side by side
    read_seconds, read_bytes   -- what reading took so far, from disk or from the page cache, decoding included
    moved_seconds, moved_bytes -- likewise of moving blocks to the device and turning them into the type
    waited_seconds             -- how long somebody waited for a block that was not there yet
    """

    def __init__(self, read: Read, device: torch.device, dtype: torch.dtype, at_once: int = 1) -> None:
        self._read, self._device, self._dtype = read, device, dtype
        self._thread: ThreadPoolExecutor | None = None
        self._movers = ThreadPoolExecutor(at_once, "blocks-moved") if at_once > 1 else None
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.read_seconds = self.moved_seconds = self.waited_seconds = 0.0
        self.read_bytes = self.moved_bytes = 0

    def take(self, number: int) -> dict[str, Tensor]:
        """The tensors of a block. Raises what reading it raises."""
        began = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == number:
            tensors = ahead[1].result()
        else:
            if ahead is not None:  # of a block that nobody asks for
                wait([ahead[1]])
            tensors = self._made(number)
        if self._device.type == "cpu":
            began_moving = time.perf_counter()
            for name in list(tensors):
                tensors[name] = _converted(tensors.pop(name), self._dtype)  # one after the other: not two of each
                self.moved_bytes += tensors[name].nbytes
            self.moved_seconds += time.perf_counter() - began_moving
        if self._stream is not None:
            using = torch.cuda.current_stream(self._device)
            for tensor in tensors.values():
                tensor.record_stream(using)  # else the next block could be put there while this one is still used
        self.waited_seconds += time.perf_counter() - began
        return tensors

    def begin(self, number: int) -> None:
        """Read a block that will be taken next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "blocks-ahead")
        self._ahead = number, self._thread.submit(self._made, number)

    def wait(self) -> None:
        """Let what was begun come to its end."""
        if self._ahead is not None:
            wait([self._ahead[1]])

    def _made(self, number: int) -> dict[str, Tensor]:
        placed: dict[str, Tensor] = {}
        moving: dict[str, Future[Tensor]] = {}
        began = time.perf_counter()
        for name, stored in self._read(number):
            read = time.perf_counter()
            self.read_seconds += read - began
            self.read_bytes += stored.nbytes
            if self._movers is not None:
                moving[name] = self._movers.submit(self._placed, stored)
            else:
                placed[name] = self._placed(stored)
            del stored  # before the next one is read
            began = time.perf_counter()
            self.moved_seconds += began - read
        placed |= {name: moved.result() for name, moved in moving.items()}
        self.moved_seconds += time.perf_counter() - began
        self.moved_bytes += sum(each.nbytes for each in placed.values()) if self._device.type != "cpu" else 0
        return placed

    def _placed(self, stored: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return stored if stored.dtype.itemsize < self._dtype.itemsize else _converted(stored, self._dtype)
        if self._stream is None:
            return stored.to(self._device, self._dtype)
        with torch.cuda.stream(self._stream):
            placed = stacked_on(str(self._device), [stored]).to(self._dtype)
        self._stream.synchronize()
        return placed


def _converted(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a type, on the CPU, in pages that go back to the system when the tensor is let go of.

    The allocator would keep them: they are taken by one thread and let go of by another, a block at a time.
    """
    nbytes = stored.numel() * dtype.itemsize
    if stored.dtype == dtype or nbytes < _PAGES_FROM:
        return stored.to(dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(stored.shape).copy_(stored)


RESIDENT = 8
"""Hidden states stay on a GPU where they take at most this part of its memory: one over so many."""


class BlockSource(Protocol):
    """A model whose tensors are read one at a time: a checkpoint, or what an artifact stands for."""

    @property
    def config(self) -> Any:
        """The stock transformers configuration."""

    @property
    def family(self) -> Family: ...

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""

    @property
    def bases(self) -> Collection[int]:
        """The blocks before which the residual stream changes its basis."""

    @property
    def tensor(self) -> Callable[[str], torch.Tensor]:
        """One tensor by its Hugging Face name, on the CPU."""


class BlockStream:
    """Holds one decoder block of a model on a device, and reads the next one while that is used.

    `load(i)` replaces the block in memory, `block` is its module to hook, calling the stream runs it:
    hidden [B, S, H] -> [B, S, H]. `embed` reads the embedding and lets it go again. After the last block come
    `finish` and `head`.

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
            output = self._backbone(inputs_embeds=placed, use_cache=False).last_hidden_state
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
        return hidden

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes after the last block, which must have been run: [B, S, H] -> [B, S, columns of the head]."""
        hidden = hidden.to(self.device, self.dtype)
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
        if layer in self.source.bases:
            add_basis(backbone.layers[0], config.hidden_size)
        backbone.eval().requires_grad_(False)
        if self.device.type == "cuda":
            norms_by_one_kernel(backbone.layers[0])
        after = {name: module for name in family.after if (module := getattr(backbone, name)) is not None}
        self._after = self._after or {f"{family.backbone}.{name}": module for name, module in after.items()}
        for name in ("embed_tokens", *after):
            setattr(backbone, name, nn.Identity())
        if family.widening and getattr(backbone, family.widening) is not None:
            setattr(backbone, family.widening, nn.Identity())
        if family.positions is not None:
            setattr(backbone, family.positions.module, _Nowhere())
        if family.rotary != "none":
            # Its frequencies are computed, not loaded: made again off the meta device.
            backbone.rotary_emb = type(backbone.rotary_emb)(config).to(self.device)
        return backbone


_UNFINISHED = 6
"""A GPU may have so many recorded parts to do when the next block begins, whose first part Python launches slowly."""


class _Nowhere(nn.Module):
    """In the place of learned positions, which `embed` has added already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())
