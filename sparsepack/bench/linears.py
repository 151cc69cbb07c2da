"""Products of a model's Linears on an NVIDIA GPU: dense ones, and slid ones of several patterns, in turns.

What a user waits for is timed: quantising the inputs, the product, its scales. Weights are random, of a real spread;
copies of them take turns, so that no cache serves them. Every contender's outputs are compared with the plain product
of its own weights before it is timed.

Time launches on a GPU: many of them in one CUDA graph, so that no host is measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.bench.bandwidth import read_bandwidth
from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import VALUE_TYPES, Slide, encode, quantise_rows
from sparsepack.models.pattern import Pattern, kept
from sparsepack.progress import progress
from sparsepack.runtime.cuda.driver.device import usable
from sparsepack.runtime.cuda.slide.product import quantise_slide, scale_outputs
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import prepare, sparse24_linear


def graph_seconds(run: Callable[[int], object], count: int) -> Callable[[], float]:
    """A function that replays run(0), run(1), ... run(count - 1), and returns the seconds of one of them."""
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph,
        stream=torch.cuda.Stream(),  # type: ignore[no-untyped-call]
    ):
        for i in range(count):
            run(i)
    graph.replay()

    def replay() -> float:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    return replay


SCHEMA = 1
TOKENS = (64, 512, 2048, 8192, 16384)
PATTERNS = (Pattern(2, 4), Pattern(4, 6), Pattern(6, 8), Pattern(8, 10))
LAUNCHES = 8
"""A graph holds at least this many launches."""
ROTATION = 1 << 27
"""The copies of a matrix that take turns have this many bytes together."""
CHECKED_TOKENS = 128
PEAKS = {"NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H200": 989.5e12}
"""A GPU of this name does this many operations a second with BF16; 8 bits have twice as many, 2:4 twice as many
again."""
KINDS = {row.kind: row for row in VALUE_TYPES.values()}
"""Each kind of numbers has this row in the table of value types."""
FP8_FROM = (8, 9)
"""FP8 products need at least this compute capability."""
PLAIN = Slide(Pattern(2, 4))
"""Inputs of dense weights: windows of a whole group, so that nothing is seen twice."""
_FP8 = torch.float8_e4m3fn

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linear:
    """Linears of one shape, of which a model has `count`."""

    name: str
    rows: int
    columns: int
    count: int = 1


@dataclass(frozen=True)
class Contender:
    """A way to make a product.

    kind       -- "BF16", "INT8" or "FP8"
    how        -- how the weights are slid; None: they are dense
    prepare    -- weight -> copies of what is needed of it, to take turns, and the bytes of one
    scaled     -- whether its outputs have their scales
    """

    name: str
    kind: str
    how: Slide | None
    prepare: Callable[[Tensor], tuple[list[Run], int]]
    scaled: bool = True


def contenders(patterns: Sequence[Pattern] = PATTERNS, kinds: Sequence[str] = ("INT8", "FP8")) -> list[Contender]:
    """Dense BF16, INT8 and FP8, of NVIDIA's libraries, and each pattern in the kinds of numbers."""
    dense = [
        Contender("BF16", "BF16", None, _bf16),
        Contender("INT8, no scales", "INT8", None, lambda weight: _int8(weight, scales=False), scaled=False),
        Contender("INT8", "INT8", None, _int8),
        Contender("FP8", "FP8", None, _fp8),
        Contender("FP8, a scale a matrix", "FP8", None, _fp8_of_matrix),
    ]
    slid = [
        Contender(
            f"{pattern.keep}/{pattern.of} {kind}", kind, Slide(pattern), _sparse24(Slide(pattern), KINDS[kind].dtype)
        )
        for kind in kinds
        for pattern in patterns
    ]
    return [*dense, *slid]


