"""What `distil` did, as text for people."""

from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.models.records.distilled import trained_in_words
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.records.distilled import Distilled, Figures


def distilled_text(made: "Distilled", output: Path) -> str:
    """What was trained, and how far the result is from the model, before and after."""
    sparsity = made.options["sparsity"]
    trained = trained_in_words(made.options["rank"], made.teacher is not None)
    largest = max(made.changes, key=lambda name: made.changes[name])
    return markdown(
        f"{output}: {trained} of {len(made.changes)} matrices of {made.model}, trained"
        f"{f' for {100 * sparsity:.3g} % skipped' if sparsity else ''}, stored in {made.weights}",
        _table(made, ", uniform thresholds", ", those trained along") if sparsity else _table(made),
        f"over {made.tokens:,} tokens of the calibration; matrices changed by {100 * made.changes[largest]:.2g} % of "
        f"their size at most ({largest})",
    )


def _table(made: "Distilled", first: str = "", last: str = "") -> Table:
    """How far both are from the teacher."""
    rows = [_row(f"before{first}", made.before), _row(f"after{last}", made.after)]
    return Table([f"KL divergence from {made.teacher or made.model}", "decoded", "dense, prompts", "skipped"], rows)


def _row(when: str, figures: "Figures") -> list[str]:
    return [when, f"{figures.sparse:.4f}", f"{figures.prompt:.4f}", f"{100 * figures.skipped:.1f} %"]
