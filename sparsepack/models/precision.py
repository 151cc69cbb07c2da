"""In which type weights are stored, and in which type a model is computed.

Weights are read in the type in which they are stored, a tensor at a time. On a CPU each block then runs in float32
while it is its turn: products in 16 bits take five to eight times as long where a processor has no instructions for
them, and what is measured is the model, not the CPU's rounding. On a GPU the model's own type is the fast one.
"""

import torch

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
