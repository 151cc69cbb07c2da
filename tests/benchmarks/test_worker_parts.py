"""The parts of a worker's time that `benchmarks/many_workers.py` tells, by names that the tree still has."""

import subprocess
import sys
from pathlib import Path

import pytest
from many_workers import parts_line, unshrunk
from worker_parts import OTHER, PARTS, part_of, parts_in, sampled

SPARSEPACK = Path(__file__).parents[2] / "sparsepack"


@pytest.mark.parametrize(("part", "path", "name"), PARTS[1:])
def test_a_part_is_named_after_code_that_there_is(part: str, path: str, name: str) -> None:
    files = [file for file in SPARSEPACK.rglob("*.py") if path in file.as_posix()]
    assert files
    assert not name or any(f"def {name}(" in file.read_text() for file in files)
    assert part_of([("/x/click/core.py", "invoke"), (files[0].as_posix(), name)]) == part


def test_what_no_row_names_is_other() -> None:
    outer = ("/x/sparsepack/cli/app.py", "main")
    assert part_of([("/x/torch/cuda.py", "init"), ("/x/sparsepack/packing.py", "pack"), outer]) == (
        f"{OTHER} (packing.py pack)"
    )
    assert part_of([("/x/torch/cuda.py", "init")]) == OTHER


def test_a_process_writes_the_seconds_of_its_main_thread(tmp_path: Path) -> None:
    folder = tmp_path / "workers" / "made"
    script = tmp_path / "workers" / "tokenizer" / "slow.py"
    environment = sampled({"RANK": "1"}, folder)
    script.parent.mkdir()
    script.write_text("import time\ntime.sleep(0.3)\n")
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    (seconds,) = parts_in(folder)
    assert seconds["tokenising"] > 0.1
    # One that only starts workers is none.
    subprocess.run([sys.executable, str(script), "--devices", "cpu,cpu"], env=sampled({}, tmp_path / "b"), check=True)
    assert parts_in(tmp_path / "b") == []


def test_what_did_not_shrink_is_told() -> None:
    parts = {
        1: {"importing": 4.0, "running blocks": 10.0},
        2: {"importing": 4.2, "running blocks": 5.0, "joining": 1.0},
    }
    assert parts_line(parts[1]) == "running blocks 10.0, importing 4.0"
    assert [unshrunk(parts, count) for count in parts] == [14.0, 5.2]
