"""`prune --dry-run`: what pruning a model by some workers would take."""

from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibration.folder import load as load_calibration
from sparsepack.errors import PruningError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.stock.forecast import Forecast, forecast_blocks
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.pruning.options import PruneOptions
from sparsepack.pruning.run import block_stream, prune_loaded, site_patterns
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.workers import Workers


@torch.inference_mode()
def forecast(
    model: Checkpoint | str | Path, options: PruneOptions, calibration: Path | None, workers: int = 1
) -> Forecast:
    """What `prune` would take with so many workers like this process; nothing is written.

    Raises as `prune` does, also where a worker would have nothing to do, and `PruningError` of a method that runs no
    text or a choice of sites that leaves the first block as it is.
    """
    options.check()
    options.check_calibration(calibration)
    if calibration is None:
        raise PruningError(f"--dry-run: method {options.method} runs no text, and takes as long as reading does")
    checkpoint = checkpoint_of(model, hashed=False)
    read = load_calibration(calibration)
    read.check_model(checkpoint)
    windows = spread_windows(read.windows, options.windows)
    dealt = Dealt.for_sums(Workers(0, workers), len(windows), options.batch)
    dealt.check("--windows")
    patterns = {site: pattern for (layer, site), pattern in site_patterns(checkpoint, options).items() if layer == 0}
    if not patterns:
        raise PruningError("--dry-run: the first block, which is measured, is not pruned; expected it among the sites")
    stream = block_stream(checkpoint, options)

    def run_block(hidden: Tensor, parts: Dealt) -> None:
        found, _ = prune_loaded(checkpoint, stream, 0, patterns, hidden, options, parts, lambda steps=1: None)
        stream.replace(found)
        stream.pass_on(hidden, parts.size, lambda: None)

    return forecast_blocks(checkpoint, stream, windows, dealt, run_block)
