"""Decoding a model with SiLU on a card too small for it: matrices that have no room are shared by processor and bus.

    python benchmarks/far_decode.py --shape 13b [--vram LIST] [--sites all] [--llama-bench PATH] [--json FILE]

Random weights of the shape as zigzag-q4_k, all blocks the same ones, with thresholds of the model's own inputs
(`thresholds.py`) at the site mlp_mid alone or at all sites, so that --sparsity of the columns are skipped; what was
skipped is printed. Without --vram: a quarter, a half and three quarters of the bytes. Keys and values in float16. A
token is timed as a user waits for it: chosen on the GPU, read by the host.

First two blocks of the same widths are compared with the reference backend, with matrices everywhere: a wrong engine is
not timed. Ours runs sparse and dense in turns. The peer is the best split of llama.cpp within the same budget by its
own report (`llama_cpp_offload.py`), timed before ours is loaded and after it is gone; without --llama-bench it is not
run.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from cuda_synthetic import CONTEXT, random_model
from cuda_timing import device_line
from figures import write_figures
from nearness import expect_near, relative_error
from synthetic import Size, llama_config, random_ids
from thresholds import find_thresholds, with_thresholds
from turns import in_turns
from within_budgets import (
    CHECKED,
    HEAD,
    LIMIT,
    PROMPT,
    Asked,
    asked_options,
    beside,
    best_of,
    decode_seconds,
    freed,
    links_of,
    row_of,
)

from sparsepack.formats.codecs.matrices import PackedMatrix
from sparsepack.formats.packed import DenseMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of
from sparsepack.placement.budget import in_words
from sparsepack.placement.ways import per_token, per_token_in_words
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.far_decoder import CudaFarDecoder
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

DOWN, ALL = "mlp_mid", "all"


def sparse_model(size: Size, sparsity: float, sites: str, device: str = "cuda") -> PackedModel:
    """A model of a size in the host's memory, whose blocks are the same one."""
    two = random_model(size, layers=2, device=device)
    (found,) = find_thresholds(two, [sparsity]).values()
    kept = {key: value for key, value in found.items() if sites == ALL or key[1] == sites}
    layer = _here(with_thresholds(two, kept).layers[1])
    output, embedding = (PackedMatrix(m.blocks.cpu(), m.type, m.rows, m.columns) for m in (two.output, two.embedding))
    return replace(
        two,
        architecture=architecture_of(llama_config(size, max_position_embeddings=CONTEXT), None),
        layers=(layer,) * size.layers,
        embedding=embedding,
        output=output,
        output_norm=two.output_norm.cpu(),
        manifest={**two.manifest, "kind": "zigzag-q4_k", "thresholds": {"sparsity": sparsity}},
    )


def _here(layer: PackedLayer) -> PackedLayer:
    def site(of: PackedSite) -> PackedSite:
        matrix = PackedMatrix(of.matrix.blocks.cpu(), of.matrix.type, of.matrix.rows, of.matrix.columns)
        return replace(of, matrix=matrix, rule=None if of.rule is None else of.rule.to("cpu"))

    assert isinstance(layer.mlp, DenseMlp)
    return replace(
        layer,
        attention={name: site(of) for name, of in layer.attention.items()},
        norms={name: norm.cpu() for name, norm in layer.norms.items()},
        mlp=DenseMlp({name: site(of) for name, of in layer.mlp.sites.items()}),
    )


def check(size: Size, sparsity: float, sites: str) -> dict[str, float]:
    """How far logits of two blocks are from the reference backend's, by the share of weights that has room."""
    packed = sparse_model(replace(size, layers=2), sparsity, sites)
    ids = random_ids(size.vocabulary, CHECKED, seed=2)
    oracle = Engine(packed, device="cuda", context=64, backend="reference", dense=True)
    expected = oracle.teacher_forced(ids, len(ids)).double()
    del oracle
    parts, found = parts_of(packed, 64, "f16"), dict[str, float]()
    for share in (0.0, 0.5, 0.9):
        vram = f"{(parts.least + share * (parts.weights - parts.embedding)) / 1e6:.6f}MB"
        engine = Engine(packed, EngineOptions(device="cuda", context=64, cache_type="f16", vram=vram), dense=True)
        logits = torch.stack([engine.prefill(ids[:8]), *(engine.step(id) for id in ids[8:])]).double()
        found[f"{share:.0%} on the card"] = expect_near("logits", relative_error(logits, expected[7:]), LIMIT)
        del engine
        freed()
    return found


