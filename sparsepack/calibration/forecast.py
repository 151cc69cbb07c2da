"""`calibrate --dry-run`: what calibrating a model by some workers would take."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibration.collectors.kernels import recorder_on
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.residual import residual_of
from sparsepack.calibration.run import chosen_windows, computed_in, count_block, settled
from sparsepack.calibration.samples import at_once
from sparsepack.files.text import Text, read_text
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.stock.blocks import BlockStream
from sparsepack.models.stock.forecast import Forecast, forecast_blocks
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.workers import Workers


@torch.inference_mode()
def forecast(
    model: Checkpoint | str | Path, text: Text | str | Sequence[str], options: CalibrateOptions, workers: int = 1
) -> Forecast:
    """What `calibrate` would take with so many workers like this process; nothing is written.

    Raises as `calibrate` does, also where a worker would have nothing to do.
    """
    checkpoint = checkpoint_of(model, hashed=False)
    options = settled(checkpoint, options)
    windows, _ = chosen_windows(checkpoint, text if isinstance(text, Text) else read_text(text), options)
    batch = at_once(options.batch, len(windows), windows.shape[1], options.device)
    dealt = Dealt.for_sums(Workers(0, workers), len(windows), batch)
    dealt.check("--samples")
    stream = BlockStream(checkpoint, options.device, computed_in(checkpoint, options))

    record = recorder_on(stream)

    def run_block(hidden: Tensor, parts: Dealt) -> None:
        count_block(checkpoint, stream, 0, hidden, options, parts, {}, lambda steps=1: None, record)

    width, runs = int(checkpoint.config.hidden_size), (residual_of(checkpoint) or {"runs": 0})["runs"]
    sums = (runs + 1) * 8 * width**2 if runs else 0
    return forecast_blocks(checkpoint, stream, windows, dealt, run_block, sums)
