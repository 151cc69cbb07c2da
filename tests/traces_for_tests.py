"""A random model whose neurons are sparse, and its text; a trace of it that was made once."""

from pathlib import Path

import pytest
from models_for_tests import TEXT, make_model

from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.trace_file import Trace
from sparsepack.calibrate.tracing import trace
from sparsepack.files.text import Text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint

OPTIONS = TraceOptions(sessions=3, tokens=48, prompt=8)


@pytest.fixture(scope="session")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Three blocks of 500 neurons, which is no multiple of 8; no BOS."""
    folder = tmp_path_factory.mktemp("relu") / "m"
    changes = {"num_hidden_layers": 3, "hidden_act": "relu", "intermediate_size": 500}
    return open_checkpoint(make_model(folder, "qwen2", **changes))


@pytest.fixture(scope="session")
def texts() -> Text:
    """Four documents, of which one is too short for a session."""
    return Text("topics", (TEXT[:1500], "Short.", TEXT[1500:3000], TEXT[3000:4500]), "topics", count=4)


@pytest.fixture(scope="session")
def traced(relu: Checkpoint, texts: Text, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace(relu, texts, Path(tmp_path_factory.mktemp("trace") / "t"), OPTIONS)


@pytest.fixture(scope="session")
def other_text(relu: Checkpoint, texts: Text, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace of text that `traced` does not have."""
    return trace(relu, reversed_words(texts), Path(tmp_path_factory.mktemp("other") / "t"), OPTIONS)


def reversed_words(texts: Text) -> Text:
    """The long documents of a text, from their last word to their first."""
    words = [" ".join(reversed(document.split())) for document in texts.documents if len(document) > 100]
    return Text("other", tuple(words), "other", count=len(words))
