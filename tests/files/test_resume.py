"""The state of a run that has not finished."""

from pathlib import Path

import pytest
import torch

from sparsepack.errors import OutputError
from sparsepack.files.resume import ResumeState, state_beside


def test_a_state_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"state: cannot be made \(No such file or directory\)"):
        ResumeState(tmp_path / "none" / "state", "fingerprint").keep("x", {"x": torch.zeros(1)})


def test_an_interrupt_says_where_the_state_is_if_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as bare, state_beside(tmp_path / "out"):
        raise KeyboardInterrupt
    assert str(bare.value) == ""
    kept = r"\.out\.unfinished keeps what was done"
    with pytest.raises(KeyboardInterrupt, match=kept), state_beside(tmp_path / "out") as path:
        ResumeState(path, "fingerprint").keep("x", {"x": torch.zeros(1)})
        raise KeyboardInterrupt
