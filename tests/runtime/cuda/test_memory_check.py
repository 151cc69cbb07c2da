"""What was taken of a GPU's memory beside the plan: more than the budget is an error with the numbers."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.placement.budget import DRIVER_BYTES, Parts, plan_within, work_of
from sparsepack.runtime.cuda.driver.memory import LIBRARY_BYTES, check_capacity, check_use, within_budget

WORK = work_of(hidden=256, intermediate=300, blocks=2, vocabulary=300, sequences=1, record=288, model=10**6)
PARTS = Parts(1000, 1000, (10, 10), (10, 10), record=288, neurons=300, cache=1000, work=WORK)
PLAN = plan_within(PARTS, PARTS.least + 40_000)


def test_as_much_as_planned_is_right() -> None:
    assert PLAN.budget is not None
    check_use(PLAN, PLAN.card_bytes, PLAN.card_bytes)
    check_use(PLAN, PLAN.budget + LIBRARY_BYTES, PLAN.budget + DRIVER_BYTES)


@pytest.mark.parametrize(("tensors", "driver"), [(LIBRARY_BYTES + 1, 0), (0, DRIVER_BYTES + 1)])
def test_more_than_the_budget_is_an_error_with_numbers(tensors: int, driver: int) -> None:
    assert PLAN.budget is not None
    with pytest.raises(UserError, match=r"--vram [\d.]+MB: the model took [\d.]+[GM]B .* planned") as caught:
        check_use(PLAN, PLAN.budget + tensors, PLAN.budget + driver)
    assert "\n" not in str(caught.value)


def test_without_a_budget_nothing_is_exceeded() -> None:
    check_use(replace(PLAN, budget=None), 10**12, 10**12)


def test_a_card_that_others_use_is_refused_before_anything_is_loaded() -> None:
    check_capacity(PLAN, PLAN.card_bytes, torch.device("cuda"))
    with pytest.raises(UserError, match=r"device cuda: 0\.00GB of its memory are free, and .* end the processes"):
        check_capacity(PLAN, 1000, torch.device("cuda"))


class Card:
    """A card with so many bytes free, and what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.tensors, self.given_back = free, 0, 0
        asked: dict[str, Callable[..., object]] = {
            "synchronize": lambda device: None,
            "empty_cache": self.give_back,
            "mem_get_info": lambda device: (self.free, 80 * 10**9),
            "memory_allocated": lambda device: self.tensors,
        }
        for name, answer in asked.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def give_back(self) -> None:
        self.given_back += 1

    def take(self, tensors: int) -> None:
        self.tensors += tensors
        self.free -= tensors


def test_nothing_is_loaded_to_a_card_that_another_process_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, PLAN.card_bytes - 1)
    with pytest.raises(UserError, match="end the processes"), within_budget(PLAN, torch.device("cuda")):
        pytest.fail("loaded")
    assert card.tensors == 0


@pytest.mark.parametrize("more", [0, LIBRARY_BYTES, LIBRARY_BYTES + 1])
def test_what_was_loaded_is_compared_with_the_budget(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 10**10)
    card.take(12345)  # of a model that was there before
    assert PLAN.budget is not None
    wrong = pytest.raises(UserError, match=r"--vram .*: the model took") if more > LIBRARY_BYTES else nullcontext()
    with wrong, within_budget(PLAN, torch.device("cuda")):
        card.take(PLAN.budget + more)


def test_what_torch_keeps_is_given_back_where_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, 10**10)
    with pytest.raises(torch.OutOfMemoryError), within_budget(PLAN, torch.device("cuda")):
        before = card.given_back
        raise torch.OutOfMemoryError
    assert card.given_back > before
