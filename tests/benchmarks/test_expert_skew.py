"""The figures of the study of experts, beside what they are for tokens chosen by hand."""

import numpy as np
import pytest
from expert_skew import again, again_by_chance, of_most_used


def routed(chosen: list[list[int]], experts: int) -> np.ndarray:
    """The experts of each token of one block: bool [tokens, 1, experts]."""
    active = np.zeros((len(chosen), 1, experts), np.bool_)
    for token, of in enumerate(chosen):
        active[token, 0, of] = True
    return active


def test_the_share_again_is_of_the_token_at_that_distance() -> None:
    active = routed([[0, 1], [1, 2], [3, 4], [1, 2]], 8)
    assert again(active, 1) == pytest.approx(1 / 6)
    assert again(active, 2) == pytest.approx(2 / 4)


def test_by_chance_is_what_independent_tokens_have() -> None:
    generator = np.random.default_rng()
    likely = generator.permutation(np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05]))
    active = routed([generator.choice(6, 2, replace=False, p=likely).tolist() for _ in range(20_000)], 6)
    assert again(active, 1) == pytest.approx(again_by_chance(active), abs=0.02)
    same = routed([[0, 1]] * 5, 8)
    assert again(same, 1) == again_by_chance(same) == 1


def test_a_quarter_of_each_block_is_chosen_by_the_other_counts() -> None:
    visits = np.array([[1, 2, 3, 4, 0, 0, 0, 0], [0, 10, 0, 0, 0, 0, 0, 0]])
    assert of_most_used(visits, visits) == pytest.approx((7 + 10) / 20)
    other = np.array([[0, 9, 8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 1]])
    assert of_most_used(visits, other) == pytest.approx(5 / 20)
    assert of_most_used(np.ones((3, 16)), np.zeros((3, 16))) == 0.25
