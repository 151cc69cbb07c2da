"""A learnt basis: orthogonal, better than the one that it began with, and the same after a kill."""

from pathlib import Path

import pytest
import torch

from sparsepack.calibrate import folder, pca, training
from sparsepack.calibrate import learnt_bases as learnt
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.learned import SoftChannels
from sparsepack.calibrate.learnt_bases import in_axis, learn_bases, orthonormal, sparse_in, turned, uniform_channels
from sparsepack.calibrate.rotate import RotateOptions
from sparsepack.calibrate.rotation import rotate
from sparsepack.calibrate.teal import divergence
from sparsepack.calibrate.training import trainer
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import RotationError
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.rotated import Bases, rotated
from sparsepack.models.family import SITES
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.hf_model.model import load_model
from sparsepack.workers.shard import ALONE, Shard

FEW = RotateOptions("learnt", steps=3, batch=1, length=32)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def cal(tiny_calibrated: Path) -> Calibration:
    return folder.load(tiny_calibrated)


@pytest.fixture(scope="module")
def start(tiny: Checkpoint, cal: Calibration) -> torch.Tensor:
    (basis,) = pca.bases(tiny, cal, FEW).matrices
    return basis


def learn_basis(
    model: Checkpoint, calibration: Calibration, start: torch.Tensor, options: RotateOptions, shard: Shard = ALONE
) -> torch.Tensor:
    """The one basis of all blocks."""
    (basis,) = learn_bases(
        model, calibration, Bases(matrices=(start,)), options, trainer(shard.resume("fingerprint"), options)
    ).matrices
    return basis


def _random_basis(hidden: int) -> torch.Tensor:
    noise = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(noise).Q


def _off(basis: torch.Tensor) -> float:
    """How far a matrix is from orthogonal."""
    return float((basis.t() @ basis - torch.eye(len(basis), dtype=basis.dtype)).abs().max())


@pytest.mark.parametrize("given", ["pca", "random"])
def test_a_learnt_basis_is_orthogonal_and_near_the_start(tiny, cal, start, given):
    begin = start if given == "pca" else _random_basis(256)
    found = learn_basis(tiny, cal, begin, FEW)
    assert (found.dtype, found.device.type) == (torch.float64, "cpu")
    assert _off(found) < 1e-10
    assert 1e-4 < float((found - begin).abs().max()) < 0.1


def test_bases_of_values_are_learnt_beside_those_of_the_stream(tiny, cal):
    begin = pca.bases(tiny, cal, FEW)
    found = learn_bases(tiny, cal, begin, FEW, trainer(ALONE.resume(""), FEW))
    assert len(found.values) == tiny.layers
    for one, other in zip(found.values, begin.values, strict=True):
        assert all(_off(basis) < 1e-10 for basis in one)
        assert 1e-4 < float((one - other).abs().max()) < 0.1


def test_dense_vectors_come_back_from_the_bases_as_they_were(tiny, cal):
    """With thresholds that nothing is below, at every site."""
    axes = pca.bases(tiny, cal, FEW).map(torch.Tensor.float)
    channels, weights = SoftChannels(), {(1, site): 0.25 for site in SITES}
    for key in weights:
        columns = tiny.stacked_shape(key[1])[1]
        channels.begin(key, torch.full((columns,), 1e-30))
        x = torch.randn(2, 7, columns, generator=torch.Generator().manual_seed(columns))
        changed, inactive = sparse_in(axes, tiny.family, channels, weights)(*key, x)
        torch.testing.assert_close(changed, x, atol=1e-5, rtol=0)
        assert float(inactive.detach()) < 1e-6


