"""How fast this machine's two workers are: measured once by `sparsepack tune`, then remembered."""

from collections.abc import Iterable
from typing import Any

from sparsepack.placement.links import Links
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cpu.dispatch import instruction_set
from sparsepack.runtime.cpu.machine import cpu_info
from sparsepack.runtime.hybrid.kept_links import kept_links, measure_and_keep
from sparsepack.runtime.hybrid.measure import divided, measure_links


def measured_links(threads: int, hidden: int) -> Links | None:
    """The links as measured on this machine; None where `sparsepack tune` never saw records of this width."""
    return kept_links(depends_on(threads, hidden))


def measure(widths: Iterable[int], threads: int) -> list[dict[str, Any]]:
    """Measure the links for records of each width, once, keep them, and return what was found, JSON-able.

    Raises `UserError` without kernels, and `OutputError` where it cannot be kept, before anything is measured.
    """
    beside = operations.neuron_ffn_beside
    wanted = [depends_on(threads, hidden) for hidden in widths]
    return measure_and_keep(wanted, lambda of: measure_links(operations, beside, of["threads"], of["hidden"]))


def depends_on(threads: int, hidden: int) -> dict[str, Any]:
    """What the links depend on; each has a file of its own. Threads are those that both workers have together."""
    both = sum(divided(threads))
    return {"cpu_info": cpu_info(), "instruction_set": instruction_set(), "threads": both, "hidden": hidden}
