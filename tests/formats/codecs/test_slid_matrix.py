"""A slid matrix as it is stored: what placing one weight after the other gives, in pieces of any size, bit for bit."""

import pytest
import torch
from devices import DEVICES
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.formats.orders import slide as slid_matrix
from sparsepack.formats.orders.slide import STEPS, Slide, unpack_positions
from sparsepack.models.pattern import Pattern, kept

TYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16]


def placed(group: list[float], how: Slide) -> tuple[list[float], list[int]]:
    """Values and positions of one group, by the definition: the first window that has room takes a nonzero."""
    windows: list[list[int]] = [[] for _ in range(how.windows)]
    for place, value in enumerate(group):
        covering = (n for n in range(how.windows) if 0 <= place - n * how.stride < how.window)
        if value:
            windows[next(n for n in covering if len(windows[n]) < how.most)].append(place)
    values, positions = [], []
    for number, taken in enumerate(windows):
        in_window = [place - number * how.stride for place in taken]
        free = [position for position in range(how.window) if position not in in_window]
        for position in sorted(in_window + free[: how.most - len(taken)]):
            positions.append(position)
            values.append(group[number * how.stride + position] if position in in_window else 0.0)
    return values, positions


def pruned(rows: int, columns: int, pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """Normal numbers; pruned ones become zeros of either sign, as a product with a mask leaves them."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    return (weight * kept(weight.abs(), pattern)).to(dtype)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("keep", "of", "columns"), [(2, 4, 20), (4, 6, 31), (6, 8, 64), (8, 10, 47), (14, 16, 100)])
def test_every_weight_goes_where_it_belongs(
    keep: int,
    of: int,
    columns: int,
    dtype: torch.dtype,
    piece: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slid_matrix, "PIECE", piece)
    monkeypatch.setattr(slid_matrix, "CUDA_PIECE", piece)
    how = Slide(Pattern(keep, of))
    weight = pruned(23, columns, how.pattern, torch.bfloat16)
    values, positions, scale = slid_matrix.encode(weight.to(device), how, dtype)

    groups = torch.nn.functional.pad(weight, (0, -columns % of)).float().view(23, -1, of).tolist()
    expected = [[placed(group, how) for group in row] for row in groups]
    found = unpack_positions(positions.cpu(), how.stored(columns), how)
    assert found.tolist() == [[position for _, group in row for position in group] for row in expected]
    exact = torch.tensor([[value for group, _ in row for value in group] for row in expected])
    if scale is None:
        assert torch.equal(bits(values), bits(exact.to(dtype)))
        return
    steps = STEPS[dtype]
    largest = exact.abs().amax(1)
    inverse = torch.where(largest > 0, torch.tensor(steps) / largest, 0)
    scaled = (exact * inverse[:, None]).clamp(-steps, steps)
    assert torch.equal(bits(values), bits((scaled.round() if dtype == torch.int8 else scaled).to(dtype)))
    assert torch.equal(bits(scale), bits(largest / steps))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_that_are_too_small_for_the_type_keep_their_places(dtype: torch.dtype) -> None:
    how = Slide(Pattern(6, 8))
    weight = torch.zeros(1, 8)
    weight[0, 3], weight[0, 6] = 1.0, -1e-9
    values, positions, _ = slid_matrix.encode(weight, how, dtype)
    assert unpack_positions(positions, 6, how).tolist() == [[0, 3, 0, 1, 0, 2]]
    assert values.float()[0, :4].tolist() == [0, {torch.int8: 127, torch.bfloat16: 1}.get(dtype, 448), 0, 0]


def test_a_group_without_the_pattern_is_named_by_its_row_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slid_matrix, "PIECE", 128)
    weight = pruned(9, 64, Pattern(6, 8), torch.float32)
    weight[6, 8:16] = weight[8, :8] = 1
    with pytest.raises(PackingError, match=r"^row 6 has 8 nonzeros in its inputs 8 to 15, .* \(2 such groups\)"):
        slid_matrix.encode(weight, Slide(Pattern(6, 8)), torch.int8)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_values_that_are_not_finite_are_refused(dtype: torch.dtype) -> None:
    weight = pruned(9, 64, Pattern(6, 8), torch.float32)
    weight[weight != 0] = float("inf")
    with pytest.raises(PackingError, match="not finite"):
        slid_matrix.encode(weight, Slide(Pattern(6, 8)), dtype)


def test_a_matrix_without_rows_has_none() -> None:
    values, positions, scale = slid_matrix.encode(torch.zeros(0, 16), Slide(Pattern(6, 8)), torch.int8)
    assert (values.shape, positions.shape) == ((0, 12), (0, 3))
    assert scale is not None
    assert scale.shape == (0,)