def test_a_heads_basis_is_that_of_its_kv_head(tiny):
    heads = heads_of_config(tiny.config)
    x = torch.randn(2, 3, heads.heads * heads.head_dim, generator=torch.Generator().manual_seed(0))
    axis = torch.randn(heads.kv_heads, heads.head_dim, heads.head_dim, generator=torch.Generator().manual_seed(1))
    found, group = in_axis(x, axis), heads.heads // heads.kv_heads
    for head in range(heads.heads):
        part = slice(head * heads.head_dim, (head + 1) * heads.head_dim)
        torch.testing.assert_close(found[..., part], x[..., part] @ axis[head // group], atol=1e-4, rtol=1e-4)


def test_a_rate_of_zero_leaves_the_start(tiny, cal, start):
    found = learn_basis(tiny, cal, start, RotateOptions("learnt", steps=2, batch=1, length=32, rate=0.0))
    torch.testing.assert_close(found, start, rtol=0, atol=1e-12)


def test_a_turn_alone_lowers_the_divergence(tiny, cal, start):
    """With the thresholds left as they are, on the windows that it is trained on."""
    model, family = load_model(rotated(tiny, Bases())), tiny.family
    weights = weights_of(tiny, [(layer, site) for layer in range(tiny.layers) for site in SITES])
    first, ids = Bases(matrices=(start.float(),)), cal.windows[:2].long()
    channels = uniform_channels(model, family, ids, 0.5, first)
    turn = torch.zeros(256, 256, requires_grad=True)
    optimiser, seen = torch.optim.Adam([turn], lr=0.006 / 16), []
    for _ in range(12):
        kl, sparsity = divergence(
            model, family, ids, sparse_in(turned(first, Bases(matrices=(turn,))), family, channels, weights)
        )
        seen.append((float(kl.detach()), float(sparsity.detach())))
        optimiser.zero_grad()
        # At the price of skipping less, as `Training` has it.
        (kl - 4 * seen[0][0] * sparsity).backward()
        optimiser.step()
    print(seen)
    assert seen[0][1] == pytest.approx(0.5, abs=0.01)
    assert seen[-1][1] > 0.49
    assert seen[-1][0] < 0.93 * seen[0][0]


def test_learning_goes_on_after_a_kill_with_the_same_bits(tiny, cal, start, tmp_path, monkeypatch):
    whole = learn_basis(tiny, cal, start, FEW)
    slices, left = training.slices, iter(range(2))

    def dies(*given):
        if next(left, None) is None:
            raise Killed
        return slices(*given)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training, "slices", dies)
        learn_basis(tiny, cal, start, FEW, Shard(folder=tmp_path / "s"))
    again = Shard(folder=tmp_path / "s").resume("fingerprint")
    assert again.state.parts["learning"]["step"] == 2
    assert torch.equal(learn_basis(tiny, cal, start, FEW, again), whole)


def test_another_seed_is_another_basis(tiny, cal, start):
    one, same, other = (
        learn_basis(tiny, cal, start, RotateOptions("learnt", steps=1, batch=1, length=32, seed=seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_rotate_learns_a_basis_and_goes_on_after_a_kill(tiny, tiny_calibrated, tmp_path, monkeypatch):
    made = rotate(tiny, tiny_calibrated, tmp_path / "whole", FEW)
    assert made.error < 1e-5
    assert made.options["basis"] == "learnt"

    def dies(*given):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(learnt, "orthonormal", dies)  # after the last step
        rotate(tiny, tiny_calibrated, tmp_path / "again", FEW)
    with monkeypatch.context() as patch:
        patch.setattr(training, "slices", dies)  # no step is taken again
        rotate(tiny, tiny_calibrated, tmp_path / "again", FEW)
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again"))
    assert whole == again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 0.0}, r"sparsity 0\.0: expected above 0 and below 1"),
        ({"sparsity": 1.0}, r"sparsity 1\.0: expected above 0 and below 1"),
        ({"steps": 0}, "steps 0: expected at least 1"),
        ({"rate": -0.1}, r"rate -0\.1: expected at least 0"),
        ({"basis": "pca", "steps": 5}, "steps 5: it is for basis learnt, not pca"),
    ],
)
def test_an_option_out_of_range_is_one_line(changes, message):
    with pytest.raises(RotationError, match=message) as caught:
        RotateOptions(**{"basis": "learnt", **changes}).check()
    assert "\n" not in str(caught.value)


def test_a_matrix_that_is_nearly_orthogonal_becomes_orthogonal():
    near = _random_basis(64) + 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).double()
    assert _off(orthonormal(near)) < 1e-12
