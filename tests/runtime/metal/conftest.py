"""What the tests of Metal kernels share."""

import pytest
from metal_emulation import Library, compile_shader

from sparsepack.runtime.metal.library import source


@pytest.fixture(scope="session")
def library() -> Library:
    """The kernels, compiled for this processor."""
    return compile_shader(source())
