"""What the benchmark of hybrid decoding is made of: replayed activity, models of a shape, the peer's best split."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from benchmarks.shared.budgets import HEAD, row_of, tiled, with_more
from benchmarks.shared.llama_bench import LAYERS, Peer, reported_bytes, write_shape
from benchmarks.shared.random_models import random_neurons
from benchmarks.shared.shapes import SIZES, llama_config
from sparsepack.runtime.engine import Engine

TINY = SIZES["tiny"]


def test_every_block_keeps_its_density_and_neurons_stand_by_falling_frequency() -> None:
    found = tiled(16, 2000)
    carried = tiled(8, 1280)
    assert found.density == pytest.approx(0.135, abs=0.005)
    assert (np.diff(found.frequency) <= 0).all()
    shares, own = (np.bitwise_count(a.bits.numpy()).sum((0, 2)) / a.frequency.shape[1] for a in (found, carried))
    assert shares[::2] == pytest.approx(own, rel=0.1)
    assert (found.bits[:, 0] != found.bits[:, 1]).any()  # blocks of one block's activity are tiled differently
    assert torch.equal(found.bits, tiled(16, 2000).bits)


def test_who_is_often_active_elsewhere_is_often_active_here() -> None:
    found = tiled(8, 2560)
    active = np.unpackbits(found.bits.numpy(), axis=2, bitorder="little").mean(0)
    assert np.corrcoef(active.ravel(), found.frequency.ravel())[0, 1] > 0.7


@pytest.mark.parametrize("times", [1.0, 1.75, 16.0])
def test_copies_list_more_neurons_among_which_are_the_active_ones(times: float) -> None:
    found = tiled(2, 1281, tokens=3)
    more = with_more(found, times)
    assert not (found.bits & ~more.bits).any()
    active, listed = (np.bitwise_count(each.bits.numpy()).sum(2) for each in (found, more))
    assert listed == pytest.approx(np.minimum(times * active, 1281), abs=0.51)


@pytest.mark.parametrize("rows", [False, True])
def test_a_model_of_a_shape_runs_and_its_neurons_are_skipped_exactly(rows: bool) -> None:
    packed = random_neurons(TINY, tiled(TINY.layers, TINY.intermediate).frequency, rows=rows)
    ids = [5, 7, 11, 13]
    dense, skipping = (Engine(packed, context=16, backend="reference", dense=dense) for dense in (True, False))
    expected = dense.teacher_forced(ids, len(ids))
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(skipping.teacher_forced(ids, 0), expected, rtol=1e-3, atol=1e-3)


def test_a_file_for_llama_cpp_has_every_tensor_of_the_shape(tmp_path: Path) -> None:
    path = write_shape(tmp_path / "peer.gguf", llama_config(TINY))
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(found) == 3 + 9 * TINY.layers
    assert list(found["blk.3.ffn_down.weight"].shape) == [TINY.intermediate, TINY.hidden]
    assert list(found["token_embd.weight"].shape) == [TINY.hidden, TINY.vocabulary]
    weights = gguf.dequantize(found["blk.0.attn_q.weight"].data, found["blk.0.attn_q.weight"].tensor_type)
    assert weights.std() == pytest.approx(0.1 * TINY.hidden**-0.5, rel=0.1)
    assert [each.name for each in tmp_path.iterdir()] == ["peer.gguf"]


class Pretended:
    """A llama-bench of 10 layers of 100 MiB, of which the MLP has 60; beside them 50 MiB are taken."""

    def __init__(self, help: str = "") -> None:
        self.calls: list[list[str]] = []
        self.help = help

    def __call__(self, arguments: Sequence[str]) -> tuple[str, str]:
        if arguments == ["--help"]:
            return self.help, ""
        self.calls.append([*arguments])
        if "--n-cpu-ffn" in arguments:
            mib = 50 + 40 * 10 + 60 * (10 - int(arguments[arguments.index("--n-cpu-ffn") + 1]))
        elif "-ot" in arguments:
            listed = arguments[arguments.index("-ot") + 1]
            mib = 50 + 40 * 10 + 60 * (10 - (listed.count("|") - 1))
        else:
            mib = 50 + 100 * min(10, int(arguments[arguments.index("-ngl") + 1]))
        said = f"x: CUDA0 model buffer size = {mib - 20}.00 MiB\nCUDA0 KV buffer size = 15.00 MiB\n"
        said += "x: CUDA0 compute buffer size = 5.00 MiB\nCUDA_Host compute buffer size = 999.00 MiB\n"
        said += "CPU_Mapped model buffer size = 12345 MiB\n"
        return json.dumps([{"samples_ts": [mib, mib + 1]}]), said


def peer(run: Pretended) -> Peer:
    return Peer(run, Path("f"), 10, depth=8, new=4, threads=2, layer=100 << 20, mlp=60 << 20)


@pytest.mark.parametrize("help", ["", "--n-cpu-ffn N"])
def test_of_each_kind_the_largest_split_within_the_budget_is_found(help: str) -> None:
    run = Pretended(help)
    found_by = peer(run)
    layers, mlps = (found := found_by.within(600 << 20, 2))
    assert (layers.name, layers.bytes >> 20) == ("layers 5/10", 550)
    assert (mlps.name, mlps.bytes >> 20) == ("MLPs 2/10", 570)
    assert len(run.calls) <= 6
    assert found_by.tokens_per_second(layers, 2) == found[layers] == [550, 551]
    run.calls.clear()
    layers, mlps = found_by.within(700 << 20, 2)  # once what is beside the layers is known, at the first try
    assert (layers.name, mlps.name, len(run.calls)) == ("layers 6/10", "MLPs 4/10", 2)
    (only,) = found_by.within(120 << 20, 2)  # without room for the attention of all
    assert only.name == "layers 0/10"
    (whole,) = replace(found_by, kinds=[LAYERS]).within(2000 << 20, 2)
    assert (whole.name, whole.bytes >> 20) == ("layers 10/10", 1050)


@pytest.mark.parametrize(
    ("help", "expected"), [("--mmap <0|1>", "-mmp 0"), ("-lm, --load-mode <none|mmap>", "-lm none")]
)
def test_the_file_is_read_and_not_mapped(help: str, expected: str) -> None:
    assert " ".join(peer(Pretended(help)).command(["-ngl", "3"], 8, 4, 2)).endswith(f"-t 2 {expected} -ngl 3")


def test_a_log_without_buffers_is_an_error() -> None:
    assert reported_bytes("CUDA1 RS buffer size = 2.50 MiB, CPU buffer size = 1.00 MiB") == 2.5 * 2**20
    assert reported_bytes("CPU model buffer size = 1.00 MiB") == 0
    with pytest.raises(RuntimeError, match="reports no buffers"):
        reported_bytes("nothing")


def test_rows_have_a_cell_for_each_column() -> None:
    read = {"card": 1e6, "bus": 2e6, "worker": 3e6, "moved": 0}
    of = {"slots": 0.3, "hits": 6, "needed": 8, "bytes": read, "waited_us": 3.4, "model": None}
    assert len(row_of("ours", [1.0, 3.0], 2.0, of)) == len(row_of("theirs", [1.0], None, {})) == len(HEAD)
    assert row_of("ours", [1.0, 3.0], 2.0, of)[3:7] == ["1.00", "30.0%", "75.0%", "1.0 / 2.0 / 3.0 / 0.0"]
