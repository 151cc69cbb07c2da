"""A process that cannot find the other workers says so in a line."""

from importlib import import_module
from typing import Any

import pytest
import torch.distributed

from sparsepack.errors import WorkersError
from sparsepack.workers import joined as module
from sparsepack.workers.joined import joined


def _environment(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    for name, value in {"RANK": number, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("number", ["2", "-1", "first", ""])
def test_a_number_that_no_worker_has_is_refused(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    _environment(monkeypatch, number)
    line = f"RANK is '{number}': expected the number of this worker, from 0 to 1"
    with pytest.raises(WorkersError, match=line), joined():
        pass


def test_a_group_that_the_process_has_already_is_refused_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, "0")
    ended: list[None] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append(None))
    with pytest.raises(WorkersError, match="has a group of torch"), joined():
        pass
    assert not ended


def test_connections_that_cannot_be_opened_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed:\n unable to resolve address")

    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    _environment(monkeypatch, "0")
    meeting = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(module, "_names", lambda *_: ("worker 0 of 2 on here", "worker 1 of 2 on there"))
    monkeypatch.setattr(module.Workers, "agree", lambda *_: None)
    monkeypatch.setattr(module, "_own_gpu", lambda *_: None)
    line = r"worker 0 of 2 on here cannot open .* \(Gloo connectFullMesh failed: unable to .*GLOO_SOCKET_IFNAME"
    with pytest.raises(WorkersError, match=line), joined():
        pass
