"""Whether the fast tests notice faults: each row of `mutations.txt` puts one into the source, and its tests must fail.

    python tools/mutations.py               # every fault whose source or tests changed since it was last tried
    python tools/mutations.py serve zigzag  # those whose names begin so

Faults are made in a copy of the tree, build/mutations/tree, never in the checkout; outcomes stay in
build/mutations/outcomes.json, so that an interrupted run goes on. A fault is found by its text alone, wherever its file
was moved, and a test file by its name. Each fault runs in a fork of a process that has imported what is not ours. Tests
that failed run once more without any fault, and must pass.

A row of the table is

    NAME: TEST FILE ...
    -text that stands in the source once
    +what takes its place

where either text may have several lines.
"""

import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tools/mutations.txt"
BUILD = ROOT / "build/mutations"
SUFFIXES = (".py", ".inc", ".h", ".cpp", ".cu", ".cuh")
KERNELS = "sparsepack/runtime/cpu"
SECONDS = 600
"""A fault whose tests take longer than this counts as killed: it hangs them."""
HUNG = "the tests hung or crashed"
THIRD_PARTY = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "hypothesis",
    "safetensors.torch",
    "click",
    "jinja2",
)


@dataclass(frozen=True)
class Mutation:
    """A fault: `old` becomes `new`, and at least one test of the files `tests` must fail."""

    name: str
    tests: tuple[str, ...]
    old: str
    new: str


def read_table(text: str) -> list[Mutation]:
    """The faults of a table. Raises `ValueError` for a row that is none."""
    found = []
    for row in text.split("\n\n"):
        lines = [line for line in row.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        name, _, tests = lines[0].partition(": ")
        old, new = ("\n".join(line[1:] for line in lines[1:] if line[0] == sign) for sign in "-+")
        if not tests or not old or any(line[0] not in "-+" for line in lines[1:]):
            raise ValueError(f"mutations.txt: no fault: {row!r}")
        found.append(Mutation(name, tuple(tests.split()), old, new))
    return found


def source_of(mutation: Mutation, sources: dict[Path, str]) -> Path:
    """The file that a mutation changes. Raises `ValueError` unless its text stands in one file, once."""
    found = {file: count for file, text in sources.items() if (count := text.count(mutation.old))}
    if sum(found.values()) != 1:
        places = ", ".join(f"{file} ({count})" for file, count in found.items()) or "no file"
        raise ValueError(f"text expected once in the source, found in {places}; give it another: {mutation.old!r}")
    return next(iter(found))


def files_of(mutation: Mutation, root: Path) -> list[Path]:
    """Its tests. Raises `ValueError` where one is not there."""
    found = {name: next((root / "tests").rglob(name), None) for name in mutation.tests}
    if missing := [name for name, path in found.items() if path is None]:
        raise ValueError(f"no such test file: {', '.join(missing)}")
    return [path for path in found.values() if path is not None]


def sources_in(root: Path) -> dict[Path, str]:
    """The source files of the package by their paths from `root`."""
    files = (file for file in sorted((root / "sparsepack").rglob("*")) if file.suffix in SUFFIXES)
    return {file.relative_to(root): file.read_text(encoding="utf-8") for file in files}


def installed_kernels() -> Path:
    """The compiled CPU kernels of the checkout's environment."""
    return next(Path(sysconfig.get_path("platlib"), KERNELS).glob("_native.*"))


def copy_tree() -> Path:
    """A copy of what git knows of the checkout, changes included."""
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    # What runs imports the copy, programs that tests start too, and not the installed package.
    (tree / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'ScikitBuild' not in type(each).__name__]\n"
    )
    shutil.copy2(installed_kernels(), tree / KERNELS)
    return tree


def build_kernels(tree: Path) -> None:
    """Compile the CPU kernels of the copy into it."""
    folder = BUILD / "native"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if not (folder / "build.ninja").exists():
        options = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "--log-level=WARNING"]
        subprocess.run(["cmake", "-S", str(tree), "-B", str(folder), *options], env=environment, check=True)
    subprocess.run(["ninja", "-C", str(folder)], env=environment, check=True, stdout=subprocess.DEVNULL)
    shutil.copy2(next(folder.glob("_native.*")), tree / KERNELS)


