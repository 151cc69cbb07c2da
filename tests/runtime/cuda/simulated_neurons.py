"""Launches of `kernels/neurons` and of `dequantise.cu` on records, computed in plain torch from the macros and the
arguments that the kernels would get."""

import time
from typing import Any

import torch
from simulated_products import gated
from torch import Tensor

from sparsepack.placement.machine import BandwidthProfile, over_the_bus
from sparsepack.runtime.hybrid.mailbox import Abort, next_number
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
    norm, eps, normed, index, gates_of, counts, active, *division = rest
    assert grid == (int(defines["CLUSTER"]),)
    assert 512 * grid[0] * int(defines["ROUNDS"]) >= neurons
    assert gates.shape == gates_of.shape == (int(defines["INPUTS"]), neurons)
    assert x.shape == normed.shape == (int(defines["INPUTS"]), hidden)
    normed.copy_(x if norm is None else reference.rms_norm(x, norm, eps))
    after = ACTIVATIONS[int(defines["ACTIVATION"])](gates)
    listed = (after != 0).any(0) if defines["ALL"] == "0" else torch.ones(neurons, dtype=torch.bool)
    if defines["REPLAYED"] == "1":
        number, begins = division[7:9]
        replayed, pitch, rows = division[-3:]
        assert (pitch, rows) == (replayed.stride(0), len(replayed))
        row = (int(number[0]) + begins - 1 - int(number[1])) % rows
        listed = (replayed[row][:, None] >> torch.arange(32) & 1).flatten()[:neurons].bool()
        after = torch.where(after == 0, 1.0, after)
    found = listed.nonzero()[:, 0].int()
    if active is not None:
        active += len(found)
    if defines["DIVIDED"] == "0":
        _put(found, found, after, index, gates_of)
        counts.copy_(torch.tensor([len(found), len(found), 0]))
        return
    tables, table_pitch, version, bandwidth, seen, seen_pitch, kept, number, begins, *request = division
    request_number, request_indices, request_gates, request_x, traffic, *_ = request
    assert (table_pitch, seen_pitch, kept) == (tables.stride(0), seen.stride(0), len(seen))
    number[0] = next_number(int(number[0])) if begins else number[0]
    words = torch.nn.functional.pad(listed, (0, -neurons % 32)).view(-1, 32).long() @ (1 << torch.arange(32))
    seen[int(number[0]) % kept] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    slots = tables[int(version)][found.long()]
    resident, offloaded = found[slots >= 0], found[slots < 0]
    bus = over_the_bus(
        len(resident), len(offloaded), BandwidthProfile(*(1 / bandwidth[:3]).tolist(), float(bandwidth[3]))
    )
    beside, over = offloaded[: len(offloaded) - bus], offloaded[len(offloaded) - bus :]
    _put(torch.cat([slots[slots >= 0], over]), torch.cat([resident, over]), after, index, gates_of)
    _put(beside, beside, after, request_indices, request_gates)
    request_x.copy_(normed)
    counts.copy_(torch.tensor([len(resident), len(resident) + len(over), len(beside)]))
    traffic[:4] += torch.tensor([len(resident), len(over), len(beside), len(beside) > 0])
    request_number[1] = len(beside)
    request_number[0] = number[0]


def _put(listed: Tensor, neurons: Tensor, gates: Tensor, index: Tensor, gates_of: Tensor) -> None:
    index[: len(listed)] = listed
    gates_of[:, : len(listed)] = gates[:, neurons.long()]


def neuron_wait(
    defines: Any, grid: Any, counts: Tensor, number: Tensor, answer: Tensor, abort: Tensor, limit: int, waited: Tensor
) -> None:
    assert grid == (1,)
    begin = time.monotonic()
    end = begin + limit / 1000
    while int(counts[2]) and int(answer) != int(number[0]) and not int(abort):
        if time.monotonic() > end:
            abort.fill_(Abort.DEVICE_WAITED)
        time.sleep(0)
    waited[0] += int(1e9 * (time.monotonic() - begin))


