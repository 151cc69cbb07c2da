"""What `sparsepack tune --device cuda` measures of the links, keeps and refuses; never how fast anything is."""

import itertools
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulated
import torch
from artifacts_for_tests import tiny_by_neurons, write_zigzag
from native_build import instruction_set_params

from sparsepack import tuning
from sparsepack.cli.commands.tune import tuning_table
from sparsepack.errors import OutputError, UserError
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.hybrid import bandwidth as bandwidth
from sparsepack.runtime.hybrid import measure_bandwidth as card
from sparsepack.tuning import tune

pytestmark = pytest.mark.parametrize("isa", instruction_set_params()[:1])
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and so little work that a test takes seconds; a machine that does much else."""
    small = {"ROTATION": 1 << 14, "TIMES_CACHES": 0, "LISTED": 8}
    for name, some in {**small, "ROUNDS": 2, "REPLAYS": 1, "MAILBOX_BLOCKS": 3, "BANDS": 2, "NOISE": math.inf}.items():
        monkeypatch.setattr(card, name, some)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def _slow_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulated GPU takes says nothing: a step with requests shall take longer."""
    figure = card._figure
    monkeypatch.setattr(card, "_figure", lambda name, taken: figure(name, taken) + (name == "steps with requests"))


@pytest.mark.usefixtures("_slow_hand_over")
def test_every_speed_is_measured_kept_and_read_again(isa: str, kernels: Kernels) -> None:
    device = kernels.usable(DEVICE)
    assert bandwidth.load_profile(None, 512, device, kernels) is None
    (row,) = bandwidth.measure([512, 512], device, None, kernels)
    for of in (row["together"], row["alone"]):
        assert all(0 < value < math.inf for value in of.values())
    assert 0 < row["copies"] < math.inf
    kept = bandwidth.load_profile(None, 512, device, kernels)
    assert kept is not None
    assert asdict(kept) == row["together"]
    assert bandwidth.load_profile(None, 256, device, kernels) is None
    shown = tuning_table({"shapes": [], "gpu_info": "some GPU", "path": "there", "links": [row]})
    share = f"{100 * row['alone']['bus'] / row['copies']:.0f} %"
    assert share in shown
    for name in ("near", "far_bus", "far_worker"):
        assert f"{row['together'][name] / 1e9:.1f} ({row['alone'][name] / 1e9:.1f})" in shown


@pytest.mark.usefixtures("_slow_hand_over")
def test_what_was_measured_with_another_gpu_is_ignored(isa: str) -> None:
    class Other(simulated.SimulatedKernels):
        device_name = staticmethod(lambda device: "another GPU")

    with simulated.launches():
        (row,) = bandwidth.measure([256], DEVICE, None, simulated.KERNELS)
    assert bandwidth.load_profile(None, 256, DEVICE, Other()) is None
    content = json.loads(Path(row["path"]).read_text())
    Path(row["path"]).write_text(json.dumps({**content, "gpu_info": "another GPU"}))
    assert bandwidth.load_profile(None, 256, DEVICE, simulated.KERNELS) is None


@pytest.mark.usefixtures("_slow_hand_over")
def test_what_a_graph_reads_lives_as_long_as_the_graph(isa: str) -> None:
    """A graph of a GPU has addresses alone: what it reads must be kept by who replays it."""

    class Forgetful(simulated.SimulatedKernels):
        @staticmethod
        def capture_graph(run: Callable[[], None], stream: object, pool: object = None) -> simulated.Graph:
            run()
            kept = weakref.ref(run)

            def replay() -> None:
                found = kept()
                assert found is not None, "the tensors of a graph were let go of"
                found()

            return simulated.Graph(replay)

    with simulated.launches():
        bandwidth.measure([256], DEVICE, None, Forgetful())


