"""A packed tiny model that skips, and a server of it."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from artifacts_for_tests import write_zigzag
from serving import Served, tiny_model

from sparsepack.loading import Model
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.sites import SiteRule
from sparsepack.runtime.cpu import machine
from sparsepack.serve.options import ServeOptions


@pytest.fixture(autouse=True, scope="session")
def _native_operations_end() -> Iterator[None]:
    """Without this nanobind may call the operations leaked, where pytest keeps a module to the very end."""
    yield
    machine._operations.cache_clear()


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a threshold at every site that skips some columns."""
    path = tmp_path_factory.mktemp("serve") / "tiny.gguf"
    checkpoint = open_checkpoint("shipped:tiny")
    write_zigzag(checkpoint, {(layer, site): SiteRule(0.02) for layer in range(3) for site in SITES}, path)
    return path


@pytest.fixture(scope="session")
def model(artifact: Path) -> Model:
    """The tiny model, loaded, with room for several texts."""
    return tiny_model(artifact)


@pytest.fixture(scope="session")
def dense(artifact: Path) -> Model:
    """The same, with nothing skipped: what a text is does not depend on the texts beside it, but for roundings."""
    return tiny_model(artifact, dense=True)


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    """A server with the usual options."""
    with Served(model, ServeOptions()) as running:
        yield running


@pytest.fixture(scope="module")
def served_dense(dense: Model) -> Iterator[Served]:
    """A server of the model that skips nothing."""
    with Served(dense, ServeOptions()) as running:
        yield running


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
