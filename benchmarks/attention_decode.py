"""Attention of a decoding step on the GPU: torch's best, ours to all tokens, ours to the best 1/16 of them.

Ours also rotates q and k and appends k and v, which torch is spared. Sparse attention is Double Sparsity's, everything
included: appending the label, scoring 4-bit labels of a quarter of the channels, selecting, attending. Steps are
replayed as CUDA graphs over copies of the cache that take turns, so that no cache of the GPU serves them; all sides
take turns, too. Every result is compared with float64 before anything is timed. Bytes are those that a step has to
move; its bound is what they take at the measured read bandwidth.
"""

import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shared.timing import (
    announced_bandwidth,
    check_close,
    device_line,
    interleaved,
    json_option,
    of_bound,
    relative_error,
    rotation,
    write_figures,
)
from sparsepack.bench.linears import graph_seconds
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.cuda.attention.attention import AttentionParameters, attend
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import double_sparsity as reference
from sparsepack.tables import Table, markdown

HEAD_DIM = 128
CHANNELS = 32
CASES = (
    *((32, kv_heads, 1, tokens) for kv_heads in (8, 32) for tokens in (128, 1024, 4096, 16384, 65536)),
    *((32, 32, batch, 16384) for batch in (4, 16, 32)),
    (32, 8, 16, 16384),
    (32, 8, 32, 65536),
    *((32, kv_heads, batch, tokens) for kv_heads in (32, 8) for batch in (1, 8) for tokens in (512, 2048, 8192)),
)
"""Query heads, key heads, sequences, tokens; of few tokens, to see from where on sparse attention pays."""
SPARSE_FROM = 512
"""Of fewer tokens sparse attention is not timed."""
POLICY = TokenPolicy(Fraction(1, 16), sinks=4, recent=64, min_context=0)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BYTES = 1 << 30
"""Bytes that the keys and values of all copies take, at least."""
FEWEST = 20
"""Steps that are replayed together, at least."""
LIMITS = {"sparse": 1e-3, "dense": 1e-3, "torch": 2e-2}
"""The largest relative error of a result; torch rounds its own to bfloat16."""
WHY_NOT = r"(?s).*Triggered internally at .*sdp_utils"
"""Warnings in which torch says why a backend has no kernel for a case."""
HEAD = ["heads", "sequences", "tokens", "torch's best, us", "our dense", "x", "of bound", "sparse"]
HEAD += ["x our dense", "fewer bytes", "MiB", "of bound"]


