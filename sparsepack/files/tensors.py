"""Write a safetensors file."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write named tensors, readable by whom the umask allows. Raises OSError where the disk refuses it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    except SafetensorError as error:  # a full disk is told in words only
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(0o666 & ~_umask())  # the library leaves it to the owner alone


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
