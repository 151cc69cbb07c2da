"""The pages as a site: every page is in it, and a link that leads nowhere ends the build."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # `make docs` builds it, too
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "benchmarks/RESULTS.md")


def build(root: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` builds it."""
    command = ["-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-c", "docs", ".", str(into)]
    return subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = [page for name in PAGES for page in ((ROOT / name).glob("*.md") if name == "docs" else [ROOT / name])]
    assert [page for page in pages if not (tmp_path / page.relative_to(ROOT)).with_suffix(".html").exists()] == []
    first = (tmp_path / "README.html").read_text(encoding="utf-8")
    assert "_static/site.css" in first, "lines of code take another line there, where they would be cut"
    assert "Copyright" not in first, "the project names no holder"


def test_a_link_to_a_heading_that_is_not_there_ends_the_build(tmp_path: Path) -> None:
    root = tmp_path / "project"
    for name in ("docs/conf.py", "docs/static/site.css", "docs/README.md", "sparsepack/version.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "docs" / "README.md").write_text("# Documentation\n[a](a.md)\n")
    (root / "docs" / "a.md").write_text("# A\n[there](../CHANGELOG.md#there), [nowhere](../CHANGELOG.md#nowhere)\n")
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        (root / name).write_text(f"# {name}\n\n## There\n")
    done = build(root, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert "'there'" not in done.stderr
