"""A softmax over parts of the vocabulary is the softmax over all of it."""

import pytest
import torch

from sparsepack.eval.perplexity import score_windows
from sparsepack.eval.protocols import Logits
from sparsepack.eval.scorer import RunningSoftmax


def taken(logits: torch.Tensor, wanted: torch.Tensor, step: int) -> RunningSoftmax:
    found = RunningSoftmax(wanted)
    for at in range(0, len(logits), 3):
        for first in range(0, logits.shape[1], step):
            found.take(slice(at, at + 3), first, logits[at : at + 3, first : first + step])
    return found


@pytest.mark.parametrize("step", [1, 7, 50, 64])
def test_parts_add_up_to_the_whole(step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(8, 50, generator=generator)
    wanted = torch.randint(50, (8,), generator=generator)
    found = taken(logits, wanted, step)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(found.nll(), -exact.gather(-1, wanted[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.log_sum(), logits.double().logsumexp(-1), rtol=1e-7, atol=1e-7)
    assert torch.equal(found.top, logits.argmax(-1))


def test_of_equal_words_the_first_is_the_top_one() -> None:
    found = taken(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), torch.tensor([4]), 2)
    assert found.top.tolist() == [1]


def test_logits_far_from_zero_neither_overflow_nor_vanish() -> None:
    found = taken(torch.tensor([[1e4, -1e4, 1e4 - 1, -1e4]]), torch.tensor([2]), 1)
    assert float(found.nll()) == pytest.approx(1 + float(torch.log1p(torch.exp(torch.tensor(-1.0)))), abs=1e-6)


def test_what_is_no_number_stays_none() -> None:
    assert taken(torch.tensor([[1.0, float("nan"), 2.0, 0.0]]), torch.tensor([0]), 1).nll().isnan().all()


def test_the_divergence_of_two_sure_models_is_no_rounding_error() -> None:
    """Nearly all of both distributions is one word's; what is left is far below float32's last place."""

    class Fixed:
        device, vocabulary, steps = torch.device("cpu"), 3, 1

        def __init__(self, *logits: float) -> None:
            self.logits = torch.tensor([[logits]])

        def rows_at_once(self, width: int, batch: int) -> int:
            return 1

        def hidden(self, *_: object) -> torch.Tensor:
            return self.logits

        def head(self, words: slice) -> Logits:
            return lambda logits: logits[..., words]

    p, q = Fixed(123.0, 101.0, 100.0), Fixed(121.7, 101.5, 100.0)
    token = torch.zeros(1, 1, dtype=torch.int64)
    found = score_windows(q, token, token, "dense", p)
    log_p, log_q = (each.logits.double().log_softmax(-1) for each in (p, q))
    expected = float((log_p.exp() * (log_p - log_q)).sum())
    assert 0 < expected < 1e-7
    assert found.kl is not None
    assert float(found.kl) == pytest.approx(expected, rel=1e-4)
