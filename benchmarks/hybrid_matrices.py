"""Decoding a model with SiLU on a GPU too small for it: matrices that have no room are shared by processor and bus.

Random weights as zigzag-q4_k, all blocks the same ones, with thresholds of the model's own inputs at the site mlp_mid
alone or at all sites, so that --sparsity of the columns are skipped; what was skipped is printed. Without --vram: a
quarter, a half and three quarters of the bytes. Keys and values in float16. A token is timed as a user waits for it:
chosen on the GPU, read by the host.

First two blocks of the same widths are compared with the reference backend, with matrices everywhere. Ours runs sparse
and dense in turns; with --planes BITS also a model of planes of the same shape in the same budget, with thresholds of
levels at all sites under which a token reads so many bits of a weight. The peer is the best split of llama.cpp within
the same budget by its own report (--llama-bench), timed before ours is loaded and after it is gone.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.shared.budgets import (
    CHECKED,
    LIMIT,
    PROMPT,
    BudgetRequest,
    bandwidth_tensor,
    budget_options,
    decode_seconds,
    free_memory,
    measure_budgets,
)
from benchmarks.shared.random_models import random_model
from benchmarks.shared.shapes import CONTEXT, Size, llama_config, random_ids
from benchmarks.shared.thresholds import find_levels, find_thresholds, with_limits, with_thresholds
from benchmarks.shared.timing import check_close, device_line, interleave, relative_error
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.packed import DenseMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.activity import bits_read
from sparsepack.models.hf_config import architecture_of
from sparsepack.placement.budget import format_bytes
from sparsepack.placement.traffic import per_token
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid.plan import parts_of
from sparsepack.runtime.options import EngineOptions

DOWN, ALL, PLANES = "mlp_mid", "all", "planes"


def sparse_model(size: Size, sparsity: float, sites: str, device: str = "cuda") -> PackedModel:
    """A model of a size in the host's memory, whose blocks are the same one."""
    two = random_model(size, layers=2, device=device)
    (found,) = find_thresholds(two, [sparsity]).values()
    kept = {key: value for key, value in found.items() if sites == ALL or key[1] == sites}
    return _of_one_block(size, two, with_thresholds(two, kept).layers[1], "zigzag-q4_k", sparsity)


def planes_model(size: Size, bits: float, device: str = "cuda") -> PackedModel:
    """The same of planes, of whose weights a token reads so many bits."""
    two = random_model(size, layers=2, device=device, block="Q6_P")
    (found,) = find_levels(two, [bits]).values()
    assert two.plane_bits is not None
    layer = with_limits(two, found).layers[1]
    return _of_one_block(size, two, layer, "zigzag-q6_p", 1 - bits / two.plane_bits)


def _of_one_block(size: Size, two: PackedModel, block: PackedLayer, kind: str, sparsity: float) -> PackedModel:
    layer = _to_host(block)
    output, embedding = (PackedMatrix(m.blocks.cpu(), m.format, m.rows, m.columns) for m in (two.output, two.embedding))
    return replace(
        two,
        architecture=architecture_of(llama_config(size, max_position_embeddings=CONTEXT), None),
        layers=(layer,) * size.layers,
        embedding=embedding,
        output=output,
        output_norm=two.output_norm.cpu(),
        manifest={**two.manifest, "kind": kind, "thresholds": {"sparsity": sparsity}},
    )


def _two_blocks(packed: PackedModel) -> dict[str, Any]:
    """What makes two blocks of a model."""
    a, windows = packed.architecture, packed.architecture.sliding_windows[:2]
    return {"architecture": replace(a, layers=2, sliding_windows=windows), "layers": packed.layers[:2]}


def _to_host(layer: PackedLayer) -> PackedLayer:
    def site(of: PackedSite) -> PackedSite:
        matrix = PackedMatrix(of.matrix.blocks.cpu(), of.matrix.format, of.matrix.rows, of.matrix.columns)
        return replace(of, matrix=matrix, rule=None if of.rule is None else of.rule.to("cpu"))

    assert isinstance(layer.mlp, DenseMlp)
    return replace(
        layer,
        attention={name: site(of) for name, of in layer.attention.items()},
        norms={name: norm.cpu() for name, norm in layer.norms.items()},
        mlp=DenseMlp({name: site(of) for name, of in layer.mlp.sites.items()}),
    )


