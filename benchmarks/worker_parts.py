"""What the main thread of each worker of a command does, a hundred times a second, as seconds of parts with names.

So it is seen which parts grow shorter with more workers, and which take as long however many there are. Python runs
`begin` as it starts in every process of a command whose environment is `sampled(environment, folder)`. A GPU works on
by itself: a part has the seconds in which the process is there, which are the GPU's only where it waits for that.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

EVERY = 0.01

PARTS = (
    ("importing", "importlib._bootstrap", ""),
    ("saving", "workers/resume.py", ""),
    ("exchanging", "workers/workers.py", ""),
    ("joining", "workers/joined.py", ""),
    ("reading blocks", "stock/blocks.py", ""),
    ("embedding", "stock/blocks.py", "embed"),
    ("running blocks", "stock/blocks.py", ""),
    ("running blocks", "eval/perplexity.py", "score_windows"),
    ("pruning", "pruning/block.py", ""),
    ("learning", "sparsity/training.py", ""),
    ("rotating", "rotation/run.py", "block_of"),
    ("packing", "containers/write_tensors.py", ""),
    ("hashing", "files/hashing.py", ""),
    ("tokenising", "tokenizer/", ""),
    ("writing", "files/atomic.py", ""),
    ("writing", "checkpoint/writer.py", ""),
    ("writing", "calibration/folder.py", "save"),
    ("reading a calibration", "calibration/folder.py", "load"),
)
"""The name of a part, what stands in a file's path, and the name of a function there; none: any. The first row counts
that fits one of the functions which are being run, wherever it stands among them."""
OTHER, START = "other", "starting Python"


def part_of(running: Iterable[tuple[str, str]]) -> str:
    """The part that functions belong to which are being run, each given by its file and name, the innermost first.

    Where no row fits it is "other" and the innermost function of sparsepack, for whoever looks for what takes so long.
    """
    functions = list(running)
    for part, path, name in PARTS:
        if any(path in file and name in ("", function) for file, function in functions):
            return part
    for file, function in functions:
        if "/sparsepack/" in file:
            return f"{OTHER} ({file.rpartition('/sparsepack/')[2]} {function})"
    return OTHER


def sampled(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which the workers of a command write their parts into a folder, which is made."""
    folder.mkdir(parents=True)
    run = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['begin']({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(run)
    before = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def parts_in(folder: Path) -> list[dict[str, float]]:
    """The seconds of the parts of each worker, in their order. Of a worker's own children none counts: it lasts
    longest."""
    found: dict[int, dict[str, float]] = {}
    for file in folder.glob("*.json"):
        number, seconds = int(file.name.partition("-")[0]), json.loads(file.read_text())
        found[number] = max(found.get(number, {}), seconds, key=lambda each: sum(each.values()))
    return [found[number] for number in sorted(found)]


def begin(folder: str) -> None:
    """Sample this process's main thread until it ends, unless it only starts workers."""
    if "RANK" not in os.environ and any(word.startswith("--devices") for word in sys.orig_argv):
        return
    main, began = threading.main_thread().ident, time.perf_counter()
    seconds = {START: _age()}
    number, process, stop = os.environ.get("RANK", "0"), os.getpid(), threading.Event()

    def sample() -> None:
        before = began
        while not stop.wait(EVERY):
            part, now = part_of(_running(sys._current_frames().get(main or 0))), time.perf_counter()
            seconds[part] = seconds.get(part, 0.0) + now - before
            before = now

    def end() -> None:
        stop.set()
        if os.getpid() == process:
            Path(folder, f"{number}-{process}.json").write_text(json.dumps(seconds))

    atexit.register(end)
    threading.Thread(target=sample, name="worker parts", daemon=True).start()


def _running(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _age() -> float:
    """Seconds since this process began, where the system says so."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
