"""Gated delta nets on the GPU (`kernels/attention/delta_net.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.blocks import DeltaNet
from sparsepack.runtime.cuda.attention.state_chunks import MOST_DIM, state_chunks
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input
from sparsepack.runtime.decoder import load_vector

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels

STEP_THREADS = 512
TASKS = 8
"""Warps of a block of `delta_inputs` and `delta_outputs`."""
MOST_HIDDEN = 32 * STEP_THREADS


@dataclass(frozen=True)
class DeltaNetParameters:
    """A block's gated delta net, and what it keeps of B sequences: a `states.Mixer`.

    gates    -- float32 [2 value_heads, hidden]: of beta, then of the decay
    taps     -- float32 [channels, taps]
    rate     -- float32 [value_heads]; dt_bias: [value_heads]
    norm     -- float32 [value_dim], of outputs
    eps      -- of this norm, and of that of what attn_in takes
    state    -- float32 [2, B, value_heads, value_dim, key_dim]
    inputs   -- float32 [B, taps, channels]
    """

    mixer: DeltaNet
    gates: Tensor
    taps: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    state: Tensor
    inputs: Tensor

    @property
    def width(self) -> int:
        """Rows of attn_in."""
        return self.mixer.channels + self.mixer.values

    @property
    def defines(self) -> tuple[str, ...]:
        m = self.mixer
        values = {
            "KEY_DIM": m.key_dim,
            "VALUE_DIM": m.value_dim,
            "RATIO": m.value_heads // m.key_heads,
            "TAPS": m.taps,
        }
        return tuple(f"{name}={value}" for name, value in values.items())

    def step(
        self, kernels: Kernels, rows: Tensor, x: Input, positions: Tensor, out: Tensor, *, flag_in_data: bool
    ) -> None:
        kernels.delta_step(self, rows, x, positions, out, flag_in_data=flag_in_data)

    def prefill(
        self, kernels: Kernels, rows: Product, x: ScaledFp16, first: int, sequence: int, counted: Tensor | None
    ) -> Tensor:
        return kernels.delta_prefill(self, rows, x, first, sequence, counted)

    def copy(self, source: int, to: int) -> None:
        self.state[:, to].copy_(self.state[:, source])
        self.inputs[to].copy_(self.inputs[source])


def delta_net_parameters(
    mixer: DeltaNet, of: Mapping[str, Tensor], eps: float, sequences: int, device: torch.device
) -> DeltaNetParameters:
    """A block's gated delta net on a GPU, with room for its states. of: `PackedLayer.delta_net`.

    Raises `UserError` for heads, or a hidden state, that the kernels do not know.
    """
    hidden = of["delta_beta"].shape[1]
    if max(mixer.key_dim, mixer.value_dim) > MOST_DIM or hidden > MOST_HIDDEN:
        raise UserError(
            f"gated delta nets with heads of {mixer.key_dim} and {mixer.value_dim} channels, {hidden} wide: the cuda "
            f"backend runs up to {MOST_DIM}, {MOST_HIDDEN} wide; use the reference backend"
        )
    shape = mixer.value_heads, mixer.value_dim, mixer.key_dim
    return DeltaNetParameters(
        mixer,
        gates=torch.cat([of["delta_beta"], of["delta_alpha"]]).to(device, torch.float32).contiguous(),
        taps=of["delta_conv"].to(device, torch.float32).contiguous(),
        rate=load_vector(of["delta_a_log"].float().exp(), device),
        dt_bias=load_vector(of["delta_dt_bias"], device),
        norm=load_vector(of["delta_norm"], device),
        eps=float(eps),
        state=torch.zeros(2, sequences, *shape, device=device),
        inputs=torch.zeros(sequences, mixer.taps, mixer.channels, device=device),
    )


def delta_step(
    of: DeltaNetParameters,
    rows: Tensor,
    x: Input,
    positions: Tensor,
    out: Tensor,
    *,
    flag_in_data: bool = False,
) -> None:
    """Put a gated delta net of one new position per sequence on the current stream.

    rows         -- float32 [B, width]: what attn_in left
    x            -- what attn_in took: x [B, hidden] with its norm
    positions    -- int32 [B], as `attention.attend` takes them; those at 0 begin with zeros
    out          -- float32 [B, value_heads * value_dim]
    flag_in_data -- rows are in words of `driver/memory.py`: read as soon as they are stored, and where the input says
                    so x, too; out may be read so in any case

    Raises `ValueError` for shapes that do not fit.
    """
    m, hidden = of.mixer, of.gates.shape[1]
    sequences = of.inputs.shape[0]
    expected = {"rows": (rows, of.width), "x": (x.x, hidden), "out": (out, m.values)}
    for name, (tensor, width) in expected.items():
        if tensor.numel() != sequences * width or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)}: expected contiguous {[sequences, width]}")
    if x.norm is None:
        raise ValueError("x without a norm: a block with a gated delta net norms what attn_in takes")
    defines = (
        *of.defines,
        f"ROUNDS={-(-hidden // STEP_THREADS)}",
        f"FLAG_IN_DATA={int(flag_in_data)}",
        f"X_IN_DATA={int(flag_in_data and x.flag_in_data)}",
    )
    launch(
        kernel("delta_step", "delta_step", defines, rows.device.index or 0),
        (m.value_heads, sequences),
        STEP_THREADS,
        *(rows, x.x, hidden, x.norm, of.eps, of.gates, of.taps, of.rate, of.dt_bias, of.norm),
        *(positions, of.state, of.inputs, out),
    )


def delta_prefill(
    of: DeltaNetParameters,
    rows: Product,
    x: ScaledFp16,
    first: int,
    sequence: int = 0,
    counted: Tensor | None = None,
) -> Tensor:
    """A gated delta net of the positions first .. first + S - 1 of a sequence.

    rows    -- [S, width]: what attn_in gives; x: what it takes
    counted -- int32 [1]: so many positions count, and the state is that after these; None: all

    Returns float32 [S, value_heads * value_dim], finite beyond those that count.
    """
    m, count, device = of.mixer, len(rows.sums), rows.sums.device
    out = torch.empty(count, m.values, device=device)
    if not count:
        return out
    logits = x.values.float() @ of.gates.t()
    product = (rows.sums, rows.factor, rows.inverse, rows.bias)
    inputs = of.inputs[sequence]
    mixed = torch.empty(count, m.channels, device=device)
    factors = torch.empty(count, 2 * m.value_heads, device=device)
    tasks = m.key_heads + m.value_heads + -(-m.value_heads // 32)
    launch(
        kernel("delta_prefill", "delta_inputs", of.defines, device.index or 0),
        (count, -(-tasks // TASKS)),
        32 * TASKS,
        *(*product, of.taps, inputs, first, m.value_heads, logits, x.factor, of.rate, of.dt_bias, mixed, factors),
    )
    of_sequence = of.state[:, sequence]
    state_chunks(mixed, factors, of_sequence, first, counted, out, key_heads=m.key_heads, corrects=True)
    launch(
        kernel("delta_prefill", "delta_outputs", of.defines, device.index or 0),
        (count, -(-m.value_heads // TASKS)),
        32 * TASKS,
        *(*product, of.norm, of.eps, m.value_heads, first, counted, inputs, out),
    )
    return out
