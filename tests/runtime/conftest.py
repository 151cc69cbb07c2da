"""What the tests of runtimes share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from artifacts_for_tests import plan_neurons
from native_build import use_other_build
from operations_for_tests import Backend, load_backend_module

from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.cpu import machine

use_other_build()


@pytest.fixture(autouse=True, scope="session")
def _no_operations_are_kept() -> Iterator[None]:
    """Nanobind may call them leaked, where pytest keeps a module to the very end."""
    yield
    machine._operations.cache_clear()


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """What `operations_for_tests.every_backend` names."""
    yield from load_backend_module(*request.param)


@pytest.fixture(scope="session")
def trained(shared_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """books-26m-relu, its MLPs stored by neurons."""
    path = tmp_path_factory.mktemp("real") / "relu.gguf"
    plan_neurons(open_checkpoint(shared_model("books-26m-relu"))).write(path)
    return read_packed(path)
