"""Folders, compared and changed."""

from pathlib import Path

from sparsepack.files.hashing import sha256_bytes
from sparsepack.formats.containers.safetensors import MANIFEST, sealed, unsealed


def content(path: Path) -> dict[str, bytes]:
    """What the files of a folder hold, by name."""
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}


def sealed_again(folder: Path, name: str, text: str) -> None:
    """Give a file of an artifact's folder another content, as if it had been packed so."""
    (folder / name).write_text(text)
    inside, data = unsealed(folder / MANIFEST), text.encode()
    inside["files"][name] = {"bytes": len(data), "sha256": sha256_bytes(data)}
    del inside["sha256"]
    (folder / MANIFEST).write_bytes(sealed(inside))
