"""What `distil` did, as text for people."""

from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.records.distilled import Distilled, Figures


def distilled_text(made: "Distilled", output: Path) -> str:
    """What was trained, and how far the result is from the model, before and after."""
    rank = made.options["rank"]
    largest = max(made.changes, key=lambda name: made.changes[name])
    return markdown(
        f"{output}: {'all weights' if rank is None else f'updates of rank {rank}'} of {len(made.changes)} matrices of "
        f"{made.model}, trained for {100 * made.options['sparsity']:.3g} % skipped, stored in {made.weights}",
        Table(
            ["KL divergence", "sparse, decoded", "dense, prompts", "skipped"],
            [_row("before, uniform thresholds", made.before), _row("after, those trained along", made.after)],
        ),
        f"over {made.tokens:,} tokens of the calibration; matrices changed by {100 * made.changes[largest]:.2g} % of "
        f"their size at most ({largest})",
    )


def _row(when: str, figures: "Figures") -> list[str]:
    return [when, f"{figures.sparse:.4f}", f"{figures.prompt:.4f}", f"{100 * figures.skipped:.1f} %"]
