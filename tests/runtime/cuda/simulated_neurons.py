"""Launches of `kernels/neurons` and of `dequantise.cu` on records, computed in plain torch from the macros and the
arguments that the kernels would get."""

from typing import Any

import torch
from torch import Tensor

from sparsepack.runtime.reference import products as reference

ACTIVATIONS = list(reference.ACTIVATION_FUNCTIONS.values())
BLOCK_BYTES = 144


def superblocks(blocks: Tensor) -> Tensor:
    """Decode superblocks uint8 [.., 144] whose headers are in the order of `zigzag.cuh`: float32 [.., 256]."""
    d, dmin = blocks[..., :4].contiguous().view(torch.float16).float().split(1, dim=-1)
    bits = (blocks[..., 4:16, None] >> torch.arange(8)) & 1
    twelve = bits.flatten(-2).unflatten(-1, (8, 2, 6)).float() @ (2.0 ** torch.arange(6))  # [.., sub-block, 2]
    nibbles = torch.stack([blocks[..., 16:] & 15, blocks[..., 16:] >> 4], dim=-1)  # byte 32 p + l
    rows = nibbles.unflatten(-2, (4, 32)).transpose(-1, -2).flatten(-3, -2).float()  # [.., 8, 32]
    return ((d * twelve[..., 0])[..., None] * rows - (dmin * twelve[..., 1])[..., None]).flatten(-2)


def decoded(records: Tensor) -> tuple[Tensor, Tensor]:
    """Up and down of records uint8 [n, bytes]: float32 [n, hidden] each."""
    up, down = superblocks(records.unflatten(1, (-1, BLOCK_BYTES))).flatten(1).chunk(2, dim=1)
    return up, down


def neuron_list(defines: Any, grid: Any, gates: Tensor, neurons: int, x: Tensor, hidden: int, *rest: Any) -> None:
    norm, eps, normed, index, gates_of, counts, active = rest
    assert grid == (1,)
    assert gates.shape == gates_of.shape == (int(defines["INPUTS"]), neurons)
    assert x.shape == normed.shape == (int(defines["INPUTS"]), hidden)
    assert 1024 * int(defines["ROUNDS"]) >= min(neurons, 32 * 1024)
    normed.copy_(reference.rms_norm(x, norm, eps))
    after = ACTIVATIONS[int(defines["ACTIVATION"])](gates)
    listed = (after != 0).any(0) if defines["ALL"] == "0" else torch.ones(neurons, dtype=torch.bool)
    found = listed.nonzero()[:, 0]
    index[: len(found)] = found.int()
    gates_of[:, : len(found)] = after[:, found]
    counts.fill_(len(found))
    if active is not None:
        active += len(found)


def neuron_ffn(
    defines: Any, grid: Any, slots: Tensor, host: Tensor | None, bands: int, counts: Tensor, index: Tensor, *rest: Any
) -> None:
    gates, stride, x, partial, pitch = rest
    macros = {name: int(value) for name, value in defines.items()}
    assert (len(x), x.shape[1]) == (macros["INPUTS"], 256 * bands)
    assert macros["GROUPS"] == -(-bands // 2)
    assert macros["BATCH"] <= min(macros["SLOTS"], macros["SLICES"] * -(-macros["GROUPS"] // macros["ROUNDS"]))
    assert (stride, pitch, grid[0]) == (gates.stride(0), partial.stride(0), len(partial))
    resident, count = counts.tolist()
    memories = [slots[index[:resident].long()]]
    memories += [] if host is None else [host[index[resident:count].long()]]
    up, down = decoded(torch.cat(memories))
    inner = gates[:, :count] * (x @ up.t())
    for block in range(min(grid[0], count)):
        partial[block] = inner[:, block :: grid[0]] @ down[block :: grid[0]]


def neuron_sum(
    defines: Any, grid: Any, partial: Tensor, blocks: int, counts: Tensor, hidden: int, residual: Tensor, y: Tensor
) -> None:
    assert grid == (hidden // 32, len(y))
    assert partial.shape == (blocks, *y.shape)
    y.copy_(residual + partial[: min(blocks, int(counts[1]))].sum(0))


def zigzag_dequantise(defines: Any, grid: Any, blocks: Tensor, columns: int, tile_bands: int, *rest: Any) -> None:
    gate_bands, first, bands, scale, out, width = rest
    assert (tile_bands, gate_bands, first, bands, width) == (1, 0, 0, 1, 256), "records, whose superblocks are columns"
    out.copy_(superblocks(blocks.view(columns, BLOCK_BYTES)) * scale)


LAUNCHED = {each.__name__: each for each in (neuron_list, neuron_ffn, neuron_sum, zigzag_dequantise)}
