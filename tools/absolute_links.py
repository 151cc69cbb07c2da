"""README.md for PyPI, where a link to another file of the repository leads nowhere.

    python tools/absolute_links.py https://github.com/OWNER/sparsepack v0.1.0

writes into README.md, in place, the addresses of files as they are in that version; the release workflow does so before
it builds.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def absolute(text: str, repository: str, version: str) -> str:
    """A page with its relative links and pictures as addresses in a repository of GitHub."""

    def address(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}({repository}/{kind}/{version}/{match[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s]+)\)", address, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text(encoding="utf-8"), *sys.argv[1:3]), encoding="utf-8")
