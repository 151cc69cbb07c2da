"""The gates of a run as a table, for its report and its page."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsepack.tables import Styled, Table


def readable(value: float) -> str:
    """A measured value or a limit as text: sizes in full, all else to six digits."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"


def gates_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """Verdicts as a report has them."""
    rows = [
        [
            verdict["gate"],
            "not measured" if verdict["measured"] is None else readable(verdict["measured"]),
            verdict["limit"],
            verdict["where"],
            Styled("pass", "good") if verdict["passed"] else Styled("FAIL", "bad"),
        ]
        for verdict in verdicts
    ]
    return Table(["gate", "measured", "limit", "on", "verdict"], rows)
