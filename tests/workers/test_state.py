"""The state of a run that has not finished."""

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_for_tests import make_model

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import CalibrationError, OutputError, PlacementError
from sparsepack.files.hashing import fingerprint
from sparsepack.workers import state as states
from sparsepack.workers.shard import BEHIND, Shard
from sparsepack.workers.state import state_beside


def test_a_state_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"state: cannot be made \(No such file or directory\)"):
        Shard(folder=tmp_path / "none" / "state").resume("fingerprint").state.keep("blocks", "x", {"x": torch.zeros(1)})


def test_an_interrupt_says_where_the_state_is_if_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as bare, state_beside(tmp_path / "out"):
        raise KeyboardInterrupt
    assert str(bare.value) == ""
    kept = r"\.out\.unfinished keeps what was done"
    with pytest.raises(KeyboardInterrupt, match=kept), state_beside(tmp_path / "out") as path:
        Shard(folder=path).resume("fingerprint").state.commit("learnt", price=0.1)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as early, state_beside(tmp_path / "other") as path:
        Shard(folder=path).resume("fingerprint").state.keep("blocks", "x", {"x": torch.zeros(1)})  # not committed yet
        raise KeyboardInterrupt
    assert str(early.value) == ""


def _committed(path: Path) -> None:
    """A state with a file for each of its parts, and a value beside."""
    shard = Shard(folder=path).resume("fingerprint")
    shard.state.keep("learning", "learning", {"x": torch.ones(2)})
    shard.state.commit("learning", step=1)
    shard.state.commit("learnt", price=0.1)
    shard.save_block(0, {"y": torch.zeros(2)}, torch.ones(3), rows=[1 / 3])


def test_a_state_is_read_back_as_it_was(tmp_path: Path) -> None:
    _committed(tmp_path / "s")
    shard = Shard(folder=tmp_path / "s").resume("fingerprint")
    assert shard.state.parts == {
        "learning": {"step": 1},
        "learnt": {"price": 0.1},
        "blocks": {"done": 1, "rows": [1 / 3]},
    }
    assert torch.equal(shard.state.load("learning")["x"], torch.ones(2))
    assert [block.keys() for block in map(shard.block, range(shard.done))] == [{"y"}]
    hidden = shard.hidden()
    assert hidden is not None
    assert torch.equal(hidden, torch.ones(3))


@pytest.mark.parametrize("damage", ["changed", "cut", "emptied", "lost", "a folder"])
@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("learning", {"learnt", "blocks"}),
        ("hidden-00001", {"learning", "learnt"}),
        ("block-00000", {"learning", "learnt"}),
    ],
)
def test_a_damaged_file_costs_its_own_part_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, left: set[str], damage: str
) -> None:
    _committed(tmp_path / "s")
    path = tmp_path / "s" / f"{file}.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "lost":
        changed = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"changed": changed, "cut": content[:-1], "emptied": b""}[damage])
    shard = Shard(folder=tmp_path / "s").resume("fingerprint")
    assert shard.state.parts.keys() == left
    assert capsys.readouterr().err.count("\n") == 1
    assert shard.done == ("blocks" in left)
    shard.save_block(0, {"y": torch.zeros(2)}, torch.ones(3))
    assert Shard(folder=tmp_path / "s").resume("fingerprint").done == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "1", "{}", "\udcff", "[" * 100_000, None])
def test_a_damaged_list_of_what_counts_costs_everything_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    _committed(tmp_path / "s")
    listed = tmp_path / "s" / "state.json"
    text = listed.read_text()
    listed.write_text(text.replace("0.1", "0.2") if content is None else content, errors="surrogateescape")
    assert not Shard(folder=tmp_path / "s").resume("fingerprint").state.parts
    assert not (tmp_path / "s").exists()
    err = capsys.readouterr().err
    assert "state.json: damaged" in err
    assert err.count("\n") == 1


