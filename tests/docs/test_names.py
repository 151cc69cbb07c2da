"""Pages of docs and comments of the kernels name files that exist, and pages name what the code has."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = {".py", ".cpp", ".h", ".inc", ".cu", ".cuh", ".metal"}
COMMENTED = [
    path
    for folder in ("runtime/cuda", "runtime/cpu/native", "runtime/metal")
    for path in sorted((ROOT / "sparsepack" / folder).rglob("*"))
    if path.suffix in SOURCES
]
FILE = re.compile(r"(?<![\w.*<{-])(?:\.\./)*((?:[\w-]+/)*[\w-]+\.(?:py|cpp|cuh|cu|h|inc|metal|yaml|svg))\b(?!`? as)")
OTHERS = ("sglang.", "vllm.")
"""Names that begin with these are of programs that load parts of ours, and that stand in no source of ours."""
NOT_FILES_OF_OURS = {"llama.cpp", "cusparseLt.h", "sparsepack/runtime/toy/backend.py"}


@cache
def paths() -> frozenset[str]:
    """Every end of the path of every file and folder of the repository: a page may leave out the folders in front."""
    roots = ("sparsepack", "tests", "docs", "benchmarks", "recipes", "tools")
    found = [*ROOT.glob("*"), *(path for name in roots for path in (ROOT / name).rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in found if "__pycache__" not in path.parts]
    return frozenset("/".join(each[first:]) for each in parts for first in range(len(each)))


@cache
def words() -> frozenset[str]:
    """Every word of the sources, the recipes and the build."""
    found = [path for name in ("sparsepack", "tests", "tools") for path in (ROOT / name).rglob("*")]
    texts = [path.read_text(encoding="utf-8") for path in found if path.suffix in SOURCES | {".yaml", ".jinja"}]
    texts += [(ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "pyproject.toml", "CMakeLists.txt")]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def missing_files(text: str) -> list[str]:
    text = re.sub(r"^ *#include <.*$", "", text, flags=re.MULTILINE)
    named = {name for name in FILE.findall(text) if "NAME" not in name and "FILE" not in name}
    return sorted(named - NOT_FILES_OF_OURS - paths())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_folders_that_pages_name_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w-]+/)+)`|`(sparsepack/[\w/]+|runtime/[\w/]+|tests/[\w/]+)`", page.read_text("utf-8"))
    assert [name for pair in named if (name := "".join(pair).rstrip("/")) not in paths()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_type_stand_in_the_code(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {name for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text) if "NAME" not in name}
    named -= {name for name in named if FILE.fullmatch(name) or name.startswith(OTHERS)}
    named -= {name for name in named if re.fullmatch("[a-f]{2}", name)}  # a byte
    unknown = {name for name in named for part in name.split(".") if part not in words()}
    assert sorted(unknown - {"metal"}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_classes_that_pages_name_are_in_the_module_that_they_name(page: Path) -> None:
    for module, name in re.findall(r"`([a-z_.]+)\.([A-Z][a-z]\w*)`", page.read_text(encoding="utf-8")):
        files = (ROOT / "sparsepack").rglob(f"{module.rpartition('.')[2]}.py")
        assert any(f"class {name}" in file.read_text(encoding="utf-8") for file in files), f"{module}.{name}"


def test_files_that_comments_of_the_kernels_name_exist() -> None:
    missing = {path.name: names for path in COMMENTED if (names := missing_files(path.read_text(encoding="utf-8")))}
    assert missing == {}
