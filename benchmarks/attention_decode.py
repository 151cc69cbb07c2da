"""Attention of a decoding step to the best 1/16 of the tokens, beside reading them all.

    python benchmarks/attention_decode.py [--quick] [--json FILE]

Sparse attention is Double Sparsity's, everything included: norming and rotating nothing, appending key, value and
label, scoring 4-bit labels of a quarter of the channels, selecting, attending. Dense is the best of torch's backends,
which is spared the appending, and our own dense step. Steps are replayed as CUDA graphs over copies of the cache that
take turns, so that no cache of the GPU serves them; all ways take turns, too. Every result is compared with the
oracle's before anything is timed. Bytes are those that a step has to move; its bound is what they take at the measured
read bandwidth.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from cuda_attention import torchs_runs
from cuda_timing import device_line, interleaved, read_bandwidth
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsepack.bench.graph_timing import graph_seconds
from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import attention as dense_attention
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.cuda.attention.attention import AttentionParameters
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import double_sparsity as reference
from sparsepack.tables import Table, markdown

HEAD_DIM, CHANNELS = 128, 32
CASES = (
    *((32, 32, batch, 16384) for batch in (1, 4, 16, 32)),
    (32, 8, 1, 16384),
    (32, 8, 1, 65536),
    (32, 8, 16, 16384),
    (32, 8, 32, 65536),
)
"""Query heads, key heads, texts, tokens: those of the anchors."""
BREAK_EVEN = (512, 1024, 2048, 4096, 8192)
"""Tokens at which it is asked whether sparse attention pays already."""
POLICY = TokenPolicy(Fraction(1, 16), sinks=4, recent=64, min_context=0)
BYTES = 1 << 30
"""Of keys and values of all copies, at least."""
LIMITS = {"sparse": 1e-3, "dense": 1e-3, "torch": 2e-2}
"""Of the norm of a result; torch rounds its own to bfloat16."""


class Case:
    """Steps of some texts of a length, over copies of their cache that take turns."""

    def __init__(self, heads: int, kv_heads: int, batch: int, tokens: int, steps: int = 20) -> None:
        self.heads, self.kv_heads, self.batch, self.tokens = heads, kv_heads, batch, tokens
        self.dense_bytes = 2 * batch * kv_heads * tokens * HEAD_DIM * torch.bfloat16.itemsize
        copies = max(2, -(-BYTES // self.dense_bytes))
        self.length = copies * -(-steps // copies)
        self._random = torch.Generator(device="cuda").manual_seed(0)
        room = (batch, kv_heads, tokens, HEAD_DIM)
        heavy = torch.stack([torch.randperm(HEAD_DIM)[:CHANNELS].sort().values for _ in range(kv_heads)]).cuda()
        cos, layer = torch.ones(tokens, HEAD_DIM // 2, device="cuda"), LayerAttention(channels=heavy)
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, 0.0, cos, torch.zeros_like(cos), (layer,), batch, POLICY)
        self._heavy, self._last = heavy, torch.full((batch,), tokens - 1, dtype=torch.int32, device="cuda")
        self._parameters = []
        for _ in range(copies):
            dense = AttentionParameters(shape, layer, self._normal(*room), self._normal(*room))
            of = double_sparsity.double_sparsity_parameters(dense, heavy, POLICY)
            double_sparsity.label_append(of, 0, tokens, positions=torch.zeros_like(self._last))
            self._parameters.append(of)
        self._q = self._normal(batch, heads, 1, HEAD_DIM)
        new = [of[:, :, -1].reshape(batch, -1) for of in (self._keys(0), self._values(0))]
        self._qkv = torch.cat([self._q.flatten(1), *new], dim=1).float()
        self._out = torch.empty(batch, heads * HEAD_DIM, device="cuda")

    def sparse(self, number: int, cluster: int | None = None) -> Tensor:
        """Put a sparse step on the current stream; float32 [batch, heads * HEAD_DIM]."""
        of = self._parameters[number % len(self._parameters)]
        double_sparsity.attend(of, self._qkv, self._last, self._out, cluster=cluster)
        return self._out

    def dense(self, number: int) -> Tensor:
        """The same of every token."""
        of = self._parameters[number % len(self._parameters)].dense
        dense_attention.attend(of, self._qkv, self._last, self._out)
        return self._out

    def torchs(self, number: int) -> Tensor:
        """The same by torch, over a cache that has the new position already: bfloat16 [batch, heads, 1, HEAD_DIM]."""
        grouped = self.heads != self.kv_heads
        return scaled_dot_product_attention(self._q, self._keys(number), self._values(number), enable_gqa=grouped)

    @property
    def sparse_bytes(self) -> int:
        """Labels and scales, and the selected tokens' keys and values."""
        each = CHANNELS // 2 + 2
        read = POLICY.budget(self.tokens) * 4 * HEAD_DIM
        return self.batch * self.kv_heads * (self.tokens * each + read)

    def errors(self, found: Tensor, sparse: bool) -> float:
        """Of the first copy's result, of the norm of the oracle's; of the first and the last text."""
        worst = 0.0
        for n in {0, self.batch - 1}:
            q = self._q[n].float()
            keys, values = self._keys(0)[n].float(), self._values(0)[n].float()
            selected = torch.ones(self.kv_heads, 1, self.tokens, dtype=torch.bool, device="cuda")
            if sparse:
                of = self._parameters[0]
                queries = reference.label_queries(q, self._heavy)
                scores = reference.label_scores(queries, of.codes[n], of.scales[n])
                selected = reference.select_tokens(scores, self.tokens - 1, POLICY)
            expected = reference.attend_selected(q, keys, values, selected)
            worst = max(worst, float((found[n].flatten().float() - expected.flatten()).norm() / expected.norm()))
        return worst

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device="cuda", dtype=torch.bfloat16)

    def _keys(self, number: int) -> Tensor:
        return self._parameters[number % len(self._parameters)].dense.keys

    def _values(self, number: int) -> Tensor:
        return self._parameters[number % len(self._parameters)].dense.values


