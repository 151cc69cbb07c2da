"""The compiled module, and which of its instruction sets runs."""

import os
from functools import lru_cache
from importlib import import_module
from typing import Any

from sparsepack.errors import UserError

FORCED = "SPARSEPACK_ISA"
"""This environment variable names the instruction set to run, for tests and comparisons."""

_REMEDY = (
    "run `pip install --force-reinstall --no-deps --no-cache-dir sparsepack`, in its source folder with `.` in place "
    "of `sparsepack`, or use the reference backend"
)
"""Without --no-cache-dir pip installs again what it built without a compiler."""


def native() -> Any:
    """The compiled module `sparsepack.runtime.cpu._native`. Raises `UserError` where it is missing or does not load."""
    try:
        return import_module("sparsepack.runtime.cpu._native")
    except ModuleNotFoundError as error:
        raise UserError(
            "the CPU kernels were not built: no working C++17 compiler when sparsepack was installed; install g++ or "
            f"clang++ and {_REMEDY}"
        ) from error
    except ImportError as error:
        raise UserError(f"the CPU kernels cannot be loaded ({error}); {_REMEDY}") from error


def instruction_sets() -> list[str]:
    """The instruction sets in the build that this machine runs, best first. Raises `UserError` as `native` does."""
    return list(native().instruction_sets())


def instruction_set() -> str:
    """The best one, or the one that SPARSEPACK_ISA forces. Raises `UserError` where that cannot run here."""
    known = instruction_sets()
    forced = os.environ.get(FORCED)
    if not forced:
        return known[0]
    if forced not in known:
        raise UserError(f"{FORCED}={forced}: not available on this machine; expected one of {', '.join(known)}")
    return forced


def operations() -> Any:
    """The native operations of that instruction set, on as many threads as torch has now."""
    import torch  # here, so that `sparsepack --version` takes no seconds

    return _operations(instruction_set(), torch.get_num_threads())


@lru_cache(maxsize=4)
def _operations(instruction_set: str, threads: int) -> Any:
    return native().Operations(instruction_set, threads)
