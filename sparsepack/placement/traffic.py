"""How often needed neurons had slots, where neurons were computed, and how many bytes a token read from each memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparsepack.placement.budget import Plan
from sparsepack.placement.machine import BandwidthProfile, Listed, measured_rates, seconds_per_token

_IN_RESULTS = ("tokens", "needed", "hits", "moves")


@dataclass(frozen=True)
class HitCounts:
    """What happened to decoded tokens.

    tokens -- decoded
    needed -- neurons that these tokens needed; hits: of these, those that were resident when they were needed
    moves  -- units that became resident meanwhile; unused: of these, those that left before they were needed
    """

    tokens: int = 0
    needed: int = 0
    hits: int = 0
    moves: int = 0
    unused: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of what was needed that was resident."""
        return self.hits / max(self.needed, 1)

    def __add__(self, other: "HitCounts") -> "HitCounts":
        """The counts of both texts together."""
        return HitCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def in_words(self) -> str:
        """The hit rate and the moves in a few words."""
        moves = self.moves / max(self.tokens, 1)
        return f"hit rate {100 * self.hit_rate:.1f} % of the active neurons, {moves:.1f} moved per token"

    def to_json(self) -> dict[str, Any]:
        """The counts for results, and the hit rate."""
        counts = asdict(self)
        return {**{name: counts[name] for name in _IN_RESULTS}, "hit_rate": self.hit_rate}


def describe_hits(found: Mapping[str, Any]) -> str:
    """What `to_json` gave, in the words of `HitCounts.in_words`."""
    return HitCounts(**{name: found[name] for name in _IN_RESULTS}).in_words


@dataclass(frozen=True)
class Traffic:
    """What happened in decoding steps.

    resident, bus, worker -- neurons that were computed out of slots, by the device out of host memory, by the worker;
                             of a model of planes bytes
    handed                -- how often a block's neurons were handed over to the worker
    waited                -- seconds that the device waited for the worker's answers
    managed               -- seconds that passed between tokens to learn who gets slots, and to give them
    """

    resident: int = 0
    bus: int = 0
    worker: int = 0
    handed: int = 0
    waited: float = 0.0
    managed: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        """The traffic of both together."""
        return Traffic(
            self.resident + other.resident,
            self.bus + other.bus,
            self.worker + other.worker,
            self.handed + other.handed,
            self.waited + other.waited,
            self.managed + other.managed,
        )


@dataclass(frozen=True)
class TrafficStats:
    """How a decoder divides neurons.

    traffic -- since the reset
    hits    -- of the same steps
    plan    -- what lies where
    bandwidth   -- as they were measured on this machine; None: nobody has
    cpu_bytes  -- bytes of matrices that every token reads which the worker reads in place of the device
    kept    -- share of the columns of attention and gates that a token reads
    times   -- where the plan has copies of gates, how many times as many neurons as are active these list; traffic and
               hits are of listed neurons there
    """

    traffic: Traffic
    hits: HitCounts
    plan: Plan
    bandwidth: BandwidthProfile | None
    cpu_bytes: int = 0
    kept: float = 1.0
    times: float = 1.0

    @property
    def listed_share(self) -> float:
        """The share of the counted neurons that copies of gates have listed, if their blocks are as dense as others."""
        copied = self.plan.copied * self.times
        return copied / (copied + self.plan.parts.blocks - self.plan.copied)

    @property
    def neuron(self) -> float:
        """Bytes that are read of a neuron that is counted: its record, or if it was listed its gate, and its record
        where it is active."""
        parts, listed = self.plan.parts, self.listed_share
        return listed * (parts.gate + parts.record / self.times) + (1 - listed) * parts.record