def ours(packed: PackedModel, budget: int, settings: EngineOptions, tokens: int, rounds: int) -> dict[str, Any]:
    """Sparse and dense: seconds of a token in each round, and what a token took."""
    start = time.perf_counter()
    engine = Engine(packed, replace(settings, vram=f"{budget / 1e6:.6f}MB"))
    loading = time.perf_counter() - start
    if not isinstance(engine._decoder, CudaFarDecoder):
        raise click.ClickException(f"{in_words(budget)} hold the whole model: no matrix is far there")
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    found: dict[str, Any] = {}

    def timed(mode: str) -> float:
        engine.dense = mode == "dense"
        seconds = decode_seconds(engine, prompt, tokens)
        ways = engine.ways
        assert ways is not None
        skipped = engine.skipped()
        found[mode] = {
            **per_token(ways, seconds),
            "skipped": None if skipped is None else skipped.of_sparse_sites,
            "slots": ways.plan.share,
            "loading": loading,
            "description": engine.description,
        }
        return seconds

    for mode, seconds in in_turns({mode: partial(timed, mode) for mode in ("sparse", "dense")}, rounds, 1).items():
        found[mode]["seconds"] = seconds
    return found


@click.command()
@asked_options(tokens=64)
@click.option("--sparsity", default=0.5, show_default=True, help="The share of columns that thresholds skip.")
@click.option("--sites", type=click.Choice([DOWN, ALL]), default=DOWN, show_default=True, help="With thresholds.")
def main(asked: Asked, sparsity: float, sites: str, json_path: Path | None) -> None:
    """Print a table for each budget, and write the figures so far."""
    size, tokens, rounds, threads = asked.size, asked.tokens, asked.rounds, asked.threads
    packed, context = sparse_model(size, sparsity, sites), PROMPT + tokens
    settings = EngineOptions(device="cuda", context=context, cache_type="f16", threads=threads)
    parts = parts_of(packed, context, "f16")
    budgets = asked.budgets(parts)
    differences = check(size, sparsity, sites)
    freed()
    click.echo(
        f"{device_line()}, {threads} threads; {size.name}, {in_words(parts.weights)} of weights, context {context}\n"
        f"logits differ from the reference backend's by: {differences}"
    )
    report: dict[str, Any] = {"device": device_line(), "threads": threads, "size": asdict(size), "check": differences}
    if asked.tune:
        click.echo(links_of(size, threads))
    peer = asked.peer(parts, mlp=parts.gates[0] + parts.neurons * parts.record)
    for budget in budgets:
        found, of_splits = beside(peer, budget, rounds, partial(ours, packed, budget, settings, tokens, rounds))
        theirs = {split.name: speeds for split, speeds in of_splits.items()}
        best = best_of(theirs)
        rows = [row_of(f"llama.cpp, {name}", speeds, best, {}) for name, speeds in theirs.items()]
        rows += [row_of(f"ours, {mode}", [1 / each for each in of["seconds"]], best, of) for mode, of in found.items()]
        skipped, loading = found["sparse"]["skipped"], found["sparse"]["loading"]
        told = [f"{skipped:.1%} of the weights of sites with thresholds were skipped, loaded in {loading:.0f} s"]
        told += [f"{mode}: {per_token_in_words(of)}" for mode, of in found.items()]
        told.append(found["sparse"]["description"])
        click.echo(markdown(Table(HEAD, rows, f"{size.name} in {in_words(budget)}, {sites} at {sparsity:g}", told)))
        report[in_words(budget)] = {
            "ours": found,
            "llama.cpp": theirs,
            "splits": [asdict(split) for split in of_splits],
        }
        write_figures(json_path, report)


if __name__ == "__main__":
    main()
