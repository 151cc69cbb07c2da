"""What a calibration knows of experts: how many tokens each was given."""

import torch

from sparsepack.calibration.folder import Calibration
from sparsepack.errors import CalibrationError

FEW = 32
"""An expert that was given fewer tokens than this is named: what is known of its inputs is of other experts."""


def has_experts(calibration: Calibration) -> bool:
    """Whether it is of a model whose MLPs have experts."""
    return "experts.given" in calibration.layers[0]


def given(calibration: Calibration) -> torch.Tensor:
    """How many tokens each expert of each block was given: int64 [layers, experts]. Raises `CalibrationError` for
    counts that contradict each other."""
    rows: list[torch.Tensor] = []
    model = calibration.manifest["model"]["name"]
    for layer, statistics in enumerate(calibration.layers):
        each, tokens = statistics["experts.given"], statistics["experts.routed_tokens"]
        fits = len(tokens) == 1 and int(tokens) > 0 and bool(((each >= 0) & (each <= tokens)).all())
        if not fits or int(each.sum()) % int(tokens) or (rows and len(rows[0]) != len(each)):
            raise CalibrationError(
                f"the calibration of {model}: experts.given of block {layer} is no count of the tokens; calibrate again"
            )
        rows.append(each)
    return torch.stack(rows)


def told_of_starved(calibration: Calibration) -> str | None:
    """A sentence for people about experts that were given fewer than `FEW` tokens; None where there are none.

    Nothing is refused for it: thresholds are those of a block, pooled over its experts.
    """
    if not has_experts(calibration):
        return None
    counts = given(calibration)
    few = (counts < FEW).nonzero().tolist()
    if not few:
        return None
    none = int((counts == 0).sum())
    layer, expert = min(few, key=lambda at: int(counts[at[0], at[1]]))
    return (
        f"{len(few)} of {counts.numel()} experts were given fewer than {FEW} tokens, {none} of them none (the fewest: "
        f"expert {expert} of block {layer}, {int(counts[layer, expert])}); thresholds are pooled over a block's "
        "experts and stay those of the others: calibrate on more text, or on text of other kinds, to reach them"
    )
