"""What every test may use."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

# Read when numpy is imported: threads of its OpenBLAS spin for each other longer than they multiply small matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Bits depend on the layouts that an engine finds to be fast; commands that tests run inherit this.
os.environ["SPARSEPACK_AUTOTUNE"] = "0"

import pytest
import torch
from hypothesis import settings

from sparsepack.runtime.cpu.tile_config import tuned as tuned_cpu
from sparsepack.runtime.cuda.driver.kernel import compiled_folder
from sparsepack.runtime.cuda.products.tile_config import tuned as tuned_cuda
from sparsepack.workers import state as states

# An example may wait for a core that other workers hold.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


HAS = {
    "gpu": torch.cuda.is_available() or bool(os.environ.get("TRITON_INTERPRET")),
    "mps": torch.backends.mps.is_available(),
}
"""Whether tests that are marked so can run; TRITON_INTERPRET=1 is for files whose kernels Triton can interpret."""


def pytest_report_header() -> list[str]:
    return [f"no device for tests marked `{mark}`: they are not collected" for mark, has in HAS.items() if not has]


def _can_run(marks: Iterable[Any]) -> bool:
    return all(HAS.get(mark.name, True) for mark in marks)


def _that_run(values: Iterable[Any]) -> list[bool]:
    return [_can_run(getattr(value, "marks", ())) for value in values]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """No cases are made that need a device that is not there, thousands otherwise; of a test that always does, one."""
    marks = list(metafunc.definition.iter_markers())
    sets = [mark.args[1] for mark in marks if mark.name == "parametrize" and isinstance(mark.args[-1], Sequence)]
    none = not _can_run(marks) or any(values and not any(_that_run(values)) for values in sets)
    parametrize = metafunc.parametrize

    def that_run(names: Any, values: Iterable[Any], *, ids: Any = None, **settings: Any) -> None:
        values = list(values)
        stay = [n == 0 for n in range(len(values))] if none else _that_run(values)
        if not all(stay):
            settings.pop("_param_mark", None)  # it would bring the ids of all values
            values = list(compress(values, stay))
            ids = ids if ids is None or callable(ids) else list(compress(ids, stay))
        parametrize(names, values, ids=ids, **settings)

    metafunc.parametrize = that_run  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    """Nothing is collected that needs a device that is not there."""
    made = yield
    return [item for item in made if _can_run(item.iter_markers())] if isinstance(made, list) else made


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The garbage collector looks no more at what imports and the collection of tests have left, which stays: each
    engine on CUDA calls it, and took most of a second for that."""
    _freeze_heap()


def _freeze_heap() -> None:
    gc.collect()
    gc.freeze()


_begun: Counter[Path] = Counter()
"""Of each file, how many of its tests have begun in this process."""


_broken: list[str] = []
"""What broke this process's CUDA context, and how."""


_ended: list[str] = []
"""The test that ended last in this process."""


def _break(what: str, error: BaseException) -> None:
    _broken.append(f"{what}: {(str(error) or repr(error)).splitlines()[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test begins with one thread of torch's and random numbers of its own, and one that is marked `gpu` is skipped
    where CUDA cannot be used any more.

    Models of tests are small: two threads wait for each other longer than they work, and other tests hold their cores.
    A test of what several threads do says how many.
    """
    if _broken and item.get_closest_marker("gpu"):
        pytest.skip(f"not judged: CUDA cannot be used in this process since {_broken[0]}")
    _begun[item.path] += 1
    if _begun[item.path] <= 2 and not _broken:  # what CUDA cannot free any more ends the process
        # Nor does the garbage collector look at what the files before have left, and what the first test has imported:
        # engines, forks and tests of servers would wait for that hundreds of times, for a second at the end of a run.
        _freeze_heap()
    if torch.get_num_threads() != 1:  # also where the test before it ran a command with `--threads`
        torch.set_num_threads(1)
    _seed()


def _seed() -> None:
    """Inputs of a test do not depend on the tests before it, which differ from worker to worker."""
    if _broken:
        torch.default_generator.manual_seed(0)
        return
    try:
        torch.manual_seed(0)  # CUDA's, too, which fails after a fault and while a capture is open
    except RuntimeError as error:
        _break(f"what followed {_ended[-1]}" if _ended else "the collection of tests", error)
        raise


def _judge(item: pytest.Item, when: str) -> None:
    """Raise `RuntimeError` where what a test marked `gpu` did, when it was set up, called or torn down, has broken
    CUDA."""
    if _broken or not item.get_closest_marker("gpu") or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _break(f"{when} of {item.nodeid}", error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A fault of a kernel, and a capture that is left open, are the fault of the test that they come from: all that
    asks CUDA for anything after it would fail, too."""
    _judge(item, "the setup")
    try:
        yield
    finally:
        _judge(item, "the call")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """The same of what fixtures leave, those of the file too where the test is its last one."""
    try:
        yield
    finally:
        _ended[:] = [item.nodeid]
        _judge(item, "the teardown")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What fails is appended at once to the file that $SPARSEPACK_FAILURES names: a run that is cut off, on a machine
    that is lent for minutes, ends without its summary."""
    file = os.environ.get("SPARSEPACK_FAILURES")
    if file and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = str(report.longrepr if crash is None else crash.message).strip().splitlines()
        why = [line for line in lines if line.startswith("E ")] or lines
        with open(file, "a") as failures:
            failures.write(f"{report.when} of {report.nodeid}: {' | '.join(why[:3])}\n")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `sparsepack tune` found for the user must change no test, and no test what it found."""
    kept = Path(__file__).parents[1] / "build" / "compiled"
    kept.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        compiled_folder().parent.mkdir(parents=True)
        compiled_folder().symlink_to(kept)  # GPU kernels, named by all that they depend on
        tuned_cpu.cache_clear()
        tuned_cuda.cache_clear()
        yield


@pytest.fixture(autouse=True, scope="session")
def _states_are_saved_at_once() -> Iterator[None]:
    """Tests that kill a run count on a state that is saved after each block and each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "SAVE_EVERY", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts() -> None:
    """What a shell starts in its background ignores Ctrl-C; tests that interrupt themselves would then hang."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts: SPARSEPACK_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("SPARSEPACK_SHARED", Path(__file__).parents[2] / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"{folder} holds no models; set SPARSEPACK_SHARED")
    return folder


@pytest.fixture(scope="session")
def shared_model(shared: Path) -> Callable[[str], Path]:
    """A function that finds a model's folder there by its name; a test is skipped where it was not copied, as to a
    machine that is lent for minutes."""

    def folder(name: str) -> Path:
        if not (found := shared / "models" / name).is_dir():
            pytest.skip(f"{shared} holds no {name}")
        return found

    return folder
