"""Whether a rotated model is the model: both are run over some tokens, and their logits compared."""

import math

import torch
from torch import Tensor

from sparsepack.errors import RotationError
from sparsepack.models.precision import brought, type_name
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.tokenizer.windows import spread_windows

WINDOWS, TOKENS = 4, 128
"""So many windows of the calibration are run, and so many tokens of each."""

BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}
"""The largest relative error of the logits, by the type in which the rotated weights are stored: computing in float32
leaves about 1e-6, and rounding weights to 16 bits what it does to any model. A wrong rotation leaves more than 1."""

_WORDS = 8192
"""The logits of this many tokens of the vocabulary exist at one time."""


def checked_tokens(windows: Tensor) -> Tensor:
    """What is run, of a calibration's windows [N, S]: int64 [windows, tokens]."""
    return spread_windows(windows, WINDOWS)[:, :TOKENS]


def relative_error(model: BlockStream, rotated: BlockStream, hidden: Tensor, turned: Tensor) -> float:
    """The difference of two models' logits over those of the first, in the Frobenius norm.

    hidden, turned -- what leaves the last block of each, [N, S, H]; the streams have run that block
    """
    outputs = [stream.finish(states) for stream, states in ((model, hidden), (rotated, turned))]
    heads = [torch.split(stream.head(), _WORDS) for stream in (model, rotated)]
    difference = norm = 0.0
    for words in zip(*heads, strict=True):
        logits, others = (
            states @ brought(rows, states.device, states.dtype).t() for states, rows in zip(outputs, words, strict=True)
        )
        difference += float((logits - others).square().sum(dtype=torch.float64))
        norm += float(logits.square().sum(dtype=torch.float64))
    return math.sqrt(difference / norm) if norm else math.inf if difference else 0.0


def check_error(error: float, weights: torch.dtype, name: str) -> None:
    """Raise `RotationError` where logits differ by more than the type of the weights explains."""
    bound = BOUNDS[weights]
    if not error <= bound:
        raise RotationError(
            f"{name}: rotated, its logits differ by {error:.2g} of their size, {type_name(weights)} explains at most "
            f"{bound:g}; nothing was written: please report this model"
        )
