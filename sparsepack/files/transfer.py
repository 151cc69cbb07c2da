"""Between a checkpoint's files, the device where the encoders run, and the artifact: in pieces of bounded size.

    file --(memory map)--> weights --(copy)--> page-locked buffer --(DMA)--> CUDA device
    CUDA device --(DMA)--> page-locked buffer --> SHA-256, artifact

Each thread has one such buffer. Other memory would go through the driver's own, slowly and one thread at a time, and
memory taken anew for each tensor costs more in page faults than the copy into it.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 25
"""A buffer has this many bytes, enough to hide what starting a copy costs."""

CUDA_AT_ONCE = 4
"""This many threads keep up with the device, and this many matrices fit into its memory."""

_own = threading.local()


class Workspace(threading.local):
    """Memory of each thread for one matrix in float32 at a time. What the system gives anew for every matrix costs page
    faults, for which the threads of a process wait for each other."""

    _floats: Tensor | None = None

    def floats(self, *shape: int) -> Tensor:
        """A tensor on the CPU, valid until the next one is taken."""
        count = math.prod(shape)
        if self._floats is None or self._floats.numel() < count:
            self._floats = None  # before the larger one is taken
            self._floats = torch.empty(count)
        return self._floats[:count].view(shape)


def tensors_at_once(device: str, most: int = CUDA_AT_ONCE) -> int:
    """On how many tensors to work side by side: `most` for a CUDA device.

    There one thread cannot read, hash and write as fast as it encodes. Encoders on a CPU use every core by themselves.
    """
    return most if torch.device(device).type == "cuda" else 1


def stacked_on(device: str, parts: Sequence[Tensor]) -> Tensor:
    """Tensors on the CPU with their rows stacked, on `device`: in the type that `torch.cat` gives them."""
    where = torch.device(device)
    if where.type != "cuda":
        return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(where)
    rows = [part.shape[0] for part in parts]
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    stacked = torch.empty(sum(rows), *parts[0].shape[1:], dtype=dtype, device=where)
    for part, place in zip(parts, torch.split(stacked, rows), strict=True):
        _copy(part, place)
    return stacked


def host_pieces(data: Tensor) -> Iterator[memoryview]:
    """The bytes of a uint8 tensor of any shape, one piece after the other; each holds until the next is taken."""
    flat = data.contiguous().view(-1)
    if flat.is_cuda:
        yield from _staged(flat)
    else:
        yield flat.cpu().numpy().data


def on_host(tensor: Tensor, ready: torch.cuda.Event | None = None) -> Tensor:
    """The tensor in the host's memory. A GPU's is copied by a stream of the thread's own: what is put on the current
    one from now on goes on beside, and must not change it.

    ready -- after this the tensor holds what it should; None: after all that is on the current stream now
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    whole, end = made.view(-1).view(torch.uint8).numpy(), 0
    beside = _stream(tensor.device)
    if ready is None:
        beside.wait_stream(torch.cuda.current_stream(tensor.device))
    else:
        beside.wait_event(ready)
    with torch.cuda.stream(beside):
        for piece in host_pieces(tensor.contiguous().view(-1).view(torch.uint8)):
            start, end = end, end + len(piece)
            np.copyto(whole[start:end], np.frombuffer(piece, np.uint8))
    return made


def _staged(flat: Tensor) -> Iterator[memoryview]:
    for piece in torch.split(flat, PIECE):
        staged = _buffer()[: piece.numel()]
        staged.copy_(piece, non_blocking=True)
        _wait(piece.device)
        yield staged.numpy().data


def _copy(source: Tensor, target: Tensor) -> None:
    """Fill a contiguous `target` with a tensor on the CPU."""
    source, target = source.contiguous().view(-1), target.view(-1)
    count = PIECE // source.itemsize
    for piece, place in zip(torch.split(source, count), torch.split(target, count), strict=True):
        staged = _buffer()[: piece.nbytes]
        # numpy copies on this thread alone, without the interpreter's lock; torch would start a team of threads.
        np.copyto(staged.numpy(), piece.view(torch.uint8).numpy())
        place.copy_(staged.view(piece.dtype), non_blocking=True)
        _wait(place.device)


def _buffer() -> Tensor:
    if not hasattr(_own, "buffer"):
        with torch.inference_mode(False):  # what is made in that mode can never be written to outside it
            _own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    buffer: Tensor = _own.buffer
    return buffer


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this thread on a GPU, one for all its copies: torch has 32, of which others record graphs."""
    streams: dict[torch.device, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


def _wait(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
