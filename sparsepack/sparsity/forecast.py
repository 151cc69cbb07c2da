"""`thresholds --dry-run`: what finding the thresholds of a model by some workers would take."""

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from sparsepack.calibration.folder import load as load_calibration
from sparsepack.errors import ThresholdsError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.sites import chosen_sites
from sparsepack.models.stock.forecast import Forecast, forecast_blocks
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.sparsity.allocation import weights_of
from sparsepack.sparsity.allocations import ALLOCATIONS
from sparsepack.sparsity.find import BATCH, block_stream
from sparsepack.sparsity.options import AllocationOptions
from sparsepack.sparsity.sequential import rules_of_block
from sparsepack.workers.dealt import Dealt
from sparsepack.workers.resume import ResumeState
from sparsepack.workers.workers import Workers


@torch.no_grad()
def forecast(
    model: Checkpoint | str | Path, calibration: Path, options: AllocationOptions, workers: int = 1
) -> Forecast:
    """What `thresholds` would take with so many workers like this process; nothing is written.

    Raises as `make_thresholds` does, also where a worker would have nothing to do, and `ThresholdsError` where not each
    block is run by itself: an allocation that trains, thresholds from a calibration's counts, a sparsity of 0.
    """
    options.check()
    if ALLOCATIONS[options.allocation].trains:
        raise ThresholdsError(
            f"--dry-run: allocation {options.allocation} trains the whole model, whose blocks cannot be measured one "
            "by one; start it: it says what is left after its first steps"
        )
    if options.upstream == "dense" or options.sparsity == 0:
        raise ThresholdsError(
            f"--dry-run: upstream {options.upstream} at sparsity {options.sparsity:g} runs no text through the blocks, "
            "and takes as long as reading does"
        )
    checkpoint = checkpoint_of(model, hashed=False)
    read = load_calibration(calibration)
    read.check_model(checkpoint)
    windows = spread_windows(read.windows, options.windows)
    dealt = Dealt(Workers(0, workers), len(windows), BATCH)
    dealt.check("--windows")
    weights = weights_of(checkpoint, chosen_sites(checkpoint, options.include, options.ignore))
    choose = import_module(ALLOCATIONS[options.allocation].module).chooser(
        checkpoint, read, options, weights, ResumeState(None, "")
    )
    stream = block_stream(checkpoint, options)

    def run_block(hidden: Tensor, parts: Dealt) -> None:
        rules_of_block(stream, 0, hidden, choose, parts, lambda steps=1: None)

    return forecast_blocks(checkpoint, stream, windows, dealt, run_block)
