"""What lies in the GPU's memory and what in the host's, for a budget of the GPU's: counted before anything is loaded.

    always on the card        keys and values of all sequences, buffers
    on the card while it fits output | attention, block by block | gates, block by block | slots | embedding
    in the host's memory      the rest, and where not every neuron has a slot the records of all neurons, all twice:
                              pinned for the bus, and as the processor's kernels read them

What stands last leaves the card first, and of attention and gates the last blocks. What lies in the host's memory is
read there: of the embedding a row for a token, of gates and attention all, in part by the GPU over the bus, in part by
the processor. So slots have only what is left when all of these are on the card. Beside the budget the driver takes
memory for its context, kernels and libraries.

A model whose MLPs are stored as sites is planned likewise: its gates are the matrices of gate and up, and the columns
of a block's down matrix are the records, which lie on the card or in the host's memory together (`Parts.together`). So
down matrices leave the card first, block by block: where a token skips columns, it reads the fewest bytes of these.

Of a model of planes the first planes of every matrix come first, then the second ones, in the same order: a first plane
is read of nearly every column, the last of few. What lies in the host's memory of a matrix is then its last planes, and
where not even the first ones have room all of them.

Where gates do not all fit, copies of them in few bits may take their place, block by block (`Parts.copies`), and come
before attention: a byte of a copy saves more of what is read from the host's memory than a byte of attention does. The
gates themselves, by rows, lie in the host's memory, and those of residents in slots, too. At the budget at which gates
just fit, both take about as long by the model of time: gates are 2 % ahead in a 13B shape, copies 8 % in a 70B shape.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsepack.errors import PlacementError

DRIVER_BYTES = 600_000_000
"""What the driver's context, kernels and libraries take on the card beside any budget, at most."""
SPARE = 64
_ONE_SPARE_IN = 64
_WORK_OF_A_BUDGET = 3 / 64
"""Beyond the least, buffers take at most this share of what a budget has beyond its own least."""

_POSITIONS = (2048, 1024, 512, 256, 128, 64, 32)
_MOST_SCRATCH, _MOST_STAGED, _LEAST_STAGED = 1 << 28, 1 << 24, 1 << 18


