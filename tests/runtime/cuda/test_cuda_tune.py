"""What `sparsepack tune --device cuda` finds, keeps and changes; never how fast anything is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from click.testing import CliRunner

from sparsepack.cli import main
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag as codec
from sparsepack.runtime.cuda.driver import device as driver
from sparsepack.runtime.cuda.driver import kernel as launching
from sparsepack.runtime.cuda.products import tile_config, tune, zigzag, zigzag_products
from sparsepack.runtime.cuda.products.tile_config import (
    SCHEMA,
    CudaTileConfig,
    measured_tile_config,
    read_tuning,
    tile_config_of,
    tuned,
    tuning_path,
)

SHAPE, OTHER = (1100, 320), (512, 64)
GPU = "some GPU"
ANY = CudaTileConfig()
FIELDS = [name for name in asdict(ANY) if name != "block_bytes"]  # which the block says
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned.cache_clear()
    yield tmp_path / "cache"
    tuned.cache_clear()


@pytest.fixture
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)


def row(shape: tuple[int, int] = SHAPE, of: CudaTileConfig = ANY, **changes: Any) -> dict[str, Any]:
    return {"rows": shape[0], "columns": shape[1], **asdict(of), **changes}


def keep(content: Any) -> None:
    path = tuning_path(GPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    tuned.cache_clear()


@pytest.mark.usefixtures("_named")
def test_what_was_measured_is_looked_up_by_shape_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_tile_config(SHAPE, DEVICE) is None
    keep({"schema": SCHEMA, "shapes": [row()]})
    assert measured_tile_config(SHAPE, DEVICE) == ANY
    assert measured_tile_config(OTHER, DEVICE) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert measured_tile_config(SHAPE, DEVICE) is None


@pytest.mark.usefixtures("_named")
def test_gate_and_up_take_no_odd_number_of_bands() -> None:
    one, two = (replace(ANY, tile_bands=bands) for bands in (1, 2))
    keep({"schema": SCHEMA, "shapes": [row(SHAPE, one), row(OTHER, two)]})
    assert measured_tile_config(SHAPE, DEVICE, gate=True) is None
    assert measured_tile_config(SHAPE, DEVICE) == one
    assert measured_tile_config(OTHER, DEVICE, gate=True) == measured_tile_config(OTHER, DEVICE) == two


@pytest.mark.usefixtures("_named")
@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0",
        [],
        {"schema": SCHEMA + 1, "shapes": [row()]},
        {"schema": SCHEMA, "shapes": [None]},
        *(
            {"schema": SCHEMA, "shapes": [row(**{name: value})]}
            for name in FIELDS
            for value in (0, -1, 65, None, "x")
            if (name, value) != ("stages", 0)
        ),
        *({"schema": SCHEMA, "shapes": [{k: v for k, v in row().items() if k != name}]} for name in FIELDS),
    ],
    ids=str,
)
def test_a_tuning_that_is_damaged_or_impossible_is_ignored(content: Any) -> None:
    keep(content)
    assert measured_tile_config(SHAPE, DEVICE) is None
    assert read_tuning(tuning_path(GPU)) == {}


class Imagined:
    """In place of trials: a time for every configuration, and some that no GPU runs."""

    best = replace(ANY, **{name: values[1] for name, values in tune.CHOICES.items()})

    def __init__(self, shape: tuple[int, int], device: torch.device, gate: bool, block: str) -> None:
        self.bands, self.columns = -(-shape[0] // 256), shape[1]
        self.tried: list[CudaTileConfig] = []
        self.compiled: list[CudaTileConfig] = []

    def check(self) -> None:
        pass

    def compile(self, candidates: Sequence[CudaTileConfig]) -> None:
        self.compiled += candidates

    def nanoseconds(self, candidate: CudaTileConfig) -> float:
        assert candidate not in self.tried, "measured twice"
        assert candidate in self.compiled or not self.tried, "compiled by itself"
        self.tried.append(candidate)
        differences = sum(value != asdict(self.best)[name] for name, value in asdict(candidate).items())
        if candidate != ANY and differences == len(asdict(ANY)):
            raise RuntimeError("CUDA: out of shared memory")
        return 1000 * (1 + differences)


def test_the_search_finds_what_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_Trial", Imagined)
    monkeypatch.setattr(tune, "default_tile_config", lambda *_: ANY)
    monkeypatch.setattr(tune, "filling_splits", lambda bands, columns, device, tile_bands: 16 // tile_bands)
    found = tune._best(SHAPE, DEVICE, gate=False)
    assert tile_config_of(found) == Imagined.best
    assert found["microseconds"] == 1
    assert found["slowest_microseconds"] > 1
    assert (found["rows"], found["columns"]) == SHAPE


def test_another_number_of_bands_is_tried_with_splits_that_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Imagined] = []

    class Kept(Imagined):
        def check(self) -> None:
            trials.append(self)

    monkeypatch.setattr(tune, "_Trial", Kept)
    monkeypatch.setattr(tune, "default_tile_config", lambda *_: ANY)
    monkeypatch.setattr(tune, "filling_splits", lambda bands, columns, device, tile_bands: 32 // tile_bands)
    tune._best(SHAPE, DEVICE, gate=False)
    tried = {(config.tile_bands, config.splits) for config in trials[0].tried[:10]}
    assert tried == {(ANY.tile_bands, ANY.splits), (1, 32), (2, 16), (4, 8)}


def test_products_of_candidates_are_compiled_together_but_for_impossible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the macros of the products that are measured, without a GPU."""
    compiled: list[tuple[str, int, tuple[str, ...]]] = []
    monkeypatch.setattr(launching, "architecture", lambda device: 90)
    monkeypatch.setattr(launching, "cubin", lambda *of: (compiled.append(of), b"")[1])
    monkeypatch.setattr(tune, "own_stream", lambda: None)
    for module in (tile_config, zigzag_products):
        monkeypatch.setattr(module, "shared_limit", lambda device: simulated.SHARED_MEMORY)
        monkeypatch.setattr(module, "multiprocessors", lambda device: simulated.MULTIPROCESSORS)
    monkeypatch.setattr(zigzag_products, "workspace", lambda device: simulated.WORKSPACE)
    launching._code.cache_clear()
    trial = tune._Trial(SHAPE, torch.device("cpu"), gate=False)
    possible = [CudaTileConfig(1, 8, 16, 8), CudaTileConfig(2, 8, 0, 4), CudaTileConfig(4, 8, 8, 2)]
    trial.compile([possible[0], CudaTileConfig(1, 8, 16, 16), *possible])  # 320 columns have 10 chunks
    launching._code.cache_clear()
    input = zigzag_products.Input(trial._x, threshold=trial._threshold)
    expected = [zigzag_products._defines(trial._laid_out(config), input, None) for config in possible]
    assert sorted(compiled) == sorted(("zigzag_gemv", 90, defines) for defines in expected)


