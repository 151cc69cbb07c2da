"""The examples of docs/library.md, run as they stand there, and names that are modules and functions at once."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsepack

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "tiny.gguf ()" in printed
    assert "missing.gguf" in printed.splitlines()[-1]


def test_the_page_names_the_whole_surface() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in sparsepack.__all__ if name not in page] == []


def test_every_public_name_is_there_and_documented() -> None:
    assert set(sparsepack.__all__) <= set(dir(sparsepack))
    for name in sparsepack.__all__:
        found = getattr(sparsepack, name)
        assert inspect.unwrap(found).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'packs'"):
        sparsepack.packs  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, sparsepack; sys.exit(bool({'torch', 'numpy', 'pydantic', 'click'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHECK = """
from sparsepack.packing import pack
from sparsepack.calibration.run import calibrate
from sparsepack.loading import load
assert (sparsepack.pack, sparsepack.calibrate, sparsepack.load) == (pack, calibrate, load)
"""


@pytest.mark.parametrize(
    "first",
    [
        "import sparsepack; sparsepack.pack; sparsepack.calibrate; sparsepack.load",
        "import sparsepack, sparsepack.packing, sparsepack.calibration.run, sparsepack.loading",
        "import sparsepack; from sparsepack import pack, calibrate, load",
        "import sparsepack; from sparsepack.cli import main",
    ],
)
def test_a_name_means_the_same_function_whoever_imports_what_first(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", first + "\n" + CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
