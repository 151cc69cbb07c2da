"""Attention of a decoding step on the GPU, over a cache of bfloat16, beside the best of torch's.

    python benchmarks/cuda_attention.py [--quick] [--json FILE]

A step is one of a single sequence. Ours also rotates q and k and appends k and v, which torch is spared. Steps are
replayed as a CUDA graph, over more than 600 MB of keys and values, so that no cache serves them; both take turns. They
wait for each other, but ours, as batches run it, may bring rows near before its turn. Both are compared with float64
before anything is timed.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from nearness import expect_near, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention.attention import AttentionParameters, attend
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference.double_sparsity import attend_selected
from sparsepack.tables import Table, markdown

HEADS = {"Llama-3-8B": (32, 8), "Llama-2-7B": (32, 32)}
"""The heads of queries, and those of keys and values."""
HEAD_DIM = 128
POSITIONS = (128, 1024, 4096, 16384, 65536)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BYTES = 600 << 20
FEWEST = 20
"""Steps that are replayed together."""
LIMITS = {"ours": 1e-4, "torch": 1e-2}
"""The largest relative error of a result; torch rounds its own to bfloat16."""
ROUNDS = 9
WHY_NOT = r"(?s).*Triggered internally at .*sdp_utils"
"""Warnings in which torch says why a backend has no kernel for a case."""


class Case:
    """Steps of texts with so many positions each, the new ones included, over copies of their cache that take turns.

    nbytes   -- keys and values of all copies, at least
    channels -- heavy channels of each key head, and policy: of sparse attention, where there is any
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        positions: int,
        batch: int = 1,
        *,
        nbytes: int = BYTES,
        channels: Tensor | None = None,
        policy: TokenPolicy | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.positions, self.batch = heads, kv_heads, positions, batch
        self.nbytes = 2 * batch * kv_heads * positions * HEAD_DIM * torch.bfloat16.itemsize
        copies = max(2, -(-nbytes // self.nbytes))
        self.length = copies * -(-FEWEST // copies)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        # A rotation by nothing, which takes as long as any.
        cos, layer = torch.ones(positions, HEAD_DIM // 2, device="cuda"), LayerAttention(channels=channels)
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, 0.0, cos, torch.zeros_like(cos), (layer,), batch, policy)
        room = (batch, kv_heads, positions, HEAD_DIM)
        self.caches = [AttentionParameters(shape, layer, normal(*room), normal(*room)) for _ in range(copies)]
        self.q = normal(batch, heads, 1, HEAD_DIM)
        new = [cached[:, :, -1].reshape(batch, -1) for cached in (self.caches[0].keys, self.caches[0].values)]
        self.qkv = torch.cat([self.q.flatten(1), *new], dim=1).float()
        self.last = torch.full((batch,), positions - 1, dtype=torch.int32, device="cuda")
        self.out = torch.empty(batch, heads * HEAD_DIM, device="cuda")

    def dense(self, number: int) -> Tensor:
        """Put a step of ours on the current stream; float32 [batch, heads * HEAD_DIM]."""
        attend(self.caches[number % len(self.caches)], self.qkv, self.last, self.out)
        return self.out

    def torchs(self, number: int) -> Tensor:
        """The same by torch, over a cache that has the new position already: bfloat16 [batch, heads, 1, HEAD_DIM]."""
        of = self.caches[number % len(self.caches)]
        return scaled_dot_product_attention(self.q, of.keys, of.values, enable_gqa=self.heads != self.kv_heads)

    def error(self, found: Tensor, selected: Callable[[int], Tensor] | None = None) -> float:
        """How far the first copy's result is from float64, relative; of the first and the last text, the larger.

        selected -- the tokens that are read by the text of a number, bool [kv_heads, 1, positions]; None: all
        """
        everything, worst = torch.ones(self.kv_heads, 1, self.positions, dtype=torch.bool, device="cuda"), 0.0
        for n in {0, self.batch - 1}:
            of_text = (x[n].double() for x in (self.q, self.caches[0].keys, self.caches[0].values))
            expected = attend_selected(*of_text, selected(n) if selected else everything)
            worst = max(worst, relative_error(found[n].double().flatten(), expected.flatten()))
        return worst


def _with_backend(case: Case, backend: SDPBackend) -> Callable[[int], None]:
    """torch's step by one of its backends."""

    def run(number: int) -> None:
        with sdpa_kernel(backend):
            case.torchs(number)

    return run


def torchs_runs(case: Case, check: Callable[[Tensor], object]) -> dict[str, Callable[[], float]]:
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
    expect_near("ours", case.error(case.dense(0)), LIMITS["ours"])
    runs = {
        "ours": graph_seconds(case.dense, case.length),
        **torchs_runs(case, lambda y: expect_near("torch", case.error(y), LIMITS["torch"])),
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
@json_option
def main(quick: bool, json_path: Path | None) -> None:
    """Print the table."""
    bandwidth = announced_bandwidth()
    results = {
        model: [measure(*heads, positions, 1 if quick else ROUNDS) for positions in POSITIONS]
        for model, heads in HEADS.items()
    }
    head = ["heads of", "positions", "MiB", "us", "GB/s", "of bandwidth", "torch's best", "us", "x"]
    lines = [row_of(model, result, bandwidth) for model, found in results.items() for result in found]
    click.echo(markdown(Table(head, lines)))
    click.echo("x: the time of torch's best over ours")
    write_figures(json_path, {"device": device_line(), "bandwidth": bandwidth, "heads": results})


if __name__ == "__main__":
    main()
