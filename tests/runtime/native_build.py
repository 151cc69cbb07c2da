"""The compiled module that the tests run: the installed one, or the one that SPARSEPACK_NATIVE names."""

import importlib.util
import os
import sys

import pytest

from sparsepack.errors import UserError
from sparsepack.runtime.cpu.machine import instruction_sets, native

MODULE = "sparsepack.runtime.cpu._native"
SANITISED = "libasan" in os.environ.get("LD_PRELOAD", "")
"""Whether the tests run under AddressSanitizer."""

forks = pytest.mark.skipif(
    SANITISED or not hasattr(os, "fork"),
    reason="no fork; or AddressSanitizer, whose allocator may stay locked in a child where other threads allocate",
)
"""Marks a test that forks its process."""


def use_other_build() -> None:
    """Load the module from SPARSEPACK_NATIVE (a file), so that a sanitised build needs no installation."""
    file = os.environ.get("SPARSEPACK_NATIVE")
    if not file or MODULE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def skip_without_kernels() -> None:
    """Skip the module that is imported where there are no kernels, or fail where SPARSEPACK_REQUIRE_KERNELS is set."""
    use_other_build()
    try:
        native()
    except UserError as error:
        if os.environ.get("SPARSEPACK_REQUIRE_KERNELS"):
            raise
        pytest.skip(str(error), allow_module_level=True)


def instruction_set_params() -> list:
    """One pytest parameter for each instruction set of this machine; without kernels one that is skipped, or that
    fails where SPARSEPACK_REQUIRE_KERNELS is set."""
    use_other_build()
    try:
        return [pytest.param(name) for name in instruction_sets()]
    except UserError as error:
        if os.environ.get("SPARSEPACK_REQUIRE_KERNELS"):
            raise
        return [pytest.param("none", marks=pytest.mark.skip(reason=str(error)))]
