"""Finding thresholds goes on after a kill, and ends the same."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pairwise import each_value

from sparsepack.calibrate import find_thresholds as find
from sparsepack.calibrate import learned, training
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.folder import Calibration, load
from sparsepack.calibrate.refit import RefitOptions
from sparsepack.calibrate.threshold_table import read_thresholds, rules_to_json
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.cli import main
from sparsepack.files.text import read_text
from sparsepack.models.family import SITES
from sparsepack.models.hf_model.blocks import BlockStream
from sparsepack.models.sites import SiteRule
from sparsepack.packing import PackRequest, pack
from sparsepack.workers import state as states
from sparsepack.workers.shard import Shard
from sparsepack.workers.state import State, state_beside

GLOBAL = AllocationOptions(0.5, "global", windows=2, steps=6, batch=1, length=32)
TEAL = AllocationOptions(0.25, "teal", windows=2)
UNIFORM = AllocationOptions(0.5, "uniform", windows=2)
KINDS = {
    "uniform": UNIFORM,
    "column-norm": replace(UNIFORM, criterion="column-norm"),
    "teal": TEAL,
    "teal, dense upstream": replace(TEAL, upstream="dense"),
    "global": replace(GLOBAL, steps=1),
}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def calibration(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cal") / "c"
    calibrate(tiny, read_text("shipped:train"), folder, CalibrateOptions(context=32, samples=3))
    return folder


@pytest.fixture(scope="module")
def cal(calibration) -> Calibration:
    return load(calibration)


@pytest.fixture(scope="module")
def whole(tiny, cal) -> Callable[[AllocationOptions], dict[str, Any]]:
    """What a run that nothing disturbs finds by these options, found once."""
    found = cache(lambda options: find_thresholds(tiny, cal, options))
    return lambda options: found(options).to_json()


@pytest.fixture
def work(monkeypatch) -> list[str | int]:
    """What is done: "step" for an optimiser step, a number for a block that is read."""
    done: list[str | int] = []
    load, slices = BlockStream.load, training.slices
    monkeypatch.setattr(BlockStream, "load", lambda self, layer: done.append(layer) or load(self, layer))
    monkeypatch.setattr(training, "slices", lambda *given: done.append("step") or slices(*given))
    return done


def _killed_in_step(monkeypatch, tiny, cal, options, state, step) -> None:
    """Run until optimiser step number `step`, counted from 0 in this run, is about to begin."""
    slices, left = training.slices, iter(range(step))

    def dies(*given):
        if next(left, None) is None:
            raise Killed
        return slices(*given)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training, "slices", dies)
        find_thresholds(tiny, cal, options, Shard(folder=state))


def _killed_at_block(monkeypatch, tiny, cal, options, state, block, saved) -> None:
    save = Shard.save_block

    def dies(self, layer, *given, **values):
        if layer == block and not saved:
            raise Killed
        save(self, layer, *given, **values)
        if layer == block:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Shard, "save_block", dies)
        find_thresholds(tiny, cal, options, Shard(folder=state))


@pytest.mark.parametrize("offsets", [False, pytest.param(True, marks=pytest.mark.long)])
def test_learning_goes_on_from_the_step_it_was_killed_in(whole, tiny, cal, tmp_path, monkeypatch, work, offsets):
    options = replace(GLOBAL, offsets=offsets)
    expected = whole(options)
    state = tmp_path / ".t.unfinished"
    _killed_in_step(monkeypatch, tiny, cal, options, state, 2)
    _killed_in_step(monkeypatch, tiny, cal, options, state, 2)  # and again, four steps in
    assert sorted(entry.name for entry in state.iterdir()) == ["learning-4.safetensors", "state.json"]
    work.clear()
    assert find_thresholds(tiny, cal, options, Shard(folder=state)).to_json() == expected
    assert work == ["step", "step", *range(tiny.layers)]


def test_learning_is_not_saved_more_often_than_asked(tiny, cal, tmp_path, monkeypatch, work):
    monkeypatch.setattr(states, "SAVE_EVERY", 3600.0)
    _killed_in_step(monkeypatch, tiny, cal, GLOBAL, tmp_path / "s", 3)
    assert not (tmp_path / "s").exists()
    work.clear()
    find_thresholds(tiny, cal, GLOBAL, Shard(folder=tmp_path / "s"))
    assert work.count("step") == GLOBAL.steps


def test_a_run_killed_after_the_last_step_learns_nothing_again(whole, tiny, cal, tmp_path, monkeypatch, work):
    expected = whole(GLOBAL)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(learned, "_realised", lambda *_: (_ for _ in ()).throw(Killed))
        find_thresholds(tiny, cal, GLOBAL, Shard(folder=tmp_path / "s"))
    work.clear()
    assert find_thresholds(tiny, cal, GLOBAL, Shard(folder=tmp_path / "s")).to_json() == expected
    assert "step" not in work


@each_value({"saved": [False, True], "kind": KINDS})
def test_blocks_that_are_finished_are_not_run_again(whole, tiny, cal, tmp_path, monkeypatch, work, kind, saved):
    options, block = KINDS[kind], 1
    expected = whole(options)
    _killed_at_block(monkeypatch, tiny, cal, options, tmp_path / "s", block, saved)
    work.clear()
    monkeypatch.setattr(learned, "load_model", None)  # learnt already: the whole model is not needed
    assert find_thresholds(tiny, cal, options, Shard(folder=tmp_path / "s")).to_json() == expected
    assert work == list(range(block + saved, tiny.layers))


def test_a_finished_search_is_only_read(tiny, cal, tmp_path, work):
    """So a `pack` that failed when it wrote its file, on a full disk say, does not search again."""
    found = [find_thresholds(tiny, cal, TEAL, Shard(folder=tmp_path / "s")).to_json() for _ in range(2)]
    assert found[0] == found[1]
    assert work == list(range(tiny.layers))


@pytest.mark.parametrize(
    "other",
    [
        {"sparsity": 0.1},
        *(pytest.param(other, marks=pytest.mark.long) for other in ({"criterion": "column-norm"}, {"windows": 1})),
        {"allocation": "uniform"},
    ],
    ids=str,
)
def test_the_state_of_other_options_is_not_used(whole, tiny, cal, tmp_path, monkeypatch, work, other):
    options = replace(TEAL, **other)
    expected = whole(options)
    _killed_at_block(monkeypatch, tiny, cal, TEAL, tmp_path / "s", 0, True)
    work.clear()
    assert find_thresholds(tiny, cal, options, Shard(folder=tmp_path / "s")).to_json() == expected
    assert work == list(range(tiny.layers))


def test_the_state_of_another_calibration_or_version_is_not_used(tiny, cal, tmp_path, monkeypatch, work):
    text = read_text("shipped:train")
    other = calibrate(tiny, text, tmp_path / "c", CalibrateOptions(context=32, samples=3, seed=1))
    _killed_at_block(monkeypatch, tiny, cal, UNIFORM, tmp_path / "s", 0, True)
    work.clear()
    _killed_at_block(monkeypatch, tiny, other, UNIFORM, tmp_path / "s", 0, True)
    monkeypatch.setattr(find, "__version__", "0.0.0")
    _killed_at_block(monkeypatch, tiny, other, UNIFORM, tmp_path / "s", 0, True)
    assert work == [0, 0]


def test_rules_are_read_back_as_they_were(tmp_path):
    c = torch.rand(8)
    rules = {(0, site): SiteRule() for site in SITES} | {(0, SITES[0]): SiteRule(1 / 3, c - 1, c, 0.1, 0.2)}
    Shard(folder=tmp_path / "s").resume("fingerprint").save_block(0, {}, rules=rules_to_json(rules))
    first, *others = find.finished_rules(Shard(folder=tmp_path / "s").resume("fingerprint")).values()
    assert (first.sparsity, first.threshold, first.realised) == (0.1, 1 / 3, 0.2)
    assert torch.equal(first.channel_weights, c)
    assert torch.equal(first.offset, c - 1)
    assert others == [SiteRule()] * 3


def test_the_state_stays_until_the_output_is_written(tmp_path):
    output = tmp_path / "t.json"
    with pytest.raises(Killed), state_beside(output) as state:
        State(state, "fingerprint").keep("blocks", "piece", {"x": torch.zeros(1)})
        raise Killed
    assert [entry.name for entry in tmp_path.iterdir()] == [".t.json.unfinished"]
    with state_beside(output):
        output.touch()
    assert list(tmp_path.iterdir()) == [output]


def test_thresholds_and_pack_go_on_and_leave_only_their_output(whole, tiny, calibration, tmp_path, monkeypatch, work):
    out = tmp_path / "out"
    expected = whole(TEAL)
    out.mkdir()
    flags = ["--calibration", str(calibration), "--sparsity", "0.25", "--allocation", "teal", "--windows", "2"]
    command = ["thresholds", "shipped:tiny", *flags, "-o", str(out / "t.json")]
    plain = RefitOptions(quantiser="round")
    request = PackRequest(
        "shipped:tiny", out / "m.gguf", calibration=calibration, allocation=TEAL, fitting=plain, score=False
    )
    save = Shard.save_block

    def dies(self, layer, *given, **values):
        save(self, layer, *given, **values)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "save_block", dies)
        with pytest.raises(Killed):
            CliRunner().invoke(main, command, catch_exceptions=False)
        with pytest.raises(Killed):
            pack(request)
    assert sorted(entry.name for entry in out.iterdir()) == [".m.gguf.unfinished", ".t.json.unfinished"]
    work.clear()
    assert CliRunner().invoke(main, command).exit_code == 0
    table = pack(request).thresholds
    assert work == [*range(1, tiny.layers)] * 2
    assert table is not None
    assert table.to_json() == read_thresholds(out / "t.json").to_json() == expected
    assert sorted(entry.name for entry in out.iterdir()) == ["m.gguf", "t.json"]
