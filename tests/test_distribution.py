"""What others install: the wheel without a compiler, the source archive, and where their version comes from."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import sparsepack

ROOT = Path(__file__).parents[1]


def built(what: str, into: Path, **environment: str) -> tuple[Path, str]:
    """What the build backend makes of this tree, and what it says."""
    code = f"from scikit_build_core.build import build_{what}; build_{what}({str(into)!r})"
    inherited = {name: value for name, value in os.environ.items() if name != "SPARSEPACK_REQUIRE_KERNELS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (made,) = into.iterdir()
    return made, done.stdout + done.stderr


def test_a_wheel_built_without_a_compiler_says_so_in_its_name_and_in_the_builds_output(tmp_path: Path) -> None:
    wheel, said = built("wheel", tmp_path, CXX="/nowhere/c++")
    assert wheel.name == f"sparsepack-{sparsepack.__version__}-0without_cpu_kernels-py3-none-any.whl"
    assert "installed without its CPU kernels" in said
    assert "install g++ or clang++" in said


def test_the_source_archive_has_every_file_of_the_repository(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git repository, which would list its files")
    archive, _ = built("sdist", tmp_path)
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert sorted(files - inside) == []


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert importlib.metadata.version("sparsepack") == sparsepack.__version__