def test_threads_beside_a_gpu_are_for_files_that_can_be_divided(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[list[int], int | None]]()

    class Module:
        tune = staticmethod(lambda *of: {})
        tune_bandwidth = staticmethod(lambda widths, device, threads: asked.append((widths, threads)))

    monkeypatch.setattr(tuning, "load_backend_module", lambda row: Module)
    file, other = tiny_by_neurons(tmp_path), tmp_path / "other.gguf"
    tune([file], "cuda", threads=3)
    tune([file], "cuda")
    assert asked == [([256], 3), ([256], None)]
    write_zigzag(open_checkpoint("shipped:tiny"), {}, other)
    tune([other], "cuda", threads=3)
    assert asked[2:] == [([256], 3)]
    with pytest.raises(UserError, match="threads 3: on device cuda they compute what has no room there; give a file"):
        tune([], "cuda", threads=3)


def test_hidden_links_end_what_needs_them_alone(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(widths: list[int], device: torch.device, threads: int | None) -> None:
        raise UserError("tune: other work hides the bus")

    shapes = {"shapes": [], "gpu_info": "a card", "path": "there"}
    module = SimpleNamespace(tune=lambda *of: dict(shapes), tune_bandwidth=hidden)
    monkeypatch.setattr(tuning, "load_backend_module", lambda row: module)
    file, other = tiny_by_neurons(tmp_path), tmp_path / "other.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, other)
    found = tune([other], "cuda")
    assert found == {**shapes, "links_hidden": "tune: other work hides the bus"}
    assert "without --vram nothing is lost: tune: other work hides the bus" in tuning_table(found)
    for files, threads in (([other], 3), ([other, file], None)):
        with pytest.raises(UserError, match="other work hides the bus"):
            tune(files, "cuda", threads=threads)


def test_a_figure_that_other_work_hides_is_refused_and_not_kept(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "NOISE", 0.2)
    monkeypatch.setattr(card, "ROUNDS", 4)
    took = itertools.cycle([1e-3, 2e-3, 3e-3, 4e-3])

    def on_gpu(kernels: Kernels, run: Callable[[], object], beside: Callable[[], object] | None = None) -> float:
        if beside:
            beside()
        return next(took)

    monkeypatch.setattr(card, "seconds_on_gpu", on_gpu)
    figure, load = r"tune: \w.*: \d+ to \d+ us in 4 rounds", r"[\d.]+ threads wanted to run, and tune has \d+ cores?"
    said = rf"{figure}; other work .* \(before, {load}\); .* --threads than 1,"
    with simulated.launches(), pytest.raises(UserError, match=said):
        bandwidth.measure([256], DEVICE, 1, simulated.KERNELS)
    assert bandwidth.load_profile(None, 256, DEVICE, simulated.KERNELS) is None


@pytest.mark.parametrize(
    ("taken", "is_hidden"),
    [([1.0], False), ([1.0, 1.05, 1.0, 1.02], False), ([1.0, 1.0, 1.0, 1.0, 9.0], False), ([1.0, 1.5, 2.0, 1.2], True)],
)
def test_a_figure_is_the_median_of_rounds_that_agree(
    isa: str, taken: list[float], is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "NOISE", 0.3)
    if is_hidden:
        with pytest.raises(card._Hidden, match="the bus: 1000000 to 2000000 us"):
            card._figure("the bus", taken)
    else:
        assert card._figure("the bus", taken) == pytest.approx(1.0, abs=0.02)


def test_rounds_that_do_not_agree_are_measured_anew(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "NOISE", 0.2)
    monkeypatch.setattr(card, "ROUNDS", 4)
    rounds = iter([1.0, 2.0, 3.0, 4.0, *[5.0] * 4, *[9.0] * 4])
    assert card._interleaved_medians([lambda: {"the bus": next(rounds)}]) == {"the bus": 5.0}
    assert next(rounds) == 9.0, "measured once more than it took"


def test_a_cache_without_room_is_told_before_anything_is_measured(
    isa: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(bandwidth, "measure_card", lambda *_: pytest.fail("measured"))
    with pytest.raises(OutputError, match="set XDG_CACHE_HOME"):
        bandwidth.measure([256], DEVICE, None, simulated.KERNELS)


def test_hand_overs_that_take_no_time_are_noise(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_figure", lambda name, taken: 1.0)
    with simulated.launches(), pytest.raises(UserError, match="requests: they take no longer"):
        bandwidth.measure([256], DEVICE, None, simulated.KERNELS)
