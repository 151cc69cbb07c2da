"""What the tests of runtimes share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import plan_neurons
from native_build import use_other_build
from operations_for_tests import Backend, opened

from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.cpu import dispatch

use_other_build()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """These matrices are small: two threads wait for each other longer than they work, the more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    dispatch._operations.cache_clear()  # or nanobind may call them leaked, where pytest keeps a module to the very end


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """What `operations_for_tests.every_backend` names."""
    yield from opened(*request.param)


@pytest.fixture(scope="session")
def trained(shared_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """books-26m-relu, its MLPs stored by neurons."""
    path = tmp_path_factory.mktemp("real") / "relu.gguf"
    plan_neurons(open_checkpoint(shared_model("books-26m-relu"))).write(path)
    return read_packed(path)