def bench_linears(
    linears: Sequence[Linear],
    tokens: Sequence[int] = TOKENS,
    patterns: Sequence[Pattern] = PATTERNS,
    rounds: int = 7,
    device: str = "cuda",
    kinds: Sequence[str] = ("INT8", "FP8"),
    others: Sequence[Contender] = (),
) -> dict[str, Any]:
    """Measure every contender, and `others` beside them, with every shape. Returns a JSON-able dict; `products` holds a
    row for each: `seconds` (the median of the rounds), `samples`, `bytes` (read and written at least), `share` of what
    the GPU could do with those bytes and operations, None where that is not known, and `error`; `baselines` names those
    with dense weights.

    Raises `UserError` where the device is no NVIDIA GPU of the kernels, `RuntimeError` for outputs that are wrong.
    """
    where = usable(device)
    bandwidth, peak = read_bandwidth(where), PEAKS.get(torch.cuda.get_device_name(where))
    rows = []
    fp8 = torch.cuda.get_device_capability(where) >= FP8_FROM
    entries = [contender for contender in (*contenders(patterns, kinds), *others) if fp8 or contender.kind != "FP8"]
    with torch.cuda.device(where), torch.inference_mode(), progress("products", len(linears) * len(entries)) as advance:
        for linear in linears:
            prepared = []
            for contender in entries:
                prepared.append((contender, *_build(linear, contender, max(tokens))))
                advance()
            for count in tokens:
                rows += _measure(linear, count, prepared, rounds, bandwidth, peak)
            del prepared
            torch.cuda.empty_cache()
    return {
        "schema": SCHEMA,
        "device": f"{torch.cuda.get_device_name(where)}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        "read_bandwidth": bandwidth,
        "linears": [{"name": n.name, "rows": n.rows, "columns": n.columns, "count": n.count} for n in linears],
        "contenders": [contender.name for contender in entries],
        "baselines": [contender.name for contender in entries if contender.how is None],
        "tokens": list(tokens),
        "products": rows,
    }


def _build(linear: Linear, contender: Contender, most: int) -> tuple[list[Run], int, float]:
    """What a contender makes of weights of its pattern, and how wrong its outputs are, of few tokens and of most."""
    generator = torch.Generator(device="cuda").manual_seed(linear.rows)
    noise = torch.randn(linear.rows, linear.columns, device="cuda", generator=generator) / linear.columns**0.5
    weight = noise.bfloat16()
    if contender.how is not None:
        for part in weight.split(4096):
            part.mul_(kept(part.abs(), contender.how.pattern))
    runs, nbytes = contender.prepare(weight)
    errors = []
    for tokens in {CHECKED_TOKENS, most}:
        x = torch.randn(tokens, linear.columns, device="cuda", generator=generator).bfloat16()
        found = runs[-1](x)[-CHECKED_TOKENS:]
        last = x[-CHECKED_TOKENS:]
        expected = last.float() @ weight.float().t()
        if not contender.scaled:
            found = found * quantise_rows(last, torch.int8)[1][:, None] * quantise_rows(weight, torch.int8)[1]
        errors.append(float((found.float() - expected).norm() / expected.norm()))
    if not max(errors) <= KINDS[contender.kind].output_bound:
        raise RuntimeError(f"{linear.name}, {contender.name}: outputs differ by {max(errors):.3g}; not timed")
    return runs, nbytes, max(errors)


def _measure(
    linear: Linear,
    tokens: int,
    prepared: Sequence[tuple[Contender, list[Run], int, float]],
    rounds: int,
    bandwidth: float,
    peak: float | None,
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, linear.columns, device="cuda").bfloat16()
    replays = [_replay(runs, x) for _, runs, _, _ in prepared]
    samples: list[list[float]] = [[] for _ in prepared]
    for _ in range(rounds):
        for replay, taken in zip(replays, samples, strict=True):
            taken.append(replay())
    rows = []
    for (contender, _, nbytes, error), taken in zip(prepared, samples, strict=True):
        expanded = linear.columns if contender.how is None else contender.how.expanded(linear.columns)
        moved = nbytes + 2 * tokens * (linear.columns + linear.rows)
        if contender.kind != "BF16":
            moved += 2 * tokens * expanded  # quantised inputs are written and read
        doubled = (contender.kind != "BF16") + (contender.how is not None)
        speed = 0 if peak is None else peak * 2**doubled
        bound = max(moved / bandwidth, 2 * tokens * linear.rows * expanded / speed) if speed else None
        seconds = statistics.median(taken)
        rows.append(
            {
                "linear": linear.name,
                "rows": linear.rows,
                "columns": linear.columns,
                "tokens": tokens,
                "contender": contender.name,
                "seconds": seconds,
                "samples": taken,
                "bytes": moved,
                "share": None if bound is None else bound / seconds,
                "error": error,
            }
        )
    return rows


