"""What is trained of a matrix: it begins as it was, merged it computes the same, and the loss has its gradient."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_for_tests import OPT, WINDOWED, make_model, make_opt
from torch.nn import functional

from sparsepack.calibrate.distillation import Update, first_updates, matrices, trained_with
from sparsepack.calibrate.learned import SoftChannels, sparse_at
from sparsepack.calibrate.teal import Teacher, dense_divergence, divergence
from sparsepack.calibrate.uniform import weights_of
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.checkpoint.writer import distilled
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.halves import dense_pass
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of, load_model

KINDS = (None, 3)


def moved(checkpoint: Checkpoint, rank: int | None) -> dict[str, Update]:
    """Updates after a step in a random direction."""
    generator = torch.Generator().manual_seed(1)
    updates = first_updates(checkpoint, rank, 0, "cpu")
    with torch.no_grad():
        for update in updates.values():
            for tensor in update.trained:
                tensor += 0.02 * torch.randn(tensor.shape, generator=generator)
    return updates


def window_ids(checkpoint: Checkpoint, count: int = 2, length: int = 21) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(checkpoint.config.vocab_size, (count, length), generator=generator)


@pytest.mark.parametrize("rank", KINDS)
def test_updates_change_nothing_at_first(rank: int | None, small: Checkpoint) -> None:
    model, ids = load_model(small), window_ids(small)
    before = model(ids).logits
    with trained_with(model, first_updates(small, rank, 0, "cpu")):
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("rank", KINDS)
def test_merged_they_are_the_forward_pass_with_them(rank: int | None, small: Checkpoint) -> None:
    model, ids, updates = load_model(small), window_ids(small), moved(small, rank)
    before = model(ids).logits
    with trained_with(model, updates) as as_it_was:
        with_updates = model(ids).logits
        with as_it_was():
            torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
        torch.testing.assert_close(model(ids).logits, with_updates, rtol=0, atol=0)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    assert (with_updates - before).norm() > 0.05 * before.norm()
    made = distilled(small, {name: update.merged for name, update in updates.items()})
    assert {made.source.dtypes[name] for name in made.source.shapes} == {torch.float32}
    torch.testing.assert_close(load_model(made)(ids).logits, with_updates, rtol=1e-4, atol=1e-5)
    for name in small.source.shapes.keys() - updates.keys():
        torch.testing.assert_close(made.tensor(name), small.tensor(name).float(), rtol=0, atol=0)


def test_every_matrix_of_the_blocks_is_trained_and_nothing_else(small: Checkpoint) -> None:
    assert len(matrices(small)) == 7 * small.layers
    assert all(".layers." in name and small.source.shapes[name][1:] for name in matrices(small))


class Case:
    """A model with updates and thresholds for all of its sites, and windows to run."""

    def __init__(self, checkpoint: Checkpoint, rank: int | None) -> None:
        self.family, self.model, self.ids = checkpoint.family, load_model(checkpoint), window_ids(checkpoint)
        self.weights = weights_of(checkpoint, [(n, site) for n in range(checkpoint.layers) for site in SITES])
        self.channels, self.updates = SoftChannels(), moved(checkpoint, rank)
        for n, site in self.weights:
            self.channels.begin((n, site), torch.full((checkpoint.stacked_shape(site, n)[1],), 0.3), offsets=True)
        self.sparse = sparse_at(self.channels, self.weights)

    def in_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        with trained_with(self.model, self.updates) as as_it_was:

            def dense(ids: torch.Tensor) -> torch.Tensor:
                with as_it_was():
                    return dense_pass(self.model, ids)[0]

            kl, sparsity = divergence(self.model, self.family, self.ids, self.sparse, Teacher(dense, 0.5))
            (kl + sparsity).backward()
        return kl, sparsity

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both runs whole, with every intermediate kept."""
        half, shares = self.ids.shape[1] // 2, []

        def second_half(layer: int, site: str, x: torch.Tensor) -> torch.Tensor:
            found = self.sparse(layer, site, x[:, half:])
            assert found is not None
            shares.append(found[1])
            return torch.cat([x[:, :half], found[0]], 1)

        with torch.no_grad():
            dense = self.model(self.ids, use_cache=False).logits
        blocks = list(enumerate(backbone_of(self.model).layers))
        with trained_with(self.model, self.updates), site_hooks(blocks, self.family, second_half):
            sparse = self.model(self.ids, use_cache=False).logits
            log_p, log_q = (functional.log_softmax(logits, -1) for logits in (dense, sparse))
            each = (log_p.exp() * (log_p - log_q)).sum(-1)
            kl, sparsity = each[:, half:].mean() + 0.5 * each[:, :half].mean(), torch.stack(shares).sum()
            (kl + sparsity).backward()
        return kl, sparsity

    def gradients(self) -> list[torch.Tensor]:
        trained = [tensor for update in self.updates.values() for tensor in update.trained]
        trained += [tensor for group in self.channels.groups() for tensor in group["params"]]
        found = []
        for tensor in trained:
            assert tensor.grad is not None
            found.append(tensor.grad)
            tensor.grad = None
        return found