def neuron_ffn(
    defines: Any, grid: Any, slots: Tensor, host: Tensor | None, bands: int, counts: Tensor, index: Tensor, *rest: Any
) -> None:
    gates, stride, x, partial, pitch = rest
    macros = {name: int(value) for name, value in defines.items()}
    assert (len(x), x.shape[1]) == (macros["INPUTS"], 256 * bands)
    assert macros["GROUPS"] == -(-bands // 2)
    warps = macros["SLICES"] * -(-macros["GROUPS"] // macros["ROUNDS"])
    assert macros["BATCH"] <= macros["SLOTS"]
    assert macros["BATCH"] * macros["PARTS"] <= warps <= 32
    assert (stride, pitch, grid[0]) == (gates.stride(0), partial.stride(0), len(partial))
    resident, count = counts[:2].tolist()
    memories = [slots[index[:resident].long()]]
    memories += [] if host is None else [host[index[resident:count].long()]]
    if macros["PLAIN"]:
        down, inner = superblocks(torch.cat(memories).unflatten(1, (-1, BLOCK_BYTES))).flatten(1), gates[:, :count]
    else:
        up, down = decoded(torch.cat(memories))
        inner = gates[:, :count] * (x @ up.t())
    for block in range(min(grid[0], count)):
        partial[block] = inner[:, block :: grid[0]] @ down[block :: grid[0]]


def neuron_sum(defines: Any, grid: Any, partial: Tensor, blocks: int, counts: Tensor, hidden: int, *rest: Any) -> None:
    residual, y, answer = rest
    assert grid == (hidden // 32, len(y))
    assert partial.shape == (blocks, *y.shape)
    y.copy_(residual + partial[: min(blocks, int(counts[1]))].sum(0))
    if answer is not None and int(counts[2]):
        y += answer


def zigzag_dequantise(defines: Any, grid: Any, blocks: Tensor, columns: int, tile_bands: int, *rest: Any) -> None:
    gate_bands, first, bands, scale, row_scale, out, width, elsewhere, _ = rest
    assert (row_scale, elsewhere) == (None, None), "records have neither scales of rows nor planes"
    assert (tile_bands, gate_bands, first, bands, width) == (1, 0, 0, 1, 256), "records, whose superblocks are columns"
    out.copy_(superblocks(blocks.view(columns, BLOCK_BYTES)) * scale)


def request_rows(
    defines: Any, grid: Any, x: Tensor, columns: int, norm: Tensor | None, eps: float, threshold: Any, *rest: Any
) -> None:
    per_channel, offset, scales, rows, skipped, request_number, request_x, number, before_list, levels, own_x = rest
    texts, each = int(defines["INPUTS"]), 2 if defines["GATED"] == "1" else 1
    assert (grid, request_x.shape, x.numel()) == ((1,), (texts, columns), texts * each * columns)
    x = x.view(texts, each * columns)
    x = x if defines["GATED"] == "0" else gated(int(defines["ACTIVATION"]), x, each == 1)
    x = x if norm is None else reference.rms_norm(x, norm, eps)
    x = x if offset is None else x - offset
    if levels is not None:
        own_x.copy_(x)
        most, of_levels = int(defines["LEVELS"]), defines["OF_LEVELS"] == "1"
        levels.fill_(most)
        if threshold is not None:
            limits = threshold if of_levels else threshold.expand(1, columns)
            limits = limits if scales is None else scales[:, None, None] * limits
            exceeded = (x.abs()[:, None] > limits).sum(1).amax(0)
            levels.copy_(exceeded if of_levels else exceeded * most)
            x = torch.where(levels > 0, x, 0)
    elif threshold is not None:
        assert len(threshold.view(-1)) == (columns if per_channel else 1)
        active = x.abs() > (threshold if scales is None else scales[:, None] * threshold)
        if skipped is not None:
            skipped += rows * (~active).sum(1)
        x = torch.where(active.any(0), x, 0)
    request_x.copy_(x)
    request_number[0] = next_number(int(number[0])) if before_list else number[0]


def take_rows(
    defines: Any, grid: Any, sums: Tensor, summed: int, near: int, answered: Tensor, answer: Tensor, *rest: Any
) -> None:
    rows, abort, limit, number, before_list, bias, residual, y, squares, waited = rest
    texts = len(answer)
    assert (sums.shape, answer.shape, y.numel()) == ((texts, summed), (texts, rows - near), texts * rows)
    asked = torch.tensor([1, 1, 1])
    step = torch.tensor([next_number(int(number[0])) if before_list else int(number[0])])
    neuron_wait(defines, (1,), asked, step, answered, abort, limit, waited)
    pad = torch.nn.functional.pad
    found = pad(sums, (0, rows - summed)) + pad(answer, (near, 0))
    found = found if bias is None else found + bias
    found = found if residual is None else found + residual.view(texts, rows)
    y.view(texts, rows).copy_(found)
    if squares is not None:
        assert squares.numel() == texts * grid[0]
        parts = found.square().split(-(-rows // grid[0]), dim=1)
        squares.view(texts, -1).copy_(torch.zeros(texts, grid[0]))
        for n, part in enumerate(parts):
            squares.view(texts, -1)[:, n] = part.sum(1)


def count_step(defines: Any, grid: Any, number: Tensor) -> None:
    assert (grid, len(number)) == ((1,), 2)
    number[0] = next_number(int(number[0]))


def neuron_score(
    defines: Any, grid: Any, codes: Tensor, scales: Tensor, limits: Tensor, neurons: int, words: int, *rest: Any
) -> None:
    x, norm, eps, listed = rest
    assert listed.shape == (int(defines["INPUTS"]), neurons) == (len(x), len(scales))
    assert x.shape[1] == 16 * words == 4 * codes.shape[1]
    codes = (codes[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
    normed = reference.rms_norm(x, norm, eps)
    scores = scales.float() * (2 * normed @ codes.float().t() - 3 * normed.sum(1, keepdim=True))
    listed.copy_(~(scores <= -limits * normed.norm(dim=1, keepdim=True)))


def neuron_gates(
    defines: Any, grid: Any, slots: Tensor, host: Tensor | None, bands: int, counts: Tensor, index: Tensor, *rest: Any
) -> None:
    x, gates, stride = rest
    macros = {name: int(value) for name, value in defines.items()}
    assert (len(x), x.shape[1], stride) == (macros["INPUTS"], 256 * bands, gates.stride(0))
    assert macros["GROUPS"] == -(-bands // 2)
    assert 1 <= macros["WARPS"] <= 32
    resident, count = counts[:2].tolist()
    memories = [slots[index[:resident].long()]]
    memories += [] if host is None else [host[index[resident:count].long()]]
    rows = superblocks(torch.cat(memories).unflatten(1, (-1, BLOCK_BYTES))).flatten(1)
    gates[:, :count] = ACTIVATIONS[macros["ACTIVATION"]](x @ rows.t())


def neuron_keep(defines: Any, grid: Any, counts: Tensor, index: Tensor, gates: Tensor, stride: int, *rest: Any) -> None:
    kept_counts, kept_index, kept_gates, read, columns, neurons = rest
    assert (grid, len(gates), stride) == ((1,), int(defines["INPUTS"]), gates.stride(0))
    assert gates.shape == kept_gates.shape == (len(gates), neurons)
    resident, count, asked = counts.tolist()
    kept = (gates[:, :count] != 0).any(0).nonzero()[:, 0]
    kept_index[: len(kept)] = index[kept]
    kept_gates[:, : len(kept)] = gates[:, kept]
    kept_counts.copy_(torch.tensor([int((kept < resident).sum()), len(kept), asked]))
    if read is not None:
        read += columns * (count + asked) // neurons


_KERNELS = (
    *(neuron_list, neuron_score, neuron_gates, neuron_keep, neuron_ffn, neuron_wait, neuron_sum),
    *(zigzag_dequantise, request_rows, take_rows, count_step),
)
LAUNCHED = {each.__name__: each for each in _KERNELS}