def test_candidates_of_planes_travel_to_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "shared_limit", lambda device: simulated.SHARED_MEMORY)
    for module in (tile_config, zigzag_products):
        monkeypatch.setattr(module, "shared_limit", lambda device: simulated.SHARED_MEMORY)
        monkeypatch.setattr(module, "multiprocessors", lambda device: simulated.MULTIPROCESSORS)
    monkeypatch.setattr(tune, "own_stream", lambda: None)
    cpu = torch.device("cpu")
    trial = tune._Trial(SHAPE, cpu, gate=False, block="Q6_P")
    assert trial._threshold.shape == (5, SHAPE[1])
    best = tile_config.default_tile_config(trial.bands, SHAPE[1], cpu, block_bytes=zigzag.block_bytes("Q6_P"))
    tried = {each for names in tune.TOGETHER for each in tune._candidates(best, names, trial, cpu)}
    assert {each.stages for each in tried} >= {4, 8, 16}
    for each in tried:
        assert each.planes
        assert each.stages
        assert trial._laid_out(each).planes


@pytest.mark.usefixtures("_named")
def test_planes_have_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning_path(GPU, "Q6_P")
    assert path != tuning_path(GPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": SCHEMA, "shapes": [row()]}))
    tuned.cache_clear()
    assert measured_tile_config(SHAPE, DEVICE, block="Q6_P") == ANY
    assert measured_tile_config(SHAPE, DEVICE) is None


def test_every_field_is_chosen() -> None:
    assert set(tune.CHOICES) == set(FIELDS) == {name for names in tune.TOGETHER for name in names}


# on a GPU


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little work that most of the time is spent compiling."""
    few = {"tile_bands": (1, 2), "splits": (1, 2), "warps": (8,), "stages": (0, 16)}
    for name, value in {"CHOICES": few, "TURNS": 1, "ROTATION": 1 << 16, "REPLAYS": 2}.items():
        monkeypatch.setattr(tune, name, value)


@pytest.mark.gpu
@pytest.mark.usefixtures("_quick")
def test_planes_are_tuned_and_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "STAGES_OF_PLANES", (4, 8))
    result = tune.measure([SHAPE], block="Q6_P")
    matrix = PackedMatrix(codec.pack(torch.randn(*SHAPE), "Q6_P"), MatrixFormat("Q6_P", "zigzag"), *SHAPE)
    loaded = zigzag.load_zigzag(matrix, "cuda")
    torch.cuda.synchronize()
    found = tile_config_of(result["shapes"][0])
    assert loaded.config == replace(found, block_bytes=zigzag.block_bytes("Q6_P"))
    x, y = torch.randn(SHAPE[1]), torch.empty(SHAPE[0], device="cuda")
    zigzag_products.gemv(loaded, zigzag_products.Input(x.cuda()), zigzag_products.Output(y))
    expected = decode_matrix(matrix).double() @ x.double()
    assert (y.cpu() - expected).norm() < 1.5e-4 * expected.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("_quick")
def test_a_tuning_is_kept_and_used(cache: Path) -> None:
    name = torch.cuda.get_device_name()
    result = tune.measure([SHAPE, OTHER, SHAPE], gates={OTHER})
    assert result.pop("path") == str(tuning_path(name))
    assert json.loads(tuning_path(name).read_text()) == result
    assert [(row["rows"], row["columns"]) for row in result["shapes"]] == [SHAPE, OTHER]
    assert result["shapes"][1]["tile_bands"] == 2
    matrix = PackedMatrix(codec.pack(torch.randn(*SHAPE)), MatrixFormat("Q4_K", "zigzag"), *SHAPE)
    loaded = zigzag.load_zigzag(matrix, "cuda")
    torch.cuda.synchronize()
    assert loaded.config == tile_config_of(result["shapes"][0])
    x, y = torch.randn(SHAPE[1]), torch.empty(SHAPE[0], device="cuda")
    zigzag_products.gemv(
        loaded, zigzag_products.Input(x.cuda(), threshold=torch.tensor([0.5], device="cuda")), zigzag_products.Output(y)
    )
    expected = decode_matrix(matrix).double() @ torch.where(x.abs() > 0.5, x, 0).double()
    assert (y.cpu() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("_quick")
def test_the_command_measures_and_prints(tmp_path: Path) -> None:
    packed = tmp_path / "m.gguf"
    assert CliRunner().invoke(main, ["pack", "shipped:tiny", "-o", str(packed)]).exit_code == 0
    table = CliRunner().invoke(main, ["tune", str(packed), "--device", "cuda"])
    assert table.exit_code == 0, table.output
    for expected in (torch.cuda.get_device_name(), "splits", "GB/s", "kept in"):
        assert expected in table.stdout
