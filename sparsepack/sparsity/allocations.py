"""The table of allocations: who gives each site its share of the sparsity. Cheap to import."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """A way to share a target among sites.

    name           -- what users and tables call it
    module         -- what implements it, by `chooser(checkpoint, calibration, options, weights, resume) -> Chooser`
    even           -- every site gets the target itself; otherwise they have it on average
    dense_upstream -- whether its thresholds can be taken with everything upstream dense
    per_channel    -- whether it has channel weights of its own, whatever the criterion
    with_experts   -- whether it does without them where a block's MLP has experts, which share their thresholds
    trains         -- whether it trains the whole model's thresholds by `steps`, `batch` and `length`, and can learn
                      what inactive channels stand at; the others stream one block at a time
    """

    name: str
    module: str
    even: bool = False
    dense_upstream: bool = True
    per_channel: bool = False
    with_experts: bool = False
    trains: bool = False

    def problems(self, upstream: str, windows: bool) -> Iterator[tuple[str, str]]:
        """The options that the allocation cannot have, each with what is wrong and what was expected.

        windows -- whether somebody said how many to run
        """
        if windows and self.even and upstream == "dense":
            yield (
                "windows",
                f"{self.name} takes dense thresholds from the calibration's counts, and runs none; leave it",
            )
        if upstream == "dense" and not self.dense_upstream:
            yield "upstream", f"{self.name} runs the whole sparse model; expected sparse"


ALLOCATIONS = {
    row.name: row
    for row in (
        Allocation("fisher", "sparsepack.sparsity.fisher", dense_upstream=False, per_channel=True, with_experts=True),
        Allocation("uniform", "sparsepack.sparsity.uniform", even=True),
        Allocation("teal", "sparsepack.sparsity.teal"),
        Allocation(
            "global",
            "sparsepack.sparsity.learned",
            dense_upstream=False,
            per_channel=True,
            trains=True,
        ),
    )
}
"""The rows by their names."""
