"""What transformers says to the makers of models does not reach those who run them."""

import logging
from collections.abc import Iterator

import pytest
from transformers import Phi3Config
from transformers.utils import logging as of_transformers

import sparsepack.cli.app  # noqa: F401  (it filters)

LOGGER = logging.getLogger("transformers.modeling_rope_utils")


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the logger lets through."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    yield lines
    LOGGER.removeHandler(handler)


def test_that_a_configuration_has_the_field_of_every_long_phi_is_not_said(told: list[str]) -> None:
    said: list[str] = []
    kept = list(LOGGER.filters)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for filters in ([], kept):
        of_transformers.warning_once.cache_clear()
        LOGGER.filters = list(filters)
        Phi3Config(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=256,
            original_max_position_embeddings=64,
            rope_parameters=dict(rope),
        )
        said.append(" ".join(told))
        told.clear()
    LOGGER.filters = kept
    assert "original_max_position_embeddings" in said[0]  # what is tested: transformers still says it
    assert said[1] == ""


def test_other_warnings_are_shown(told: list[str]) -> None:
    LOGGER.warning("`short_factor` is odd")
    assert told == ["`short_factor` is odd"]
