"""The table of allocations: who gives each site its share of the sparsity. Cheap to import."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """A way to share a target among sites.

    name           -- what users and tables call it
    module         -- what implements it, by `chooser(checkpoint, calibration, options, weights, resume) -> Chooser`
    even           -- every site gets the target itself; otherwise they have it on average
    offsets        -- whether it can learn what inactive channels stand at
    dense_upstream -- whether its thresholds can be taken with everything upstream dense
    per_channel    -- whether it has channel weights of its own, whatever the criterion
    trains         -- whether it trains the whole model's thresholds by `steps`, `batch` and `length`; the others stream
                      one block at a time
    """

    name: str
    module: str
    even: bool = False
    offsets: bool = False
    dense_upstream: bool = True
    per_channel: bool = False
    trains: bool = False

    def problems(self, offsets: bool, upstream: str) -> Iterator[tuple[str, str]]:
        """The options that the allocation cannot have, each with what is wrong and what was expected."""
        if offsets and not self.offsets:
            names = " or ".join(row.name for row in ALLOCATIONS.values() if row.offsets)
            yield "offsets", f"they are learnt from the model's output; expected allocation {names}"
        if upstream == "dense" and not self.dense_upstream:
            yield "upstream", f"{self.name} runs the whole sparse model; expected sparse"


ALLOCATIONS = {
    row.name: row
    for row in (
        Allocation("uniform", "sparsepack.sparsity.uniform", even=True),
        Allocation("teal", "sparsepack.sparsity.teal"),
        Allocation(
            "global",
            "sparsepack.sparsity.learned",
            offsets=True,
            dense_upstream=False,
            per_channel=True,
            trains=True,
        ),
    )
}
"""The rows by their names."""
