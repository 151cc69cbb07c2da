"""Tile configurations that are taken where nothing was measured, on any GPU that the backend runs on."""

from dataclasses import replace

import pytest
import torch

from sparsepack.runtime.cuda.driver import device, memory
from sparsepack.runtime.cuda.products import tile_config, zigzag_products
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, default_tile_config, dense_ring, shared_bytes
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Output, batch, gemv, most_inputs

GPUS = {"A100": (108, 163), "A10": (72, 99), "RTX 3050": (20, 99), "RTX 4090": (128, 99), "H100": (132, 227)}
"""Multiprocessors, and KiB of shared memory that a block may have."""
SHAPES = [
    (128, 64),
    (1024, 4096),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (57344, 8192),
    (8192, 28672),
]


LARGE = SHAPES[-2:]
"""Of a model of 70 billion parameters, which smaller GPUs cannot hold."""


def on_gpu(monkeypatch: pytest.MonkeyPatch, processors: int, memory: int = 227) -> None:
    """As if on a GPU with so many multiprocessors, and so many KiB of shared memory for a block."""
    for module in (tile_config, zigzag_products):
        monkeypatch.setattr(module, "multiprocessors", lambda device: processors)
    for module in (device, tile_config, zigzag_products):
        monkeypatch.setattr(module, "shared_limit", lambda device: memory * 1024)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_all_blocks_run_at_once_and_fit(
    gpu: str, shape: tuple[int, int], gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape in LARGE and gpu in ("A10", "RTX 3050"):
        pytest.skip("does not fit this GPU's memory anyway")
    processors, memory = GPUS[gpu]
    on_gpu(monkeypatch, processors, memory)
    bands = -(-shape[0] // 256)
    config = default_tile_config(bands, shape[1], torch.device("cuda"), gate)
    assert config.splits == 1 or config.splits * -(-bands // config.tile_bands) <= processors
    assert config.splits <= -(-shape[1] // 32), "a block without columns"
    assert shared_bytes(shape[1], config) <= memory * 1024 - 2048
    assert config.tile_bands % 2 == 0 or not gate


def test_defaults_are_what_measured_best_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 50 %: the matrices of 8B in a decoder on an H200, others in chains on an H100."""
    on_gpu(monkeypatch, *GPUS["H100"])
    best = {
        (6144, 4096, False): CudaTileConfig(2, 8, 16, 11),
        (4096, 4096, False): CudaTileConfig(2, 8, 16, 16),
        (28672, 4096, True): CudaTileConfig(4, 8, 8, 4),
        (4096, 14336, False): CudaTileConfig(4, 8, 8, 32),
        (28672, 4096, False): CudaTileConfig(4, 8, 8, 4),
        (28672, 8192, False): CudaTileConfig(4, 8, 8, 4),
        (8192, 28672, False): CudaTileConfig(4, 8, 8, 16),
        (14336, 4096, False): CudaTileConfig(4, 8, 8, 9),
        (1024, 4096, False): CudaTileConfig(1, 8, 0, 32),
        (2048, 2048, False): CudaTileConfig(1, 8, 0, 16),
        (3072, 2048, False): CudaTileConfig(1, 8, 0, 11),
        (2560, 2560, False): CudaTileConfig(1, 8, 0, 13),
        (3072, 3072, False): CudaTileConfig(2, 8, 16, 22),
        (4096, 2048, False): CudaTileConfig(2, 8, 16, 16),
    }
    for (rows, columns, gate), config in best.items():
        assert default_tile_config(rows // 256, columns, torch.device("cuda"), gate) == config


@pytest.mark.parametrize("values", [(3, 8, 16), (2, 8, 6), (2, 12, 6), (1, 4, 10)])
def test_stages_and_warps_that_do_not_divide_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        CudaTileConfig(*values, 4)


def test_a_block_without_a_ring_has_no_warps_and_no_memory_for_it() -> None:
    ring, none = CudaTileConfig(2, 8, 16, 4), CudaTileConfig(2, 8, 0, 4)
    assert (ring.threads, none.threads) == (384, 256)
    assert shared_bytes(256, ring) - shared_bytes(256, none) == ring.ring_bytes == 16 * 16 * 304


def test_where_all_columns_are_active_there_is_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, *GPUS["H100"])
    launched: list[tuple[str, int, int]] = []

    def launch(defines: tuple[str, ...], grid: object, threads: int, *_: object, shared: int) -> None:
        launched.append((next(one for one in defines if one.startswith("STAGES=")), threads, shared))

    monkeypatch.setattr(zigzag_products, "kernel", lambda file, name, defines, device: defines)
    monkeypatch.setattr(zigzag_products, "launch", launch)
    monkeypatch.setattr(zigzag_products, "workspace", lambda device: torch.empty(memory.WORKSPACE_WORDS * 132))
    none = CudaZigzag(torch.empty(4, 0), 1024, 4096, CudaTileConfig(1, 6, 0, 32), 0, 1.0, 1.0, 1.0)
    x, y, threshold = torch.zeros(4096), torch.empty(1024), torch.zeros(1)
    for input in (Input(x, threshold=threshold), Input(x)):
        gemv(none, input, Output(y))
    sparse, dense = launched
    assert sparse == ("STAGES=0", 192, shared_bytes(4096, none.config))
    assert dense == ("STAGES=24", 384, shared_bytes(4096, CudaTileConfig(1, 8, 24, 32)))


@pytest.mark.parametrize(("config", "gate", "stages"), [((4, 8, 8, 4), True, 12), ((2, 8, 16, 16), False, 12)])
def test_where_all_columns_are_active_a_ring_has_stages_of_its_own(
    config: tuple[int, int, int, int], gate: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, *GPUS["H100"])
    of = CudaTileConfig(*config)
    dense = dense_ring(of, 4096, gate, torch.device("cuda"))
    assert dense == replace(of, stages=stages)
    on_gpu(monkeypatch, *GPUS["A10"])
    assert shared_bytes(4096, dense_ring(of, 4096, gate, torch.device("cuda"))) <= 97 * 1024, "as many as fit"
    of_planes = replace(of, block_bytes=tile_config.PLANES_BYTES)
    assert dense_ring(of_planes, 4096, gate, torch.device("cuda")) == of_planes


@pytest.mark.parametrize("tile_bands", [1, 2, 4, 8])
def test_several_inputs_need_a_ring(tile_bands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, *GPUS["H100"])
    none = CudaZigzag(torch.empty(0), 2048, 256, CudaTileConfig(tile_bands, 8, 0, 4), 0, 1.0, 1.0, 1.0)
    config = zigzag_products._for_inputs(none, 8).config
    assert config.stages
    assert (config.tile_bands, config.splits) == (tile_bands, 4), "as the matrix lies"
    assert most_inputs(none) == 8


@pytest.mark.parametrize(("gpu", "inputs"), [("H100", 8), ("A100", 8), ("RTX 4090", 7), ("A10", 5)])
def test_how_many_sequences_of_8_billion_parameters_run_together(
    gpu: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, *GPUS[gpu])
    found = []
    for rows, columns, gate in ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)):
        config = default_tile_config(rows // 256, columns, torch.device("cuda"), gate)
        found.append(most_inputs(CudaZigzag(torch.empty(0), rows, columns, config, 0, 1.0, 1.0, 1.0)))
    assert min(found) == inputs


def test_products_whose_blocks_would_wait_in_vain_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 6)
    monkeypatch.setattr(zigzag_products, "workspace", memory.workspace.__wrapped__)
    monkeypatch.setattr(memory, "multiprocessors", lambda device: 6)
    x, y = torch.zeros(8, 96), torch.zeros(8, 3 * 256)

    def matrix(tiles: int, config: CudaTileConfig) -> CudaZigzag:
        return CudaZigzag(torch.empty(tiles, 0), 3 * 256, 96, config, 0, 1.0, 1.0, 1.0)

    for config, tiles, message in (
        (CudaTileConfig(1, 8, 8, 4), 3, "more splits than 96 columns have chunks of 32"),
        (CudaTileConfig(1, 8, 8, 3), 3, "9 blocks that wait for each other, more than run at once"),
        (
            CudaTileConfig(16, 16, 4, 3),
            2,
            "196608 sums of blocks with 8 inputs, more than 98304; take tiles of",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            batch(matrix(tiles, config), Input(x), Output(y))
    with pytest.raises(ValueError, match="9 inputs, expected 1 to 8"):
        batch(matrix(1, CudaTileConfig(1, 8, 8, 1)), Input(torch.zeros(9, 96)), Output(y))
    for config, tiles in ((CudaTileConfig(1, 8, 8, 4), 3), (CudaTileConfig(1, 8, 8, 3), 3)):
        with pytest.raises(ValueError, match=r"splits|wait for each other"):
            gemv(matrix(tiles, config), Input(x[0]), Output(y[0]))


def test_impossible_configurations_are_refused() -> None:
    for wrong in ((4, 6, 8, 1), (1, 8, 12, 1), (2, 8, 6, 1)):
        with pytest.raises(ValueError, match="multiple"):
            CudaTileConfig(*wrong)
    for wrong in ((1, 32, 32, 1), (2, 8, 36, 1)):
        with pytest.raises(ValueError, match="at most 28 warps and 32 stages"):
            CudaTileConfig(*wrong)
