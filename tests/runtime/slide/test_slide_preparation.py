"""What is made of slid weights for a GPU, and is known of its kernels, without one."""

import json
from pathlib import Path

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.slide import algorithms, cusparselt, hopper


def test_every_thread_gets_the_positions_of_its_rows() -> None:
    rows, stored = 100, 150
    given = torch.randint(0, 256, (rows, -(-stored // 4)), dtype=torch.uint8)
    arranged = hopper.arranged_positions(given, stored)
    assert arranged.shape == (2, 3, 128, 8)
    nothing = 0b01000100
    for row in range(128):
        of_row = [nothing] * 48
        if row < rows:
            of_row[: given.shape[1]] = given[row].tolist()
            of_row[stored // 4] |= 0b01000000  # half of these four are stored
        block, warp, lower, line = row // 64, row % 64 // 16, row % 16 // 8, row % 8
        for k_tile in range(3):
            for half in range(2):
                for piece in range(2):
                    thread = 32 * warp + 4 * line + 2 * piece + lower
                    found = arranged[block, k_tile, thread, 4 * half : 4 * half + 4].tolist()
                    at = 16 * k_tile + 8 * half + 4 * piece
                    assert found == of_row[at : at + 4], (row, k_tile, half, piece)


@pytest.mark.parametrize("tile", hopper.TILES, ids=str)
def test_tiles_fit_into_shared_memory(tile: hopper.Tile) -> None:
    assert tile.shared_bytes + hopper._STATIC_BYTES - 1024 <= hopper._SHARED_BYTES
    assert tile.stages >= 4
    assert tile.out_buffers >= 2


def test_small_products_have_small_tiles() -> None:
    assert hopper.best_tile(3584, 16, 132).tokens == 64
    assert hopper.best_tile(37888, 16384, 132).tokens >= 192


@pytest.mark.parametrize(
    "content", ["", "[]", '{"schema": 0}', '{"schema": 1, "products": {"a": {"config": "x"}}}', "{"]
)
def test_a_damaged_list_of_algorithms_holds_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(content)
    assert algorithms._read(path) == {}


def test_algorithms_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = {"8 x 64, 16 tokens, int8 to bfloat16": cusparselt.Algorithm(19, -1, 1, 0)}
    path = tmp_path / "deep" / "found.json"
    algorithms._write(path, found)
    assert algorithms._read(path) == found
    assert json.loads(path.read_text())["schema"] == algorithms.SCHEMA


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusparselt, "LIBRARY", "libnothing.so.0")
    cusparselt.library.cache_clear()
    with pytest.raises(UserError, match=r"libnothing\.so\.0; install it with: pip install nvidia-cusparselt-cu13"):
        cusparselt.library()
    cusparselt.library.cache_clear()
