"""The activity of the neurons of a model's MLP, or of its experts, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.tables import Table, markdown


def neurons_table(report: Mapping[str, Any]) -> str:
    """What `inspect` found of neurons, or of experts, in a calibration or a trace (`tracing.activity_report`)."""
    tops = [f"hottest {100 * share:.0f} %" for share in report["shares"]]
    drifts, unit = report["drift"] is not None, report["unit"]
    rows = [[number, *_row(layer, drifts, f"{layer['spread']:.3f}")] for number, layer in enumerate(report["layers"])]
    rows.append(["all", *_row(report, drifts, "")])
    lines = [
        f"{unit}, over {report['tokens']:,} tokens",
        f"  active: share of the {unit} that a token has active; spread: its standard deviation over tokens",
        f"  hottest: share of what is active that is of so many of the most used {unit} of the block, or of all blocks",
    ]
    if drifts:
        lines.append(
            "  own, others: the same for the hottest 30 % of a document by its own counts, and by those of the others; "
            "they are apart where documents differ"
        )
    head = ["block", "active", "spread", *tops, *(["own", "others"] if drifts else [])]
    return markdown(Table(head, rows, "\n".join(lines), [str(report["verdict"])]))


def given_table(found: Mapping[str, Any]) -> str:
    """How many tokens a calibration gave the experts of each block; empty for a model without experts."""
    if found["given"] is None:
        return ""
    rows = [
        [block, f"{each[0]:,}", f"{each[len(each) // 2]:,}", f"{each[-1]:,}"]
        for block, each in enumerate(map(sorted, found["given"]))
    ]
    about = "tokens that an expert was given; all counts are in `given` of --json"
    return markdown(Table(["block", "the fewest", "the middle one", "the most"], rows, about))


def starved_note(found: Mapping[str, Any]) -> str:
    """What a calibration says of experts that were given few tokens; empty where there is nothing to say."""
    return f"note: {found['starved']}" if found.get("starved") else ""


def _row(part: Mapping[str, Any], drifts: bool, spread: str) -> list[str]:
    shares = [*part["hottest"], *(part["drift"].values() if drifts else [])]
    return [f"{part['density']:.3f}", spread, *(f"{share:.2f}" for share in shares)]
