"""Fixtures of the tests of calibration and of thresholds: small and real models, calibrated once."""

from pathlib import Path

import pytest
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.folder import Calibration
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Checkpoint:
    """A random Qwen2 of three blocks: grouped queries, biases, no BOS."""
    return open_checkpoint(make_model(tmp_path_factory.mktemp("small") / "m", "qwen2", num_hidden_layers=3))


@pytest.fixture(scope="session")
def text() -> Text:
    """A few thousand tokens of the random models' tokenizer."""
    return Text("topics", (TEXT[:6000],), "topics")


@pytest.fixture(scope="session")
def small_calibration(small, text, tmp_path_factory) -> Calibration:
    return calibrate(small, text, tmp_path_factory.mktemp("cal") / "c", CalibrateOptions(context=64, samples=8))


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """The trained model that every installation has."""
    return open_checkpoint("shipped:tiny")


@pytest.fixture(scope="session")
def tiny_calibration(tiny, tmp_path_factory) -> Calibration:
    options = CalibrateOptions(context=128, samples=48, batch=8)
    return calibrate(tiny, read_text("shipped:train"), tmp_path_factory.mktemp("cal") / "c", options)


@pytest.fixture(scope="session")
def silu(shared: Path) -> Checkpoint:
    return open_checkpoint(shared / "models" / "books-26m-silu")


@pytest.fixture(scope="session")
def silu_calibration(silu, shared, tmp_path_factory) -> Calibration:
    books = read_text(str(shared / "text" / "books.calibration.jsonl.xz"))
    return calibrate(silu, books, tmp_path_factory.mktemp("cal") / "c", CalibrateOptions(context=512, samples=8))