def check(size: Size, packed: PackedModel) -> dict[str, float]:
    """How far dense logits of a model of two blocks are from the reference backend's, by the share of weights that has
    room."""
    ids = random_ids(size.vocabulary, CHECKED, seed=2)
    oracle = Engine(packed, device="cuda", context=64, backend="reference", dense=True)
    expected = oracle.teacher_forced(ids, len(ids)).double()
    del oracle
    parts, found = parts_of(packed, 64, "f16"), dict[str, float]()
    for share in (0.0, 0.5, 0.9):
        vram = f"{(parts.least + share * (parts.weights - parts.embedding)) / 1e6:.6f}MB"
        engine = Engine(packed, EngineOptions(device="cuda", context=64, cache_type="f16", vram=vram), dense=True)
        logits = torch.stack([engine.prefill(ids[:8]), *(engine.step(id) for id in ids[8:])]).double()
        found[f"{share:.0%} on the card"] = check_close("logits", relative_error(logits, expected[7:]), LIMIT)
        del engine
        free_memory()
    return found


def ours(
    packed: PackedModel, budget: int, settings: EngineOptions, tokens: int, rounds: int, planes: PackedModel | None
) -> dict[str, Any]:
    """Sparse and dense, and the model of planes where there is one: seconds of a token in each round, and what a token
    took."""
    engines, loading = dict[str, Engine](), dict[str, float]()
    for mode, model in (("sparse", packed), (PLANES, planes)):
        if model is None:
            continue
        start = time.perf_counter()
        engines[mode] = Engine(model, replace(settings, vram=f"{budget / 1e6:.6f}MB"))
        loading[mode] = time.perf_counter() - start
        decoder = engines[mode]._decoder
        if not isinstance(decoder, CudaDecoder) or decoder.cpu_gpu is None:
            raise click.ClickException(f"{format_bytes(budget)} hold the whole model: no matrix is offloaded there")
    engines["dense"], loading["dense"] = engines["sparse"], loading["sparse"]
    prompt = random_ids(packed.architecture.vocabulary, PROMPT, seed=3)
    found: dict[str, Any] = {}

    def timed(mode: str) -> float:
        engine = engines[mode]
        engine.dense = mode == "dense"
        seconds = decode_seconds(engine, prompt, tokens)
        ways = engine.traffic_stats
        assert ways is not None
        skipped = engine.skipped()
        found[mode] = {
            **per_token(ways, seconds),
            "skipped": None if skipped is None else skipped.of_sparse_sites,
            "slots": ways.plan.share,
            "loading": loading[mode],
            "description": engine.description,
        }
        return seconds

    modes = {mode: partial(timed, mode) for mode in ("sparse", "dense", PLANES) if mode in engines}
    for mode, seconds in interleave(modes, rounds, 1).items():
        found[mode]["seconds"] = seconds
    return found


@click.command()
@budget_options(tokens=64)
@click.option("--sparsity", default=0.5, show_default=True, help="The share of columns that thresholds skip.")
@click.option("--sites", type=click.Choice([DOWN, ALL]), default=DOWN, show_default=True, help="With thresholds.")
@click.option("--planes", "bits", type=float, help="Beside it a model of planes, so many bits of a weight read.")
def main(request: BudgetRequest, sparsity: float, sites: str, bits: float | None, json_path: Path | None) -> None:
    """Print a table for each budget."""
    size, threads, context = request.size, request.threads, PROMPT + request.tokens
    packed = sparse_model(size, sparsity, sites)
    planes = None if bits is None else planes_model(size, bits)
    settings = EngineOptions(device="cuda", context=context, cache_type="f16", threads=threads)
    parts = parts_of(packed, context, "f16")
    differences = check(size, replace(packed, **_two_blocks(packed)))
    if planes is not None:
        of_planes = check(size, replace(planes, **_two_blocks(planes)))
        differences |= {f"{PLANES}, {share}": error for share, error in of_planes.items()}
    free_memory()
    click.echo(
        f"{device_line()}, {threads} threads; {size.name}, {format_bytes(parts.weights)} of weights, "
        f"context {context}\n"
        f"logits differ from the reference backend's by: {differences}"
    )
    if request.tune:
        click.echo(bandwidth_tensor(size, threads))

    def notes(found: Mapping[str, Any]) -> list[str]:
        said = [f"{found['sparse']['skipped']:.1%} of the weights of sites with thresholds were skipped"]
        if planes is not None and planes.plane_bits is not None:
            said.append(f"{PLANES}: {bits_read(planes.plane_bits, found[PLANES]['skipped'], planes.sparsity)}")
        return said

    report = {"device": device_line(), "threads": threads, "size": asdict(size), "check": differences}
    peer = request.peer(parts, mlp=parts.gates[0] + parts.neurons * parts.record)
    run = partial(ours, packed, settings=settings, tokens=request.tokens, rounds=request.rounds, planes=planes)
    title = f"{size.name} in {{}}, {sites} at {sparsity:g}".format
    measure_budgets(request, request.budgets(parts), peer, run, title, notes, report, json_path)