class Case:
    """Steps of sequences with so many tokens each, the new ones included, over copies of their cache in rotation."""

    def __init__(self, heads: int, kv_heads: int, batch: int, tokens: int) -> None:
        self.heads, self.kv_heads, self.batch, self.tokens = heads, kv_heads, batch, tokens
        self.nbytes = 2 * batch * kv_heads * tokens * HEAD_DIM * torch.bfloat16.itemsize
        copies, self.length = rotation(self.nbytes, BYTES, runs=FEWEST)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.heavy = torch.stack([torch.randperm(HEAD_DIM)[:CHANNELS].sort().values for _ in range(kv_heads)]).cuda()
        # A rotation by nothing, which takes as long as any.
        cos, layer = torch.ones(tokens, HEAD_DIM // 2, device="cuda"), LayerAttention(channels=self.heavy)
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, 0.0, cos, torch.zeros_like(cos), (layer,), batch, POLICY)
        sizes = (batch, kv_heads, tokens, HEAD_DIM)
        self.caches = [AttentionParameters(shape, layer, normal(*sizes), normal(*sizes)) for _ in range(copies)]
        self.q = normal(batch, heads, 1, HEAD_DIM)
        new = [cached[:, :, -1].reshape(batch, -1) for cached in (self.caches[0].keys, self.caches[0].values)]
        self.qkv = torch.cat([self.q.flatten(1), *new], dim=1).float()
        self.last = torch.full((batch,), tokens - 1, dtype=torch.int32, device="cuda")
        self.out = torch.empty(batch, heads * HEAD_DIM, device="cuda")
        self.labelled = []
        for cache in self.caches if tokens >= SPARSE_FROM else ():
            of = double_sparsity.double_sparsity_parameters(cache, self.heavy, POLICY)
            double_sparsity.label_append(of, 0, tokens, positions=torch.zeros_like(self.last))
            self.labelled.append(of)

    def dense(self, number: int) -> Tensor:
        """Put a step of ours on the current stream; float32 [batch, heads * HEAD_DIM]."""
        attend(self.caches[number % len(self.caches)], self.qkv, self.last, self.out)
        return self.out

    def sparse(self, number: int) -> Tensor:
        """Put a sparse step on the current stream; float32 [batch, heads * HEAD_DIM]."""
        double_sparsity.attend(self.labelled[number % len(self.labelled)], self.qkv, self.last, self.out)
        return self.out

    def torch_dense(self, number: int) -> Tensor:
        """The same by torch, over a cache that has the new position already: bfloat16 [batch, heads, 1, HEAD_DIM]."""
        of = self.caches[number % len(self.caches)]
        return scaled_dot_product_attention(self.q, of.keys, of.values, enable_gqa=self.heads != self.kv_heads)

    @property
    def sparse_bytes(self) -> int:
        """Labels and scales, and the selected tokens' keys and values."""
        read = POLICY.budget(self.tokens) * 4 * HEAD_DIM
        return self.batch * self.kv_heads * (self.tokens * (CHANNELS // 2 + 2) + read)

    def selected(self, sequence: int) -> Tensor:
        """Return the tokens that a sequence's step reads of the first copy: bool [kv_heads, 1, tokens]."""
        of = self.labelled[0]
        queries = reference.label_queries(self.q[sequence].float(), self.heavy)
        scores = reference.label_scores(queries, of.codes[sequence], of.scales[sequence])
        return reference.select_tokens(scores, self.tokens - 1, POLICY)

    def error(self, found: Tensor, selected: Callable[[int], Tensor] | None = None) -> float:
        """Return how far the first copy's result is from float64; of the first and the last sequence, the larger.

        selected -- the tokens that a sequence reads, bool [kv_heads, 1, tokens]; None: all
        """
        everything, worst = torch.ones(self.kv_heads, 1, self.tokens, dtype=torch.bool, device="cuda"), 0.0
        for n in {0, self.batch - 1}:
            inputs = (x[n].double() for x in (self.q, self.caches[0].keys, self.caches[0].values))
            expected = reference.attend_selected(*inputs, selected(n) if selected else everything)
            worst = max(worst, relative_error(found[n].double().flatten(), expected.flatten()))
        return worst


def _with_backend(case: Case, backend: SDPBackend) -> Callable[[int], None]:
    """Return torch's step by one of its backends."""

    def run(number: int) -> None:
        with sdpa_kernel(backend):
            case.torch_dense(number)

    return run


def torch_runs(case: Case) -> dict[str, Callable[[], float]]:
    """Check each of torch's backends that has a kernel for a case; return what replays it."""
    runs = {}
    for backend in BACKENDS:
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.filterwarnings("ignore", WHY_NOT, UserWarning)
                found = case.torch_dense(0)
        except RuntimeError:  # it has no kernel for this
            continue
        check_close("torch", case.error(found), LIMITS["torch"])
        name = backend.name.removesuffix("_ATTENTION").lower()
        runs[name] = graph_seconds(_with_backend(case, backend), case.length)
    return runs


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Return the seconds of each side."""
    check_close("dense", case.error(case.dense(0)), LIMITS["dense"])
    runs = {"dense": graph_seconds(case.dense, case.length), **torch_runs(case)}
    if case.labelled:
        check_close("sparse", case.error(case.sparse(0), case.selected), LIMITS["sparse"])
        runs["sparse"] = graph_seconds(case.sparse, case.length)
    return interleaved(runs, rounds)


def row_of(case: Case, seconds: dict[str, float], bandwidth: float) -> list[str]:
    """Return a row of the table."""
    others = {name: taken for name, taken in seconds.items() if name not in ("sparse", "dense")}
    best, dense = min(others, key=lambda name: others[name]), seconds["dense"]
    cells = [
        *(f"{case.heads}/{case.kv_heads}", str(case.batch), str(case.tokens)),
        *(f"{others[best] * 1e6:.1f} ({best})", f"{dense * 1e6:.1f}", f"{others[best] / dense:.2f}"),
        of_bound(case.nbytes, dense, bandwidth),
    ]
    if "sparse" not in seconds:
        return [*cells, *"-----"]
    sparse = seconds["sparse"]
    cells += [f"{sparse * 1e6:.1f}", f"{dense / sparse:.2f}", f"{case.nbytes / case.sparse_bytes:.1f}"]
    return [*cells, f"{case.sparse_bytes / 2**20:.1f}", of_bound(case.sparse_bytes, sparse, bandwidth)]


@click.command()
@click.option("--quick", is_flag=True, help="Three rounds.")
@json_option
def main(quick: bool, json_path: Path | None) -> None:
    """Print the table."""
    bandwidth, rows, results = announced_bandwidth(), list[list[str]](), list[dict[str, Any]]()
    for shape in CASES:
        case = Case(*shape)
        seconds = measure(case, 3 if quick else 9)
        rows.append(row_of(case, seconds, bandwidth))
        results.append({"case": shape, "bytes": [case.nbytes, case.sparse_bytes], "seconds": seconds})
        del case
        torch.cuda.empty_cache()
    click.echo(markdown(Table(HEAD, rows)))
    write_figures(json_path, {"device": device_line(), "bandwidth": bandwidth, "results": results})
