"""What workers say through a store of torch.distributed, of any length."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from sparsepack.workers.joined import _Link


@pytest.mark.parametrize("length", [0, 1, (1 << 20) - 1, 1 << 20, (9 << 20) + 1])
def test_a_value_comes_whole_whatever_its_length(length: int) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    link = _Link(store)
    value = ("0123456789é" * (length // 11 + 1))[:length]
    assert link.get("key") is None
    link.set("key", value)
    assert link.get("key") == value
    link.forget("key")
    assert link.get("key") is None
    assert store.num_keys() <= 1  # its own
