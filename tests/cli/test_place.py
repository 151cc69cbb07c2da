"""`place`: what goes where for a budget, the slots of the file's frequencies, and refusals in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from artifacts_for_tests import tiny_by_neurons, write_zigzag
from commands_for_tests import fails, succeeds

from sparsepack.cli.commands.place import placement_table
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import NeuronMlp
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.placement.budget import parse_bytes
from sparsepack.placement.placement import across_blocks
from sparsepack.placement.policies import POLICIES, Start
from sparsepack.progress import format_count


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_by_neurons(tmp_path_factory.mktemp("place"))


def placed(file: Path, vram: str, *more: object) -> dict:
    return json.loads(succeeds("place", file, "--vram", vram, "--context", 64, "--json", "-", *more))


def half_of_the_neurons(file: Path) -> str:
    """A budget that has room for all but about a half of the records."""
    all_of_it = placed(file, "1GB")
    return f"{(sum(all_of_it['card'].values()) - all_of_it['card']['records'] // 2) / 1e6:.3f}MB"


def test_where_a_dense_split_would_be_faster_the_table_says_so(file: Path) -> None:
    found = placed(file, half_of_the_neurons(file))
    told = "By this model of time slots do not pay"
    for dense, says in ((3.0, True), (2.0, False)):
        found["tokens_per_second"] = {"processor": 1.0, "and_bus": 2.0, "dense_split": dense}
        assert (told in placement_table(found)) == says


def test_slots_are_those_that_an_engine_begins_with(file: Path) -> None:
    found = placed(file, half_of_the_neurons(file))
    mlps = [layer.mlp for layer in read_packed(file).layers if isinstance(layer.mlp, NeuronMlp)]
    stored = np.stack([mlp.frequency.double().numpy() for mlp in mlps])
    frequency = np.stack([row[mlp.order.argsort().numpy()] for row, mlp in zip(stored, mlps, strict=True)])
    nothing = np.zeros((0, *frequency.shape), np.uint8)
    begun, _ = POLICIES["slow"].begin(Start(frequency, sum(found["slots"]), nothing, 0))
    assert tuple(found["slots"]) == begun.slots
    assert 0 < sum(found["slots"]) < frequency.size
    assert found["hit_rate"] == pytest.approx(frequency[begun.resident].sum() / frequency.sum())
    assert found["density"] == pytest.approx(frequency.mean())
    assert across_blocks(stored, sum(found["slots"])).slots == begun.slots


def test_more_of_the_budget_is_faster_and_all_of_it_needs_no_host(file: Path) -> None:
    least, half, whole = (placed(file, vram) for vram in (least_of(file), half_of_the_neurons(file), "1GB"))
    speeds = [found["tokens_per_second"]["and_bus"] for found in (least, half, whole)]
    assert sorted(speeds) == speeds
    assert sum(whole["host"].values()) == 0
    assert whole["hit_rate"] == 1
    assert least["slots"] == [0] * least["blocks"]["all"]
    assert sum(least["card"].values()) <= least["vram"]


def least_of(file: Path) -> str:
    return fails("place", file, "--vram", "0.001MB", "--context", 64).split("at least ")[1].split(",")[0]


def test_a_budget_below_the_least_is_refused_with_it_and_it_works(file: Path) -> None:
    least = least_of(file)
    assert placed(file, least)["vram"] == parse_bytes(least)


def test_the_table_says_where_everything_lies(file: Path) -> None:
    said = succeeds("place", file, "--vram", half_of_the_neurons(file), "--machine", "pcie3")
    assert "card: slots; host: of all neurons, pinned" in said
    assert "tokens per second on pcie3" in said
    assert "0.6GB" in said or "600MB" in said
    said = succeeds("place", file, "--vram", least_of(file), "--context", 64)
    assert "read over the bus" in said
    assert said.count("read by the bus and the processor") == 2


def test_copies_of_gates_are_planned_where_gates_do_not_fit(file: Path, tmp_path: Path) -> None:
    rows = tiny_by_neurons(tmp_path, gates="rows")
    whole = placed(rows, "1GB", "--gate-copy", 2)
    assert (whole["blocks"]["copied"], whole["listed"]) == (0, None)
    card = whole["card"]
    room = sum(card.values()) - card["embedding"] - card["records"] - card["gates"] // 3
    vram = f"{room / 1e6:.3f}MB"
    without, found = placed(rows, vram), placed(rows, vram, "--gate-copy", 2)
    assert 0 < without["blocks"]["gates"] < without["blocks"]["all"]
    assert found["blocks"]["copied"] == found["blocks"]["all"]
    assert found["density"] < found["listed"] <= 2 * found["density"]
    assert found["tokens_per_second"]["and_bus"] > without["tokens_per_second"]["and_bus"]
    said = succeeds("place", rows, "--vram", vram, "--context", 64, "--gate-copy", 2)
    assert "copies of gates" in said
    assert "of these alone the exact gates are read" in said
    assert "pack the model again with --gates rows" in fails("place", file, "--vram", vram, "--gate-copy", 2)
    assert "is not in the range 1<=x<=16" in fails("place", rows, "--vram", vram, "--gate-copy", 0.5)


def test_down_matrices_of_a_file_of_sites_leave_the_card_first(tmp_path: Path) -> None:
    zigzag = tmp_path / "z.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, zigzag)
    whole = placed(zigzag, "1GB")
    assert (whole["unit"], whole["hit_rate"], sum(whole["host"].values())) == ("columns", 1, 0)
    card = whole["card"]
    room = sum(card.values()) - card["embedding"] - card["records"] // 2
    found = placed(zigzag, f"{room / 1e6:.3f}MB")
    blocks = found["blocks"]
    assert blocks["attention"] == blocks["gates"] == blocks["all"] > blocks["records"] > 0
    assert found["hit_rate"] == blocks["records"] / blocks["all"]
    assert found["host"]["records"] + found["card"]["records"] == card["records"]
    assert found["host"]["records for the processor"] == found["host"]["records"]
    assert found["tokens_per_second"]["and_bus"] < whole["tokens_per_second"]["and_bus"]
    said = succeeds("place", zigzag, "--vram", f"{room / 1e6:.3f}MB", "--context", 64)
    assert (
        f"card: the first {format_count(blocks['records'], 'block')}; the others by the bus and the processor" in said
    )
    assert "taken to read 100 % of its columns" in said
    assert "| down " in said
    assert "| gate and up " in said


def test_what_cannot_be_placed_is_one_line(file: Path, tmp_path: Path) -> None:
    zigzag = tmp_path / "z.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, zigzag)
    assert "with the activation 'silu' none is exactly inactive" in fails(
        "place", zigzag, "--vram", "8GB", "--gate-copy", 2
    )
    assert "lie on the card or in host memory as a whole; leave it out" in fails(
        "place", zigzag, "--vram", "8GB", "--calibration", tmp_path
    )
    assert "the file has the frequencies of its neurons; leave it out" in fails(
        "place", file, "--vram", "8GB", "--calibration", tmp_path
    )
    assert "expected gigabytes or megabytes" in fails("place", file, "--vram", "8")
    assert "expected one of pcie3" in fails("place", file, "--vram", "8GB", "--machine", "abacus")
    assert "context 10000000" in fails("place", file, "--vram", "8GB", "--context", 10_000_000)


def test_first_planes_lie_on_the_card(tmp_path: Path) -> None:
    path = tmp_path / "planes.gguf"
    succeeds("pack", "shipped:tiny", "--format", "zigzag-q6_p", "-o", path)
    whole = placed(path, "1GB")
    assert not any(whole["host"].values())
    assert whole["blocks"]["planes"] == 4
    kinds = ("attention", "gates", "records")
    matrices = {kind: whole["card"][kind] for kind in kinds}
    seen = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.95):
        budget = sum(whole["card"].values()) - (1 - share) * sum(matrices.values())
        found = placed(path, f"{budget / 1e6:.3f}MB")
        seen.append([found["blocks"][name] for name in ("planes", "attention", "gates", "records")])
        assert sum(found["card"].values()) <= budget + 1000
        assert all(found["card"][kind] + found["host"][kind] == matrices[kind] for kind in kinds)
        assert found["tokens_per_second"]["and_bus"] < whole["tokens_per_second"]["and_bus"]
        assert f"card: {format_count(found['blocks']['planes'], 'plane')}" in placement_table(found)
    assert seen == sorted(seen)
    assert "norms and thresholds" in fails("place", path, "--vram", "0.2MB", "--context", 64)
