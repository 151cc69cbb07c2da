"""Each reader on hostile input for a little while.

Five seconds a target: some hundred inputs, enough to notice what a change broke, without a minute more on every run of
the tests. The seed is fixed, so that a run fails for a change and not by chance; `make fuzz` takes another seed each
time, and as long as one likes.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fuzz.harness import Broken, Target, fuzz
from tests.fuzz.targets import TARGETS, make_targets

SECONDS = float(os.environ.get("FUZZ_SECONDS", 5))
SEED = int(os.environ.get("FUZZ_SEED", 0))
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `make_targets` sets for its process does not stay for the tests that follow."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_ends_in_success_or_one_line(name: str, tmp_path: Path) -> None:
    (target,) = make_targets(tmp_path, [name])
    failures = fuzz(target, SEED, SECONDS, KEPT)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.usefixtures("as_it_was")
def test_all_targets_are_made_in_one_folder(tmp_path: Path) -> None:
    """As `make fuzz` does."""
    assert tuple(target.name for target in make_targets(tmp_path)) == TARGETS


def test_make_fuzz_says_what_it_takes() -> None:
    """The line of the Makefile runs outside of pytest, which has a search path of its own."""
    asked = ["make", "fuzz", "FUZZ=--help", "-o", ".venv/.installed-test", "-o", ".venv/.built"]
    run = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert TARGETS[0] in run.stdout


def test_a_failure_is_found_told_and_kept(tmp_path: Path) -> None:
    def write(random, into):
        (into / "x").write_text(str(random.randrange(4)))

    def read(inside):
        if (inside / "x").read_text() == "3":
            raise Broken("three")

    target = Target("threes", write, read)
    failures = fuzz(target, 7, 60, tmp_path, most=40)
    assert failures
    assert "seed 7" in failures[0]
    assert "Broken: three" in failures[0]
    kept = list(tmp_path.glob("threes-7-*"))
    assert len(kept) == len(failures)
    assert all((path / "x").read_text() == "3" for path in kept)
    assert fuzz(target, 7, 60, tmp_path, most=40) == failures
