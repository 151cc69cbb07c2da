"""Blocks as kernels take them apart, run by the processor, against what they decode to."""

import pytest
import torch
from emulated import Emulation, needs_compiler
from zigzag_cases import CUDA_BLOCKS, random_matrix

from sparsepack.formats.matrix import decode_matrix
from sparsepack.runtime.cuda.driver.kernel import FOLDER
from sparsepack.runtime.cuda.driver.memory import DividedPlace, on_card
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig


@needs_compiler
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("block", CUDA_BLOCKS[1:])
def test_lanes_have_the_weights_of_their_rows(
    emulation: Emulation, block: str, gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zigzag, "kernel", emulation.kernel)
    monkeypatch.setattr(zigzag, "launch", emulation.launch)
    monkeypatch.setattr(zigzag, "multiprocessors", lambda device: 1)
    stored = random_matrix(1024, 5, block=block)
    matrix = zigzag.load_zigzag(stored, "cpu", CudaTileConfig(2, 8, 8, 1), gate=gate)
    out = torch.zeros(5, 1024, dtype=torch.float16)
    zigzag.dequantise(matrix, out, 0, 4)
    expected = decode_matrix(stored).t() * matrix.fp16_scale
    assert expected.abs().max() < 65504
    assert (out.float() - expected).norm() < 4e-4 * expected.norm()


@needs_compiler
@pytest.mark.parametrize(("planes", "tile_bands", "gate"), [(1, 4, False), (2, 2, True), (3, 1, False), (4, 2, False)])
def test_lanes_have_planes_that_lie_elsewhere(
    emulation: Emulation, planes: int, tile_bands: int, gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zigzag, "kernel", emulation.kernel)
    monkeypatch.setattr(zigzag, "launch", emulation.launch)
    monkeypatch.setattr(zigzag, "multiprocessors", lambda device: 1)
    stored = random_matrix(1536 if gate else 1100, 5, block="Q6_P")
    place = DividedPlace(planes, on_card, torch.clone)
    config = CudaTileConfig(tile_bands, 8, 8, 1)
    matrix = zigzag.load_zigzag(stored, "cpu", config, gate=gate, place=place)
    assert matrix.rest is not None
    bands, tiles = -(-stored.rows // 256), len(matrix.blocks)
    assert matrix.rest.planes.shape == (tiles, 5, tile_bands * 32 * (5 - planes))
    assert matrix.blocks.nbytes + matrix.rest.planes.nbytes == 5 * tiles * max(200 * tile_bands, 208)
    out = torch.zeros(5, 256 * (bands - 1), dtype=torch.float16)
    zigzag.dequantise(matrix, out, 1, bands - 1)
    expected = decode_matrix(stored)[256:].t() * matrix.fp16_scale
    assert (out[:, : stored.rows - 256].float() - expected).norm() < 4e-4 * expected.norm()


@pytest.mark.parametrize("block", CUDA_BLOCKS)
def test_headers_have_the_bytes_that_superblocks_are_laid_out_in(block: str) -> None:
    header = (FOLDER / "blocks" / f"{block.lower()}.cuh").read_text()
    assert f"BLOCK_BYTES = {zigzag.block_bytes(block)};" in header
