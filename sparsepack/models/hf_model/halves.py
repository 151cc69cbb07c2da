"""The two halves of windows, apart: what decoding after a dense prefill sees, with gradients.

The first half of a window is dense, so a change of the second half needs only its keys and values, and its states
(`blocks.DeltaNet`). They need no gradient unless weights are trained: then the first half is a pass of its own. Each
decoder block of a pass with gradients is computed once more in the backward pass: until then only what enters it is
kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from sparsepack.models.family import Family
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of

Change = Callable[[int, str, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]
"""The function takes (layer, site, x [B, S, columns]) and returns the vector to use in place of x and a scalar that
tells of it, or None to leave x as it is. It may be called twice for one x, and must answer the same."""


def dense_pass(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Cache]:
    """Run windows `ids` [B, S] without gradients. Returns what enters the output matrix, [B, S, H], and the keys and
    values of their first halves."""
    half = ids.shape[1] // 2
    blocks = backbone_of(model).layers
    if any(map(_keeps_state, blocks)):  # of which a pass gives the last one alone
        with torch.no_grad():
            kept = [_kept(block) for block in blocks]
            first = model.base_model(ids[:, :half], past_key_values=Cache(layers=kept), use_cache=False)
            context = Cache(layers=[layer.finished() for layer in kept])
            second = model.base_model(ids[:, half:], past_key_values=context, use_cache=False)
        return torch.cat([first.last_hidden_state, second.last_hidden_state], 1), context
    context = Cache(layers=[_FirstHalf(half) for _ in backbone_of(model).layers])
    with torch.no_grad():
        return model.base_model(ids, past_key_values=context, use_cache=False).last_hidden_state, context


def trained_pass(model: Any, family: Family, ids: torch.Tensor) -> tuple[torch.Tensor, Cache]:
    """Run windows `ids` [B, S], or their first halves alone, with gradients. Returns what enters the output matrix,
    [B, S, H], and their keys and values as `changed_pass` takes those of first halves; both differentiable."""
    kept = [_kept(block) for block in backbone_of(model).layers]
    with _recomputed_blocks(model, family, lambda *_: None, []):
        states = model.base_model(ids, past_key_values=Cache(layers=kept), use_cache=False).last_hidden_state
    return states, Cache(layers=[layer.finished() for layer in kept])


def changed_pass(
    model: Any, family: Family, ids: torch.Tensor, context: Cache, change: Change
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the second halves of windows `ids` [B, S] with `change` at their sites, behind the dense first halves.

    context -- as `dense_pass` returns it, or `trained_pass` of the first halves

    Returns what enters the output matrix, [B, S - S // 2, H], and what the change told, in order of execution; both
    differentiable.
    """
    told: list[torch.Tensor] = []
    with _recomputed_blocks(model, family, change, told):
        second = ids[:, ids.shape[1] // 2 :]
        states = model.base_model(second, past_key_values=context, use_cache=False).last_hidden_state
    return states, told


class _FirstHalf(DynamicLayer):
    """The keys and values [B, heads, S, size] of one block: those of the first `half` positions of the first pass. A
    later pass has them before its own, and leaves them as they are."""

    def __init__(self, half: int) -> None:
        super().__init__()
        self.half = half
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_initialized:
            return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states[:, :, : self.half].clone(), value_states[:, :, : self.half].clone()
        self.is_initialized = True
        return key_states, value_states


class _Kept(DynamicLayer):
    """The keys and values [B, heads, S, size] of one block at its first run. The run that the backward pass makes once
    more leaves them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = False
        self.keys = self.values = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def finished(self) -> _FirstHalf:
        """These keys and values, as a later pass takes those of the tokens before its own; none of a block that reads
        another's."""
        if not self.is_initialized:
            return _FirstHalf(0)
        layer = _FirstHalf(self.keys.shape[2])
        layer.keys, layer.values, layer.is_initialized = self.keys, self.values, True
        return layer


class _FirstState(LinearAttentionLayer):
    """The state [B, heads, key_dim, value_dim] of one block after the first half, None of a short convolution, and the
    last inputs of its convolution [B, channels, taps]. A later pass goes on from them, and leaves them as they are."""

    def __init__(self, inputs: torch.Tensor, state: torch.Tensor | None) -> None:
        super().__init__()
        self.conv_states, self.recurrent_states = {0: inputs}, {0: state}
        self.has_previous_state = {0: True}
        self.record_past = True  # else a pass of one token writes into them

    def update_conv_state(self, conv_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        inputs = self.conv_states[0]
        assert inputs is not None
        return torch.cat([inputs, conv_states], -1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return recurrent_states


class _KeptState(LinearAttentionLayer):
    """The same of one block at its first run, as `_Kept` has keys and values: a run sees nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: torch.Tensor | None = None
        self.state: torch.Tensor | None = None
        self.record_past = True

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        if self.inputs is None:
            taps = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, taps - conv_states.shape[-1])
            self.inputs = nn.functional.pad(conv_states, (missing, 0))[..., -taps:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.state is None:
            self.state = recurrent_states
        return recurrent_states

    def finished(self) -> _FirstState:
        """The state, as a later pass takes that of the tokens before its own."""
        assert self.inputs is not None
        return _FirstState(self.inputs, self.state)


def _keeps_state(block: nn.Module) -> bool:
    return any(
        isinstance(getattr(module, "conv1d", getattr(module, "conv", None)), nn.Conv1d) for module in block.children()
    )


def _kept(block: nn.Module) -> _Kept | _KeptState:
    return _KeptState() if _keeps_state(block) else _Kept()


@contextmanager
def _recomputed_blocks(model: Any, family: Family, change: Change, told: list[torch.Tensor]) -> Iterator[None]:
    """Within the context each decoder block runs with `change`, and again in the backward pass."""
    blocks = list(enumerate(backbone_of(model).layers))
    for layer, block in blocks:
        block.forward = _recomputed(layer, block, family, change, told)
    try:
        yield
    finally:
        for _, block in blocks:
            del block.forward  # the class's own


def _recomputed(
    layer: int, block: nn.Module, family: Family, change: Change, told: list[torch.Tensor]
) -> Callable[..., Any]:
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        of_block: list[torch.Tensor] = []

        def at_site(_: int, site: str, x: torch.Tensor) -> torch.Tensor | None:
            answer = change(layer, site, x)
            if answer is None:
                return None
            of_block.append(answer[1])
            return answer[0]

        with site_hooks([(layer, block)], family, at_site):
            return forward(*args, **kwargs), of_block

    def twice(*args: Any, **kwargs: Any) -> Any:
        output, of_block = recomputed(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        told.extend(of_block)
        return output

    return twice


def repeatable(device: str) -> AbstractContextManager[None]:
    """Within the context attention's backward pass adds in an order of its own on a GPU.

    The other kernels that PyTorch has there add in the order in which groups of threads happen to end, so that a
    training is another one each time it is run. This one keeps all scores of a block; it takes no longer on windows of
    usual length, of which only the second half has gradients.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.startswith("cuda") else nullcontext()
