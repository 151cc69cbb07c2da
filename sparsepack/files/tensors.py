"""Write a safetensors file: whole, or one tensor after the other."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes as it is written."""
        return math.prod(self.shape) * self.dtype.itemsize


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


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    tensor: Callable[[str], torch.Tensor],
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Write a safetensors file one tensor after the other, as `tensor` gives each; one is held at a time."""
    with path.open("wb") as file:
        listed = ((e.name, _NAMES[e.dtype], e.shape, e.nbytes) for e in entries)
        file.write(header(listed))
        for entry in entries:
            data = tensor(entry.name)
            if data.dtype != entry.dtype or data.shape != entry.shape:
                raise RuntimeError(f"{entry.name}: {data.dtype} {list(data.shape)}, planned {entry}")
            file.write(data.contiguous().view(-1).view(torch.uint8).numpy().data)
            advance()


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, of any shape and type; one pass, which holds no copy of the values."""
    if values.dtype == torch.float8_e4m3fn:  # has no infinity; torch finds no extremes of it
        return not bool(values.isnan().any())
    if not values.is_floating_point() or values.numel() == 0:
        return True
    low, high = values.detach().aminmax()  # a NaN is both
    return math.isfinite(low) and math.isfinite(high)


def header(entries: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """What stands before the tensors, each given by name, type, shape and bytes: the length of its JSON, which spaces
    bring to a multiple of 8."""
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in entries:
        start, end = end, end + nbytes
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(listed, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
