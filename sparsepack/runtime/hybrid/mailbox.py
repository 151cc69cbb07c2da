"""The memory through which a device asks the processor for offloaded neurons, and where in it everything lies.

    abort            int32: 0, or why either side gave up
    request, block l int32 number, int32 count | int32 indices [N] | float32 gates [B][N] | float32 x [B][H]
    answer, block l  int32 number              | float32 y [B][H]
    request, product int32 number              | float32 x [B][K] | uint8 levels [K]
    answer, product  int32 number              | float32 y [B][R]

with L blocks of N neurons, H channels and B sequences; a product is of R rows and K columns of a matrix that every
token reads (`runtime/hybrid/offloaded.py`), and where it is of planes each column has a level, of all sequences. Where
N is 0, products alone are asked for. Each part between two bars begins at a multiple of `PART` bytes.
`number` is that of the step, from 1 on; whoever announces writes it last, with release, and the other side awaits it
with acquire. Indices are ascending; the gates of a sequence are those of the listed neurons, its first `count`. Where
`count` is 0 nobody answers and nobody waits. Where the processor has a block's gates (`cold_worker`), its request
lists neurons that may be active, and gates are not written. Both sides look at `abort` while they wait.
"""

from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np

PART = 128
"""Parts begin at multiples of this many bytes: no two share a line of any cache."""
MAX_SEQUENCES = 8
LAST_NUMBER = 2**31 - 1
"""Numbers are int32; after this one comes 1, since memory begins with zeros."""
_WORD = 4  # bytes of an int32 and a float32


class Abort(IntEnum):
    """Why a side gave up a step, as `abort` says it; the first reason stays. The native worker has the same numbers."""

    GOES_ON = 0
    INTERRUPTED = 1
    """By the caller: the worker clears it when the next step begins."""
    DEVICE_WAITED = 2
    """Too long for an answer."""
    WORKER_WAITED = 3
    """Too long for a request."""
    BAD_REQUEST = 4
    """The device asked for neurons that there are not."""


def next_number(number: int) -> int:
    """The number of the step after the one with `number`; the first step has that after 0."""
    return number % LAST_NUMBER + 1


@dataclass(frozen=True)
class ProductRequest:
    """A product that the device asks for in each step, before the neurons of a block.

    skips  -- whether the worker leaves out the columns whose input is zero
    levels -- whether the request says at which level each column is read
    begins -- then of the first 1,024 rows columns before this are the device's
    """

    block: int
    columns: int
    rows: int
    skips: bool = False
    levels: bool = False
    begins: int = 0


@dataclass(frozen=True)
class ProductPlaces:
    """The places of a product's parts, in bytes from the beginning of the memory.

    request, x -- the number of its request, and its input; answer, y -- the number of its answer, and the rows
    levels     -- of its columns; 0: it has none
    """

    request: int
    x: int
    answer: int
    y: int
    levels: int = 0


