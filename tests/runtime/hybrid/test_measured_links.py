"""What `sparsepack tune` measures of the links, keeps and changes; never how fast anything is."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import plan_neurons
from click.testing import CliRunner
from models_for_tests import make_model
from native_build import instruction_set_params

from sparsepack.cli import main
from sparsepack.errors import OutputError, UserError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.placement.links import HALVES, Links, over_the_bus
from sparsepack.runtime.cpu import links as cpu_links
from sparsepack.runtime.cpu import tune as tuning
from sparsepack.runtime.cpu.links import measure, measured_links
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid import measure as measuring
from sparsepack.runtime.hybrid.kept_links import SCHEMA, keep_links, kept_links, links_path
from sparsepack.runtime.hybrid.measure import MeasuredLinks, divided, measure_links
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference.backend import operations as reference_operations
from sparsepack.runtime.tuning import check_room

OF = {"cpu_info": "a processor", "instruction_set": "scalar", "threads": 2, "hidden": 256}
FAST, SLOW = Links(3.1e6, 2.7e6, 1.3e6, 4.7e-5, 3e12, 5e9, 8e9), Links(9e6, 8e6, 7e6, 4.7e-5, 4e12, 9e9, 9e9)
with_kernels = pytest.mark.parametrize("isa", instruction_set_params()[:1])
IDS = torch.randint(300, (20,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and so little work that a test takes milliseconds."""
    for name, value in {"ROTATION": 1 << 10, "TIMES_CACHES": 0, "LISTED": 4, "CALLS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(measuring, name, value)
    for name, some in {"SPANS": (1,), "TILES": (24,), "ROTATION": 1 << 10, "CALLS": 2, "ROUNDS": 1}.items():
        monkeypatch.setattr(tuning, name, some)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links")
    model = make_model(folder / "relu", "llama", hidden_act="relu", hidden_size=256)
    plan_neurons(open_checkpoint(model)).write(folder / "m.gguf")
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def packed(file: Path) -> PackedModel:
    return read_packed(file)


def keep(of: dict[str, Any], links: Links) -> dict[str, Any]:
    check_room(links_path(of), 1)
    return keep_links(of, MeasuredLinks(links, alone=SLOW))


def test_threads_are_divided_by_halves_and_nobody_has_none() -> None:
    assert [divided(threads) for threads in (1, 2, 3, 8)] == [(1, 1), (1, 1), (2, 1), (4, 4)]


def test_every_speed_is_measured_by_any_operations() -> None:
    before = torch.get_num_threads()
    found = measure_links(reference_operations, lambda threads: reference_operations.neuron_ffn, 2, 512)
    for links in (found.together, found.alone):
        assert all(0 < value < math.inf for value in asdict(links).values())
    assert found.together.handover == found.alone.handover
    assert torch.get_num_threads() == before


def test_what_was_measured_is_read_to_the_last_bit() -> None:
    assert kept_links(OF) is None
    kept = keep(OF, FAST)
    assert kept_links(OF) == FAST
    assert kept["path"] == str(links_path(OF))
    assert kept["alone"] == asdict(SLOW)
    assert kept_links({**OF, "threads": 4}) is kept_links({**OF, "hidden": 512}) is None


KEPT = {"schema": SCHEMA, **OF, "together": asdict(FAST)}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0\0",
        "[" * 100_000,
        '{"schema": 1, "together": {"resident": 1',
        [],
        {**KEPT, "schema": SCHEMA + 1},
        {**KEPT, "cpu_info": "another processor"},
        {**KEPT, "threads": 3},
        {**KEPT, "together": None},
        {**KEPT, "together": {"resident": 1.0, "bus": 1.0, "worker": 1.0}},
        *(
            {**KEPT, "together": {**asdict(FAST), "resident": value}}
            for value in (0, -1, None, "fast", math.inf, math.nan)
        ),
    ],
    ids=lambda content: str(content)[:60],
)
def test_what_is_damaged_or_of_another_machine_is_ignored_and_replaced(content: Any) -> None:
    path = links_path(OF)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(KEPT))
    assert kept_links(OF) == FAST
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert kept_links(OF) is None
    keep(OF, FAST)
    assert kept_links(OF) == FAST


def run(packed: PackedModel, threads: int = 2) -> tuple[str, torch.Tensor]:
    engine = Engine(packed, backend="cpu", threads=threads, cached=0.3)
    return engine.description, torch.stack([engine.step(id) for id in IDS])


@with_kernels
def test_engines_divide_by_one_kept_profile_and_give_the_same_bits(
    packed: PackedModel, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, assumed = run(packed)
    assert described.endswith("links assumed equal")
    of = cpu_links.depends_on(2, 256)
    keep(of, SLOW)
    asked: list[Links] = []

    def watched(resident: int, offloaded: int, links: Links) -> int:
        asked.append(links)
        return over_the_bus(resident, offloaded, links)

    monkeypatch.setattr("sparsepack.runtime.hybrid.mlps.over_the_bus", watched)
    first, second = run(packed), run(packed)
    assert first[0].endswith("links measured")
    assert set(asked) == {SLOW}
    assert torch.equal(first[1], second[1])
    with pytest.raises(UserError, match="two workers need a thread each; give --threads 2"):
        run(packed, threads=1)
    assert EngineOptions(device="cuda", cached=0.3, threads=1).divided_by, "a GPU needs but one beside it"
    assert torch.allclose(first[1], assumed, atol=0.1)
    assert run(packed, threads=4)[0].endswith("links assumed equal")
    links_path(of).write_text("{")
    assert run(packed)[0].endswith("links assumed equal")
    assert asked[-1] == HALVES


@with_kernels
def test_tune_measures_them_for_files_by_neurons(file: Path, packed: PackedModel, isa: str) -> None:
    done = CliRunner().invoke(main, ["tune", str(file), "--threads", "2", "--json", "-"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["links"]
    assert (row["hidden"], row["threads"]) == (256, 2)
    links = measured_links(2, 256)
    assert links is not None
    assert asdict(links) == row["together"]
    assert run(packed)[0].endswith("links measured")
    table = CliRunner().invoke(main, ["tune", str(file), "--threads", "2"])
    assert table.exit_code == 0, table.output
    for expected in ("both workers at once (one alone)", "handing over, us", f"kept in {row['path']}"):
        assert expected in table.stdout


@with_kernels
def test_a_cache_without_room_is_told_before_anything_is_measured(
    cache: Path, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(cpu_links, "measure_links", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match=r"cache/sparsepack: cannot be made .*; set XDG_CACHE_HOME"):
        measure([256], threads=2)


def test_what_takes_turns_is_larger_than_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROTATION": 1 << 28, "TIMES_CACHES": 4, "LISTED": 2048}.items():
        monkeypatch.setattr(measuring, name, value)
    caches = {0: 1 << 28, 300 << 20: 1200 << 20, 1 << 40: 2 << 30}
    for size, expected in caches.items():
        monkeypatch.setattr(measuring, "last_caches", lambda size=size: size)
        count = measuring.count_for(8192)
        assert expected <= 9216 * count < expected + 9216 * 8 * 2048
        assert count % (8 * 2048) == 0
        assert measuring.count_for(512) <= 256 * 2048
