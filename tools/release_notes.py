"""What a release says of itself: `python tools/release_notes.py v0.1.0` prints its section of CHANGELOG.md.

It fails, so that nothing is published, where the tag is not the version in sparsepack/version.py, or where the
changelog has no section `## 0.1.0 - 2026-12-01` of that version.
"""

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """The changelog's section of the version that a tag names. Raises `SystemExit` with the reason where none is."""
    version = runpy.run_path(str(root / "sparsepack" / "version.py"))["__version__"]
    if tag != f"v{version}":
        raise SystemExit(f"tag {tag}: sparsepack/version.py says {version}; expected v{version}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if not found or not found[1].strip():
        raise SystemExit(
            f"CHANGELOG.md: no section of {version}; give `## Unreleased` the title `## {version} - YYYY-MM-DD`, and "
            "put a new `## Unreleased` above it"
        )
    return found[1].strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(notes(sys.argv[1]))
