"""What the study of a large mixture makes of a few blocks."""

import sys

import pytest
from large_mixture import LAYERS, Found, measured, row
from steps import Step


def found(name: str, fewer: float, more: float, peak: int) -> Found:
    return Found(name, Step(name, fewer, peak // 2, 0), Step(name, more, peak, 0))


def test_a_whole_model_takes_what_one_more_block_takes_for_each() -> None:
    assert found("pack", 30.0, 34.0, 1).of_all(2, 4, LAYERS) == pytest.approx(30 + 46 * 2)
    other_work = found("pack", 30.0, 29.0, 1)
    assert other_work.of_all(2, 3, LAYERS) is None
    assert "| 30.0 | 29.0 | ? |" in row(other_work, [2, 3], 1)["shown"]


def test_memory_is_told_in_blocks_of_the_type_that_is_computed_in() -> None:
    shown = [
        row(found(name, 60.0, 90.0, 5_000_000_000), [2, 3], 1_250_000_000)["shown"] for name in ("pack", "calibrate")
    ]
    assert shown[0].endswith("| 24 | 5.00 | 4.00 |")
    assert shown[1].endswith("| 24 | 5.00 | 2.00 |")


def test_memory_of_a_command_is_that_of_all_its_processes() -> None:
    code = "import subprocess, sys, time; x = bytearray(60_000_000); "
    child = "import time; x = bytearray(80_000_000); time.sleep(1)"
    step = measured("both", [sys.executable, "-c", f"{code}subprocess.run([sys.executable, '-c', '{child}'])"])
    assert step.code == 0
    assert step.peak_bytes > 140_000_000
    assert measured("fails", [sys.executable, "-c", "exit(3)"]).code == 3
