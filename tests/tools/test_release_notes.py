"""A release is published only where its tag, the version and the changelog agree."""

from pathlib import Path

import pytest
from release_notes import notes

CHANGELOG = """# Changelog

## Unreleased
- not yet

## 1.2.0 - 2026-12-01
- new

## 1.1.0 - 2026-11-30
- old
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sparsepack").mkdir()
    (tmp_path / "sparsepack" / "version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_the_notes_are_the_changelogs_section_of_the_version(project: Path) -> None:
    assert notes("v1.2.0", project) == "- new\n"


def test_a_tag_of_another_version_is_refused(project: Path) -> None:
    with pytest.raises(SystemExit, match=r"tag v1\.3\.0: .*says 1\.2\.0; expected v1\.2\.0"):
        notes("v1.3.0", project)


def test_a_version_without_a_section_is_refused(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(CHANGELOG.replace("## 1.2.0", "## 1.20"))
    with pytest.raises(SystemExit, match=r"no section of 1\.2\.0; give `## Unreleased` the title `## 1\.2\.0 - "):
        notes("v1.2.0", project)
