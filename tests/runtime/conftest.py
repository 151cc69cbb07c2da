"""What the tests of runtimes share."""

from collections.abc import Iterator

import pytest
import torch
from native_build import use_other_build
from operations_for_tests import Backend, opened

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
