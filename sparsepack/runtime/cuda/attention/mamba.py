"""State-space models (Mamba-2) on the GPU (`kernels/attention/mamba.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.models.blocks import Mamba
from sparsepack.runtime.cuda.attention.state_chunks import MOST_DIM, state_chunks
from sparsepack.runtime.cuda.driver.kernel import kernel, launch
from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, ScaledFp16
from sparsepack.runtime.cuda.products.zigzag_products import Input
from sparsepack.runtime.decoder import load_vector

if TYPE_CHECKING:
    from sparsepack.runtime.cuda.driver.kernel_set import Kernels

STEP_THREADS, NORM_THREADS = 512, 256
MOST_GROUP = 16 * NORM_THREADS
"""So many channels are normed together at most: a thread has 16."""


@dataclass(frozen=True)
class MambaParameters:
    """A block's state-space model, and what it keeps of B sequences: a `states.Mixer`.

    taps      -- float32 [channels, taps]; conv_bias: [channels]
    rate      -- float32 [heads]; dt_bias, skip: [heads]
    norm      -- float32 [inner], of outputs; eps: of this norm
    state     -- float32 [2, B, heads, head_dim, state]
    inputs    -- float32 [B, taps, channels]
    y         -- float32 [B, inner], words of `driver/memory.py`: what a step leaves for its norm
    """

    mixer: Mamba
    taps: Tensor
    conv_bias: Tensor
    rate: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor
    eps: float
    state: Tensor
    inputs: Tensor
    y: Tensor

    @property
    def defines(self) -> tuple[str, ...]:
        m = self.mixer
        values = {
            "KEY_DIM": m.state,
            "VALUE_DIM": m.head_dim,
            "RATIO": m.heads // m.groups,
            "TAPS": m.taps,
            "GROUP": m.inner // m.norms,
        }
        return tuple(f"{name}={value}" for name, value in values.items())

    def step(
        self, kernels: Kernels, rows: Tensor, x: Input, positions: Tensor, out: Tensor, *, flag_in_data: bool
    ) -> None:
        kernels.mamba_step(self, rows, positions, out, flag_in_data=flag_in_data)

    def prefill(
        self, kernels: Kernels, rows: Product, x: ScaledFp16, first: int, sequence: int, counted: Tensor | None
    ) -> Tensor:
        return kernels.mamba_prefill(self, rows, first, sequence, counted)

    def copy(self, source: int, to: int) -> None:
        self.state[:, to].copy_(self.state[:, source])
        self.inputs[to].copy_(self.inputs[source])


def mamba_parameters(
    mixer: Mamba, of: Mapping[str, Tensor], eps: float, sequences: int, device: torch.device
) -> MambaParameters:
    """A block's state-space model on a GPU, with room for its states. of: `PackedLayer.delta_net`.

    Raises `UserError` for heads or groups of channels that the kernels do not know.
    """
    group = mixer.inner // mixer.norms
    if max(mixer.state, mixer.head_dim) > MOST_DIM or group > MOST_GROUP:
        raise UserError(
            f"state-space models with states of {mixer.head_dim} by {mixer.state}, normed by {group} channels: the "
            f"cuda backend runs up to {MOST_DIM} by {MOST_DIM}, {MOST_GROUP} channels; use the reference backend"
        )
    vectors = ("mamba_conv_bias", "mamba_dt_bias", "mamba_skip", "mamba_norm")
    conv_bias, dt_bias, skip, norm = (load_vector(of[name], device) for name in vectors)
    return MambaParameters(
        mixer,
        taps=of["mamba_conv"].to(device, torch.float32).contiguous(),
        conv_bias=conv_bias,
        rate=load_vector(of["mamba_a_log"].float().exp(), device),
        dt_bias=dt_bias,
        skip=skip,
        norm=norm,
        eps=float(eps),
        state=torch.zeros(2, sequences, mixer.heads, mixer.head_dim, mixer.state, device=device),
        inputs=torch.zeros(sequences, mixer.taps, mixer.channels, device=device),
        y=flag_in_data_buffers([sequences * mixer.inner], device)[1][0].view(sequences, -1),
    )


def mamba_step(
    of: MambaParameters, rows: Tensor, positions: Tensor, out: Tensor, *, flag_in_data: bool = False
) -> None:
    """Put a state-space model of one new position per sequence on the current stream.

    rows         -- float32 [B, rows]: what attn_in left
    positions    -- int32 [B], as `attention.attend` takes them; those at 0 begin with zeros
    out          -- float32 [B, inner]
    flag_in_data -- rows are in words of `driver/memory.py`: read as soon as they are stored; out may be read so in any
                    case

    Raises `ValueError` for shapes that do not fit.
    """
    m, sequences = of.mixer, len(of.inputs)
    for name, tensor, width in (("rows", rows, m.rows), ("out", out, m.inner)):
        if tensor.numel() != sequences * width or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)}: expected contiguous {[sequences, width]}")
    defines, index = (*of.defines, f"FLAG_IN_DATA={int(flag_in_data)}"), rows.device.index or 0
    launch(
        kernel("mamba_step", "mamba_step", defines, index),
        (m.heads, sequences),
        STEP_THREADS,
        *(rows, of.taps, of.conv_bias, of.rate, of.dt_bias, of.skip, positions, of.state, of.inputs, of.y),
    )
    launch(
        kernel("mamba_step", "mamba_norm", defines, index),
        (m.norms, sequences),
        NORM_THREADS,
        *(of.y, rows, m.rows, of.norm, of.eps, out),
    )


def mamba_prefill(
    of: MambaParameters, rows: Product, first: int, sequence: int = 0, counted: Tensor | None = None
) -> Tensor:
    """A state-space model of the positions first .. first + S - 1 of a sequence.

    rows    -- [S, rows]: what attn_in gives
    counted -- int32 [1]: so many positions count, and the state is that after these; None: all

    Returns float32 [S, inner], finite beyond those that count.
    """
    m, count, device = of.mixer, len(rows.sums), rows.sums.device
    out = torch.empty(count, m.inner, device=device)
    if not count:
        return out
    product = (rows.sums, rows.factor, rows.inverse, rows.bias)
    inputs, defines, index = of.inputs[sequence], of.defines, device.index or 0
    mixed = torch.empty(count, m.channels, device=device)
    factors = torch.empty(count, 2, m.heads, device=device)
    launch(
        kernel("mamba_prefill", "mamba_inputs", defines, index),
        (count, -(-(m.channels + m.heads) // NORM_THREADS)),
        NORM_THREADS,
        *(*product, of.taps, of.conv_bias, inputs, first, m.heads, of.rate, of.dt_bias, mixed, factors),
    )
    state_chunks(mixed, factors, of.state[:, sequence], first, counted, out, key_heads=m.groups, corrects=False)
    launch(
        kernel("mamba_prefill", "mamba_outputs", defines, index),
        (count, m.norms),
        NORM_THREADS,
        *(*product, mixed, of.skip, of.norm, of.eps, m.heads, first, counted, inputs, out),
    )
    return out
