"""The examples of docs/library.md, run as they stand there, and names that are modules and functions at once."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from forks_for_tests import in_forks

import sparsepack

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


class Hub:
    """What `push` asks the hub for, answered without a network."""

    def create_repo(self, name: str, **asked: object) -> None: ...

    def file_exists(self, name: str, file: str, revision: str | None) -> bool:
        return False

    def create_commit(self, name: str, files: object, **asked: object) -> object:
        return type("Commit", (), {"commit_url": f"https://hub/{name}/commit/1"})


@pytest.mark.long
def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "tiny.gguf ()" in printed
    assert names["address"] == "https://hub/me/tiny/commit/1"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!")
    assert "missing.gguf" in printed.splitlines()[-1]


def test_the_page_names_the_whole_surface() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in sparsepack.__all__ if name not in page] == []


def test_every_verb_that_makes_or_measures_something_is_a_function() -> None:
    from sparsepack.cli import main

    names = {"eval": "evaluate", "generate": "load", "serve": "load"}
    without = {"inspect", "bench", "tune"}
    verbs = [names.get(verb, verb) for verb in main.commands if verb not in without]
    assert [verb for verb in verbs if verb not in sparsepack.__all__] == []


def test_every_example_is_of_a_function_that_the_package_has() -> None:
    used = set(re.findall(r"sparsepack\.([a-z]+)\(", PAGE.read_text(encoding="utf-8")))
    functions = {name for name in sparsepack.__all__ if name.islower()}
    assert functions <= used


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
from sparsepack.calibrate.collection import calibrate
from sparsepack.errors import CalibrationError
from sparsepack.loading import load
assert (sparsepack.pack, sparsepack.load) == (pack, load)
for function in (sparsepack.calibrate, calibrate):  # the first is the package
    try:
        function(0, None, None, None)
    except CalibrationError as error:
        assert "model" in str(error), error
"""
FIRST = [
    "import sparsepack; sparsepack.pack; sparsepack.calibrate; sparsepack.load",
    "import sparsepack, sparsepack.packing, sparsepack.calibrate.prune, sparsepack.loading",
    "import sparsepack; from sparsepack import pack, calibrate, load",
    "import sparsepack; from sparsepack.cli import main",
]


@pytest.mark.parametrize("firsts", [FIRST[:1], pytest.param(FIRST[1:], marks=pytest.mark.long)], ids=str)
def test_a_name_means_the_same_function_whoever_imports_what_first(firsts: list[str]) -> None:
    codes = [f"{first}\n{CHECK}" for first in firsts]
    assert in_forks("import torch, transformers.models.llama.modeling_llama", codes) == [""] * len(firsts)
