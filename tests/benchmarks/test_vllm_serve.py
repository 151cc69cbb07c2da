"""What the benchmark of vLLM makes of its figures, without vLLM."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import vllm_serve
from benchmarks.vllm_serve import (
    BATCHES,
    LINEARS,
    Server,
    fill,
    measure,
    table,
    write_config,
)
from sparsepack.formats.slide import configured_slides, configured_type
from sparsepack.models.pattern import Pattern


@pytest.mark.parametrize(("kind", "pattern"), [("FP8, 6 of 8", Pattern(6, 8)), ("INT8, 2 of 4", Pattern(2, 4))])
def test_its_folders_are_slid_ones(kind: str, pattern: Pattern, tmp_path: Path) -> None:
    write_config(tmp_path, kind, 3)
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    slides = configured_slides(section["patterns"])
    assert len(slides) == 3 * len(LINEARS)
    assert {how.pattern for how in slides.values()} == {pattern}
    assert configured_type(section["format"]).kind == kind.split(",")[0]


def test_random_positions_ascend_and_all_weights_are_filled() -> None:
    layer = torch.nn.Module()
    for name, dtype in (("weight", torch.int8), ("weight_positions", torch.uint8), ("weight_scale", torch.float32)):
        empty = torch.zeros(4100, 33, dtype=dtype)
        layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    layer.register_parameter("input_layernorm", torch.nn.Parameter(torch.zeros(7)))
    fill(layer)
    positions = layer.weight_positions
    assert ((positions & 3) < (positions >> 2 & 3)).all()
    assert ((positions >> 4 & 3) < positions >> 6).all()
    assert 30 < layer.weight.float().std() < 50
    assert len(layer.weight_scale.unique()) == 1
    assert layer.input_layernorm.eq(1).all()


def test_kinds_are_compared_with_the_dense_ones() -> None:
    lines = table({"BF16": {"prefill": 2.0}, "FP8": {"prefill": 1.0}, "FP8, 6 of 8": {"prefill": 1.6}})
    assert "prefill 1600.00 ms (1.25 x BF16, 0.62 x FP8)" in lines[2]


class Scripted(Server):
    """Takes a second for each new token; ends before it is asked for the `end`-th time."""

    def __init__(self, kind: str, end: int) -> None:
        self.kind, self.left = kind, end

    def seconds(self, count: int, tokens: int, new: int) -> float:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("has ended")
        return float(new)


def test_what_was_measured_is_there_after_each_turn_and_outlives_a_process() -> None:
    of_a_turn = 1 + 2 * len(BATCHES)
    lasting, ending = Scripted("BF16", 99), Scripted("FP8", 2 * of_a_turn + 1)
    turns = measure([lasting, ending], 2)
    counts = [[len(took[kind].get("batch 64", [])) for kind in ("BF16", "FP8")] for took in turns]
    # a warm-up by both, a round by both, and the last round, in which one ends
    assert counts == [[0, 0], [0, 0], [0, 1], [1, 1], [2, 1]]


def test_a_process_that_says_nothing_is_ended_and_tells_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("def waits():\n    print('waits', flush=True)\n    __import__('time').sleep(60)\nwaits()\n")
    monkeypatch.setattr(vllm_serve, "START", [sys.executable, str(silent)])
    server = Server("FP8", 1, [], tmp_path / "log", patience=0.5)
    assert server.process.stdout
    assert server.process.stdout.readline() == "waits\n"  # Python may take longer to begin
    with pytest.raises(RuntimeError, match=r"(?s)FP8 has ended: .*in waits"):
        server.hear()
