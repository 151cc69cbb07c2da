"""The options of `place` and the names of policies. Nothing heavy is imported here: the command line reads them."""

from dataclasses import dataclass

from sparsepack.errors import PlacementError
from sparsepack.option import check_options, not_with, option
from sparsepack.placement.budget import parse_bytes

POLICIES = (
    "static",
    "static-same-share",
    "static-after-prompt",
    "slow",
    "lru",
    "lfu",
    "momentum",
    "momentum-threshold",
    "momentum-letter",
    "oracle-static",
    "belady-within-blocks",
    "belady",
)
"""The names of `placement.policies`, in the order in which they are shown."""
EXTRA = ("momentum-threshold", "momentum-letter", "belady-within-blocks")
"""These policies are played only where they are asked for."""
SINGLE = ("belady-within-blocks", "belady")
"""These policies are the best for single neurons, and nothing special for groups."""
DRAWN = ("static", "slow", "momentum", "belady", "oracle-static")
"""A picture of all policies shows the first four of these that were played: how to start, two ways to move, a bound."""
ONLINE = ("static", "static-same-share", "slow", "lru", "lfu", "momentum", "momentum-threshold", "momentum-letter")
"""An engine can follow these policies: they know neither what is to come nor how long the prompt is."""


DEFAULT_MACHINE = "pcie5"
MOST_LISTED = 16
"""Copies of gates that list more times as many neurons as are active would list most of them."""


@dataclass(frozen=True)
class PlaceOptions:
    """The budget, and what is asked about it. Raises `PlacementError` for values that make no sense."""

    vram: str = option(
        "What the model, keys and values and buffers may take of the GPU's memory, 8GB for one. The driver's own 0.6GB "
        "come on top."
    )
    context: int | None = option(
        "Room for so many tokens (default: what the model was made for, at most 4096, halved until keys and values "
        "take at most a quarter of the budget).",
        default=None,
        least=2,
    )
    gate_copy: float | None = option(
        "Where gates do not all fit, reckon with copies of them in 2 bits on the card, which list this many times as "
        "many neurons as are active; the exact gates of those alone are read. 1.5 loses little, 2 less. For files "
        "packed with --gates rows (default: gates are read whole).",
        default=None,
        least=1,
        most=MOST_LISTED,
    )
    device: str = option(
        "On cuda, reckon with the speeds that `sparsepack tune FILE --device cuda` has measured on this machine.",
        default="cpu",
        counts=(not_with("machine"),),
    )
    machine: str | None = option(
        "The machine whose speed is modelled: pcie3, pcie4, pcie5 or server, or what a .json file describes (default: "
        f"{DEFAULT_MACHINE}).",
        default=None,
    )

    def __post_init__(self) -> None:
        check_options(self, PlacementError)
        _ = self.budget

    @property
    def budget(self) -> int:
        """What `vram` says, in bytes."""
        return parse_bytes(self.vram)
