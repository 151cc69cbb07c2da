"""The sources of the Metal kernels, as `torch.mps.compile_shader` takes them: one string."""

from functools import cache
from importlib.resources import files

FOLDER = files("sparsepack.runtime.metal") / "kernels"
FIRST = "common.metal"
"""What the other files use; no file includes another."""


@cache
def source() -> str:
    """All kernels, file by file."""
    names = sorted(file.name for file in FOLDER.iterdir() if file.name.endswith(".metal"))
    names.sort(key=lambda name: name != FIRST)
    return "\n".join((FOLDER / name).read_text() for name in names)
