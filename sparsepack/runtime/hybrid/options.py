"""What a hybrid engine is asked for. Nothing heavy is imported here: the command line reads the defaults."""

from dataclasses import dataclass

from sparsepack.errors import UserError
from sparsepack.option import check_options, option
from sparsepack.placement.names import ONLINE

DEFAULT_POLICY = "slow"


@dataclass(frozen=True)
class PlacesOptions:
    """Who has places. Raises `UserError` for values that make no sense."""

    cached: float | None = option(
        "Give this share of the neurons places, and compute the others by a second worker, as with a GPU that has no "
        "room for all: says how often a neuron had a place. So far both are on the CPU, which is slower than without. "
        "For files of the format neuron-q4_k (default: no such division).",
        default=None,
        least=0,
        most=1,
    )
    policy: str | None = option(
        f"What moves neurons between places, with --cached: as simulate takes it (default: {DEFAULT_POLICY}).",
        default=None,
        choices=ONLINE,
    )

    def __post_init__(self) -> None:
        check_options(self, UserError)
        if self.cached is None and self.policy is not None:
            raise UserError(f"policy {self.policy}: nothing has places; give cached too, 0.3 for one")

    @property
    def asked(self) -> bool:
        """Whether any neuron has a place of its own."""
        return self.cached is not None

    @property
    def mover(self) -> str:
        """The policy that is meant."""
        return self.policy or DEFAULT_POLICY
