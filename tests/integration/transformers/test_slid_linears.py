"""What is made of slid weights for a GPU, and is known of its kernels, without one."""

import json
from pathlib import Path

import pytest
import torch

from sparsepack.errors import PackingError, UserError
from sparsepack.formats.orders.slide import Slide, encode, pack_positions
from sparsepack.integration.transformers.linears import Sparse24Linear
from sparsepack.models.pattern import Pattern
from sparsepack.runtime.cuda.slide import cusparselt, hopper


def test_every_thread_gets_the_positions_of_its_rows() -> None:
    rows, stored = 100, 150
    given = pack_positions(ascending(rows, stored))
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


def ascending(rows: int, stored: int) -> torch.Tensor:
    """Positions in windows of two each, any of the six that there can be."""
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], dtype=torch.uint8)
    return pairs[torch.randint(0, 6, (rows, stored // 2))].flatten(1)


@pytest.mark.parametrize(("row", "byte", "bits"), [(0, 0, 0), (99, 37, 0b0101), (50, 10, 0b01001011)])
def test_positions_that_do_not_ascend_are_refused(row: int, byte: int, bits: int) -> None:
    positions = pack_positions(ascending(100, 150))
    positions[row, byte] = bits
    with pytest.raises(PackingError, match=f"row {row} do not ascend"):
        hopper.arranged_positions(positions, 150)


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
    assert cusparselt._read(path) == {}


def test_algorithms_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = {"8 x 64, 16 tokens, int8 to bfloat16": cusparselt.Algorithm(19, -1, 1, 0)}
    path = tmp_path / "deep" / "found.json"
    cusparselt._write(path, found)
    assert cusparselt._read(path) == found
    assert json.loads(path.read_text())["schema"] == cusparselt.SCHEMA


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusparselt, "LIBRARY", "libnothing.so.0")
    cusparselt.library.cache_clear()
    with pytest.raises(UserError, match=r"libnothing\.so\.0; install it with: pip install nvidia-cusparselt-cu13"):
        cusparselt.library()
    cusparselt.library.cache_clear()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_cast_leaves_what_is_stored_as_it_is(dtype: torch.dtype) -> None:
    how = Slide(Pattern(6, 8))
    weight = torch.randn(16, 64) * (torch.arange(64) % 8 < 6)
    values, positions, scale = encode(weight, how, dtype)
    linear = Sparse24Linear(64, 16, how, dtype, True, torch.float32, torch.device("cpu"))
    state = {"weight": values, "weight_positions": positions, "bias": torch.zeros(16)}
    linear.load_state_dict(state if scale is None else {**state, "weight_scale": scale})
    x = torch.randn(3, 64).bfloat16()
    wanted = linear(x)
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == dtype
    assert linear.bias is not None
    assert linear.bias.dtype == torch.bfloat16
    assert torch.equal(linear(x), wanted)


def test_inputs_of_another_width_are_refused() -> None:
    linear = Sparse24Linear(64, 16, Slide(Pattern(6, 8)), torch.int8, False, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="expected"):
        linear(torch.zeros(3, 63))
