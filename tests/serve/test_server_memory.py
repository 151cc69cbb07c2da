"""What the garbage collector looks at while a server runs: it holds every thread up meanwhile."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from sparsepack.loading import Model
from sparsepack.serve import server
from sparsepack.serve.options import ServeOptions
from sparsepack.serve.server import frozen_heap


def test_what_is_there_is_not_collected_and_what_comes_is() -> None:
    gc.unfreeze()  # what the tests' own start has left to itself
    before = len(gc.get_objects())
    with frozen_heap():
        assert len(gc.get_objects()) < 1000 < before
        cycle: list[Any] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > before // 2


def test_a_server_lets_the_model_and_libraries_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        looked_at.append(len(gc.get_objects()))

    monkeypatch.setattr(asyncio, "run", run)
    server.serve(model, "tiny", ServeOptions(), server.bind_socket("127.0.0.1", 0, 1))
    assert looked_at[0] < 1000
    assert gc.get_freeze_count() == 0
