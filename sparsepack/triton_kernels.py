"""Work that a Triton kernel does where one can run: on CUDA devices that Triton compiles for."""

import importlib.util
import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FAILED: set[str] = set()
"""What could not be compiled here, by the words in which that was said."""

_alone = threading.Lock()  # nobody promises that Triton compiles in several threads


@cache
def importable() -> bool:
    """Whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


def run_triton(on: Tensor, work: Callable[[], Tensor], without: str) -> Tensor | None:
    """What `work` gives, which imports Triton (half a second) and runs a kernel on the device of a tensor.

    None where it cannot: on other devices, without Triton, or where compiling failed (no C compiler, a GPU that Triton
    has left behind). That is said once, with the words `without`: the caller does the same in plain torch, more slowly.
    """
    if not on.is_cuda or not importable():
        return None
    with _alone:
        if without in FAILED:
            return None
        try:
            return work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton raises what its compiler, the C compiler or the driver does
            FAILED.add(without)
            reason = str(error).strip().splitlines()
            warnings.warn(
                f"{without}: Triton cannot compile the kernel here "
                f"({type(error).__name__}: {reason[0] if reason else 'no reason given'})",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
