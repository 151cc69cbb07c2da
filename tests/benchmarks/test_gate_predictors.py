"""Predictors of active neurons: what they hold, and what their scores are worth on made-up inputs."""

import pytest
import torch
from gate_predictors import Frequency, Previous, Seen, principal, rank_within, seen, thresholds, trained

from sparsepack.formats.codecs.gate_rows import copied

N, D, TOKENS = 48, 32, 4000


@pytest.fixture(scope="module")
def gate() -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    """Most of their size lies in a few directions."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    return torch.randn(TOKENS, D, generator=generator) * 0.8 ** torch.arange(D) @ directions


def _alone(here: torch.Tensor) -> Seen:
    """One window, in a layer where nobody was active before."""
    return seen(here[None], None, torch.zeros(1, len(here), N, dtype=torch.bool))


def test_ranks_are_the_largest_that_fit(gate: torch.Tensor, inputs: torch.Tensor) -> None:
    nbytes = copied(gate, 2).nbytes
    rank = rank_within(nbytes, gate)
    fits, next_one = principal(gate, inputs, [rank, rank + 1])
    assert fits.nbytes <= nbytes < next_one.nbytes


def test_a_lower_rank_has_the_least_error_on_the_inputs(gate: torch.Tensor, inputs: torch.Tensor) -> None:
    (made,) = principal(gate, inputs, [6])
    values = torch.linalg.svdvals(gate.float() @ torch.linalg.qr(inputs).R.T)
    least = values[6:].square().sum()
    error = (made.scores(_alone(inputs))[0] - inputs @ gate.float().T).square().sum()
    assert error == pytest.approx(float(least), rel=0.01)


def test_training_finds_more_than_frequency(gate: torch.Tensor, inputs: torch.Tensor) -> None:
    active = inputs @ gate.float().T > 1
    learned, new = slice(None, 3500), slice(3500, None)
    frequency = Frequency(active[learned].float().mean(0).half())
    network = trained(inputs[learned], active[learned], 12, epochs=10, adjacent=False)
    recalls = []
    for predictor in (network, frequency):
        scores = predictor.scores(_alone(inputs[new]))[0]
        (threshold,) = thresholds(scores, [int(active[new].sum())])
        recalls.append(float(((scores > threshold) & active[new]).sum() / active[new].sum()))
    assert recalls[0] > recalls[1] + 0.2


def test_training_twice_gives_the_same(gate: torch.Tensor, inputs: torch.Tensor) -> None:
    active = inputs[:500] @ gate.float().T > 1
    once, again = (trained(inputs[:500], active, 4, epochs=1, adjacent=True) for _ in range(2))
    assert torch.equal(once.inner, again.inner)
    assert torch.equal(once.outer, again.outer)


def test_thresholds_let_as_many_pass_as_asked() -> None:
    scores = torch.randperm(1000, generator=torch.Generator().manual_seed(2)).view(2, 20, 25).float()
    counts = [0, 1, 137, 999, 1000, 3000]
    assert [int((scores > each).sum()) for each in thresholds(scores, counts)] == [0, 1, 137, 999, 1000, 1000]


def test_of_equal_scores_all_stay_out_rather_than_too_many_pass() -> None:
    (threshold,) = thresholds(torch.tensor([3.0, 2.0, 2.0, 1.0]), [2])
    assert int((torch.tensor([3.0, 2.0, 2.0, 1.0]) > threshold).sum()) == 1


def test_the_first_layer_looks_at_the_token_before() -> None:
    here = torch.arange(12.0).view(1, 4, 3)
    told = seen(here, None, here > 5)
    assert torch.equal(told.before[0, 1:], here[0, :-1])
    assert torch.equal(told.active[0, 1:], here[0, :-1] > 5)
    assert not told.before[0, 0].any()
    assert not told.active[0, 0].any()


def test_who_was_active_comes_before_whoever_is_frequent() -> None:
    active = torch.zeros(1, 2, 3, dtype=torch.bool)
    active[0, 0, 2] = True
    previous = Previous(Frequency(torch.tensor([0.4, 1.0, 0.0], dtype=torch.float16)))
    scores = previous.scores(seen(torch.zeros(1, 2, 8), None, active))
    assert scores[0, 0].argsort(descending=True).tolist() == [1, 0, 2]
    assert scores[0, 1].argsort(descending=True).tolist() == [2, 1, 0]
    assert previous.nbytes == 3 * 2 + 1
