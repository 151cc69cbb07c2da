"""How tokens are chosen where the user does not say."""

from typing import Any

import pytest

from sparsepack.errors import UserError
from sparsepack.runtime.generation.continuation import sampling_of
from sparsepack.runtime.generation.generate import apply_suggestions, check_generate_options
from sparsepack.runtime.generation.sampling import Sampling
from sparsepack.runtime.options import GenerateOptions

MAKERS = {"temperature": 0.7, "top_k": 20, "repeat_penalty": 1.1}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, MAKERS),
        ({"top_k": 5}, {"temperature": 0.7, "repeat_penalty": 1.1}),
        ({"temperature": 0}, {"repeat_penalty": 1.1}),
        ({"temperature": 0, "repeat_penalty": 1}, {}),
    ],
)
def test_what_is_given_comes_before_what_the_makers_suggest(given: dict[str, Any], taken: dict[str, float]) -> None:
    options, found = apply_suggestions(GenerateOptions(**given), MAKERS)
    assert found == taken
    assert options == GenerateOptions(**given, **taken)
    assert apply_suggestions(check_generate_options(options), MAKERS)[0] == options  # taken twice, it is the same


@pytest.mark.parametrize("makers", [{"top_k": 5}, {"temperature": 0.0, "top_k": 5}])
def test_a_suggestion_for_drawing_where_nothing_is_drawn_is_not_taken(makers: dict[str, float]) -> None:
    options, taken = apply_suggestions(GenerateOptions(), makers)
    assert "top_k" not in taken
    assert sampling_of(check_generate_options(options)) == Sampling()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"top_k": 5}, "top_k 5: it does nothing with temperature 0"),
        ({"temperature": 0, "seed": 7}, "seed 7: it does nothing with temperature 0"),
        ({"repeat_last_n": 8}, "repeat_last_n 8: it does nothing with repeat_penalty 1"),
    ],
)
def test_what_does_nothing_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_generate_options(GenerateOptions(**given))
