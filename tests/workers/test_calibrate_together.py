"""Several processes calibrate together: the same bytes as one, whoever goes on, and one line where one of them dies."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_models import small
from folders_for_tests import content
from forks_for_tests import Fork, on_devices
from models_for_tests import TEXT

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.workers import state as states
from sparsepack.workers.shard import Shard
from sparsepack.workers.state import unfinished_path

__all__ = ["on_devices", "small"]

WINDOWS = ["--context", "24", "--samples", "35"]
"""Nine parts of two batches, of which the last has less."""
OPTIONS = CalibrateOptions(context=24, samples=35)


def _dies_at_a_block() -> None:
    """Worker 1 is killed when it has saved block 0."""
    save = Shard.save_block

    def dies(self: Shard, layer: int, *rest: Any, **values: Any) -> None:
        if os.environ["RANK"] == "1" and layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, layer, *rest, **values)

    states.SAVE_EVERY = 0.0
    Shard.save_block = dies  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text, a file."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(TEXT[:6000])
    return path


@pytest.fixture(scope="module")
def alone(small: Checkpoint, given: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes."""
    folder = tmp_path_factory.mktemp("alone") / "c"
    calibrate(small, str(given), folder, OPTIONS)
    return content(folder)


@pytest.mark.long
def test_a_mixture_of_experts_has_the_same_bytes_by_two_workers(
    given: Path, tmp_path: Path, on_devices: Callable[..., str]
) -> None:
    name = "shipped:tiny-mixture"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has: of few tokens an expert's products depend on it
    try:
        calibrate(name, str(given), tmp_path / "alone", OPTIONS)
    finally:
        torch.set_num_threads(threads)
    command = ["calibrate", name, "--text", str(given), *WINDOWS, "-o", str(tmp_path / "two")]
    on_devices(2, *command)
    assert content(tmp_path / "two") == content(tmp_path / "alone")


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **more}


def _command(small: Checkpoint, given: Path, output: Path) -> list[str]:
    return ["calibrate", str(small.path), "--text", str(given), *WINDOWS, "-o", str(output)]


def _port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _started(
    arguments: list[str],
    number: int,
    port: str,
    said: Path,
    folder: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Fork:
    """Worker `number` of two, as torchrun starts it."""
    who = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with said.open("w") as errors:
        environment = _environment(**who, LOCAL_RANK=str(number), GLOO_SOCKET_IFNAME="lo")
        return Fork(arguments, environment, None, errors, folder, before)


@pytest.mark.slow
def test_devices_make_the_bytes_of_one(small: Checkpoint, given: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    command = [*_command(small, given, tmp_path / "c"), "--devices", "cpu,cpu"]
    ended = subprocess.run(
        [sys.executable, "-m", "sparsepack", *command], env=_environment(), capture_output=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert content(tmp_path / "c") == alone
    assert ended.stdout.count(b"windows ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.long  # those that go on make the same
def test_three_devices_make_the_bytes_of_one(
    small: Checkpoint, given: Path, alone: dict[str, bytes], tmp_path: Path, on_devices: Callable[..., str]
) -> None:
    said = on_devices(3, *_command(small, given, tmp_path / "c"))
    assert content(tmp_path / "c") == alone
    assert said.count("windows ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.slow
def test_torchrun_makes_the_bytes_of_one(
    small: Checkpoint, given: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "sparsepack", *_command(small, given, tmp_path / "c")]
    environment = _environment(GLOO_SOCKET_IFNAME="lo", TMPDIR=str(tmp_path))  # torchrun leaves a folder of logs
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr.decode()
    assert content(tmp_path / "c") == alone


def test_a_worker_that_dies_ends_the_other_with_a_line_and_one_alone_goes_on(
    small: Checkpoint, given: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, command = _port(), _command(small, given, tmp_path / "c")
    texts = [tmp_path / f"said-{number}" for number in range(2)]
    first, other = (_started(command, number, port, said, before=_dies_at_a_block) for number, said in enumerate(texts))
    assert other.wait(300) == -signal.SIGKILL
    assert first.wait(300) == 1
    lines = [line for line in texts[0].read_text().splitlines() if line.startswith("sparsepack: ")]
    assert len(lines) == 1, lines
    assert re.search("worker 1 of 2 on .* is gone", lines[0])  # seen at once; what gives no sign of life, later
    assert not (tmp_path / "c").exists()
    assert unfinished_path(tmp_path / "c").is_dir()
    read: list[int] = []
    load = BlockStream.load
    monkeypatch.setattr(BlockStream, "load", lambda self, layer: read.append(layer) or load(self, layer))
    calibrate(small, str(given), tmp_path / "c", OPTIONS)
    assert read == list(range(1, small.layers))
    assert content(tmp_path / "c") == alone


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_several_go_on_with_what_one_began(
    small: Checkpoint,
    given: Path,
    alone: dict[str, bytes],
    tmp_path: Path,
    count: int,
    on_devices: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ends(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states, "SAVE_EVERY", 0.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="goes on from there"):
        load = BlockStream.load
        patch.setattr(BlockStream, "load", lambda self, layer: ends() if layer == 2 else load(self, layer))
        calibrate(small, str(given), tmp_path / "c", OPTIONS)
    assert (unfinished_path(tmp_path / "c") / "hidden-00002.safetensors").exists()
    on_devices(count, *_command(small, given, tmp_path / "c"))
    assert content(tmp_path / "c") == alone


def test_workers_that_were_given_other_commands_are_refused_and_keep_nothing(
    small: Checkpoint, given: Path, tmp_path: Path
) -> None:
    port, command = _port(), _command(small, given, tmp_path / "c")
    commands = [command, [*command, "--seed", "1"]]
    texts = [tmp_path / f"said-{number}" for number in range(2)]
    both = [_started(each, number, port, texts[number]) for number, each in enumerate(commands)]
    for each, said in zip(both, texts, strict=True):
        assert each.wait(300) == 2
        assert "sparsepack: worker 1 of 2 on" in said.read_text()
        assert "has another command" in said.read_text()
    assert sorted(tmp_path.iterdir()) == texts


def test_weights_that_differ_are_found_before_anything_is_kept(small: Checkpoint, given: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / small.path.name
    shutil.copytree(small.path, other)
    (file,) = other.glob("*.safetensors")
    with file.open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x40")  # a norm of 1.0 before
    (tmp_path / "out").mkdir()
    port, command = _port(), _command(small, given, tmp_path / "out" / "c")
    command[1] = small.path.name
    folders = [small.path.parent, other.parent]
    texts = [tmp_path / f"said-{number}" for number in range(2)]
    both = [_started(command, number, port, texts[number], at) for number, at in enumerate(folders)]
    for each, said in zip(both, texts, strict=True):
        assert each.wait(300) == 2
        assert "has another model" in said.read_text()
    assert list((tmp_path / "out").iterdir()) == []
