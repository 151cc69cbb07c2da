"""Run a model of a family without a row block by block: its whole stock model on the meta device, into which the
weights of one block at a time are loaded.

What is around the blocks is transformers' own code, too: it runs for each part with all other blocks passed by, so that
masks, positions, multipliers and what differs between blocks are nowhere done again. What enters the first block, and
what enters the output matrix, are taken where they come by. In memory are the block, the next one, and the parameters
that are of no block; embeddings while they are needed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsepack.errors import CheckpointError
from sparsepack.files.stored import shown
from sparsepack.models.found import FoundFamily, meta_model
from sparsepack.models.hf_config import multipliers
from sparsepack.models.hf_model.attention import Watcher, masks_of_whole_texts
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.hf_model.hooks import check_finite
from sparsepack.models.hf_model.model import BlockSource


def open_blocks(
    source: BlockSource, device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str | None = None
) -> BlockStream:
    """The blocks of a model on a device, by the row of its family, or as they are found; see `BlockStream`."""
    if source.family.has_row:
        return BlockStream(source, device, dtype, attention)
    return FoundBlocks(source, device, dtype)


class _Taken(Exception):
    """Ends a run where what it is for has come by."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class FoundBlocks(BlockStream):
    """`BlockStream` of a family without a row."""

    def __init__(self, source: BlockSource, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__(source, device, dtype)
        family = source.family
        assert isinstance(family, FoundFamily)
        self._family = family
        self._model = meta_model(source.config, dtype)
        self._blocks = self._model.get_submodule(family.blocks)
        self._forwards = [block.forward for block in self._blocks]
        self._at: Callable[[int, Any, Any], Any] | None = None
        self._computed: dict[int, list[tuple[nn.Module, str, Tensor]]] = {}
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._pass, number)
        inside = (f"{family.blocks}.", family.embedding, family.head)
        self._fill_buffers()
        bias = family.head.removesuffix("weight") + "bias"
        for name in self._model.state_dict():
            if not name.startswith(inside[0]) and name not in (*inside[1:], bias):
                self._set(name, self._tensor(name))
        self._bias = self._tensor(bias) if family.biased else None

    def _set(self, name: str, value: Tensor | None) -> None:
        """Put a tensor in its place outside of the blocks; None: nothing is there any more."""
        owner, _, last = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if value is None:
            value = getattr(module, last).to("meta")
        if last in module._buffers:
            module._buffers[last] = value
        else:
            module._parameters[last] = nn.Parameter(value, requires_grad=False)

    def _fill_buffers(self) -> None:
        """Compute the buffers that are in no checkpoint, as transformers does when it loads a model, and keep those of
        blocks. No parameter may be there yet: they would be given random values."""
        empty = [
            (path, module, name)
            for path, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
            if module._buffers[name] is not None
        ]
        for _, module, name in empty:
            buffer: Any = module._buffers[name]
            unknown = torch.nan if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, unknown, device=self.device)
        with torch.no_grad():
            for module in self._model.modules():
                self._model._init_weights(module)
        for path, module, name in empty:
            value: Any = module._buffers[name]
            if value.is_floating_point() and value.isnan().any():
                raise CheckpointError(
                    f"{self._family.model_type}: {path} computes {name} as nothing here knows; expected a model all of "
                    "whose buffers transformers computes when it loads one"
                )
            if path.startswith(f"{self._family.blocks}."):
                layer = int(path.removeprefix(f"{self._family.blocks}.").partition(".")[0])
                self._computed.setdefault(layer, []).append((module, name, value))

    def _stored(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        prefix = self.source.family.block(layer)
        for name in self._blocks[layer].state_dict():
            yield name, self.source.tensor(f"{prefix}.{name}")

    def load(self, layer: int, tensors: Mapping[str, Tensor] | None = None, step: int = 1) -> None:
        self.unload()
        self._layer = layer
        placed = self.ahead.take(layer) if tensors is None else self._placed(tensors)
        self.block.load_state_dict(placed, strict=True, assign=True)
        self.block.requires_grad_(False)
        for module, name, value in self._computed.get(layer, ()):
            module._buffers[name] = value
        if tensors is None and 0 <= layer + step < self.source.layers:
            self.ahead.begin(layer + step)

    def unload(self) -> None:
        self.block.to("meta")

    @property
    def block(self) -> nn.Module:
        block: nn.Module = self._blocks[self._layer]
        return block

    def _pass(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of every block: what this run is for at its place, else the hidden states as they are."""
        made = None if self._at is None else self._at(number, args, kwargs)
        if made is None:
            made = args[0] if args else kwargs["hidden_states"]
            made = self._returned(number, made)
        return made

    def _returned(self, number: int, hidden: Tensor) -> Any:
        """Hidden states in the form in which the stock block returns them."""
        returns = self._family.found[number].returns
        return (hidden, *[None] * (returns - 1)) if returns else hidden

    def _run(self, at: Callable[[int, Any, Any], Any], head: bool = False, **inputs: Tensor) -> Tensor:
        """Run the stock model up to the place at which `at`, or the output matrix, takes what comes by."""
        self._at = at
        model = self._model if head else self._model.base_model
        try:
            with masks_of_whole_texts():
                model(**inputs, use_cache=False)
        except _Taken as taken:
            return taken.value
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise CheckpointError(
                f"{self._family.model_type}: its code reads parameters of other blocks, or the embedding, where one "
                f"runs ({shown(error)}); expected a model whose blocks are given hidden states alone"
            ) from error
        finally:
            self._at = None
        raise AssertionError("the stock model ran to its end")

    def __call__(self, hidden: Tensor) -> Tensor:
        placed = hidden.to(self.device, self.dtype, non_blocking=self.device.type == "cuda")

        def at(number: int, args: Any, kwargs: Any) -> Any:
            if number != self._layer:
                return None
            if args:
                args = (placed, *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": placed}
            output = self._hooked(number, args, kwargs)
            raise _Taken(output[0] if isinstance(output, tuple) else output)

        output = self._run(at, False, inputs_embeds=placed)
        if self.device.type == "cpu":
            check_finite(output, self._where)
        return output

    def _hooked(self, number: int, args: Any, kwargs: Any) -> Any:
        return self._forwards[number](*args, **kwargs)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, S] -> what enters the first block [N, S, H], on the CPU."""
        self._set(self._family.embedding, self._tensor(self._family.embedding))

        def at(_: int, args: Any, kwargs: Any) -> Any:
            raise _Taken(args[0] if args else kwargs["hidden_states"])

        try:
            with torch.no_grad():
                rows = [self._run(at, input_ids=row[None].to(self.device)).cpu() for row in ids]
        finally:
            self._set(self._family.embedding, None)
        return torch.cat(rows)

    def finish(self, hidden: Tensor) -> Tensor:
        """What comes after the last block: [B, S, H] -> [B, S, columns of the head]. A bias of the output matrix is one
        more column, whose input is 1."""
        single = hidden.dim() == 2
        hidden = hidden.to(self.device, self.dtype)
        check_finite(hidden, self._where)
        entered = hidden[None] if single else hidden
        last = self.source.layers - 1

        def at(number: int, args: Any, kwargs: Any) -> Any:
            return self._returned(number, entered) if number == last else None

        def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _Taken(inputs[0])

        handle = self._model.get_submodule(self._family.head.rpartition(".")[0]).register_forward_pre_hook(take)
        try:
            found = self._run(at, True, inputs_embeds=entered)
        finally:
            handle.remove()
        found = found * multipliers(self.source.config).logits
        if self._bias is not None:
            found = torch.cat([found, torch.ones_like(found[..., :1])], -1)
        return found[0] if single else found

    def head(self) -> Tensor:
        tied = self.source.config.tie_word_embeddings
        matrix = self.source.tensor(self._family.embedding if tied else self._family.head)
        if self._bias is None:
            return matrix
        scale = multipliers(self.source.config).logits
        return torch.cat([matrix.float(), scale * self._bias.float().cpu()[:, None]], 1)

    def watched(self, watcher: Watcher) -> AbstractContextManager[None]:
        return nullcontext()
