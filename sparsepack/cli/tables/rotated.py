"""What `rotate` did, as text for people."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsepack.models.records.rotated import Rotated


def rotated_text(made: "Rotated", output: Path) -> str:
    """What was rotated, how far its logits are from the model's, and what it costs."""
    from sparsepack.models.records.rotated import basis_in_words

    into = basis_in_words(made.options["basis"], made.boundaries)
    lines = [
        f"{output}: {made.model} in {into}; over {made.tokens:,} tokens its logits differ by {made.error:.1e} of their "
        "size",
        *(f"note: {note}" for note in made.notes),
    ]
    return "\n".join(lines)
