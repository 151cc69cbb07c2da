"""The bases: what each is made of, and that it is orthogonal."""

from dataclasses import replace

import pytest
import torch

from sparsepack.calibrate import bases as hadamard
from sparsepack.calibrate.bases import ROTATIONS
from sparsepack.calibrate.folder import PRODUCT, Calibration
from sparsepack.calibrate.pca import directions, evened, placed
from sparsepack.calibrate.rotate import BASES, RotateOptions
from sparsepack.calibrate.statistics import output_moments, second_moments
from sparsepack.errors import RotationError
from sparsepack.formats.table import FORMATS
from sparsepack.models.checkpoint.checkpoint import Checkpoint


def found(name: str, model: Checkpoint, calibration: Calibration, **options: int) -> torch.Tensor:
    (basis,) = ROTATIONS[name].find(model, calibration, RotateOptions(name, **options)).matrices
    return basis


def test_the_table_has_the_names_of_the_option_and_formats_that_exist() -> None:
    assert tuple(ROTATIONS) == BASES
    suited = {name: basis.formats for name, basis in ROTATIONS.items()}
    assert all(set(names) <= set(FORMATS) for names in suited.values())
    zigzag = ("zigzag-q4_k", "zigzag-q6_k", "zigzag-q8_0", "zigzag-q6_p")
    assert suited["pca"] == (*zigzag, "neuron-q4_k", "planes-q6_p")
    assert suited["hadamard"] == ("slide-int8", "slide-fp8")


@pytest.mark.parametrize("name", [name for name in BASES if not ROTATIONS[name].trains])
def test_a_basis_is_orthogonal(name: str, small: Checkpoint, small_calibration: Calibration) -> None:
    basis = found(name, small, small_calibration)
    assert basis.dtype == torch.float64
    torch.testing.assert_close(basis.t() @ basis, torch.eye(256).double(), atol=1e-12, rtol=0)


def test_pca_brings_the_second_moments_into_falling_order(small: Checkpoint, small_calibration: Calibration) -> None:
    basis = found("pca", small, small_calibration)
    moments = second_moments(small_calibration)
    assert moments is not None
    pooled = sum(moment for _, moment in moments) / len(moments)
    turned = basis.t() @ pooled @ basis
    sizes = turned.diagonal()
    assert float((turned - sizes.diag()).abs().max()) < 1e-12 * float(sizes[0])
    order = placed(torch.arange(256)[None])[0]  # which size became which channel
    falling = torch.empty_like(sizes)
    falling[order] = sizes
    assert bool((falling.diff() <= 1e-12).all())
    assert float(sizes.sum()) == pytest.approx(256, rel=1e-3)  # x is of length sqrt(hidden)


def test_the_largest_directions_stand_among_the_smallest() -> None:
    order = placed(torch.arange(512)[None])[0]
    assert order[:64:16].tolist() == [0, 1, 2, 3]
    assert order[1:16].tolist() == [*range(497, 512)]
    assert order[49:64].tolist() == [*range(452, 467)]
    assert order[64:].tolist() == [*range(4, 452)]
    assert placed(torch.arange(64)[None])[0].tolist() == [*range(64)]  # too narrow


def test_pca_weighs_runs_by_their_blocks(small: Checkpoint, small_calibration: Calibration) -> None:
    """Where blocks share a sum, the basis is what it is with a sum for each."""
    sums = [layer[PRODUCT] for layer in small_calibration.layers]
    layers = [{name: value for name, value in layer.items() if name != PRODUCT} for layer in small_calibration.layers]
    layers[0][PRODUCT] = sums[0]
    layers[2][PRODUCT] = sums[1] + sums[2]
    shared = replace(small_calibration, layers=tuple(layers))
    assert [blocks for blocks, _ in second_moments(shared) or []] == [range(1), range(1, 3)]
    difference = found("pca", small, shared) - found("pca", small, small_calibration)
    assert float(difference.abs().max()) < 1e-8


