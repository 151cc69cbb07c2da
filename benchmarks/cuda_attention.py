"""Attention of a decoding step on the GPU, over a cache of bfloat16, beside the best of torch's.

    python benchmarks/cuda_attention.py [--quick] [--json FILE]

A step is one of a single sequence. Ours also rotates q and k and appends k and v, which torch is spared. Steps are
replayed as a CUDA graph, over more than 600 MB of keys and values, so that no cache serves them; both take turns. They
wait for each other, but ours, as batches run it, may bring rows near before its turn. Both are compared with float64
before anything is timed.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click
import torch
from cuda_timing import device_line, interleaved, read_bandwidth
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsepack.bench.graph_timing import graph_seconds
from sparsepack.runtime.cuda.attention.attention import AttentionParameters, attend
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.tables import Table, markdown

HEADS = {"Llama-3-8B": (32, 8), "Llama-2-7B": (32, 32)}
"""Of queries, and of keys and values."""
HEAD_DIM = 128
POSITIONS = (128, 1024, 4096, 16384, 65536)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BYTES = 600 << 20
FEWEST = 20
"""Steps that are replayed together."""
LIMITS = {"ours": 1e-4, "torch": 1e-2}
"""Of the norm of a result; torch rounds its own to bfloat16."""
ROUNDS = 9
WHY_NOT = r"(?s).*Triggered internally at .*sdp_utils"
"""Warnings in which torch says why a backend has no kernel for a case."""


class TorchCase(Protocol):
    """Steps over copies of a cache that take turns, `length` of them replayed together."""

    length: int

    def torchs(self, number: int) -> Tensor:
        """Put a step by torch's attention on the current stream."""


class Case:
    """Steps of one sequence with so many positions, its new one included, over copies of its cache that take turns."""

    def __init__(self, heads: int, kv_heads: int, positions: int) -> None:
        self.nbytes = 2 * kv_heads * positions * HEAD_DIM * torch.bfloat16.itemsize
        copies = max(2, -(-BYTES // self.nbytes))
        self.length = copies * -(-FEWEST // copies)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self._heads, self._kv_heads = heads, kv_heads
        self._keys, self._values = ([normal(1, kv_heads, positions, HEAD_DIM) for _ in range(copies)] for _ in range(2))
        self._q = normal(1, heads, 1, HEAD_DIM)
        new = normal(1, 2 * kv_heads * HEAD_DIM)
        self._qkv = torch.cat([self._q.flatten(1), new], dim=1).float()
        self._last = torch.tensor([positions - 1], dtype=torch.int32, device="cuda")
        # A rotation by nothing, which takes as long as any.
        cos, layer = torch.ones(positions, HEAD_DIM // 2, device="cuda"), LayerAttention()
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, 0.0, cos, torch.zeros_like(cos), (layer,))
        caches = zip(self._keys, self._values, strict=True)
        self._parameters = [AttentionParameters(shape, layer, keys, values) for keys, values in caches]
        self._out = torch.empty(1, heads * HEAD_DIM, device="cuda")

    def ours(self, number: int) -> Tensor:
        """Put a step on the current stream; float32 [1, heads * HEAD_DIM]."""
        attend(self._parameters[number % len(self._parameters)], self._qkv, self._last, self._out)
        return self._out

    def torchs(self, number: int) -> Tensor:
        """The same by torch, over a cache that has the new position already: bfloat16 [1, heads, 1, HEAD_DIM]."""
        copy = number % len(self._keys)
        grouped = self._heads != self._kv_heads
        return scaled_dot_product_attention(self._q, self._keys[copy], self._values[copy], enable_gqa=grouped)

    def error(self, found: Tensor) -> float:
        """Of the first copy's result, of the norm."""
        gqa_ratio = self._heads // self._kv_heads
        q = self._q.double().view(self._kv_heads, gqa_ratio, HEAD_DIM)
        weights = (q @ self._keys[0][0].double().mT / HEAD_DIM**0.5).softmax(-1)
        expected = (weights @ self._values[0][0].double()).flatten()
        return float((found.double().flatten() - expected).norm() / expected.norm())


def checked(name: str, error: float) -> None:
    """RuntimeError where a result is wrong."""
    if not error <= LIMITS[name]:
        raise RuntimeError(f"{name}: wrong by {error:.3g}, expected {LIMITS[name]}; not timed")


def _with_backend(case: TorchCase, backend: SDPBackend) -> Callable[[int], None]:
    """torch's step by one of its backends."""

    def run(number: int) -> None:
        with sdpa_kernel(backend):
            case.torchs(number)

    return run


def torchs_runs(case: TorchCase, check: Callable[[Tensor], None]) -> dict[str, Callable[[], float]]:
    """Each of torch's backends that has a kernel for a case, its result checked: what replays it."""
    runs = {}
    for backend in BACKENDS:
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.filterwarnings("ignore", WHY_NOT, UserWarning)
                found = case.torchs(0)
        except RuntimeError:  # it has no kernel for this
            continue
        check(found)
        name = backend.name.removesuffix("_ATTENTION").lower()
        runs[name] = graph_seconds(_with_backend(case, backend), case.length)
    return runs


def measure(heads: int, kv_heads: int, positions: int, rounds: int) -> dict[str, Any]:
    """Seconds of ours and of each of torch's that can."""
    case = Case(heads, kv_heads, positions)
    checked("ours", case.error(case.ours(0)))
    runs = {
        "ours": graph_seconds(case.ours, case.length),
        **torchs_runs(case, lambda y: checked("torch", case.error(y))),
    }
    return {"positions": positions, "nbytes": case.nbytes, "seconds": interleaved(runs, rounds)}


def row_of(model: str, result: dict[str, Any], bandwidth: float) -> list[str]:
    """A line of the table."""
    seconds, others = result["seconds"]["ours"], {k: v for k, v in result["seconds"].items() if k != "ours"}
    best = min(others, key=lambda name: others[name])
    return [
        model,
        str(result["positions"]),
        f"{result['nbytes'] / 2**20:.1f}",
        f"{seconds * 1e6:.1f}",
        f"{result['nbytes'] / seconds / 1e9:.0f}",
        f"{result['nbytes'] / seconds / bandwidth:.0%}",
        best,
        f"{others[best] * 1e6:.1f}",
        f"{others[best] / seconds:.2f}",
    ]


@click.command()
@click.option("--quick", is_flag=True, help="One round.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(quick: bool, path: Path | None) -> None:
    """Print the table."""
    bandwidth = read_bandwidth()
    click.echo(f"{device_line()}; read bandwidth {bandwidth / 1e9:.0f} GB/s")
    results = {
        model: [measure(*heads, positions, 1 if quick else ROUNDS) for positions in POSITIONS]
        for model, heads in HEADS.items()
    }
    head = ["heads of", "positions", "MiB", "us", "GB/s", "of bandwidth", "torch's best", "us", "x"]
    lines = [row_of(model, result, bandwidth) for model, found in results.items() for result in found]
    click.echo(markdown(Table(head, lines)))
    click.echo("x: the time of torch's best over ours")
    if path:
        path.write_text(json.dumps({"device": device_line(), "bandwidth": bandwidth, "heads": results}, indent=1))


if __name__ == "__main__":
    main()