@dataclass(frozen=True)
class Mailbox:
    """Sizes of a mailbox. All properties are in bytes; those of a request or an answer count from where it begins.

    blocks, neurons of each, 0: there are none; hidden: channels; sequences: how many at once, 1 to `MAX_SEQUENCES`
    products -- in the order in which a step asks for them, by block

    Raises ValueError for sizes that no mailbox has.
    """

    blocks: int
    neurons: int
    hidden: int
    sequences: int
    products: tuple[ProductRequest, ...] = ()

    def __post_init__(self) -> None:
        if min(self.blocks, self.neurons + 1, self.hidden) < 1 or not 1 <= self.sequences <= MAX_SEQUENCES:
            raise ValueError(f"{self}: expected sizes from 1 on and at most {MAX_SEQUENCES} sequences")
        blocks = [product.block for product in self.products]
        if blocks != sorted(blocks) or any(min(each.columns, each.rows) < 1 for each in self.products):
            raise ValueError(f"{self}: expected products by block, of one row and column at least")

    @property
    def abort(self) -> int:
        return 0

    @property
    def requests(self) -> int:
        return PART

    @property
    def number(self) -> int:
        """In a request as in an answer."""
        return 0

    @property
    def count(self) -> int:
        return _WORD

    @property
    def indices(self) -> int:
        return PART

    @property
    def gates(self) -> int:
        return self.indices + _parts(_WORD * self.neurons)

    @property
    def x(self) -> int:
        return self.gates + _parts(_WORD * self.sequences * self.neurons)

    @property
    def request_size(self) -> int:
        """Also from one request to the next."""
        return self.x + _parts(_WORD * self.sequences * self.hidden)

    @property
    def answers(self) -> int:
        return self.requests + self.blocks * self.request_size

    @property
    def y(self) -> int:
        return PART

    @property
    def answer_size(self) -> int:
        """Also from one answer to the next."""
        return self.y + _parts(_WORD * self.sequences * self.hidden)

    @property
    def places(self) -> tuple[ProductPlaces, ...]:
        """The places of each product's parts."""
        found, at = [], self.answers + self.blocks * self.answer_size
        for product in self.products:
            x = at + PART
            levels = x + _parts(_WORD * self.sequences * product.columns)
            answer = levels + (_parts(product.columns) if product.levels else 0)
            found.append(ProductPlaces(at, x, answer, answer + PART, levels if product.levels else 0))
            at = answer + PART + _parts(_WORD * self.sequences * product.rows)
        return tuple(found)

    @property
    def product_parts(self) -> list[tuple[int, ...]]:
        """The products and their places, as the native worker takes them."""
        pairs = zip(self.products, self.places, strict=True)
        return [(of.block, of.columns, of.rows, of.skips, of.begins, *astuple(at)) for of, at in pairs]

    @property
    def size(self) -> int:
        if self.products:
            return self.places[-1].y + _parts(_WORD * self.sequences * self.products[-1].rows)
        return self.answers + self.blocks * self.answer_size


@dataclass(frozen=True)
class Views:
    """Arrays on the memory of a mailbox, first dimension the block but for `abort`: what is written there is seen
    by the other side. An array's stores have no order of their own: `number` needs a release between."""

    abort: np.ndarray
    """int32 [1]"""
    request_numbers: np.ndarray
    """int32 [blocks], the numbers"""
    count: np.ndarray
    """int32 [blocks]"""
    indices: np.ndarray
    """int32 [blocks, neurons]"""
    gates: np.ndarray
    """float32 [blocks, sequences, neurons]"""
    x: np.ndarray
    """float32 [blocks, sequences, hidden]"""
    answer_numbers: np.ndarray
    """int32 [blocks], the numbers"""
    y: np.ndarray
    """float32 [blocks, sequences, hidden]"""


def views(layout: Mailbox, memory: np.ndarray) -> Views:
    """The parts of `memory`, uint8 [layout.size]. Raises ValueError for memory of another size."""
    if memory.dtype != np.uint8 or memory.shape != (layout.size,):
        raise ValueError(f"memory {memory.dtype} {memory.shape}, expected uint8 ({layout.size},)")

    def part(kind: type, begin: int, stride: int, *shape: int) -> np.ndarray:
        inner = np.cumprod((_WORD, *reversed(shape)))[:-1][::-1] if shape else ()
        strides = (stride, *map(int, inner))
        return np.ndarray((layout.blocks, *shape), kind, memory, begin, strides)

    def requests(kind: type, begin: int, *shape: int) -> np.ndarray:
        return part(kind, layout.requests + begin, layout.request_size, *shape)

    def answers(kind: type, begin: int, *shape: int) -> np.ndarray:
        return part(kind, layout.answers + begin, layout.answer_size, *shape)

    sequences, neurons, hidden = layout.sequences, layout.neurons, layout.hidden
    return Views(
        np.ndarray((1,), np.int32, memory, layout.abort),
        requests(np.int32, layout.number),
        requests(np.int32, layout.count),
        requests(np.int32, layout.indices, neurons),
        requests(np.float32, layout.gates, sequences, neurons),
        requests(np.float32, layout.x, sequences, hidden),
        answers(np.int32, layout.number),
        answers(np.float32, layout.y, sequences, hidden),
    )


def _parts(size: int) -> int:
    """`size` bytes as they are when the next part begins."""
    return -(-size // PART) * PART
