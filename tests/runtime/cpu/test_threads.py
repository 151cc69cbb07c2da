"""More threads than a system starts."""

from types import SimpleNamespace

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.formats.kinds import DENSE
from sparsepack.runtime.cpu import decoder


def test_more_threads_than_the_system_starts_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(decoder, "native", lambda: SimpleNamespace(Decoder=refuses))
    monkeypatch.setattr(decoder, "_build_model", lambda *_: None)
    monkeypatch.setattr(decoder, "attention_of", lambda *_: None)
    monkeypatch.setattr(decoder, "instruction_set", lambda: "plain")
    packed = SimpleNamespace(architecture=SimpleNamespace(vocabulary=1), attention=None, mlp_kind=DENSE, layers=())
    reason = "Resource temporarily unavailable"
    with pytest.raises(UserError, match="7 threads: the system does not start so many; give fewer"):
        decoder.NativeDecoder(packed, torch.device("cpu"), 4, 7, lambda shape: None)  # type: ignore[arg-type]
    reason = "another one"
    with pytest.raises(RuntimeError, match="another one"):
        decoder.NativeDecoder(packed, torch.device("cpu"), 4, 7, lambda shape: None)  # type: ignore[arg-type]
