"""What a simulation is asked for. Nothing heavy is imported here: the command line reads the defaults."""

from dataclasses import dataclass

from sparsepack.errors import PlacementError
from sparsepack.option import check_options, not_with, only_with, option
from sparsepack.placement.budget import parse_bytes
from sparsepack.placement.options import EXTRA, POLICIES, SINGLE

ORDERS = ("frequency", "random")
"""The names of `simulation.groups`."""


@dataclass(frozen=True)
class SimulateOptions:
    """What is played, for how many slots."""

    cached: str = option(
        "Shares of the neurons that have slots, with commas between them.",
        default="0.1,0.2,0.3,0.5,0.7",
        counts=(not_with("vram"),),
    )
    policy: str | None = option(
        f"What moves neurons, with commas between the names: of {', '.join(POLICIES)} (default: all but "
        f"{', '.join(EXTRA)}; with --group, without {' and '.join(SINGLE)}).",
        default=None,
    )
    group: int = option("Neurons of a block that move together.", default=1, least=1, most=255)
    order: str = option(
        "How groups are formed: of neurons that are active equally often, or at random.",
        default="frequency",
        choices=ORDERS,
        counts=(not_with("group", 1),),
    )
    machine: str | None = option(
        "Also model tokens per second, on pcie3, pcie4, pcie5 or server, or on what a .json file describes "
        "(default: no).",
        default=None,
    )
    shape: str | None = option(
        "The model whose speed is modelled: for experts 30b-a3b or 8x7b, else one of the others (default: 70b, for "
        "experts 30b-a3b).",
        default=None,
        choices=("7b", "13b", "70b", "30b-a3b", "8x7b"),
        counts=(only_with("machine"),),
    )
    vram: str | None = option(
        "What the model, its cache and buffers may take of the GPU's memory, 24GB for one, instead of --cached: slots "
        "are what it has beside all else (default: no).",
        default=None,
        counts=(only_with("machine"),),
    )

    def check(self) -> None:
        """Raise `PlacementError` for values that make no sense."""
        check_options(self, PlacementError)

    @property
    def policies(self) -> tuple[str, ...]:
        """What `policy` says, in the order of POLICIES. Raises `PlacementError`."""
        left_out = EXTRA if self.group == 1 else EXTRA + SINGLE
        asked = [name for name in POLICIES if name not in left_out] if self.policy is None else self.policy.split(",")
        for name in asked:
            if name not in POLICIES:
                raise PlacementError(f"--policy {name}: expected one of {', '.join(POLICIES)}")
            if name in SINGLE and self.group != 1:
                raise PlacementError(
                    f"--policy {name}, --group {self.group}: it is the best for single neurons only; leave one out"
                )
        return tuple(name for name in POLICIES if name in asked)

    @property
    def shares(self) -> tuple[float, ...]:
        """What `cached` says. Raises `PlacementError`."""
        try:
            found = tuple(float(part) for part in self.cached.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 <= share <= 1 for share in found):
            raise PlacementError(f"--cached {self.cached}: expected shares from 0 to 1, as in 0.1,0.3,0.5")
        return found

    @property
    def vram_bytes(self) -> int | None:
        """What `vram` says. Raises `PlacementError`."""
        return None if self.vram is None else parse_bytes(self.vram)