def test_pca_brings_what_heads_give_into_two_halves_each_of_even_size(
    small: Checkpoint, small_calibration: Calibration
) -> None:
    values = ROTATIONS["pca"].find(small, small_calibration, RotateOptions("pca")).values
    moments = output_moments(small_calibration)
    assert moments is not None
    assert len(values) == len(moments) == small.layers
    for bases, of_block in zip(values, moments, strict=True):
        sizes = (bases.mT @ of_block @ bases).diagonal(dim1=-2, dim2=-1)
        falling = torch.linalg.eigvalsh(of_block).flip(-1)
        expected = falling.unflatten(-1, (2, 32)).mean(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
        torch.testing.assert_close(sizes, expected, rtol=1e-9, atol=1e-12 * float(sizes.max()))


def test_directions_that_no_run_of_32_divides_stay_as_they_are() -> None:
    vectors = torch.eye(48).double()
    assert torch.equal(evened(vectors), vectors)


def test_values_have_hadamard_matrices_where_their_heads_have_such_a_size(
    small: Checkpoint, small_calibration: Calibration
) -> None:
    values = ROTATIONS["hadamard"].find(small, small_calibration, RotateOptions("hadamard")).values
    assert [tuple(each.shape) for each in values] == [(2, 64, 64)] * small.layers
    for each in values:
        torch.testing.assert_close(each.mT @ each, torch.eye(64).double().expand(2, -1, -1), atol=1e-12, rtol=0)
        assert not torch.equal(each[0], each[1])
    config = type(small.config)(**{**small.config.to_dict(), "head_dim": 52})
    odd = replace(small, config=config)
    assert not ROTATIONS["hadamard"].find(odd, small_calibration, RotateOptions("hadamard")).values


def test_directions_do_not_depend_on_the_side_that_an_eigenvector_points_to() -> None:
    """And a direction that nothing lies in is one like others."""
    vectors = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    sizes = torch.tensor([5.0, 3, 2, 1, 0.5, 0.25, 0.1, 0.05, 0, 0, 0, 0], dtype=torch.float64)
    made = directions(vectors @ sizes.diag() @ vectors.t())
    torch.testing.assert_close(made.t() @ made, torch.eye(12).double())
    for column in range(8):
        assert float((made[:, column] @ vectors[:, column]).abs()) == pytest.approx(1)
        assert made[made[:, column].abs().argmax(), column] > 0


@pytest.mark.parametrize("order", [1, 2, 4, 12, 16, 20, 28, 36, 60, 84, 96, 512, 576, 896])
def test_hadamard_matrices_are_orthogonal_signs(order: int) -> None:
    made = hadamard.hadamard(order)
    assert made is not None
    assert set(made.flatten().tolist()) <= {1.0, -1.0}
    assert torch.equal(made @ made.t(), order * torch.eye(order).double())


@pytest.mark.parametrize("order", [3, 6, 90, 92, 100, 52, 4 * 23])
def test_a_width_without_one_is_known_beforehand(order: int) -> None:
    made = hadamard.hadamard(order)
    assert (made is None) == (hadamard._inner_order(order) is None)
    assert made is None or torch.equal(made @ made.t(), order * torch.eye(order).double())


@pytest.mark.parametrize("hidden", [2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 896, 1536, 960, 576, 5376])
def test_the_widths_of_known_models_have_one(hidden: int) -> None:
    assert hadamard._inner_order(hidden) is not None


def test_the_seed_decides_the_signs(small: Checkpoint, small_calibration: Calibration) -> None:
    one, same, other = (found("hadamard", small, small_calibration, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one.abs(), torch.full((256, 256), 1 / 16).double())
    signs = one[:, 0].sign()  # of the rows: a Hadamard matrix begins with ones
    assert 64 < int((signs > 0).sum()) < 192
    assert torch.equal(signs[:, None] * one, hadamard.hadamard(256) / 16)


def test_a_width_without_a_hadamard_matrix_is_one_line(small: Checkpoint) -> None:
    config = type(small.config)(**{**small.config.to_dict(), "hidden_size": 90})
    with pytest.raises(RotationError, match="no Hadamard matrix for its 90 channels is known here; take the basis pca"):
        ROTATIONS["hadamard"].check_model(replace(small, config=config))
