"""What stands between the products of attention by latents, against plain torch: on a GPU, and as the processor runs
it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated import Emulation, needs_compiler
from operations_for_tests import normal
from simulated_between import attend as simulated_attend
from simulated_between import join_latents as expected_heads
from simulated_between import latent_outputs as expected_outputs
from simulated_between import latent_queries as expected_queries
from simulated_between import norm_latents as expected_norms
from simulated_words import BUFFERS
from torch import Tensor

from sparsepack.models.blocks import Latent
from sparsepack.runtime.cuda.attention import latents
from sparsepack.runtime.cuda.attention.attention import attend as real_attend
from sparsepack.runtime.cuda.attention.kv_cache import CudaLatentKvCache
from sparsepack.runtime.cuda.attention.latents import (
    LatentWeights,
    join_latents,
    latent_outputs,
    latent_parts,
    latent_queries,
    of_ones,
)
from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, norm_latents
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention

EPS = 1e-6
SHAPES = {
    "odd": (Latent(q_rank=44, kv_rank=36, plain=10, turning=6, value=12), 3),
    "wide values": (Latent(q_rank=0, kv_rank=31, plain=3, turning=2, value=7), 5),
    "DeepSeek V3": (Latent(q_rank=1536, kv_rank=512, plain=128, turning=64, value=128), 128),
    "GLM-4.7-Flash": (Latent(q_rank=768, kv_rank=512, plain=192, turning=64, value=256), 20),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    if request.param == "processor":
        monkeypatch.setattr(latents, "kernel", emulation.kernel)
        monkeypatch.setattr(latents, "launch", emulation.launch)
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def product(rows: int, width: int, seed: int, biased: bool) -> Product:
    factor = 2.0 ** torch.arange(rows).remainder(5)
    return Product(normal(rows, width, seed=seed), factor, 0.5, normal(width, seed=seed + 1) if biased else None)


def on(product: Product, device: torch.device) -> Product:
    bias = None if product.bias is None else product.bias.to(device)
    return Product(product.sums.to(device), product.factor.to(device), product.inverse, bias)


@needs_compiler
@every_shape
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_heads_are_put_together(shape: str, rows: int, biased: bool, device: torch.device) -> None:
    of, heads = SHAPES[shape]
    if device.type == "cpu" and heads > 5:
        pytest.skip("takes long on a processor")
    BUFFERS.clear()
    q, kv = product(rows, heads * of.query, 1, biased), product(rows, heads * (of.plain + of.value), 5, biased)
    turning, width = normal(rows, of.turning, seed=9), 3 * heads * of.head_dim
    expected, found = torch.empty(rows, width), torch.full((rows, width), torch.nan, device=device)
    expected_heads(of, heads, q, kv, turning, expected)
    join_latents(of, heads, on(q, device), on(kv, device), turning.to(device), found)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["flag in data", "plain", "product"])
def test_latents_are_normed_and_the_rest_is_not(shape: str, rows: int, kind: str) -> None:
    of, heads = SHAPES[shape]
    if kind == "flag in data" and rows > 1:
        pytest.skip("one position has its flag in the data")
    BUFFERS.clear()
    queries, keys = of.into(heads)
    widths = (queries, of.kv_rank, keys - of.kv_rank)
    made = product(rows, sum(widths), 1, True)
    x: Tensor | Product = made if kind == "product" else made.sums
    norms = normal(queries, seed=2) if of.q_rank else None, normal(of.kv_rank, seed=3)
    expected = torch.empty(rows, sum(widths))
    expected_norms(x, norms, widths, EPS, expected)
    device = torch.device("cuda", torch.cuda.current_device())
    _, (there, y) = flag_in_data_buffers([made.sums.numel()] * 2, device)
    there.copy_(made.sums.flatten())
    on_device = None if norms[0] is None else norms[0].cuda(), norms[1].cuda()
    of_rows = on(made, device) if kind == "product" else there.view(rows, -1)
    norm_latents(of_rows, on_device, widths, EPS, y, flag_in_data=kind == "flag in data")
    torch.testing.assert_close(y.cpu(), expected.flatten(), rtol=1e-5, atol=1e-5)
    parts = latent_parts(of, heads, y, rows)
    assert [part.shape for part in parts] == [(rows, width) for width in widths]


@pytest.mark.gpu
@every_shape
def test_what_has_its_flag_in_the_data_is_read_the_same(shape: str) -> None:
    of, heads = SHAPES[shape]
    device = torch.device("cuda", torch.cuda.current_device())
    widths = (heads * of.query, heads * (of.plain + of.value), of.turning)
    _, words = flag_in_data_buffers([*widths, 3 * heads * of.head_dim], device)
    q, kv, turning, qkv = (each.view(1, -1) for each in words)
    for number, each in enumerate((q, kv, turning)):
        each.copy_(normal(*each.shape, seed=number))
    plain = torch.empty_like(qkv)
    for to, flag in ((qkv, True), (plain, False)):
        join_latents(of, heads, of_ones(q), of_ones(kv), turning, to, flag_in_data=flag)
    assert torch.equal(qkv, plain)


def weights_of(of: Latent, heads: int, biased: bool, device: torch.device) -> LatentWeights:
    keys, values = (normal(heads, rows, of.kv_rank, seed=rows).half().to(device) for rows in (of.plain, of.value))
    bias = normal(heads * (of.plain + of.value), seed=7).to(device) if biased else None
    return LatentWeights(of, keys, values, 0.125, bias, 5)


def on_cpu(of: LatentWeights) -> LatentWeights:
    return replace(of, keys=of.keys.cpu(), values=of.values.cpu(), bias=None if of.bias is None else of.bias.cpu())


@needs_compiler
@every_shape
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_what_latents_are_multiplied_with(shape: str, texts: int, biased: bool, device: torch.device) -> None:
    of, heads = SHAPES[shape]
    if device.type == "cpu" and (heads > 5 or texts > 1):
        pytest.skip("takes long on a processor")
    BUFFERS.clear()
    weights = weights_of(of, heads, biased, device)
    q, latents = normal(texts, heads * of.query, seed=1), normal(texts, of.kv_rank, seed=2)
    turning, mixed = normal(texts, of.turning, seed=3), normal(texts, heads * of.kv_rank, seed=4)
    for flag in {False, device.type == "cuda" and texts == 1}:
        sizes = [(heads + 1) * (of.turning + of.kv_rank), heads * of.value]
        found = [torch.full((texts, size), torch.nan, device=device) for size in sizes]
        expected = [torch.empty(texts, size) for size in sizes]
        active = torch.zeros((), dtype=torch.int64, device=device)
        there = [each.to(device) for each in (q, latents, turning)]
        latent_queries(weights, *there, found[0], active=active, flag_in_data=flag)
        latent_outputs(weights, mixed.to(device), found[1], flag_in_data=flag)
        expected_queries(on_cpu(weights), q, latents, turning, expected[0])
        expected_outputs(on_cpu(weights), mixed, expected[1])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
        assert int(active) == 5


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("type", ["bf16", "f32"])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("lengths", [(0, 1, 5), (31, 700, 64), (1999, 3, 1024)], ids=str)
def test_cached_latents_are_attended_to(shape: str, type: str, texts: int, lengths: tuple[int, ...]) -> None:
    """The new row is part of the cache afterwards."""
    of, heads = SHAPES[shape]
    if (of.kv_rank + of.turning) % 2:
        pytest.skip("a row of an odd number of channels")
    BUFFERS.clear()
    device, context = torch.device("cuda", torch.cuda.current_device()), 2000
    angles = normal(context, of.turning // 2, seed=5).to(device)
    layer = LayerAttention()
    whole = AttentionShape(
        *(heads, heads, of.head_dim, 1e-5, angles.cos(), angles.sin(), (layer,), texts),
        scale=0.1,
        neighbours=True,
        value_dim=of.value,
        latents=of,
    )
    caches = CudaLatentKvCache(whole, type, device), CudaLatentKvCache(whole, type, device)
    rows = normal(texts, context, of.turning + of.kv_rank, seed=6)
    qkv = normal(texts, (heads + 1) * (of.turning + of.kv_rank), seed=8).to(device)
    results = []
    for cache, attend in zip(caches, (real_attend, simulated_attend), strict=True):
        parameters = cache._layers[0]
        parameters.keys[:, 0].copy_(rows)
        out = torch.full((texts, heads * of.kv_rank), torch.nan, device=device)
        positions = torch.tensor(lengths[:texts], dtype=torch.int32, device=device)
        attend(parameters, qkv, positions, out)
        results.append((out, parameters.keys))
    bound = 2e-2 if type == "bf16" else 2e-4  # of the new row, rounded another way
    torch.testing.assert_close(results[0][0], results[1][0], rtol=bound, atol=bound)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=bound, atol=bound)


def test_shapes_that_do_not_fit_are_named() -> None:
    of, heads = SHAPES["odd"]
    q, kv = product(2, heads * of.query, 1, False), product(2, heads * (of.plain + of.value), 5, False)
    with pytest.raises(ValueError, match=r"turning \[2, 5\]: expected \[2, 6\]"):
        join_latents(of, heads, q, kv, torch.zeros(2, 5), torch.zeros(2, 3 * heads * of.head_dim))
