"""Parts of Hugging Face decoder blocks by other kernels than their own code has: norms by torch's, where their own code
takes seven that each read and write all hidden states, and on a GPU rotary embedding, gate and norms by ours."""

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_TRIED = 4
"""A norm is compared with torch's on so many random vectors."""


def norms_by_one_kernel(block: nn.Module) -> list[str]:
    """Let the norms of a block, whose weights may be absent still, run by torch's kernel where that gives what their
    own code does: the vector over its root mean square, rounded to its type, times the weight. Returns their names."""
    changed = []
    for name, module in block.named_modules():
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if isinstance(eps, float) and isinstance(weight, nn.Parameter) and _is_plain(module, eps):
            module.forward = partial(_forward, module, eps)
            changed.append(name)
    return changed


def eps_by_one_kernel(module: nn.Module) -> float | None:
    """The epsilon of a norm that `norms_by_one_kernel` has changed; None of any other module."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        eps: float = forward.args[1]
        return eps
    return None


def _forward(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    scaled: Tensor = module.weight * nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], eps=eps)
    return scaled


@torch.no_grad()
def _is_plain(module: Any, eps: float) -> bool:
    """Whether a norm's own code does what `_forward` does, tried with random weights in 16 bits."""
    tried = copy.deepcopy(module).to_empty(device="cpu").bfloat16()
    generator = torch.Generator().manual_seed(0)
    width = tried.weight.shape[0]
    tried.weight.copy_(torch.randn(width, generator=generator))
    x = torch.randn(_TRIED, width, generator=generator).bfloat16()
    try:
        found = tried(x)
    except (RuntimeError, TypeError):  # it wants something else
        return False
    expected = _forward(tried, eps, x)
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=2**-7, atol=0)


_ROTARY = "apply_rotary_pos_emb"
"""Stock attention calls its rotary embedding by this name."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_TRIED = 1024
"""An activation is compared on so many random numbers."""


@dataclass(frozen=True)
class Parts:
    """What takes the place of stock code. Each gives what that gives, to the last bit but for the order in which a norm
    adds, or None where it does not take such tensors: stock code runs then.

    apply_rope -- of query [B, heads, S, D], key [B, kv_heads, S, D], cosine and sine [1 or B, S, D]: both turned
    silu_times -- of gate and up, of one shape: SiLU of the gate times up
    norm_rows  -- of x [.., S, columns], epsilon and weight [columns] or None: rows over their root mean square, times
                  the weight
    """

    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
    silu_times: Callable[[Tensor, Tensor], Tensor | None]
    norm_rows: Callable[[Tensor, float, Tensor | None], Tensor | None]


OWN_CODE = Parts(lambda *_: None, lambda *_: None, lambda *_: None)
"""Everything is left to stock code."""


@contextmanager
def parts_by(block: nn.Module, parts: Parts) -> Iterator[list[str]]:
    """Within the context, those modules of a block run with the given parts whose own code does what these do, which
    is tried on random numbers. Yields their names. Nothing outside the block is changed."""
    changed, before = [], []
    for name, module in block.named_modules():
        forward = _with_parts(module, parts)
        if forward is not None:
            changed.append(name)
            before.append((module, vars(module).get("forward")))
            module.forward = forward
    try:
        yield changed
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


def _with_parts(module: nn.Module, parts: Parts) -> Callable[..., Any] | None:
    """A module's forward with the given parts, or None where it has none of them."""
    if (eps := eps_by_one_kernel(module)) is not None:
        return partial(_normed, module, eps, module.forward, parts)
    if all(isinstance(module._modules.get(name), nn.Module) for name in _MLP) and _is_gated_by_silu(module):
        return partial(_gated, module, parts)
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    rotary = forward.__globals__.get(_ROTARY)
    if rotary is None or not _turns_halves(rotary):
        return None
    names = {**forward.__globals__, _ROTARY: partial(_turned, rotary, parts)}
    with_parts = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    with_parts.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(with_parts, module)


def _normed(module: Any, eps: float, own: Callable[[Tensor], Tensor], parts: Parts, hidden_states: Tensor) -> Tensor:
    made = parts.norm_rows(hidden_states, eps, module.weight)
    return own(hidden_states) if made is None else made


def _gated(module: Any, parts: Parts, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    made = parts.silu_times(gate, up)
    down: Tensor = module.down_proj(nn.functional.silu(gate) * up if made is None else made)
    return down


def _turned(
    rotary: Any, parts: Parts, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
) -> Any:
    made = None if rest or options else parts.apply_rope(q, k, cos, sin)
    return rotary(q, k, cos, sin, *rest, **options) if made is None else made


def _is_gated_by_silu(module: nn.Module) -> bool:
    """Whether a module's own code is `_gated`, tried once with random outputs of its gate and up."""
    if module not in _tried:
        _tried[module] = _found_gated_by_silu(module)
    return _tried[module]


_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""A block's modules stay when the next block's weights come."""


def _found_gated_by_silu(module: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    gate, up = (8 * torch.randn(2, _TRIED, generator=generator)).bfloat16()
    tried = copy.copy(module)
    tried._modules = {**module._modules, "gate_proj": _Gives(gate), "up_proj": _Gives(up), "down_proj": nn.Identity()}
    try:
        return torch.equal(type(module).forward(tried, gate), nn.functional.silu(gate) * up)
    except (AttributeError, RuntimeError, TypeError):  # it wants something else
        return False


class _Gives(nn.Module):
    """In the place of a projection, whose weights may be absent."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Tensor:
        return self.output


@cache
def _turns_halves(rotary: Any) -> bool:
    """Whether a rotary embedding turns channel c with c + D / 2, and rounds as the usual one, tried on random heads."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 5, 32, generator=generator).bfloat16() for heads in (4, 2))
    angles = torch.randn(2, 1, 5, 32, generator=generator).bfloat16()
    cosine, sine = angles.unbind()
    try:
        found = rotary(query, key, cosine, sine)
        return all(
            torch.equal(made, apply_rope_by_torch(x, cosine, sine)) for made, x in zip(found, (query, key), strict=True)
        )
    except (RuntimeError, TypeError, ValueError):  # it wants something else
        return False


def apply_rope_by_torch(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The usual rotary embedding of heads [B, heads, S, D], on any device; cosine, sine -- [1 or B, S, D]"""
    first, second = x.chunk(2, -1)
    return x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]
