"""Attention of a decoding step to the best 1/16 of the tokens, beside reading them all.

    python benchmarks/attention_decode.py [--quick] [--json FILE]

Sparse attention is Double Sparsity's, everything included: norming and rotating nothing, appending key, value and
label, scoring 4-bit labels of a quarter of the channels, selecting, attending. Dense is the best of torch's backends,
which is spared the appending, and our own dense step. Steps are replayed as CUDA graphs over copies of the cache that
take turns, so that no cache of the GPU serves them; all ways take turns, too. Every result is compared with the
oracle's before anything is timed. Bytes are those that a step has to move; its bound is what they take at the measured
read bandwidth.
"""

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_attention import HEAD_DIM, Case, torchs_runs
from cuda_timing import announced_bandwidth, device_line
from figures import json_option, write_figures
from nearness import expect_near
from torch import Tensor
from turns import interleaved

from sparsepack.bench.linears import graph_seconds
from sparsepack.models.records.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.reference import double_sparsity as reference
from sparsepack.tables import Table, markdown

CHANNELS = 32
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
"""Bytes that the keys and values of all copies take, at least."""
LIMITS = {"sparse": 1e-3, "dense": 1e-3, "torch": 2e-2}
"""The largest relative error of a result; torch rounds its own to bfloat16."""


class SparseCase(Case):
    """The same steps, which may also read a share of the tokens."""

    def __init__(self, heads: int, kv_heads: int, batch: int, tokens: int) -> None:
        heavy = torch.stack([torch.randperm(HEAD_DIM)[:CHANNELS].sort().values for _ in range(kv_heads)]).cuda()
        super().__init__(heads, kv_heads, tokens, batch, nbytes=BYTES, channels=heavy, policy=POLICY)
        self.heavy, self.labelled = heavy, []
        for cache in self.caches:
            of = double_sparsity.double_sparsity_parameters(cache, heavy, POLICY)
            double_sparsity.label_append(of, 0, tokens, positions=torch.zeros_like(self.last))
            self.labelled.append(of)

    def sparse(self, number: int, cluster: int | None = None) -> Tensor:
        """Put a sparse step on the current stream; float32 [batch, heads * HEAD_DIM]."""
        of = self.labelled[number % len(self.labelled)]
        double_sparsity.attend(of, self.qkv, self.last, self.out, cluster=cluster)
        return self.out

    @property
    def sparse_bytes(self) -> int:
        """Labels and scales, and the selected tokens' keys and values."""
        each = CHANNELS // 2 + 2
        read = POLICY.budget(self.positions) * 4 * HEAD_DIM
        return self.batch * self.kv_heads * (self.positions * each + read)

    def selected(self, text: int) -> Tensor:
        """The tokens that a text's step reads of the first copy: bool [kv_heads, 1, tokens]."""
        of = self.labelled[0]
        queries = reference.label_queries(self.q[text].float(), self.heavy)
        scores = reference.label_scores(queries, of.codes[text], of.scales[text])
        return reference.select_tokens(scores, self.positions - 1, POLICY)


def measure(case: SparseCase, rounds: int, clusters: bool = False) -> dict[str, float]:
    """Seconds of each way; with `clusters`, of sparse steps of every number of blocks a key head, too."""
    expect_near("sparse", case.error(case.sparse(0), case.selected), LIMITS["sparse"])
    expect_near("dense", case.error(case.dense(0)), LIMITS["dense"])
    runs = {"sparse": graph_seconds(case.sparse, case.length), "dense": graph_seconds(case.dense, case.length)}
    runs |= torchs_runs(case, lambda found: expect_near("torch", case.error(found), LIMITS["torch"]))
    if clusters:
        for n in double_sparsity.CLUSTERS:
            try:
                expect_near("sparse", case.error(case.sparse(0, n), case.selected), LIMITS["sparse"])
            except RuntimeError as error:
                click.echo(f"{n} blocks: {error}")
                continue
            runs[f"sparse, {n}"] = graph_seconds(partial(case.sparse, cluster=n), case.length)
    return interleaved(runs, rounds)


def row_of(case: SparseCase, seconds: dict[str, float], bandwidth: float) -> list[str]:
    """A line of the table."""
    others = {name: taken for name, taken in seconds.items() if not name.startswith(("sparse", "dense"))}
    best, sparse = min(others, key=lambda name: others[name]), seconds["sparse"]
    return [
        f"{case.heads}/{case.kv_heads}",
        str(case.batch),
        str(case.positions),
        f"{others[best] * 1e6:.1f} ({best})",
        f"{seconds['dense'] * 1e6:.1f}",
        f"{sparse * 1e6:.1f}",
        f"{others[best] / sparse:.2f}",
        f"{case.nbytes / case.sparse_bytes:.1f}",
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
@json_option
def main(quick: bool, clusters: bool, json_path: Path | None) -> None:
    """Print the tables."""
    bandwidth, rounds = announced_bandwidth(), 3 if quick else 9
    results: list[dict[str, Any]] = []

    def timed(heads: int, kv_heads: int, batch: int, tokens: int) -> list[str]:
        case = SparseCase(heads, kv_heads, batch, tokens)
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
    write_figures(json_path, {"device": device_line(), "bandwidth": bandwidth, "results": results})


if __name__ == "__main__":
    main()