def _replay(runs: Sequence[Run], x: Tensor) -> Callable[[], float]:
    return graph_seconds(lambda i: runs[i % len(runs)](x), max(LAUNCHES, len(runs)))


def copies(weight: Tensor, of: Callable[[Tensor], Run]) -> tuple[list[Run], int]:
    """What `Contender.prepare` returns: `of` copies of the weights, so many that no cache serves them."""
    bits = weight.view(torch.uint8)
    return [of(bits.clone().view(weight.dtype)) for _ in range(_count(weight.nbytes))], weight.nbytes


def _count(nbytes: int) -> int:
    return max(1, -(-ROTATION // nbytes))


def _bf16(weight: Tensor) -> tuple[list[Run], int]:
    def of(copy: Tensor) -> Run:
        return lambda x: F.linear(x, copy)

    return copies(weight, of)


def _int8(weight: Tensor, scales: bool = True) -> tuple[list[Run], int]:
    q, w_scale = quantise_rows(weight, torch.int8)

    def of(copy: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            values, x_scale = quantise_slide(x, PLAIN, torch.int8)
            sums = torch._int_mm(values[:, : copy.shape[1]], copy.t())
            return scale_outputs(sums, len(x), len(copy), x_scale, w_scale, None, x.dtype) if scales else sums

        return run

    return copies(q, of)


def _fp8(weight: Tensor) -> tuple[list[Run], int]:
    q, w_scale = quantise_rows(weight, _FP8)

    def of(copy: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            values, x_scale = quantise_slide(x, PLAIN, _FP8)
            return torch._scaled_mm(
                values[:, : copy.shape[1]],
                copy.t(),
                x_scale[:, None],
                w_scale[None],
                out_dtype=x.dtype,
                use_fast_accum=True,
            )

        return run

    return copies(q, of)


def _fp8_of_matrix(weight: Tensor) -> tuple[list[Run], int]:
    """A product in FP8 with one scale for all weights, and one for all inputs that was known before."""
    largest = weight.abs().amax().float()
    q, one, w_scale = (weight.float() * (448 / largest)).to(_FP8), torch.ones((), device="cuda"), largest / 448

    def of(copy: Tensor) -> Run:
        return lambda x: torch._scaled_mm(x.to(_FP8), copy.t(), one, w_scale, out_dtype=x.dtype, use_fast_accum=True)

    return copies(q, of)


def _sparse24(how: Slide, dtype: torch.dtype) -> Callable[[Tensor], tuple[list[Run], int]]:
    def of(matrix: Sparse24Matrix, out: torch.dtype) -> Run:
        prepared = prepare(matrix, out)
        return lambda x: sparse24_linear(x, matrix, None, prepared)

    def make(weight: Tensor) -> tuple[list[Run], int]:
        values, positions, scale = encode(weight, how, dtype)
        nbytes = values.nbytes + positions.nbytes
        matrices = [
            Sparse24Matrix(values.view(torch.uint8).clone().view(dtype), positions, scale, how, weight.shape[1])
            for _ in range(_count(nbytes))
        ]
        return [of(matrix, weight.dtype) for matrix in matrices], nbytes

    return make


def linears_of(shapes: Mapping[str, tuple[int, int]]) -> list[Linear]:
    """The Linears of a model by their shapes: those of one shape are measured once, by their names' last parts."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        found.setdefault(shape, []).append(name)
    if not found:
        raise UserError("no Linear of this folder is slid: there is nothing to measure")
    return [
        Linear("/".join(dict.fromkeys(name.rpartition(".")[2] for name in names)), *shape, len(names))
        for shape, names in found.items()
    ]
