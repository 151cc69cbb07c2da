"""The pages as a site: `make docs` builds it with Sphinx, and a link that leads nowhere is an error.

The pages are Markdown as GitHub reads it and stay where they are. Their order is that of the list in docs/README.md.
"""

import re
import runpy
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
_LIST = ROOT / "docs" / "README.md"
_OF_THE_PROJECT = ("CHANGELOG", "CONTRIBUTING", "SECURITY")

project = "sparsepack"
release = version = runpy.run_path(str(ROOT / "sparsepack" / "version.py"))["__version__"]
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/RESULTS.md"]
exclude_patterns = [".*", "build", "sparsepack", "tests", "work"]  # not read, so that a build takes seconds
myst_heading_anchors = 6  # the same as on GitHub
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_title = f"sparsepack {release}"


def _pages() -> list[str]:
    """The names of all pages, as Sphinx has them, in the order in which they are listed."""
    listed = re.findall(r"\]\(([^)#]+)\.md\)", _LIST.read_text(encoding="utf-8"))
    found = [(_LIST.parent / name).resolve().relative_to(ROOT).as_posix() for name in listed]
    return ["docs/README", *dict.fromkeys(found), *_OF_THE_PROJECT]


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the first page the list of all pages, which its own text would show twice."""
    if name == root_doc:
        source[0] += "\n\n```{toctree}\n:hidden:\n" + "\n".join(_pages()) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Let Sphinx call what stands above."""
    app.connect("source-read", _add_contents)
