"""Folders, compared."""

from pathlib import Path


def content(path: Path) -> dict[str, bytes]:
    """What the files of a folder hold, by name."""
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}
