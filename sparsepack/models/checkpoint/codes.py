"""Numbers of few bits in bytes and words, and scales of blocks: what decoders of quantised weights share."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]

_AT_ONCE = 1 << 17
"""So many numbers of 8 bits are converted at a time."""
_TERNARY = 32
"""Ternary weights have scales for at least so many neighbours."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What 4 bits of FP4 mean, without the sign, which is the highest of them."""
_E2M3 = tuple([m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)])
"""The same of 6 bits of FP6."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in the bytes of the last dimension, uint8 [..., bytes * 8 / bits], the lowest bits first; a code may
    begin in one byte, or word, and end in the next. What is left of the last bytes is dropped."""
    found = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (found.unsqueeze(-1).bitwise_right_shift(shifts) & ((1 << bits) - 1)).flatten(-2)
    count = found.shape[-1] * 8 // bits
    found = torch.nn.functional.pad(found, (0, -found.shape[-1] % bits))
    found = torch.unflatten(found, -1, (-1, bits))  # each has 8 codes
    whole = (found.long() << torch.arange(0, 8 * bits, 8)).sum(-1)
    codes = (whole.unsqueeze(-1) >> torch.arange(0, 8 * bits, bits)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def decoded(packed: Tensor, bits: int, values: Tensor, high_first: bool = False) -> Tensor:
    """What the codes in the bytes of the last dimension stand for, float32 [..., bytes * 8 / bits].

    values     -- float32 [2 ** bits], of each code
    high_first -- of the codes in a byte the first is in the highest bits; else as `unpacked` has them
    """
    if 8 % bits:
        return values[unpacked(packed, bits).int()]
    # numpy takes a table's entries by bytes, several numbers at a time: three times as fast as torch's conversions.
    of_byte = values[unpacked(torch.arange(256, dtype=torch.uint8).unsqueeze(1), bits).int()]
    table = (of_byte.flip(1) if high_first else of_byte).contiguous().numpy().view(f"V{32 // bits}")[:, 0]
    return torch.from_numpy(table[packed.contiguous().view(torch.uint8).numpy()].view(np.float32))


def _block(length: int, count: int, sizes: Sequence[int]) -> int:
    """How many of `length` neighbours share one of `count` numbers: one of `sizes` that fits, else as many each."""
    for size in (length, *sizes):
        if -(-length // size) == count:
            return size
    if count < 1 or length % count:
        raise ValueError
    return length // count


def is_ternary(weights: Tensor) -> bool:
    """Whether of rows [n, columns] each weight is -s, 0 or s, with an s for every `_TERNARY` neighbours in a row."""
    count = weights.shape[-1] // _TERNARY
    sizes = torch.unflatten(weights[..., : count * _TERNARY].float().abs(), -1, (count, _TERNARY))
    largest = sizes.amax(-1, keepdim=True)
    return bool(largest.any()) and bool(((sizes == 0) | (sizes == largest)).all())


def scales(found: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents of two (E8M0)."""
    return (found.float() - 127).exp2() if found.dtype == torch.uint8 else found.float()


def of_blocks(shape: Shape, numbers: Shape, sizes: Sequence[tuple[int, int]]) -> tuple[Shape, int, int]:
    """How numbers of this shape are those of blocks of a matrix [..., rows, columns]: their shape with as many
    dimensions, and the rows and columns of a block.

    sizes -- of blocks, rows and columns, that the configuration names; the last ones of a matrix may be smaller

    Raises ValueError where they are none."""
    aligned = numbers + (1,) * (len(shape) - len(numbers))
    if len(shape) < 2 or len(aligned) > len(shape):
        raise ValueError(f"is {list(numbers)} for weights {list(shape)}")
    try:
        if any(own not in (1, length) for own, length in zip(aligned[:-2], shape[:-2], strict=True)):
            raise ValueError
        rows = _block(shape[-2], aligned[-2], [size[0] for size in sizes])
        return aligned, rows, _block(shape[-1], aligned[-1], [size[1] for size in sizes])
    except ValueError:
        blocks = " or ".join(f"{rows} x {columns}" for rows, columns in sizes)
        expected = f"; expected one for each block of {blocks}" if blocks else ""
        raise ValueError(f"is {list(numbers)} for weights {list(shape)}{expected}") from None


def by_blocks(
    values: Tensor, numbers: Tensor, sizes: Sequence[tuple[int, int]], operation: Callable[..., Tensor]
) -> Tensor:
    """Change values [..., rows, columns] in place by `operation`, which takes them and the numbers of their blocks."""
    aligned, rows, columns = of_blocks(tuple(values.shape), tuple(numbers.shape), sizes)
    numbers = numbers.reshape(aligned)
    if values.shape[-2] % rows == 0 and values.shape[-1] % columns == 0:
        parts = values.view(*values.shape[:-2], aligned[-2], rows, aligned[-1], columns)
        operation(parts, numbers.unsqueeze(-1).unsqueeze(-3))
        return values
    for dim, size in ((-2, rows), (-1, columns)):  # the last block is smaller
        numbers = numbers.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    operation(values, numbers)
    return values


def floats(packed: Tensor, bits: int = 4) -> Tensor:
    """Signed numbers of FP4 or FP6 codes, float32."""
    table = torch.tensor(_E2M1 if bits == 4 else _E2M3)
    return decoded(packed, bits, torch.cat([table, -table]))


def numbers(found: Tensor) -> Tensor:
    """Numbers of 8 bits, FP8 or integers, as float32."""
    if found.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return found.float()
    values = torch.empty(found.shape)
    codes, flat = found.contiguous().view(torch.uint8).view(-1), values.view(-1)
    for first in range(0, len(flat), _AT_ONCE):  # in the caches; torch's own conversion takes three times as long
        words, here = codes[first : first + _AT_ONCE].to(torch.int16), flat[first : first + _AT_ONCE]
        if found.dtype == torch.float8_e5m2:  # the upper half of a float16
            here.copy_(words.bitwise_left_shift_(8).view(torch.float16))
            continue
        small = words & 127
        nan = bool((small == 127).any())
        half = small.bitwise_left_shift_(7).bitwise_or_(words.bitwise_and_(128).bitwise_left_shift_(8))
        here.copy_(half.view(torch.float16)).mul_(256)  # whose exponents begin 8 lower
        if nan:
            here[codes[first : first + _AT_ONCE] & 127 == 127] = torch.nan
    return values
