"""The Metal kernels as torch compiles and launches them, and whether they can run here.

The sources of the Metal kernels, as `torch.mps.compile_shader` takes them: one string.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch

from sparsepack.errors import UserError
from sparsepack.runtime.backends import find_backend

FOLDER = files("sparsepack.runtime.metal") / "kernels"
FIRST = "common.metal"
"""What the other files use; no file includes another."""


@cache
def source() -> str:
    """All kernels, file by file."""
    names = sorted(file.name for file in FOLDER.iterdir() if file.name.endswith(".metal"))
    names.sort(key=lambda name: name != FIRST)
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


Launch = Callable[[], object]
"""The function puts a kernel on torch's stream with all that the kernel takes."""

PLACE = "mps"
"""Tensors lie on this device of torch's; tests run the kernels where there is another."""


def usable(device: torch.device | str) -> torch.device:
    """The device on which tensors lie. Compiles the kernels where that was not done yet, which takes seconds.

    Raises `UserError` where the backend cannot run on it, saying what is missing.
    """
    find_backend("metal").check_device(device)
    if not torch.backends.mps.is_available():
        raise UserError(
            f"device {device}: torch finds no Apple GPU on this machine; it needs macOS on Apple silicon and torch for "
            "it; use cpu"
        )
    library()
    return torch.device(PLACE)


@cache
def library() -> Any:
    """The compiled kernels, each an attribute of its name. Raises `UserError` where Metal does not compile them."""
    try:
        return torch.mps.compile_shader(source())
    except (RuntimeError, SyntaxError) as error:
        said = str(error).strip().split("\n")[0]
        raise UserError(
            f"the Metal kernels do not compile here ({said}); please report this with the version of macOS, and use "
            "the reference backend meanwhile"
        ) from error


def launch(name: str, *arguments: Any, groups: tuple[int, int] | int, threads: int) -> Launch:
    """What puts a kernel on torch's stream, behind all that is there.

    arguments -- in the order of the kernel's buffers: tensors, ints (as int32) and floats (as float32)
    groups    -- threadgroups, in one dimension or two
    threads   -- of each threadgroup
    """
    casts = {number: "int32" for number, argument in enumerate(arguments) if isinstance(argument, int)}
    across, *down = (groups,) if isinstance(groups, int) else groups
    return partial(
        getattr(library(), name),
        *arguments,
        threads=[across * threads, *down],
        group_size=[threads, *(1 for _ in down)],
        arg_casts=casts,
    )


def new_submitter() -> Launch:
    """What gives the GPU all that is on torch's stream. Otherwise torch does so when somebody waits for a result, and
    until then the GPU has nothing to do."""
    return torch.mps.Event().record  # torch commits its command buffer with each event
