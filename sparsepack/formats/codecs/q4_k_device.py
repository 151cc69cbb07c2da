"""The devices on which Q4_K's encoder can run as one kernel: CUDA devices that Triton compiles for."""

import importlib.util
import threading
import warnings
from functools import cache

import torch
from torch import Tensor


@cache
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None


_failed = False
_alone = threading.Lock()  # nobody promises that Triton compiles in several threads


def encode(weight: Tensor) -> Tensor | None:
    """Zigzag superblocks of a finite matrix [rows, columns]: uint8 [bands * columns, 144], by `q4_k_triton`.

    None where it cannot: on other devices, without Triton, or where compiling it failed (no C compiler, a GPU that
    Triton has left behind), which is said once. The same algorithm in plain torch then serves, more slowly.
    """
    if not weight.is_cuda or not _importable():
        return None
    with _alone:
        return None if _failed else _encode(weight)


def _encode(weight: Tensor) -> Tensor | None:
    global _failed
    # Triton takes half a second to import.
    from sparsepack.formats.codecs import q4_k_triton

    try:
        return q4_k_triton.encode(weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton raises what its compiler, the C compiler or the driver does
        _failed = True
        reason = str(error).strip().splitlines()
        warnings.warn(
            f"Q4_K is encoded by plain torch, many times slower: Triton cannot compile the kernel here "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'})",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
