"""Blocks as kernels take them apart, run by the processor, against what they decode to."""

import pytest
import torch
from emulated import Emulation, needs_compiler
from zigzag_cases import CUDA_BLOCKS, random_matrix

from sparsepack.formats.matrix import decode_matrix
from sparsepack.runtime.cuda.driver.kernel import FOLDER
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


@pytest.mark.parametrize("block", CUDA_BLOCKS)
def test_headers_have_the_bytes_that_superblocks_are_laid_out_in(block: str) -> None:
    header = (FOLDER / "blocks" / f"{block.lower()}.cuh").read_text()
    assert f"BLOCK_BYTES = {zigzag.block_bytes(block)};" in header
