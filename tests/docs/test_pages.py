"""The README and the pages of docs: links lead somewhere, pages and sections are listed, and options exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sparsepack.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", RESULTS, *(ROOT / "docs").glob("*.md")]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of all headings of a page."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `sparsepack` command in the indented examples of a page, comments left out."""
    for line in re.findall(
        r"^    (?:pip install .*&& )?(sparsepack .*)$", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            found = page.parent / target if target else page
            assert found.exists(), target
            assert not heading or heading in anchors(found), f"{target}#{heading}"


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in listed + "(README.md)"] == []


@pytest.mark.parametrize("page", [*(ROOT / "docs").glob("*.md"), RESULTS], ids=lambda page: page.name)
def test_contents_lists_name_every_section(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sections = [name for name in re.findall(r"^## (.*)$", text, re.MULTILINE) if name != "Contents"]
    listed = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert len(sections) < 2 or [name for name in sections if anchor(name) not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_examples_use(page: Path) -> None:
    for verb, *words in commands(page):
        command = main.commands[verb]
        if isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words[0]]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help", "-h"}, f"sparsepack {verb} {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_narrow_enough_to_read(page: Path) -> None:
    wide = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\|[-:| ]+\|$", line) and line.count("|") > 9
    ]
    assert wide == []


def test_folders_of_the_map_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| folder in `sparsepack/` | what |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])]
    assert named
    assert [name for name in named if not (ROOT / "sparsepack" / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_pages_name_exist(page: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|tools)/\w+\.py\b", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []
