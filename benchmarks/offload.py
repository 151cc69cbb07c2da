"""Decoding with keys and values in the host's memory: the best 1/16 of the tokens, beside moving whole caches.

    python benchmarks/offload.py [--quick] [--json FILE]

"Moved whole" is FlexGen's way in the same engine: a layer's keys and values come over the bus while the layer before
computes, in two buffers that take turns, and attention reads them all. "Offloaded" is Double Sparsity's cache of this
package: labels on the GPU find the tokens, those that were not read lately are fetched.

Attention of a layer, first table: queries drift from step to step so that consecutive steps have about 70 % of their
tokens in common, as those of books-26m-silu have at 8192 tokens, or have nothing in common ("anew"). What is fetched is
counted. The result of the first step is compared with the cache's on the card. Second table: a step of a whole model of
random weights in Q4_K; its texts are random, and so is what steps have in common. Of the bus the bandwidth of a long
copy from pinned memory is taken.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from cuda_synthetic import LLAMA_7B, LLAMA_8B, random_model
from cuda_timing import device_line, read_bandwidth
from figures import json_option, write_figures
from nearness import expect_near, relative_error
from torch import Tensor
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.models.records.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.cuda.attention import attention as dense_attention
from sparsepack.runtime.cuda.attention.double_sparsity_kv_cache import CudaDoubleSparsityKvCache
from sparsepack.runtime.cuda.attention.kv_cache import CACHE_TYPES
from sparsepack.runtime.cuda.attention.offloaded_kv_cache import OffloadedKvCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.tables import Table, markdown

HEAD_DIM, CHANNELS = 128, 32
POLICY = TokenPolicy(Fraction(1, 16), sinks=4, recent=64, min_context=0)
CASES = ((32, 32, 65536), (32, 8, 65536), (32, 8, 131072), (32, 8, 262144))
"""Query heads, key heads, tokens."""
MODELS = ((LLAMA_7B, 65536), (LLAMA_8B, 131072), (LLAMA_8B, 262144))
STEPS = 48
"""Whose queries follow each other."""
KEPT = 0.92
"""The share of a query that is in the next one: chosen for the share of the tokens that two steps have in common."""
LIMIT = 1e-3
"""The largest relative error of a result, where all tokens are read."""


class WholeKvCache(OffloadedKvCache):
    """Every layer's keys and values come over the bus at each step, in two buffers that take turns."""

    def __init__(self, shape: AttentionShape, type: str, device: torch.device, kernels: Kernels = KERNELS) -> None:
        super().__init__(shape, type, device, kernels)
        room = (2, *self._layers[0].keys.shape)
        self._buffers = [torch.empty(room, dtype=CACHE_TYPES[type], device=device) for _ in range(2)]
        self._copies, self._free = torch.cuda.Stream(), [torch.cuda.Event() for _ in range(2)]
        self._there = [torch.cuda.Event() for _ in range(2)]

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        last = len(self._layers) - 1
        if layer == 0:
            for event in self._free:
                event.record()
            self._bring(0)
        torch.cuda.current_stream().wait_event(self._there[layer % 2])
        if layer < last:
            self._bring(layer + 1)
        of, (keys, values) = self._layers[layer], self._buffers[layer % 2]
        dense_attention.attend(replace(of, keys=keys, values=values), qkv, self.positions.there, out)
        here = self.positions.there.long()
        for kept, new in ((of.keys, keys), (of.values, values)):
            kept.index_copy_(2, here, new.index_select(2, here))
        self._free[layer % 2].record()

    def _bring(self, layer: int) -> None:
        self._copies.wait_event(self._free[layer % 2])
        with torch.cuda.stream(self._copies):
            for to, cached in zip(
                self._buffers[layer % 2], (self._layers[layer].keys, self._layers[layer].values), strict=True
            ):
                to.copy_(cached)
            self._there[layer % 2].record()