def spare_of(slots: int, least: int = SPARE) -> int:
    """How many slots are kept beside so many of resident neurons: `least`, or one for each 64. Neurons that come are
    copied there while those that go still stand in the table and tokens are decoded."""
    return max(least, slots // _ONE_SPARE_IN)


def parse_bytes(text: str) -> int:
    """The bytes that a sequence such as 8GB or 512MB says, GB being 10^9 bytes. Raises `PlacementError`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([GM])B", text, re.IGNORECASE)
    if not found:
        raise PlacementError(f"--vram {text}: expected gigabytes or megabytes, as in 24GB")
    return round(float(found[1]) * (1e9 if found[2] in "gG" else 1e6))


def format_bytes(count: float) -> str:
    """Bytes as a sequence that `parse_bytes` reads: never fewer than these, by 1 % at most more from a megabyte on."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    digits = 2 if count < 10 * unit else 1
    return f"{math.ceil(count / unit * 10**digits) / 10**digits:.12g}{name}"


@dataclass(frozen=True)
class Work:
    """The buffers that decoding and prefill take on the card.

    positions -- prefill takes so many at once
    scratch   -- bytes for weights that are decoded to float16
    staged    -- bytes of each of the two buffers into which prefill brings records
    steps     -- bytes of a step's buffers, of the lists of active neurons, and of the tables of slots
    prefill   -- bytes of what prefill keeps of its positions
    unused    -- bytes that rounding leaves, so that more of a budget never gives fewer slots
    """

    positions: int
    scratch: int
    staged: int
    steps: int
    prefill: int
    unused: int = 0

    @property
    def bytes(self) -> int:
        """The sum of these parts: scratch, both staging buffers, steps, prefill and what is not used."""
        return self.scratch + 2 * self.staged + self.steps + self.prefill + self.unused


def work_of(
    *,
    hidden: int,
    intermediate: int,
    blocks: int,
    vocabulary: int,
    sequences: int,
    record: int,
    model: int,
    slots: bool = True,
) -> Work:
    """The buffers for a model with room for all of it.

    slots -- whether records may have slots: these take tables, and prefill brings the others through staging buffers
    record, model -- bytes of a neuron's record, and of all weights, of which prefill's positions take at most 2 %; of
                     no weights: the least buffers
    """
    of_a_position = 16 * intermediate + 48 * hidden + intermediate // 8
    positions = next((n for n in _POSITIONS if 50 * n * of_a_position <= model), _POSITIONS[-1])
    staged = min(record * intermediate, max(_LEAST_STAGED, min(_MOST_STAGED, model // 256)))
    steps = sequences * (64 * hidden + 24 * intermediate + 8 * vocabulary)
    if slots:
        steps += blocks * intermediate * (8 + sequences)
    return Work(
        positions=positions,
        scratch=max(512 * hidden, min(_MOST_SCRATCH, model // 64)),
        staged=max(staged // record, 1) * record if slots else 0,
        steps=steps + blocks * (1 << 13),  # what is small is rounded up
        prefill=positions * of_a_position,
    )


@dataclass(frozen=True)
class Parts:
    """What a model by neurons takes, in bytes. A model with experts is one whose neurons are these.

    embedding -- of which a token reads a row; 0 where it is the output, too
    output    -- the output matrix and its norm
    attention -- of each block, what it has beside its MLP
    gates     -- of each block: what every token reads of its MLP; of experts the router, and a shared one
    record    -- of a neuron; neurons -- how many a block has
    cache     -- keys and values of all sequences, and the tables of their positions
    work, least_work -- buffers where the card has room for all, and the least that work; None: as many
    spare     -- slots beside those of resident neurons at least, where not all are resident
    copies    -- of each block, a copy of its gates in few bits with what belongs to it; empty: there are none
    gate      -- of a neuron's gate, by rows, where there are copies
    together  -- whether the records of a block lie together, on the card or in the host's memory: columns of a matrix
    levels    -- of matrices with planes, the bytes of a superblock's first plane, of its first two, ..; of others one:
                 they lie here or there as a whole
    of_processor -- in the same unit what the processor's kernels hold of a superblock where so many of its planes, from
                    none to all, lie on the card
    fixed     -- of all blocks, what lies on the card wherever matrices do; attention, gates and records are then of
                 matrices alone
    """

    embedding: int
    output: int
    attention: tuple[int, ...]
    gates: tuple[int, ...]
    record: int
    neurons: int
    cache: int
    work: Work
    spare: int = SPARE
    least_work: Work | None = None
    copies: tuple[int, ...] = ()
    gate: int = 0
    together: bool = False
    levels: tuple[int, ...] = (1,)
    of_processor: tuple[int, ...] = (1, 0)
    fixed: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.gates)

    @property
    def all_neurons(self) -> int:
        """The number of neurons of all blocks."""
        return self.blocks * self.neurons

    @property
    def records(self) -> int:
        """Bytes of the records of all blocks."""
        return self.all_neurons * self.record

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.embedding + self.output + sum(self.attention) + sum(self.gates) + self.records + self.fixed

    @property
    def least(self) -> int:
        """The least budget: all weights in the host's memory."""
        return self.cache + (self.least_work or self.work).bytes + self.fixed

    def first_planes(self, size: int, planes: int) -> int:
        """Bytes of so many planes, the first ones, of matrices of a size."""
        return size * self.levels[planes - 1] // self.levels[-1] if planes else 0

    def work_within(self, budget: int) -> Work:
        """The buffers within a budget, which grow with it: what every token reads comes before room for prompts."""
        least, most = self.least_work or self.work, self.work
        beyond = most.bytes - least.bytes
        extra = min(beyond, max(0, int((budget - self.least) * _WORK_OF_A_BUDGET)))
        if extra == beyond:
            return most

        def between(name: str) -> int:
            first, last = int(getattr(least, name)), int(getattr(most, name))
            return first + (last - first) * extra // beyond

        positions = between("positions")
        found = Work(
            positions=positions,
            scratch=between("scratch"),
            staged=between("staged") // self.record * self.record,
            steps=most.steps,
            prefill=positions * (most.prefill // most.positions),
        )
        return replace(found, unused=least.bytes + extra - found.bytes)


@dataclass(frozen=True)
class Plan:
    """What lies where.

    slots            -- how many neurons may be resident, of all blocks together; where records of a block lie
                        together those of the first blocks
    attention, gates -- of the first so many blocks they lie on the card, of the others in the host's memory
    copied           -- of so many blocks after those copies of the gates lie on the card, too
    planes           -- so many planes of every matrix lie on the card, and of what `attention`, `gates` and `slots`
                        count one more; matrices without planes are one
    embedding, output -- whether they lie on the card; an embedding that is the output counts as that alone
    budget           -- in bytes; None: there is none
    """

    parts: Parts
    slots: int
    attention: int
    gates: int
    embedding: bool = True
    output: bool = True
    budget: int | None = None
    copied: int = 0
    planes: int = 0

    @property
    def whole(self) -> bool:
        """Whether every neuron has a slot: then the host keeps no records."""
        return self.slots == self.parts.all_neurons and self.planes + 1 == len(self.parts.levels)

    @property
    def matrices(self) -> Mapping[str, tuple[tuple[int, ...], int]]:
        """Of each kind of matrix the bytes in each block, and of how many blocks one plane more lies on the card."""
        parts = self.parts
        records = (parts.neurons * parts.record,) * parts.blocks
        return {
            "attention": (parts.attention, self.attention),
            "gates": (parts.gates, self.gates),
            "records": (records, self.downs),
        }

    def on_card(self, kind: str, block: int) -> int:
        """How many planes of a kind of matrix of a block lie on the card."""
        return self.planes + (block < self.matrices[kind][1])

    def card_share(self, kind: str, block: int) -> float:
        """The share of a kind of matrix of a block that lies on the card."""
        levels = self.parts.levels
        planes = self.on_card(kind, block)
        return levels[planes - 1] / levels[-1] if planes else 0.0

    def card_bytes_of(self, kind: str) -> int:
        """Bytes of a kind of matrix on the card."""
        sizes, _ = self.matrices[kind]
        return sum(self.parts.first_planes(size, self.on_card(kind, block)) for block, size in enumerate(sizes))

    def _of_processor(self, kind: str) -> int:
        parts, (sizes, _) = self.parts, self.matrices[kind]
        return sum(
            size * parts.of_processor[self.on_card(kind, block)] // parts.levels[-1] for block, size in enumerate(sizes)
        )

    def read_on_card(self, kind: str, kept: float) -> float:
        """Bytes of matrices of planes that a token reads on the card, at most.

        kept -- the share of their bytes that it reads
        """
        parts, (sizes, _) = self.parts, self.matrices[kind]
        held = (parts.first_planes(size, self.on_card(kind, block)) for block, size in enumerate(sizes))
        return sum(min(kept * size, here) for size, here in zip(sizes, held, strict=True))

    def hit_rate(self, kept: float) -> float:
        """The share of the records that a token reads, by their bytes, that lies on the card, at most, where records
        of a block lie together."""
        if len(self.parts.levels) == 1:
            return self.share
        return self.read_on_card("records", kept) / max(kept * self.parts.records, 1.0)

    @property
    def work(self) -> Work:
        """The buffers."""
        return self.parts.work if self.budget is None else self.parts.work_within(self.budget)

    @property
    def share(self) -> float:
        """The share of all neurons that may be resident, or of the bytes of records that lie together on the card."""
        if self.parts.together:
            return self.card_bytes_of("records") / self.parts.records
        return self.slots / self.parts.all_neurons

    @property
    def slot(self) -> int:
        """Bytes of a slot: a record, and where gates are copied a gate."""
        return self.parts.record + (self.parts.gate if self.copied else 0)

    @property
    def spare(self) -> int:
        """Slots beside those of resident neurons."""
        if self.whole or not self.slots or self.parts.together:
            return 0
        return spare_of(self.slots, self.parts.spare)

    @property
    def downs(self) -> int:
        """So many first blocks have their records on the card, where the records of a block lie together."""
        return self.slots // self.parts.neurons

    @property
    def offloaded_records(self) -> int:
        """Bytes of the records that the host's memory holds: of all neurons, where not every neuron has a slot, since
        slots are copies; of the others alone, where records lie together."""
        parts = self.parts
        if parts.together:
            return parts.records - self.card_bytes_of("records")
        return 0 if self.whole else parts.records

    @property
    def card(self) -> Mapping[str, int]:
        """Bytes in the GPU's memory, by what they are."""
        parts, work = self.parts, self.work
        return {
            "embedding": self.embedding * parts.embedding,
            "output": self.output * parts.output,
            "attention": self.card_bytes_of("attention"),
            "gates": self.card_bytes_of("gates"),
            **({"norms and thresholds": parts.fixed} if parts.fixed else {}),
            **({"copies of gates": sum(parts.copies[self.gates :][: self.copied])} if parts.copies else {}),
            "records": self.card_bytes_of("records") if parts.together else (self.slots + self.spare) * self.slot,
            "keys and values": parts.cache,
            "buffers": work.bytes - 2 * work.staged,
            "staging": 2 * work.staged,
        }

    @property
    def host(self) -> Mapping[str, int]:
        """Bytes in the host's memory, by what they are; all are pinned but what is the processor's: of the
        matrices at most so many."""
        parts = self.parts
        return {
            "embedding": (not self.embedding) * parts.embedding,
            "output": (not self.output) * parts.output,
            "attention": sum(parts.attention) - self.card_bytes_of("attention"),
            "gates": sum(parts.gates) - self.card_bytes_of("gates"),
            "records": self.offloaded_records,
            "records for the processor": self._of_processor("records") if parts.together else self.offloaded_records,
            "matrices for the processor": self._of_processor("attention") + self._of_processor("gates"),
        }

    @property
    def offloaded_products(self) -> int:
        """How many matrices of blocks that every token reads lie in the host's memory: two of attention, and a gate."""
        if len(self.parts.levels) > 1:
            return 0 if self.whole else 3 * self.parts.blocks
        return 2 * (self.parts.blocks - self.attention) + self.parts.blocks - self.gates - self.copied

    @property
    def card_bytes(self) -> int:
        """All that is to lie in the GPU's memory."""
        return sum(self.card.values())

    @property
    def host_bytes(self) -> int:
        """All that is to lie in the host's memory."""
        return sum(self.host.values())

    def always_read(self, kept: float = 1.0) -> tuple[float, float]:
        """Bytes that a token reads beside records: from the GPU's memory, with a full cache, and over the bus.

        kept -- the share of the columns of attention and gates that a token reads
        """
        card, host, copies = self.card, self.host, self.card.get("copies of gates", 0)
        if len(self.parts.levels) > 1:
            here = self.read_on_card("attention", kept) + self.read_on_card("gates", kept)
            there = kept * (sum(self.parts.attention) + sum(self.parts.gates)) - here
            return here + card["output"] + card["keys and values"], there + host["output"]
        bus = kept * (host["attention"] + sum(self.parts.gates[self.gates + self.copied :])) + host["output"]
        return kept * (card["attention"] + card["gates"]) + card["output"] + copies + card["keys and values"], bus


def plan_within(parts: Parts, budget: int) -> Plan:
    """What lies where within so many bytes of the GPU's memory.

    Raises `PlacementError` where they do not hold what must be there, with the least that does.
    """
    if budget < parts.least:
        buffers = parts.least - parts.cache - parts.fixed
        fixed = f", norms and thresholds {format_bytes(parts.fixed)}" if parts.fixed else ""
        raise PlacementError(
            f"--vram {format_bytes(budget)}: keys and values take {format_bytes(parts.cache)} of it and buffers "
            f"{format_bytes(buffers)}{fixed}; give at least {format_bytes(parts.least)}, or a smaller --context"
        )
    left = budget - parts.cache - parts.fixed - parts.work_within(budget).bytes
    output = left >= parts.output
    left -= output * parts.output
    if not output:
        return Plan(parts, 0, 0, 0, False, output, budget)
    if parts.copies and left < sum(parts.attention) + sum(parts.gates):
        copied, left = _first_ones(parts.copies, left)
        attention, left = _first_ones(parts.attention, left) if copied == parts.blocks else (0, left)
        slots = _slots(parts, left, parts.record + parts.gate) if attention == parts.blocks else 0
        return Plan(parts, slots, attention, 0, False, output, budget, copied)
    if len(parts.levels) > 1:
        return _planes_within(parts, budget, left)
    attention, left = _first_ones(parts.attention, left)
    gates, left = _first_ones(parts.gates, left) if attention == parts.blocks else (0, left)
    slots = _slots(parts, left, parts.record) if gates == parts.blocks else 0
    embedding = slots == parts.all_neurons and left - parts.records >= parts.embedding
    return Plan(parts, slots, attention, gates, embedding, output, budget)


def _planes_within(parts: Parts, budget: int, left: int) -> Plan:
    """The same of a model of planes, of whose budget so many bytes are left for matrices."""
    kinds = parts.attention, parts.gates, (parts.neurons * parts.record,) * parts.blocks
    for planes in range(len(parts.levels)):
        counts = [0, 0, 0]
        for kind, sizes in enumerate(kinds):
            more = [parts.first_planes(size, planes + 1) - parts.first_planes(size, planes) for size in sizes]
            counts[kind], left = _first_ones(tuple(more), left)
            if counts[kind] < parts.blocks:
                break
        if counts[2] < parts.blocks:
            break
    attention, gates, downs = counts
    plan = Plan(parts, downs * parts.neurons, attention, gates, False, True, budget, planes=planes)
    return replace(plan, embedding=plan.whole and left >= parts.embedding)


def plan_of_share(parts: Parts, share: float) -> Plan:
    """What lies where when a share of the neurons has slots, and all else lies on the card."""
    return Plan(parts, round(share * parts.all_neurons), parts.blocks, parts.blocks)


def _first_ones(sizes: tuple[int, ...], left: int) -> tuple[int, int]:
    """How many of the first ones fit into so many bytes, and how many bytes these leave."""
    count = 0
    while count < len(sizes) and sizes[count] <= left:
        left -= sizes[count]
        count += 1
    return count, left


def _slots(parts: Parts, left: int, slot: int) -> int:
    """How many neurons have slots of so many bytes each."""
    if left >= parts.all_neurons * slot:
        return parts.all_neurons
    if parts.together:
        return left // (parts.neurons * slot) * parts.neurons
    both = left // slot
    slots = max(0, min(both - parts.spare, both * _ONE_SPARE_IN // (_ONE_SPARE_IN + 1)))
    while slots + 1 + spare_of(slots + 1, parts.spare) <= both:
        slots += 1
    return min(slots, parts.all_neurons - 1)
