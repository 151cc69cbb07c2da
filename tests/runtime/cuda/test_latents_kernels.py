"""What stands between the products of attention by latents, against plain torch: on a GPU, and as the processor runs
it."""

from collections.abc import Iterator

import pytest
import torch
from emulated import Emulation, needs_compiler
from operations_for_tests import normal
from simulated_between import join_latents as expected_heads
from simulated_between import norm_latents as expected_norms
from simulated_words import BUFFERS
from torch import Tensor

from sparsepack.models.blocks import Latent
from sparsepack.runtime.cuda.attention import latents
from sparsepack.runtime.cuda.attention.latents import join_latents, latent_parts, of_ones
from sparsepack.runtime.cuda.driver.memory import flag_in_data_buffers
from sparsepack.runtime.cuda.products.gemm_fp16 import Product, norm_latents

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
        pytest.skip("threads of a GPU are threads of the system here")
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


def test_shapes_that_do_not_fit_are_named() -> None:
    of, heads = SHAPES["odd"]
    q, kv = product(2, heads * of.query, 1, False), product(2, heads * (of.plain + of.value), 5, False)
    with pytest.raises(ValueError, match=r"turning \[2, 5\]: expected \[2, 6\]"):
        join_latents(of, heads, q, kv, torch.zeros(2, 5), torch.zeros(2, 3 * heads * of.head_dim))
