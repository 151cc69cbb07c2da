"""Between files, device and artifact: every byte arrives, in pieces of any size."""

import threading
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import write_plain, write_zigzag
from codec_cases import relative_error
from devices import DEVICES, needs_cuda
from small_rules import rules

from sparsepack.files import transfer
from sparsepack.files.gguf import read_gguf
from sparsepack.files.transfer import host_pieces, on_host, stacked_on, tensors_at_once
from sparsepack.formats import plain as plain_gguf
from sparsepack.formats.blocks import q4_k_device, q6_k
from sparsepack.formats.containers import write_tensors
from sparsepack.formats.zigzag import plan as zigzag_gguf
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.triton_kernels import FAILED, importable
from sparsepack.workers.forked import can_fork, forked_map

Checkpoints = dict[str, Checkpoint]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1000 bytes."""
    monkeypatch.setattr(transfer, "PIECE", 1000)
    monkeypatch.setattr(transfer, "_own", threading.local())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1,), (10, 25), (250, 1), (33, 77)])
@pytest.mark.usefixtures("short_pieces")
def test_pieces_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    buffer = torch.empty(1000, dtype=torch.uint8)  # which needs no CUDA
    monkeypatch.setattr(transfer, "_buffer", lambda: buffer)
    monkeypatch.setattr(transfer, "_wait", lambda device: None)
    source = normal(*shape, dtype=dtype)
    target = torch.empty_like(source)
    transfer._copy(source, target)
    assert torch.equal(target, source)
    data = source.view(-1).view(torch.uint8)
    assert b"".join(map(bytes, transfer._staged(data))) == data.numpy().tobytes()
    if source.dim() == 2:
        transfer._copy(source.t(), target.view(*shape[::-1]))
        assert torch.equal(target.view(*shape[::-1]), source.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("short_pieces")
def test_rows_are_stacked_as_torch_stacks_them(device: str) -> None:
    parts = [normal(30, 17), normal(5, 17), normal(1, 17)]
    for given in (parts, parts[:1], [part.bfloat16() for part in parts], [parts[0], parts[1].bfloat16()]):
        stacked = stacked_on(device, given)
        assert stacked.device.type == device
        assert stacked.dtype == torch.cat(given).dtype
        assert torch.equal(stacked.cpu(), torch.cat(given))
    assert torch.equal(stacked_on(device, [normal(999)]).cpu(), normal(999))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("short_pieces")
def test_bytes_come_from_any_device(device: str) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(10).view(-1, 16)
    for given in (data, data[:0], data.t(), data[:, :5]):
        assert b"".join(map(bytes, host_pieces(given.to(device)))) == given.contiguous().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("short_pieces")
def test_a_tensor_comes_to_the_host_whole(device: str) -> None:
    for given in (normal(30, 17).double(), torch.arange(7), torch.tensor(3.5), torch.zeros(0, 4), normal(8, 5).t()):
        found = on_host(given.to(device))
        assert found.device.type == "cpu"
        assert torch.equal(found, given)


def test_several_tensors_are_in_work_for_a_cuda_device_only() -> None:
    assert tensors_at_once("cpu") == 1
    assert tensors_at_once("cuda") == tensors_at_once("cuda:1") > 1


@pytest.mark.parametrize("name", ["odd", "qwen2"])
def test_threads_write_what_one_writes(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    checkpoint = checkpoints[name]
    write_zigzag(checkpoint, rules(checkpoint), tmp_path / "1.zigzag")
    write_plain(checkpoint, tmp_path / "1.plain", type="bf16")
    for module in (zigzag_gguf, plain_gguf):
        monkeypatch.setattr(module, "tensors_at_once", lambda device: 3)
    write_zigzag(checkpoint, rules(checkpoint), tmp_path / "3.zigzag")
    write_plain(checkpoint, tmp_path / "3.plain", type="bf16")
    for kind in ("zigzag", "plain"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"3.{kind}").read_bytes()


@pytest.mark.skipif(not can_fork(), reason="forks are for Linux")
@pytest.mark.parametrize("name", ["odd", "qwen2"])
def test_processes_write_what_one_writes(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    checkpoint = checkpoints[name]
    forked: list[int] = []
    for processes, start in ((1, 1 << 60), (3, 0)):
        torch.set_num_threads(processes)
        monkeypatch.setattr(write_tensors, "FORKED_FROM", start)
        monkeypatch.setattr(write_tensors, "forked_map", lambda *given: forked.append(given[3]) or forked_map(*given))
        write_zigzag(checkpoint, rules(checkpoint), tmp_path / f"{processes}.zigzag")
        write_plain(checkpoint, tmp_path / f"{processes}.plain", type="bf16")
    assert forked == [3, 3]
    for kind in ("zigzag", "plain"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"3.{kind}").read_bytes()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("piece", [1 << 12, transfer.PIECE])
@pytest.mark.parametrize("name", ["llama", "odd", "qwen2", "qwen3"])
def test_a_cuda_device_packs_what_the_cpu_packs(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int
) -> None:
    monkeypatch.setattr(transfer, "PIECE", piece)
    checkpoint = checkpoints[name]
    for device in ("cpu", "cuda"):
        write_zigzag(checkpoint, rules(checkpoint), tmp_path / f"{device}.zigzag", device=device)
        for kind in ("bf16", "q4_k"):
            if (kind, name) != ("q4_k", "odd"):  # whose widths plain Q4_K refuses
                write_plain(checkpoint, tmp_path / f"{device}.{kind}", type=kind, device=device)
    for on_cpu in tmp_path.glob("cpu.*"):
        assert_same_artifact(tmp_path / f"cuda{on_cpu.suffix}", on_cpu, checkpoint)


def assert_same_artifact(on_cuda: Path, on_cpu: Path, checkpoint: Checkpoint) -> None:
    """Equal bytes, of Q4_K where its kernel runs; Q6_K may round otherwise, and is then as good."""
    found, expected = read_gguf(on_cuda), read_gguf(on_cpu)
    assert found.tensors == expected.tensors
    for name, info in expected.tensors.items():
        ours, theirs = (torch.from_numpy(file.bytes(name).copy()) for file in (found, expected))
        if info.type == "Q6_K":
            weights = checkpoint.tensor("lm_head.weight" if name == "output.weight" else "model.embed_tokens.weight")
            errors = [relative_error(q6_k.decode(b).view(weights.shape), weights.float()) for b in (ours, theirs)]
            assert errors[0] <= errors[1] * 1.001, name
        elif info.type != "Q4_K" or (importable() and q4_k_device.WITHOUT not in FAILED):
            assert torch.equal(ours, theirs), name