def test_a_file_in_the_place_of_the_state_is_removed(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    _committed(tmp_path / "s")
    assert Shard(folder=tmp_path / "s").resume("fingerprint").done == 1


def test_the_state_of_another_command_is_not_gone_on_with(tmp_path: Path) -> None:
    Shard(folder=tmp_path / "s").resume("fingerprint").state.commit("blocks", done=1)
    assert Shard(folder=tmp_path / "s").resume("fingerprint").done == 1
    assert not Shard(folder=tmp_path / "s").resume("another").state.parts


def test_what_was_never_committed_is_removed_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _committed(tmp_path / "s")
    before = sorted(entry.name for entry in (tmp_path / "s").iterdir())
    Shard(folder=tmp_path / "s").resume("fingerprint").keep_after("hidden", {"hidden": torch.ones(4)})
    shard = Shard(folder=tmp_path / "s").resume("fingerprint")
    assert shard.done == 1
    assert sorted(entry.name for entry in (tmp_path / "s").iterdir()) == before
    assert capsys.readouterr().err == ""


def test_what_is_not_needed_any_more_stays_until_the_next_commit(tmp_path: Path) -> None:
    _committed(tmp_path / "s")
    shard = Shard(folder=tmp_path / "s").resume("fingerprint")
    shard.keep_after("hidden", {"hidden": torch.ones(4)})
    assert (tmp_path / "s" / "hidden-00001.safetensors").exists()
    shard.save_block(1, {})
    assert not (tmp_path / "s" / "hidden-00001.safetensors").exists()
    assert (tmp_path / "s" / "hidden-00002.safetensors").exists()


def test_a_refused_run_leaves_no_state_but_one_without_room_and_that_of_another_command_stay(tmp_path: Path) -> None:
    def ends(error: Exception, commits: bool) -> list[str]:
        with pytest.raises(type(error)), state_beside(tmp_path / "out") as path:
            if commits:
                Shard(folder=path).resume("fingerprint").state.keep("blocks", "x", {"x": torch.zeros(1)})
                Shard(folder=path).resume("fingerprint").state.commit("blocks", done=1)
            raise error
        return [entry.name for entry in tmp_path.iterdir()]

    assert ends(PlacementError("nothing to leave out"), True) == []
    assert ends(OutputError("the disk is full"), True) == [".out.unfinished"]
    assert ends(CalibrationError("no such folder"), False) == [".out.unfinished"]
    assert ends(PlacementError("nothing to leave out"), True) == []


def resealed(folder: Path, **changes: Any) -> None:
    """A state that says something else, with a right hash."""
    state = json.loads((folder / "state.json").read_text())
    del state["sha256"]
    state |= changes
    (folder / "state.json").write_text(json.dumps({**state, "sha256": fingerprint(state)}))


HOSTILE: dict[str, dict[str, Any]] = {
    "blocks": {"parts": {"blocks": {"done": 10**12}}},
    "less than none": {"parts": {"blocks": {"done": -1}}},
    "words": {"parts": {"blocks": {"done": "two"}}},
    "no parts": {"parts": [1]},
    "a part that is none": {"parts": {"blocks": 3}},
    "no files": {"files": None},
    "a file that is none": {"files": {"block-00000.safetensors": "x"}},
    "a file elsewhere": {"files": {"../x": {"part": "blocks", "sha256": "0"}}},
    "no fingerprint": {"fingerprint": [1]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_state_with_a_right_hash_that_no_run_keeps_is_forgotten_and_said(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ".x.unfinished"
    Shard(folder=folder).resume("run", 3).save_block(0, {"a": torch.ones(2)})
    resealed(folder, **changes)
    again = Shard(folder=folder).resume("run", 3)
    assert (again.done, again.state.parts) == (0, {})
    assert "damaged" in capsys.readouterr().err


def test_a_run_that_fails_as_it_goes_on_says_where_the_state_lies(tmp_path: Path) -> None:
    output = tmp_path / "x"
    for resumed, expected in ((False, RuntimeError), (True, OutputError)):
        with pytest.raises(expected, match="sizes") as failed, state_beside(output) as folder:
            Shard(folder=folder).resume("run", 3).save_block(0, {"a": torch.ones(2)})
            raise RuntimeError("sizes of\ntensors")
        if resumed:
            assert f"{tmp_path / '.x.unfinished'}: going on" in str(failed.value)
            assert "\n" not in str(failed.value)


def test_pruning_goes_on_from_no_hostile_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = make_model(tmp_path / "m"), PruneOptions(6, 8, method="magnitude")
    saved, stop = Shard.save_block, 1

    def interrupted(self: Shard, layer: int, *found: Any, **values: Any) -> None:
        if layer == stop:
            raise KeyboardInterrupt
        saved(self, layer, *found, **values)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Shard, "save_block", interrupted)
        sparsepack.prune(model, tmp_path / "p", options)
    folder = tmp_path / ".p.unfinished"
    good = json.loads((folder / "state.json").read_text())["parts"]["blocks"]
    for matrices in ([{}], [3], "x", [{**good["matrices"][0], "error": "much"}], [{"matrix": None}]):
        resealed(folder, parts={"blocks": {**good, "matrices": matrices}})
        with pytest.raises(OutputError, match=r"\.p\.unfinished: going on .* remove the folder") as refused:
            sparsepack.prune(model, tmp_path / "p", options)
        assert "\n" not in str(refused.value)
    resealed(folder, parts={"blocks": good})
    sparsepack.prune(model, tmp_path / "p", options)
    assert not folder.exists()


def test_blocks_are_committed_now_and_then_and_the_last_one_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SAVE_EVERY", 20.0)
    now = 0.0
    monkeypatch.setattr(states, "time", SimpleNamespace(monotonic=lambda: now))
    shard = Shard(folder=tmp_path / "s").resume("fingerprint", 5)
    kept = []
    for layer, now in enumerate((10.0, 20.0, 30.0, 39.0, 39.5)):
        shard.keep_after("others", {"hidden": torch.full((2,), 2.0 * layer)})
        shard.save_block(layer, {"y": torch.full((1,), float(layer))}, torch.full((2,), float(layer)), seen=layer)
        kept.append(Shard(folder=tmp_path / "s").resume("fingerprint", 5).done if layer in (1, 4) else shard.done)
        if layer == 1:
            shard = Shard(folder=tmp_path / "s").resume("fingerprint", 5)
            shard.state._saved = now
    assert kept == [0, 2, 2, 2, 5]
    shard = Shard(folder=tmp_path / "s").resume("fingerprint", 5)
    assert shard.value("seen") == 4
    assert [float(block["y"]) for block in map(shard.block, range(shard.done))] == [0, 1, 2, 3, 4]
    for name, value in (("hidden", 4.0), ("others", 8.0)):
        assert torch.equal(shard.kept_after(name)["hidden"], torch.full((2,), value))
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 5 + 2


def test_the_first_state_waits_as_long_as_its_size_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SAVE_EVERY", 20.0)
    monkeypatch.setattr(states, "_WRITTEN", 1.0)
    times = [0.0]
    monkeypatch.setattr(states, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    shard = Shard(folder=tmp_path / "s").resume("fingerprint", 9)
    done = []
    for layer, now in enumerate((30.0, 159.0, 161.0, 182.0)):  # 8 bytes: 8 seconds, so 160 pass before that
        times.append(now)
        shard.save_block(layer, {}, torch.zeros(2))
        done.append(shard.done)
    assert done == [0, 0, 3, 4]  # the next one as long after as the first has taken, which was nothing here


def test_a_run_killed_between_commits_goes_on_from_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SAVE_EVERY", 3600.0)
    shard = Shard(folder=tmp_path / "s").resume("fingerprint", 9)
    shard.state._pause = 0.0
    shard.save_block(0, {"y": torch.zeros(1)}, torch.zeros(2))
    shard.save_block(1, {"y": torch.ones(1)}, torch.ones(2))
    assert [float(block["y"]) for block in (shard.block(0), shard.block(1))] == [0, 1]  # before it is killed
    shard = Shard(folder=tmp_path / "s").resume("fingerprint", 9)
    assert shard.done == 1
    hidden = shard.hidden()
    assert hidden is not None
    assert torch.equal(hidden, torch.zeros(2))
    assert not shard.block(1)
    assert not (tmp_path / "s" / "block-00001.safetensors").exists()


class _WhenWaitedFor(Executor):
    """What it is given runs when somebody waits for it; blocks, in the order in which they were waited for."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def submit(self, run: Callable[..., None], layer: int, *found: Any) -> Future[None]:  # type: ignore[override]
        future = Future[None]()
        future.result = lambda timeout=None: (self.blocks.append(layer), run(layer, *found))[1]  # type: ignore[method-assign]
        return future


def test_so_many_blocks_are_kept_behind_a_run_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SAVE_EVERY", 1e9)  # nothing is committed, for which all would be waited for
    shard, behind = Shard(folder=tmp_path / "s").resume("fingerprint"), _WhenWaitedFor()
    shard._thread = behind
    for layer in range(BEHIND):
        shard.save_block(layer, {"a": torch.full((2,), float(layer))})
    assert not behind.blocks
    shard.save_block(BEHIND, {"a": torch.zeros(2)})
    assert behind.blocks == [0]
    shard.wait()
    assert behind.blocks == list(range(BEHIND + 1))
    assert [shard.block(layer)["a"].tolist() for layer in (0, 1)] == [[0.0, 0.0], [1.0, 1.0]]