def per_token(stats: TrafficStats, seconds: float) -> dict[str, Any]:
    """What a decoded token took, JSON-able, all of it means over the decoded tokens.

    seconds -- that a token took

    unit         -- what is counted: "neurons", or where records lie together "columns" of down matrices, or of a
                    model of planes "bytes"
    hits, needed -- those with slots, or on the card, and all; listed: whether these are those that copies of gates list
    bytes        -- read from the card's memory, of the full cache too; over the bus; by the worker; copied into slots
    handed       -- blocks; waited_us: microseconds that the device waited; managed_us: that slots took between tokens
    model        -- by the measured bandwidth profile, the seconds that the model of time gives each part and
                    `together`; `slowest`, the part that takes longest; `share`, what it gives over what a token took.
                    None: nobody measured
    """
    traffic, hits, plan, kept = stats.traffic, stats.hits, stats.plan, stats.kept
    tokens, record, neuron = max(hits.tokens, 1), plan.parts.record, stats.neuron
    card, bus = plan.always_read(kept)
    planes = len(plan.parts.levels) > 1
    if planes:
        card, bus, neuron = plan.card["output"] + plan.card["keys and values"], plan.host["output"], 1
    cpu_bytes = kept * stats.cpu_bytes
    found: dict[str, Any] = {
        "unit": "bytes" if planes else "columns" if plan.parts.together else "neurons",
        "hits": hits.hits / tokens,
        "needed": hits.needed / tokens,
        "listed": plan.copied > 0,
        "bytes": {
            "card": card + traffic.resident * neuron / tokens,
            "bus": bus - cpu_bytes + traffic.bus * neuron / tokens,
            "worker": cpu_bytes + traffic.worker * neuron / tokens,
            "moved": hits.moves * plan.slot / tokens,
        },
        "handed": traffic.handed / tokens,
        "waited_us": 1e6 * traffic.waited / tokens,
        "managed_us": 1e6 * traffic.managed / tokens,
        "model": None,
    }
    if stats.bandwidth is not None:
        rates = measured_rates(stats.bandwidth, record)
        everyone = plan.parts.all_neurons
        counted, moved, share = hits.needed / tokens / everyone, hits.moves / tokens / everyone, stats.listed_share
        density, listed = counted * (1 - share + share / stats.times), None
        if planes:
            density, hit_rate = kept, plan.hit_rate(kept)
        else:
            hit_rate = hits.hit_rate
        if plan.copied:
            listed = Listed(counted * share * plan.parts.blocks / plan.copied, hits.hit_rate)
        model = seconds_per_token(rates, plan, density, hit_rate, moved, over_the_bus=True, listed=listed, kept=kept)
        slowest = max(model.parts, key=lambda name: model.parts[name])
        found["model"] = {
            **model.parts,
            "together": model.together,
            "slowest": slowest,
            "share": model.together / seconds,
        }
    return found


def describe_per_token(found: Mapping[str, Any]) -> str:
    """What `per_token` gave, in a few words."""
    read = ", ".join(f"{found['bytes'][name] / 1e6:.2f} MB {said}" for name, said in _PATHS.items())
    counted, hits = "listed" if found["listed"] else "active", f"{found['hits']:.1f} of {found['needed']:.1f}"
    if found["unit"] == "bytes":
        text = f"a token: {read}"
    elif found["unit"] == "columns":
        text = f"a token: {hits} active columns of down matrices lay in the device's memory; {read}"
    else:
        text = (
            f"a token: {hits} {counted} neurons had slots; {read}; {found['handed']:.1f} blocks handed over, "
            f"{found['managed_us']:.0f} us between tokens for slots"
        )
    text += f", {found['waited_us']:.0f} us waited"
    if (model := found["model"]) is None:
        return f"{text}; no links measured, so the model of time says nothing"
    return (
        f"{text}; the model of time with measured links gives {1e6 * model['together']:.0f} us, most of it "
        f"{_PARTS[model['slowest']]}, and {100 * model['share']:.0f} % of its speed is reached"
    )


_PATHS = {
    "card": "from the device's memory",
    "bus": "from the host's by the device",
    "worker": "from the host's by the worker",
    "moved": "into slots",
}
_PARTS = {
    "card": "reading the device's memory",
    "far": "reading in host memory what every token reads",
    "slots": "reading slots",
    "host": "reading host memory",
    "handover": "handing over",
}
