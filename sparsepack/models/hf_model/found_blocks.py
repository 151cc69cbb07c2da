"""Run a model of a family without a row block by block: its whole stock model on the meta device, into which the
weights of one block at a time are loaded.

What is around the blocks is transformers' own code, too: it runs for each part with all other blocks passed by, so that
masks, positions, multipliers and what differs between blocks are nowhere done again. What enters the first block, and
what enters the output matrix, are taken where they come by. In memory are the block, the next one, and the parameters
that are of no block; embeddings while they are needed.

What blocks are given beside hidden states travels with these, in columns behind theirs (`_Beside`).
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


class _Beside:
    """What blocks of a Gemma with embeddings of each layer or shared keys and values are given beside hidden states.

        hidden states | of each block what it is given of the token | keys and values that others read, of each kind

    Of other models there is none of it. Each number is of one position, so that a run may go on from them.
    """

    def __init__(self, config: Any) -> None:
        self.hidden, self.layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.each = int(getattr(config, "hidden_size_per_layer_input", None) or 0)
        self.kinds: dict[str, tuple[int, int]] = {}  # of layers whose keys and values are read: their heads
        if getattr(config, "num_kv_shared_layers", None):
            self._types = list(config.layer_types)
            for kind in sorted(set(self._types)):
                of = config.per_layer_config[self._types.index(kind)]
                self.kinds[kind] = int(of.num_key_value_heads), int(of.head_dim)

    @property
    def width(self) -> int:
        """Columns behind the hidden states."""
        return self.layers * self.each + sum(2 * heads * size for heads, size in self.kinds.values())

    @property
    def inputs(self) -> bool:
        """Whether the stock backbone makes something of the tokens that only `embed` has."""
        return self.each > 0

    def entered(self, hidden: Tensor, given: Mapping[int, Tensor]) -> Tensor:
        """What the stream keeps of positions that enter the first block, of what the blocks are given of them."""
        parts = [hidden, *(given[layer] for layer in sorted(given))]
        made = torch.cat(parts, -1)
        missing = self.hidden + self.width - made.shape[-1]
        return nn.functional.pad(made, (0, missing))

    def given(self, states: Tensor, layer: int) -> Tensor | None:
        """What a block is given of the tokens; None: nothing."""
        first = self.hidden + layer * self.each
        return states[..., first : first + self.each] if self.each else None

    def shared(self, states: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values [B, heads, S, size] that blocks read of others, by the kind of these."""
        found, first = {}, self.hidden + self.layers * self.each
        for kind, (heads, size) in self.kinds.items():
            both = torch.unflatten(states[..., first : first + 2 * heads * size], -1, (2, heads, size))
            found[kind] = both[..., 0, :, :].transpose(1, 2), both[..., 1, :, :].transpose(1, 2)
            first += 2 * heads * size
        return found

    def left(self, output: Tensor, states: Tensor, shared: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """What the stream keeps behind a block, which had these states."""
        parts = [output, states[..., self.hidden : self.hidden + self.layers * self.each]]
        parts += [cached.transpose(1, 2).flatten(2) for kind in self.kinds for cached in shared[kind]]
        return torch.cat(parts, -1)


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
        self._beside = _Beside(source.config)
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._pass, number)
        tables = [f"{name}.weight" for name, of in self._model.named_modules() if isinstance(of, nn.Embedding)]
        self._tables = [name for name in tables if not name.startswith(f"{family.blocks}.")]
        inside = (f"{family.blocks}.", family.embedding, family.head, *self._of_tokens)
        self._fill_buffers()
        bias = family.head.removesuffix("weight") + "bias"
        for name in self._model.state_dict():
            if not name.startswith(inside[0]) and name not in (*inside[1:], bias):
                self._set(name, self._tensor(name))
        self._bias = self._tensor(bias) if family.biased else None

    @property
    def _of_tokens(self) -> list[str]:
        """The embeddings that only `embed` looks into."""
        return self._tables if self._beside.inputs else [self._family.embedding]

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
        states, beside = hidden.to(self.device, self.dtype, non_blocking=self.device.type == "cuda"), self._beside
        placed = states[..., : beside.hidden]

        def at(number: int, args: Any, kwargs: Any) -> Any:
            if number != self._layer:
                return None
            if (given := beside.given(states, number)) is not None:
                args = (placed, given, *args[2:])
            elif args:
                args = (placed, *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": placed}
            if beside.kinds:
                kwargs["shared_kv_states"].update(beside.shared(states))
            output = self._hooked(number, args, kwargs)
            output = output[0] if isinstance(output, tuple) else output
            raise _Taken(beside.left(output, states, kwargs["shared_kv_states"]) if beside.width else output)

        output = self._run(at, False, **self._embedded(placed))
        if self.device.type == "cpu":
            check_finite(output, self._where)
        return output

    def _hooked(self, number: int, args: Any, kwargs: Any) -> Any:
        return self._forwards[number](*args, **kwargs)

    def _embedded(self, hidden: Tensor) -> dict[str, Tensor]:
        """The arguments of the stock backbone for hidden states in the place of embedded tokens."""
        beside = self._beside
        if not beside.inputs:
            return {"inputs_embeds": hidden}
        unread = hidden.new_zeros(*hidden.shape[:-1], beside.layers, beside.each)
        return {"inputs_embeds": hidden, "per_layer_inputs": unread}

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, S] -> what enters the first block [N, S, H] and what travels beside it, on the CPU."""
        for name in self._of_tokens:
            self._set(name, self._tensor(name))
        beside, given = self._beside, dict[int, Tensor]()

        def at(number: int, args: Any, kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if beside.inputs:
                given[number] = args[1]
            if beside.inputs and number < beside.layers - 1:
                return None
            raise _Taken(beside.entered(hidden, given) if beside.width else hidden)

        try:
            with torch.no_grad():
                rows = [self._run(at, input_ids=row[None].to(self.device)).cpu() for row in ids]
        finally:
            for name in self._of_tokens:
                self._set(name, None)
        return torch.cat(rows)

    def finish(self, hidden: Tensor) -> Tensor:
        """What comes after the last block: [B, S, H] -> [B, S, columns of the head]. A bias of the output matrix is one
        more column, whose input is 1."""
        single = hidden.dim() == 2
        hidden = hidden[..., : self._beside.hidden].to(self.device, self.dtype)
        check_finite(hidden, self._where)
        entered = hidden[None] if single else hidden
        last = self.source.layers - 1

        def at(number: int, args: Any, kwargs: Any) -> Any:
            return self._returned(number, entered) if number == last else None

        def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _Taken(inputs[0])

        handle = self._model.get_submodule(self._family.head.rpartition(".")[0]).register_forward_pre_hook(take)
        try:
            found = self._run(at, True, **self._embedded(entered))
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
