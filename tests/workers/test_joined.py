"""A process that cannot find the other workers says so in a line."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from linked import together

from sparsepack.errors import WorkersError
from sparsepack.workers import joined as module
from sparsepack.workers.joined import joined
from sparsepack.workers.shard import Shard


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
    monkeypatch.setattr(module.Shard, "agree", lambda *_: None)
    monkeypatch.setattr(module, "_own_gpu", lambda *_: None)
    line = r"worker 0 of 2 on here cannot open .* \(Gloo connectFullMesh failed: unable to .*GLOO_SOCKET_IFNAME"
    with pytest.raises(WorkersError, match=line), joined():
        pass


@pytest.mark.parametrize(
    ("cards", "own", "note"),
    [
        (["a", "b"], ["cuda:0", "cuda:1"], ""),
        (
            ["a", "a"],
            [None, None],
            "note: 2 workers share 1 GPU, which makes nothing faster: they exchange",
        ),
        (["a", ""], [None, None], ""),
    ],
)
def test_tensors_go_from_gpu_to_gpu_where_each_worker_has_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cards: list[str], own: list[Any], note: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: SimpleNamespace(uuid=cards[int(name[-1])]))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name in module._NCCL:
        monkeypatch.setenv(name, "0")

    def work(shard: Shard) -> torch.device | None:
        number = shard.rank
        return module._own_gpu(shard, f"cuda:{number}" if cards[number] else "cpu")

    assert together(2, work) == [None if device is None else torch.device(device) for device in own]
    said = capsys.readouterr().err
    assert said.startswith(note)
    assert bool(said) == bool(note)
