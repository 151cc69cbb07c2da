"""The decoder: a packed model, run token by token, skipping the columns that its policies call inactive."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedLayer, PackedModel, PackedSite
from sparsepack.models.policy import SitePolicy
from sparsepack.runtime import reference
from sparsepack.runtime.backend import Operations, open_backend

DEFAULT_CONTEXT = 4096
CHUNK = 512
"""Positions that prefill takes through the decoder at once: attention needs heads * CHUNK * context scores."""


class _Mode(Enum):
    """How the sites treat the positions at hand; the latter two are counted in the activity."""

    PREFILL = "dense, whatever the policies say"
    STEP = "one position, inactive columns not read"
    MASKED = "several positions, inactive columns read but zero: the same sums as STEP"


@dataclass(frozen=True)
class _Site:
    """A loaded site. `constant` is what its sparse product lacks: bias + W offset, None where both are absent."""

    matrix: Any
    bias: Tensor | None
    policy: SitePolicy | None
    constant: Tensor | None
    parts: tuple[int, ...]
    columns: int


@dataclass(frozen=True)
class _Layer:
    sites: dict[str, _Site]
    norms: dict[str, Tensor]
    window: int


class Engine:
    """A packed model ready to run, with its static KV cache; one text at a time.

    packed   -- the artifact, as `read_zigzag` returns it
    device   -- where everything but the embedding lies
    context  -- positions the cache has room for; at most what the model was made for, 4096 of them unless given
    dense    -- never skip: the baseline; may be changed between calls
    backend  -- whose operations run, a name of `runtime.backend.BACKENDS`

    All arithmetic is float32. The reference backend holds every matrix decoded, 4 bytes a weight (7.1 times the stored
    size of a zigzag matrix), the cache takes 8 bytes * layers * kv_heads * head_dim a position, and the embedding
    stays in the mapped file, rows decoded as they are looked up.

    Raises `UserError` for an unknown backend or device, or a context the model was not made for.
    """

    def __init__(
        self,
        packed: PackedModel,
        device: torch.device | str = "cpu",
        context: int | None = None,
        *,
        dense: bool = False,
        backend: str = "reference",
    ) -> None:
        self.packed = packed
        self.architecture = architecture = packed.architecture
        self.device = _usable(device)
        self.context = _context(context, architecture.context)
        self.dense = dense
        self.backend = backend
        self._operations = operations = open_backend(backend)
        self._layers = [
            _loaded(layer, window, operations, self.device)
            for layer, window in zip(packed.layers, architecture.sliding_windows, strict=True)
        ]
        self._output_norm = packed.output_norm.to(self.device)
        self._output = operations.load_rows(packed.output, self.device)
        inv_freq = torch.tensor(architecture.inv_freq, device=self.device)
        self._cos, self._sin = reference.rotary_table(inv_freq, architecture.rotary_scale, self.context)
        shape = (2, architecture.layers, architecture.kv_heads, self.context, architecture.head_dim)
        self._cache = torch.zeros(shape, device=self.device)
        self.reset()

    @property
    def position(self) -> int:
        """How many tokens the cache holds: the position of the next one."""
        return self._position

    def reset(self) -> None:
        """Forget the text and the activity counted so far."""
        self._position = 0
        self._counted = 0
        self._active = {
            (number, name): torch.zeros((), dtype=torch.int64, device=self.device)
            for number, layer in enumerate(self._layers)
            for name in layer.sites
        }

    def activity(self) -> dict[tuple[int, str], float]:
        """Share of active columns per (layer, site) over the positions decoded since the last reset.

        Positions of `prefill` do not count; dense sites are wholly active. Empty before the first step.
        """
        if not self._counted:
            return {}
        return {
            (layer, name): int(active) / (self._counted * self._layers[layer].sites[name].columns)
            for (layer, name), active in self._active.items()
        }

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Append tokens, every site dense. Returns the logits after the last: float32 [vocabulary].

        Raises `UserError` for no tokens, an id the model does not have, or more tokens than the cache has room for.
        """
        if not len(ids):
            raise UserError("prefill of 0 tokens; expected at least one")
        return self._logits(self._run(ids, _Mode.PREFILL)[-1:])[0]

    @torch.no_grad()
    def step(self, id: int) -> Tensor:
        """Append one token, skipping inactive columns. Returns the logits after it: float32 [vocabulary].

        Raises `UserError` for an id the model does not have, or a full cache.
        """
        return self._logits(self._run([id], _Mode.STEP))[0]

    @torch.no_grad()
    def forced(self, ids: Sequence[int], sparse_from: int) -> Tensor:
        """Logits after every token of a text, teacher-forced from an empty cache: float32 [S, vocabulary].

        Positions before `sparse_from` run dense, the others as `step` would run them, many at once. Forgets the
        text before, and leaves the engine as prefill and steps would. Raises `UserError` as those do.

        Sums are added in another order than by `step`. That is a matter of the last bits until an input comes so close
        to its threshold that they decide; from there on the two are different, equally good, approximations.
        """
        if not 0 <= sparse_from <= len(ids):
            raise ValueError(f"sparse_from {sparse_from} of {len(ids)} positions")
        self.reset()
        hidden = [self._run(ids[:sparse_from], _Mode.PREFILL), self._run(ids[sparse_from:], _Mode.MASKED)]
        return self._logits(torch.cat(hidden))

    def _run(self, ids: Sequence[int], mode: _Mode) -> Tensor:
        """Append tokens; the normed output of the last block: [S, hidden]."""
        tokens = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
        self._check(tokens)
        hidden = [self._output_norm.new_empty(0, self.architecture.hidden)]
        for chunk in torch.split(tokens, CHUNK):
            if len(chunk):
                hidden.append(self._decoder(chunk, mode))
        return torch.cat(hidden)

    def _check(self, tokens: Tensor) -> None:
        wrong = (tokens < 0) | (tokens >= self.architecture.vocabulary)
        if wrong.any():
            raise UserError(
                f"token id {int(tokens[wrong][0])}: expected 0 to {self.architecture.vocabulary - 1}; "
                "is the tokenizer this model's?"
            )
        if self._position + len(tokens) > self.context:
            raise UserError(
                f"context of {self.context} tokens: {self._position} are in it and {len(tokens)} more do not fit; "
                "shorten the text or give a larger context"
            )

    def _decoder(self, tokens: Tensor, mode: _Mode) -> Tensor:
        eps = self.architecture.norm_eps
        x = reference.embed(self.packed.embedding, tokens).to(self.device)  # [S, hidden]
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, reference.rms_norm(x, layer.norms["attn_norm"], eps), mode)
            x = x + self._mlp(number, reference.rms_norm(x, layer.norms["mlp_norm"], eps), mode)
        self._position += len(tokens)
        if mode is not _Mode.PREFILL:
            self._counted += len(tokens)
        return reference.rms_norm(x, self._output_norm, eps)

    def _attention(self, number: int, x: Tensor, mode: _Mode) -> Tensor:
        layer, first, last = self._layers[number], self._position, self._position + len(x)
        q, k, v = torch.split(self._product(number, "attn_in", x, mode), list(layer.sites["attn_in"].parts), dim=-1)
        keys, values = self._cache[:, number]  # [kv_heads, context, head_dim]
        keys[:, first:last] = self._turned(k, layer.norms.get("k_norm"))
        values[:, first:last] = self._heads(v)
        oldest = max(0, first + 1 - layer.window) if layer.window else 0
        seen = reference.visible(first, len(x), oldest, layer.window, self.device)
        q = self._turned(q, layer.norms.get("q_norm"))
        mixed = reference.attention(q, keys[:, oldest:last], values[:, oldest:last], seen)
        return self._product(number, "attn_out", mixed, mode)

    def _turned(self, rows: Tensor, norm: Tensor | None) -> Tensor:
        """Queries or keys of the positions at hand, normed where the model does that, and rotated: [heads, S, D]."""
        x = self._heads(rows)
        if norm is not None:
            x = reference.rms_norm(x, norm, self.architecture.norm_eps)
        here = slice(self._position, self._position + x.shape[1])
        return reference.rotate(x, self._cos[here], self._sin[here])

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self.architecture.head_dim).transpose(0, 1)  # [heads, S, head_dim]

    def _mlp(self, number: int, x: Tensor, mode: _Mode) -> Tensor:
        gate, up = self._product(number, "mlp_in", x, mode).chunk(2, dim=-1)
        activation = reference.ACTIVATION_FUNCTIONS[self.architecture.activation]
        return self._product(number, "mlp_mid", activation(gate) * up, mode)

    def _product(self, number: int, name: str, x: Tensor, mode: _Mode) -> Tensor:
        """The output rows of a site for x [S, columns]: [S, rows]."""
        site = self._layers[number].sites[name]
        if mode is _Mode.PREFILL or self.dense or site.policy is None:
            if mode is not _Mode.PREFILL:
                self._active[number, name] += x.numel()
            return _plus(self._operations.zigzag_matmul(site.matrix, x), site.bias)
        threshold, offset = site.policy.threshold, site.policy.offset
        d = x if offset is None else x - offset
        if mode is _Mode.STEP:
            indices, count = self._operations.collect(d[0], threshold)
            y = self._operations.zigzag_gemv(site.matrix, d[0], indices, count)[None]
        else:
            active = d.abs() > threshold
            count = active.sum()
            y = self._operations.zigzag_matmul(site.matrix, torch.where(active, d, 0))
        self._active[number, name] += count
        return _plus(y, site.constant)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._operations.matmul(self._output, hidden)


def _usable(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no CUDA device on this machine; use cpu")
    return device


def _context(asked: int | None, made_for: int) -> int:
    context = min(made_for, DEFAULT_CONTEXT) if asked is None else asked
    if not 1 <= context <= made_for:
        raise UserError(f"context {context}: the model was made for {made_for} positions; give 1 to {made_for}")
    return context


def _loaded(layer: PackedLayer, window: int, operations: Operations, device: torch.device) -> _Layer:
    sites = {name: _loaded_site(site, operations, device) for name, site in layer.sites.items()}
    return _Layer(sites, {name: norm.to(device) for name, norm in layer.norms.items()}, window)


def _loaded_site(site: PackedSite, operations: Operations, device: torch.device) -> _Site:
    matrix = operations.load_zigzag(site.matrix, device)
    bias = None if site.bias is None else site.bias.to(device)
    policy = None if site.policy is None else site.policy.to(device)
    constant = bias
    if policy is not None and policy.offset is not None:
        constant = _plus(operations.zigzag_matmul(matrix, policy.offset[None])[0], bias)
    return _Site(matrix, bias, policy, constant, site.parts, site.matrix.columns)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
