"""Where experts lie on a GPU, and how their products are laid over it; no GPU is needed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import simulated
import torch
from zigzag_cases import random_matrix

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts
from sparsepack.runtime.cuda.products import experts, tile_config
from sparsepack.runtime.cuda.products.experts import blocks, load_experts
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, expert_tile_config
from sparsepack.runtime.cuda.products.zigzag import load_zigzag

SHAPES = [
    *((128, 8, 2048, 768, 0), (8, 2, 4096, 14336, 0), (4, 1, 64, 43, 0), (3, 3, 300, 256, 0), (512, 10, 2048, 512, 0)),
    *((60, 4, 2048, 1408, 4), (64, 8, 3584, 2560, 8), (2, 1, 64, 43, 1)),
]
"""Experts, those that a token is given, hidden, width, those that every token has."""


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(experts, "multiprocessors", lambda device: simulated.MULTIPROCESSORS)
    with simulated.launches():
        yield


@pytest.mark.parametrize("at_once", [1, 1 << 26])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("config", [CudaTileConfig(2, 8, 16, 2), CudaTileConfig(4, 8, 8, 1)], ids=str)
def test_experts_lie_one_after_the_other_as_each_would_alone(
    config: CudaTileConfig, gate: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "LOADED_AT_ONCE", at_once)
    each = [replace(random_matrix(1536, 70, seed=seed), row_scale=None) for seed in range(3)]
    each[1].blocks[..., 1] = 0x30  # the largest d is in the middle
    stored = PackedExperts(torch.stack([matrix.blocks for matrix in each]), MatrixFormat("Q4_K", "zigzag"), 1536, 70)
    loaded = load_experts(stored, 2, True, "cpu", config, gate=gate)
    alone = [load_zigzag(matrix, "cpu", config, gate=gate) for matrix in each]
    for number, matrix in enumerate(alone):
        assert torch.equal(loaded.expert(number).blocks, matrix.blocks)
        assert loaded.expert(number).gate_bands == matrix.gate_bands
    assert loaded.all.largest_d == max(matrix.largest_d for matrix in alone)
    assert loaded.all.largest_scale == max(matrix.largest_scale for matrix in alone)
    assert loaded.all.fp16_scale == min(matrix.fp16_scale for matrix in alone)


@pytest.mark.parametrize("texts", [1, 2, 5, 8])
@pytest.mark.parametrize(("count", "used", "hidden", "width", "shared"), SHAPES)
def test_blocks_that_wait_for_each_other_run_at_once(
    count: int, used: int, hidden: int, width: int, shared: int, texts: int
) -> None:
    """Of as many texts as are launched together."""
    for rows, columns, gate, added in ((2 * width, hidden, width % 256 == 0, False), (hidden, width, False, True)):
        bands = -(-rows // 256)
        config = expert_tile_config(bands, columns, torch.device("cpu"), used + shared, gate, added)
        tiles = -(-bands // config.tile_bands)
        matrix = torch.empty((count + shared) * tiles, 0)
        of_all = experts.zigzag.laid_out(matrix, rows, columns, config, bands // 2 if gate else 0, [[0.0], [0.0]])
        loaded = experts.CudaExperts(of_all, experts.Together(count, used, True, added, shared))
        at_once, of_texts = experts._spread(loaded, texts)
        assert 1 <= at_once <= texts
        assert of_texts.splits <= -(-columns // tile_config.COLUMNS_AT_ONCE)
        if added or of_texts.splits > 1:
            assert blocks(loaded, texts) * at_once <= simulated.MULTIPROCESSORS
        assert blocks(loaded, texts) == tiles * (used + shared) * of_texts.splits