def measure(case: Case, rounds: int, clusters: bool = False) -> dict[str, float]:
    """Seconds of each way; with `clusters`, of sparse steps of every number of blocks a key head, too."""
    _check("sparse", case.errors(case.sparse(0), True))
    _check("dense", case.errors(case.dense(0), False))
    runs = {"sparse": graph_seconds(case.sparse, case.length), "dense": graph_seconds(case.dense, case.length)}
    runs |= torchs_runs(case, lambda found: _check("torch", case.errors(found, False)))
    if clusters:
        for n in double_sparsity.CLUSTERS:
            try:
                _check("sparse", case.errors(case.sparse(0, n), True))
            except RuntimeError as error:
                click.echo(f"{n} blocks: {error}")
                continue
            runs[f"sparse, {n}"] = graph_seconds(_with_cluster(case, n), case.length)
    return interleaved(runs, rounds)


def _with_cluster(case: Case, cluster: int) -> Callable[[int], None]:
    def run(number: int) -> None:
        case.sparse(number, cluster)

    return run


def _check(name: str, error: float) -> None:
    """RuntimeError where a result is wrong."""
    if not error <= LIMITS[name]:
        raise RuntimeError(f"{name}: wrong by {error:.3g}, expected {LIMITS[name]}; not timed")


def row_of(case: Case, seconds: dict[str, float], bandwidth: float) -> list[str]:
    """A line of the table."""
    others = {name: taken for name, taken in seconds.items() if not name.startswith(("sparse", "dense"))}
    best, sparse = min(others, key=lambda name: others[name]), seconds["sparse"]
    return [
        f"{case.heads}/{case.kv_heads}",
        str(case.batch),
        str(case.tokens),
        f"{others[best] * 1e6:.1f} ({best})",
        f"{seconds['dense'] * 1e6:.1f}",
        f"{sparse * 1e6:.1f}",
        f"{others[best] / sparse:.2f}",
        f"{case.dense_bytes / case.sparse_bytes:.1f}",
        f"{case.sparse_bytes / 2**20:.1f}",
        f"{case.sparse_bytes / sparse / bandwidth:.0%}",
    ]


HEAD = [
    "heads",
    "texts",
    "tokens",
    "torch's best, us",
    "our dense",
    "sparse",
    "x torch's",
    "fewer bytes",
    "MiB",
    "of bound",
]


@click.command()
@click.option("--quick", is_flag=True, help="Three rounds.")
@click.option("--clusters", is_flag=True, help="Also every number of blocks that can share a key head.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(quick: bool, clusters: bool, path: Path | None) -> None:
    """Print the tables."""
    bandwidth, rounds = read_bandwidth(), 3 if quick else 9
    click.echo(f"{device_line()}; read bandwidth {bandwidth / 1e9:.0f} GB/s")
    results: list[dict[str, Any]] = []

    def timed(heads: int, kv_heads: int, batch: int, tokens: int) -> list[str]:
        case = Case(heads, kv_heads, batch, tokens)
        seconds = measure(case, rounds, clusters)
        results.append({"case": [heads, kv_heads, batch, tokens], "bytes": case.sparse_bytes, "seconds": seconds})
        if clusters:
            click.echo(
                f"{heads}/{kv_heads} {batch} {tokens}: " + ", ".join(f"{k} {v * 1e6:.1f}" for k, v in seconds.items())
            )
        row = row_of(case, seconds, bandwidth)
        del case
        torch.cuda.empty_cache()
        return row

    click.echo(markdown(Table(HEAD, [timed(*case) for case in CASES])))
    click.echo("\nWhere sparse attention begins to pay:\n")
    few = [(heads, kv, batch, tokens) for heads, kv in ((32, 32), (32, 8)) for batch in (1, 8) for tokens in BREAK_EVEN]
    click.echo(markdown(Table(HEAD, [timed(*case) for case in few])))
    if path:
        path.write_text(json.dumps({"device": device_line(), "bandwidth": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
