"""Safetensors files, written whole or one tensor after the other; several with an index, named as Hugging Face names
them. Work on several items at a time.

In which type weights are stored, and in which type a model is computed: weights are read in the type in which they are
stored, a tensor at a time. On a CPU each block then runs in float32 while it is its turn: products in 16 bits take five
to eight times as long where a processor has no instructions for them, and what is measured is the model, not the CPU's
rounding. On a GPU the model's own type is the fast one.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
"""A file holds at most this many bytes of tensors: a system lets one thread write to a file at a time, and one thread
hashes the file; files of this size are enough to keep a machine's threads from waiting for each other."""


def split(sizes: Sequence[int], most: int = SHARD_BYTES) -> list[slice]:
    """Which of some pieces, in their order, lie in each file: at most `most` bytes; a larger piece has one of its
    own."""
    starts, held = [0], 0
    for number, size in enumerate(sizes):
        if number > starts[-1] and held + size > most:
            starts.append(number)
            held = 0
        held += size
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def file_names(count: int) -> list[str]:
    """The names of `count` files that together hold a model's tensors."""
    return [WEIGHTS] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def index_text(file_of: Mapping[str, str], nbytes: int) -> str:
    """The index, as JSON, by which other programs find the file that holds a tensor.

    file_of -- the name of each tensor's file
    nbytes  -- how many bytes all tensors take
    """
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def check_index(text: str, file_of: Mapping[str, str]) -> None:
    """Raise ValueError unless an index names the file of each tensor, `file_of`, and no other tensor."""
    weight_map = json.loads(text)["weight_map"]
    for name in {**file_of, **weight_map}:
        said, found = weight_map.get(name), file_of.get(name)
        if said != found:
            raise ValueError(
                f"{INDEX} has {name[:60]} in {str(said)[:60] if said else 'no file'}, it is in {found or 'none'}"
            )


Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Item], Result], items: Iterable[Item], at_once: int, done: Callable[[], object]
) -> list[Result]:
    """`work(item)` of every item, in the order of the items, on `at_once` of them at a time.

    One at a time is the caller's own thread; more are threads of their own, none of which outlives the call. `done` is
    called after each result, in order. So is the first error raised: items not begun by then are dropped, and those
    begun are waited for.
    """
    results: list[Result] = []
    if at_once == 1:
        for item in items:
            results.append(work(item))
            done()
        return results
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for job in [pool.submit(work, item) for item in items]:
                results.append(job.result())
                done()
        finally:
            pool.shutdown(cancel_futures=True)
    return results


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


HALVES = (torch.bfloat16, torch.float16)


def arithmetic(asked: str, own: torch.dtype, device: str) -> torch.dtype:
    """The type in which blocks are computed: the one asked for; for "auto" float32 on a CPU, elsewhere `own`.

    own -- the type of the model's matrices; one that is no 16-bit type is computed in float32
    """
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    return own if own in HALVES and device != "cpu" else torch.float32


def type_name(dtype: torch.dtype) -> str:
    """The name of a type in results and for `--dtype`: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def brought(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on a device and in another type. It travels in its own: `to` with both would convert it first, and bring
    two or four times the bytes of weights in 16 bits to a GPU."""
    return values.to(device).to(dtype)


def stored_type(asked: str, own: torch.dtype) -> torch.dtype:
    """The type in which a tensor of a rotated checkpoint is stored: the one asked for; for "auto" its own, or float32
    where its own has 16 bits, since rounding a second time would make another model of it."""
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    return torch.float32 if own in HALVES else own