def shape_of(heads: int, kv_heads: int, tokens: int, layers: int) -> AttentionShape:
    """The shape of a text of so many tokens. It is rotated by nothing, which takes as long as any rotation."""
    cos = torch.ones(tokens, HEAD_DIM // 2, device="cuda")
    heavy = torch.arange(CHANNELS, device="cuda").expand(kv_heads, -1)
    layer = LayerAttention(channels=heavy)
    return AttentionShape(heads, kv_heads, HEAD_DIM, 0.0, cos, torch.zeros_like(cos), (layer,) * layers, 1, POLICY)


def fill(cache: CudaDoubleSparsityKvCache, tokens: int) -> None:
    """Random keys and values of all tokens but the last, and their labels."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for of, double in zip(cache._layers, cache._double_sparsity, strict=True):
        for cached in (of.keys, of.values):
            for head in cached[0]:
                head.copy_(torch.randn(head.shape, generator=generator, device="cuda"))
        assert double is not None
        cache._kernels.label_append(double, 0, tokens - 1, 0)
    cache.lengths[0] = tokens - 1
    cache.positions.write(cache.lengths)


def queries(heads: int, kv_heads: int, kept: float) -> list[Tensor]:
    """Rows of consecutive steps."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    rows = [torch.randn(1, (heads + 2 * kv_heads) * HEAD_DIM, generator=generator, device="cuda")]
    for _ in range(STEPS - 1):
        new = torch.randn(rows[0].shape, generator=generator, device="cuda")
        rows.append(kept * rows[-1] + (1 - kept**2) ** 0.5 * new)
    return rows


def bus_bandwidth() -> float:
    """Bytes a second of a long copy from pinned memory, the fastest of five."""
    there = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device="cuda")
    samples = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        here.copy_(there, non_blocking=True)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return here.nbytes / min(samples)


def stepped(cache: CudaDoubleSparsityKvCache, layer: int, qkv: Tensor, sparse: bool) -> Tensor:
    """What a step leaves, in memory of its own: float32 [1, heads * head_dim]."""
    cache.positions.write(cache.lengths)
    of = cache._layers[layer].shape
    out = torch.empty(1, of.heads * of.head_dim, device="cuda")
    cache.step(layer, qkv, sparse, out)
    return out


