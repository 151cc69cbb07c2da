"""Prompts of mixers that keep a matrix of each head on the GPU, by chunks (`kernels/attention/state_chunks.cu`): gated
delta nets and state-space models."""

import torch
from torch import Tensor

from sparsepack.runtime.cuda.driver.kernel import kernel, launch

CHUNK = 64
"""So many positions are taken together."""
CHUNK_THREADS, RULE_WARPS, RULE_STAGES = 256, 4, 4
"""A block of `state_chunks` has so many threads, one of `state_rule` so many warps and stages of a ring."""
MOST_DIM = 256
"""A head has at most so many keys and values."""


def state_chunks(
    mixed: Tensor,
    factors: Tensor,
    state: Tensor,
    first: int,
    counted: Tensor | None,
    out: Tensor,
    *,
    key_heads: int,
    corrects: bool,
) -> None:
    """Go on with the states of heads over the positions first .. first + S - 1 of a sequence: S_h = decay S_h + k beta
    v, or with the delta rule k beta (v - k^T decay S_h), and S_h^T q.

    mixed     -- float32 [S, channels]: queries of all key heads, keys of them, values of all value heads
    factors   -- float32 [S, 2, value heads]: beta, then the decay
    state     -- float32 [2, value heads, value_dim, key_dim]: after p tokens the state is in half p modulo 2
    counted   -- int32 [1]: so many positions count, and the state is that after these; None: all
    out       -- float32 [S, value heads, value_dim], finite beyond those that count
    key_heads -- value head h reads key head h * key_heads // value heads
    corrects  -- by the delta rule
    """
    count, device = len(mixed), mixed.device
    _, heads, value_dim, key_dim = state.shape
    # In words of 16 bytes, of a step over 16 keys and over 16 positions.
    chunks, key_steps = -(-count // CHUNK), -(-key_dim // 16)
    of_keys, of_positions = 32 * CHUNK // (4 if corrects else 8), 32 * (CHUNK // 8 + 2 * key_steps)
    words = key_steps * of_keys + CHUNK // 16 * of_positions
    operands = torch.empty(chunks, heads, 4 * words, dtype=torch.int32, device=device)
    updates = torch.empty(chunks, heads, value_dim, CHUNK, device=device)
    fades = torch.empty(chunks, heads, device=device)
    values = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "RATIO": heads // key_heads,
        "CORRECTS": int(corrects),
        "RULE_WARPS": RULE_WARPS,
    }
    defines, index = tuple(f"{name}={value}" for name, value in values.items()), device.index or 0
    launch(
        kernel("state_chunks", "state_chunks", defines, index),
        (chunks, heads),
        CHUNK_THREADS,
        *(mixed, factors, count, counted, operands, updates, fades),
    )
    launch(
        kernel("state_chunks", "state_rule", defines, index),
        (-(-value_dim // (16 * RULE_WARPS)), heads),
        32 * RULE_WARPS,
        *(operands, updates, fades, count, counted, first, state, state.stride(0), out),
        shared=RULE_STAGES * 16 * max(of_keys, of_positions),
    )
