"""What calibrating counts by kernels is what plain torch counts."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from emulated import needs_compiler

from sparsepack.calibrate import histogram
from sparsepack.calibrate.collector import SiteCounts, SiteInput, counted_by_torch
from sparsepack.calibrate.collectors import ATTENTION, product_sums, sums_by_torch
from sparsepack.runtime.cuda import calibration
from sparsepack.runtime.cuda.calibration import count_site

on_gpu = pytest.mark.gpu


def assert_counted_as_by_torch(x: torch.Tensor, norms: torch.Tensor, neurons: bool) -> None:
    site = SiteInput(x.cuda(), norms.cuda(), neurons)
    assert_same(site.counted, counted_by_torch(site), neurons)


def assert_same(found: SiteCounts, expected: SiteCounts, neurons: bool) -> None:
    assert torch.equal(found.scores, expected.scores)
    torch.testing.assert_close(found.squares, expected.squares, rtol=1e-6, atol=0)
    assert (found.active is None) == (not neurons)
    if neurons:
        assert torch.equal(found.active, expected.active)
        assert torch.equal(found.each.long(), expected.each)


@on_gpu
@pytest.mark.parametrize("neurons", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 33), (3, 300, 256), (2, 511, 1000), (1, 40, 14336)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_site_is_counted_as_by_torch(dtype, shape, neurons):
    generator = torch.Generator().manual_seed(sum(shape))
    windows, seen, columns = shape
    x = torch.randn(windows, seen + 3, columns, generator=generator) * torch.logspace(-4, 3, columns)
    x[torch.rand(x.shape, generator=generator) < 0.5] = 0
    norms = torch.rand(columns, generator=generator)
    assert_counted_as_by_torch(x.to(dtype)[:, 3:], norms, neurons)


FAR = [0.0, -0.0, 1e-44, 1e-38, 1e-20, -1e20, 3e38, torch.inf]
"""No bin but the first or the last holds such values, or their products with these norms."""
FAR_NORMS = [1e-30, 1e30]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_no_bin_holds_is_in_the_first_or_the_last(dtype):
    x = torch.tensor(FAR).to(dtype).view(1, 4, 2)
    assert_counted_as_by_torch(x, torch.tensor(FAR_NORMS), neurons=True)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "most_shared"),
    [
        *((torch.bfloat16, 227 << 10), (torch.float32, 99 << 10)),
        pytest.param(torch.float16, 227 << 10, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 99 << 10, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_processor_counts_by_the_same_kernel(emulation, monkeypatch, dtype, most_shared):
    """In blocks that have both histograms, and where a GPU has no room for them; zeros and what no bin holds, too."""
    for name in ("kernel", "launch"):
        monkeypatch.setattr(calibration, name, getattr(emulation, name))
    monkeypatch.setattr(calibration, "blocks_at_once", lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    memory = SimpleNamespace(shared_memory_per_block_optin=most_shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 90, 264, generator=generator)
    x[:, 40:][torch.rand(3, 50, 264, generator=generator) < 0.1] = 0
    x[1, 5, : len(FAR)] = torch.tensor(FAR)
    x = x.to(dtype)[:, 3:]
    norms = torch.rand(264, generator=generator)
    norms[: len(FAR_NORMS)] = torch.tensor(FAR_NORMS)
    found = SiteCounts(*count_site(x, norms, histogram.BINS, active=True))
    assert_same(found, counted_by_torch(SiteInput(x, norms, neurons=True)), neurons=True)


@on_gpu
def test_experts_and_vectors_that_lie_apart_are_counted():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 3, 64, generator=generator)
    assert_counted_as_by_torch(x[:, 2:], torch.rand(64, generator=generator), neurons=False)
    assert_counted_as_by_torch(x.transpose(1, 3)[:, :, 0], torch.rand(9, generator=generator), neurons=True)
    assert_counted_as_by_torch(x[:, :, 0], torch.rand(64, generator=generator), neurons=True)


@on_gpu
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "channels"), [(4, 4, 64), (12, 2, 80), (5, 1, 128), (2, 2, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_queries_and_keys_are_summed_as_by_torch(dtype, heads, kv_heads, channels, window):
    generator = torch.Generator().manual_seed(heads)
    # As the model makes them: heads of a token lie one beside the other.
    query, key = (
        torch.randn(2, 333, count, channels, generator=generator).to("cuda", dtype).transpose(1, 2)[:, :, 3:]
        for count in (heads, kv_heads)
    )
    found = ATTENTION.count(query, key, window)
    expected = (*sums_by_torch(query, key), product_sums(query, key, window))
    assert [value.shape for value in found] == [value.shape for value in expected]
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