def measure(heads: int, kv_heads: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a layer's attention: drifting queries with once and twice as many slots as tokens are read, queries
    with nothing in common, the same cache on the card, and a layer's whole cache moved."""
    shape, device = shape_of(heads, kv_heads, tokens, 1), torch.device("cuda")
    out = torch.empty(1, heads * HEAD_DIM, device="cuda")
    card = CudaDoubleSparsityKvCache(shape, "bf16", device)
    fill(card, tokens)
    results, caches, runs, fetched = [], [], {}, {}
    read = kv_heads * POLICY.budget(tokens)

    def steps(cache: CudaDoubleSparsityKvCache, rows: list[Tensor]) -> Callable[[int], object]:
        return lambda n: cache.step(0, rows[n % STEPS], True, out)

    drifting, anew = queries(heads, kv_heads, KEPT), queries(heads, kv_heads, 0.0)
    for name, slots, rows in (("text, 1x", 1.0, drifting), ("text, 2x", 2.0, drifting), ("anew", 1.0, anew)):
        cache = OffloadedKvCache(shape, "bf16", device, slots=slots)
        caches.append(cache)  # what is replayed does not keep it
        for mine, theirs in zip(cache._layers, card._layers, strict=True):
            mine.keys.copy_(theirs.keys)
            mine.values.copy_(theirs.values)
            cache._kernels.label_append(cache._double_sparsity[0], 0, tokens - 1, 0)
        cache.lengths[0] = tokens - 1
        cache.positions.write(cache.lengths)
        if not torch.equal(stepped(cache, 0, rows[0], True), stepped(card, 0, rows[0], True)):
            raise RuntimeError(f"{name}: not what the cache on the card gives; not timed")
        counts = []
        for n in range(2 * STEPS):
            cache.step(0, rows[n % STEPS], True, out)
            counts.append(cache.fetched()[0])
        fetched[name] = statistics.mean(counts[STEPS:])
        runs[name] = graph_seconds(steps(cache, rows), STEPS)
    runs["card"] = graph_seconds(steps(card, drifting), STEPS)
    whole = WholeKvCache(replace(shape, layers=shape.layers * 2), "bf16", device)
    for mine in whole._layers:
        mine.keys.copy_(card._layers[0].keys)
        mine.values.copy_(card._layers[0].values)
    whole.lengths[0] = tokens - 1
    whole.positions.write(whole.lengths)
    expected = stepped(card, 0, drifting[0], False)
    for layer in range(2):
        expect_near("moved whole", relative_error(stepped(whole, layer, drifting[0], True), expected), LIMIT)
    runs["whole"] = graph_seconds(lambda n: whole.step(n % 2, drifting[0], True, out), 2)
    seconds = interleaved(runs, rounds)
    row = 2 * HEAD_DIM * 2
    for name, count in fetched.items():
        results.append(
            {
                "heads": heads,
                "kv_heads": kv_heads,
                "tokens": tokens,
                "steps": name,
                "fetched": count / read,
                "bytes": count * row,
                "whole_bytes": kv_heads * tokens * row,
                "seconds": seconds[name],
                "card_seconds": seconds["card"],
                "whole_seconds": seconds["whole"],
            }
        )
    return results


def measure_model(size: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step of a whole model, random tokens, in turns."""
    heavy = torch.arange(CHANNELS).expand(size.kv_heads, -1)
    packed = random_model(size)
    packed = replace(packed, attention=SparseAttention(POLICY, (heavy,) * size.layers))
    samples: dict[str, list[float]] = {}
    fetched = 0.0
    for name, cache in (("offloaded", OffloadedKvCache), ("whole", WholeKvCache)):
        decoder = CudaDecoder(packed, torch.device("cuda"), tokens, new_cache=cache)
        fill(decoder._cache, tokens - 60)
        taken = samples.setdefault(name, [])
        steps = 8 if name == "offloaded" else 1
        for round in range(rounds + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for n in range(steps):
                decoder.step([7 * round + n], True)
            torch.cuda.synchronize()
            if round:
                taken.append((time.perf_counter() - start) / steps)
        if name == "offloaded":
            fetched = sum(decoder._cache.fetched()) / (size.layers * size.kv_heads * POLICY.budget(tokens))
        del decoder
        gc.collect()  # its memory in the host is given back with it
        torch.cuda.empty_cache()
    row = 2 * HEAD_DIM * 2 * size.kv_heads * size.layers
    return {
        "model": size.name,
        "tokens": tokens,
        "whole_bytes": row * tokens,
        "fetched": fetched,
        "bytes": fetched * row * POLICY.budget(tokens),
        "seconds": {name: statistics.median(taken) for name, taken in samples.items()},
    }


def attention_rows(results: list[dict[str, Any]], bus: float) -> list[list[str]]:
    """Lines of the first table."""
    return [
        [
            f"{of['heads']}/{of['kv_heads']}",
            str(of["tokens"]),
            of["steps"],
            f"{of['fetched']:.0%}",
            f"{of['bytes'] / 2**20:.1f}",
            f"{of['whole_seconds'] * 1e6:.0f}",
            f"{of['card_seconds'] * 1e6:.0f}",
            f"{of['seconds'] * 1e6:.0f}",
            f"{of['whole_seconds'] / of['seconds']:.1f}",
            f"{of['bytes'] / bus / of['seconds']:.0%}",
        ]
        for of in results
    ]


def model_rows(results: list[dict[str, Any]], bus: float) -> list[list[str]]:
    """Lines of the second table."""
    return [
        [
            of["model"],
            str(of["tokens"]),
            f"{of['whole_bytes'] / 1e9:.1f}",
            f"{of['fetched']:.0%}",
            f"{of['seconds']['whole'] * 1e3:.1f}",
            f"{of['seconds']['offloaded'] * 1e3:.2f}",
            f"{of['seconds']['whole'] / of['seconds']['offloaded']:.1f}",
            f"{of['bytes'] / bus / of['seconds']['offloaded']:.0%}",
        ]
        for of in results
    ]


@click.command()
@click.option("--quick", is_flag=True, help="Fewer cases and rounds.")
@click.option("--models/--no-models", default=True, help="Whether steps of whole models are measured, too.")
@json_option
@torch.no_grad()
def main(quick: bool, models: bool, json_path: Path | None) -> None:
    """Print the tables."""
    bus, rounds = bus_bandwidth(), 3 if quick else 7
    click.echo(f"{device_line()}; read {read_bandwidth() / 1e9:.0f} GB/s, bus {bus / 1e9:.1f} GB/s\n")
    attention, steps = [], []
    for case in CASES[:2] if quick else CASES:
        attention += measure(*case, rounds)
        gc.collect()
        torch.cuda.empty_cache()
    head = [
        "heads",
        "tokens",
        "queries",
        "fetched",
        "MiB",
        "moved whole, us",
        "on the card",
        "offloaded",
        "x",
        "of bus",
    ]
    click.echo(markdown(Table(head, attention_rows(attention, bus))))
    for case in (MODELS[:1] if quick else MODELS) if models else ():
        steps.append(measure_model(*case, rounds))
        gc.collect()
        torch.cuda.empty_cache()
    if models:
        head = ["model", "tokens", "GB of keys and values", "fetched", "moved whole, ms", "offloaded", "x", "of bus"]
        click.echo("\n" + markdown(Table(head, model_rows(steps, bus))))
    found = {"device": device_line(), "bus": bus, "attention": attention, "models": steps}
    write_figures(json_path, found)


if __name__ == "__main__":
    main()