class _Failed:
    """The tests that failed, or could not be collected."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.ids.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.ids.append(report.nodeid)


def run_tests(tree: Path, tests: list[str], stop: bool = True) -> dict[str, object]:
    """Pytest's exit status for the fast ones of some tests of the copy, which of them failed, and how long it took."""
    told, log, began = BUILD / "failed.json", BUILD / "last.log", time.monotonic()
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:0] = [str(tree)]
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
        failed = _Failed()
        options = ["-q", *(["-x"] if stop else []), "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
        status = pytest.main([*options, "-m", "not slow and not long and not gpu", *tests], plugins=[failed])
        told.write_text(json.dumps({"status": int(status), "failed": failed.ids}))
        sys.stdout.flush()
        os._exit(0)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(SECONDS if stop else 0)
    os.waitpid(child, 0)
    signal.alarm(0)
    outcome = json.loads(told.read_text()) if told.exists() else {"status": -1, "failed": [HUNG]}
    return {**outcome, "seconds": round(time.monotonic() - began, 1)}


def outcome_of(mutation: Mutation, tree: Path, source: Path, tests: list[Path]) -> dict[str, object]:
    """Whether tests notice a mutation, and which."""
    compiled, path = "native" in source.parts, tree / source
    was = path.read_bytes()
    try:
        path.write_bytes(was.replace(mutation.old.encode(), mutation.new.encode()))
        if compiled:
            build_kernels(tree)
        ran = run_tests(tree, [str(test.relative_to(tree)) for test in tests])
    finally:
        path.write_bytes(was)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        if compiled:  # the next build brings the source back, too
            shutil.copy2(installed_kernels(), tree / KERNELS)
    killed = ran["status"] in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, -1)
    word = (
        "killed" if killed else "SURVIVED" if ran["status"] == 0 else f"NO TEST RAN: pytest ended with {ran['status']}"
    )
    return {**ran, "outcome": word}


def fingerprint(mutation: Mutation, source: str, tests: list[Path]) -> str:
    """Of all that an outcome depends on first: the fault, its file and its test files."""
    parts = [repr(mutation), source, *(test.read_text() for test in tests)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def main() -> None:
    """Try the mutations; exit status 1 unless each is killed by a test that passes without it."""
    mutations = [each for each in read_table(TABLE.read_text()) if each.name.startswith(tuple(sys.argv[1:] or ("",)))]
    BUILD.mkdir(parents=True, exist_ok=True)
    kept = BUILD / "outcomes.json"
    outcomes = json.loads(kept.read_text()) if kept.exists() else {}
    tree = copy_tree()
    sources = sources_in(tree)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for module in THIRD_PARTY:
        importlib.import_module(module)
    fine, killers = 0, dict[str, str]()
    for mutation in mutations:
        try:
            source, tests = source_of(mutation, sources), files_of(mutation, tree)
        except ValueError as error:
            print(f"{mutation.name:<34} NOT FOUND: {error}", flush=True)
            continue
        mark = fingerprint(mutation, sources[source], tests)
        if outcomes.get(mutation.name, {}).get("mark") != mark:
            outcomes[mutation.name] = {**outcome_of(mutation, tree, source, tests), "mark": mark}
            kept.write_text(json.dumps(outcomes, indent=1))
        found = outcomes[mutation.name]
        by = next(iter(found["failed"]), "")
        if found["outcome"] == "killed" and by != HUNG and not found.get("checked"):
            killers[mutation.name] = by
        fine += found["outcome"] == "killed"
        print(f"{mutation.name:<34} {found['outcome']:<9} {found['seconds']:>6} s  {by}", flush=True)
    if killers:  # all at once, without any fault
        broken = run_tests(tree, sorted(set(killers.values())), stop=False)["failed"]
        for name, by in killers.items():
            outcomes[name]["checked"] = by not in broken
            if by in broken:
                fine -= 1
                print(f"{name:<34} NOT JUDGED: {by} fails without it, too", flush=True)
        kept.write_text(json.dumps(outcomes, indent=1))
    print(f"{fine} of {len(mutations)} killed")
    sys.exit(fine != len(mutations))


if __name__ == "__main__":
    main()
