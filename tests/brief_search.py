"""`prune --permute` in tests of what stands around it: how good the orders are that it finds is for tests/pruning."""

from collections.abc import Iterator

import pytest

from sparsepack.calibrate import permute


@pytest.fixture(autouse=True, scope="module")
def orders_are_searched_briefly() -> Iterator[None]:
    """Few rounds of swaps still find better orders, and the last hundred would take most of the time of pruning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permute, "ROUNDS", 8)
        yield