@pytest.mark.parametrize("rank", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_the_loss_in_halves_is_that_of_whole_windows_with_its_gradients(
    family: str, rank: int | None, tmp_path: Path
) -> None:
    folder = (
        make_opt(tmp_path / "m", **OPT["opt"])
        if family == "opt"
        else make_model(tmp_path / "m", family, tie_word_embeddings=False, **WINDOWED[family])
    )
    case = Case(open_checkpoint(folder), rank)
    parts = [*map(torch.Tensor.detach, case.in_parts())]
    ours = case.gradients()
    whole = [*map(torch.Tensor.detach, case.plain())]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    for one, other in zip(ours, case.gradients(), strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    assert not any("forward" in vars(module) for module in case.model.modules())


@pytest.mark.parametrize(("rank", "rate"), [(None, 3e-5), (4, 1e-3)])
def test_trained_weights_lower_the_loss_and_the_teacher_stays(rank: int | None, rate: float, tiny: Checkpoint) -> None:
    """With the thresholds left as they are, on the windows that they are trained on."""
    case = Case(tiny, None)
    case.updates = first_updates(tiny, rank, 0, "cpu")
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    optimiser = torch.optim.Adam([each for update in case.updates.values() for each in update.trained], lr=rate)
    seen = []
    for _ in range(10):
        optimiser.zero_grad()
        seen.append(float(case.in_parts()[0].detach()))
        optimiser.step()
    assert seen[-1] < 0.9 * seen[0]
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


def test_with_nothing_skipped_the_loss_is_that_of_whole_windows(small: Checkpoint) -> None:
    """Against another model, whose weights are not these."""
    case, other = Case(small, None), load_model(small)
    with trained_with(case.model, case.updates):
        kl, sparsity = dense_divergence(
            case.model, case.family, case.ids, Teacher(lambda ids: dense_pass(other, ids)[0], 0.5)
        )
        kl.backward()
        trained = [tensor for update in case.updates.values() for tensor in update.trained]
        ours = [tensor.grad.clone() for tensor in trained if tensor.grad is not None]
        for tensor in trained:
            tensor.grad = None
        log_p, log_q = (functional.log_softmax(model(case.ids).logits, -1) for model in (other, case.model))
        whole = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        whole.backward()
    assert float(sparsity) == 0
    torch.testing.assert_close(kl, whole, rtol=1e-4, atol=1e-6)
    for one, tensor in zip(ours, trained, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(one, tensor.grad, rtol=1e-3, atol=1e-3 * float(tensor.grad.abs().max()))


def test_zeros_of_pruned_matrices_stay_and_those_of_others_move(small: Checkpoint) -> None:
    pruned, other = matrices(small)[:2]
    half = {name: small.tensor(name) * (torch.rand(small.source.shapes[name]) < 0.5) for name in (pruned, other)}
    checkpoint = replace(small, source=changed_source(small.source, half.get))
    updates = first_updates(checkpoint, None, 0, "cpu", {pruned})
    zeros = {name: updates[name].trained[0].detach() == 0 for name in half}
    trained = [each for update in updates.values() for each in update.trained]
    optimiser = torch.optim.Adam(trained, lr=1e-2, betas=(0.9, 0.99))
    for _ in range(3):
        optimiser.zero_grad()
        sum((each - 1).square().sum() for each in trained).backward()
        optimiser.step()
    left = {name: updates[name].merged(half[name].double()) for name in half}
    assert zeros[pruned].any()
    assert torch.equal(left[pruned] == 0, zeros[pruned])
    assert not left[other].eq(0).any()
