"""The training: weights and thresholds together, at a fixed sparsity, against the model as it was.

The loss of a window is the KL divergence of its sparse second half from the dense model, and a share of that of its
dense first half, whose keys and values the second half reads. Both halves are computed with the weights that are
trained. Thresholds and offsets of channels are trained along and let go at the end, since `pack` learns them on the
distilled model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.distillation.measure import Measured, measure
from sparsepack.distillation.options import DistilOptions
from sparsepack.distillation.updates import Update, first_updates, trained_with
from sparsepack.files.resume import ResumeState
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.families import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.stock.halves import Change
from sparsepack.models.stock.whole import load_model
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import say
from sparsepack.sparsity.allocation import weights_of
from sparsepack.sparsity.divergence import Teacher, divergence
from sparsepack.sparsity.learned import first_channels, sparse_at
from sparsepack.sparsity.training import Training

MEASURED = 8
"""The model is measured on so many windows of the calibration, before and after."""

STATE_BYTES = 12
"""The bytes on disk that keep one number that is trained: itself and what Adam knows of it."""

_WORTH_SAYING = 1 << 30


@dataclass(frozen=True)
class Trained:
    """What a training leaves.

    updates -- of each matrix, by the name of its tensor
    sparse  -- the channels that were skipped at the end
    before  -- the model as it was, with the thresholds that the training began with
    """

    updates: dict[str, Update]
    sparse: Change
    before: Measured


def measured_windows(calibration: Calibration, options: DistilOptions) -> Tensor:
    """The windows on which a model is measured: int64 [N, S]."""
    return spread_windows(calibration.windows, MEASURED)[:, : options.length].to(options.device)


def train(checkpoint: Checkpoint, calibration: Calibration, options: DistilOptions, resume: ResumeState) -> Trained:
    """Train the matrices of a model's blocks. Holds the whole model on one device.

    A run that was killed goes on from `resume`, which keeps the state of the training.
    """
    family, device = checkpoint.family, options.device
    model = load_model(checkpoint, device, arithmetic(options.dtype, checkpoint.dtype, device))
    weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
    channels = first_channels(checkpoint, calibration, options.allocation, model, weights)
    sparse = sparse_at(channels, weights)
    before = measure(model, family, measured_windows(calibration, options), sparse)
    updates = first_updates(checkpoint, options.rank, options.seed, device)
    trained = [tensor for update in updates.values() for tensor in update.trained]
    _say_size(trained, resume)
    # One matrix at a time in each step: together, a GPU would hold several copies of all.
    groups = [*channels.groups(), {"params": trained, "lr": options.learning_rate, "foreach": False}]
    with trained_with(model, updates) as as_it_was:
        teacher = Teacher(as_it_was, options.prompt)

        def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
            return divergence(model, family, ids, sparse, teacher)

        Training(groups, options, resume).run("distilling", calibration.windows, loss)
    return Trained(updates, sparse, before)


def _say_size(trained: list[Tensor], resume: ResumeState) -> None:
    """Say how much the state takes on the disk, where that is much: the one before stays until the next is there."""
    most = 2 * STATE_BYTES * sum(tensor.numel() for tensor in trained)
    if most >= _WORTH_SAYING and resume.path is not None:
        say(f"distilling: what goes on after a kill takes up to {most / 1e9:.0f} GB in {resume.path} until it ends")


@torch.no_grad()
def measured_after(made: Checkpoint, calibration: Calibration, options: DistilOptions, trained: Trained) -> Measured:
    """Measure the distilled model, as it will be stored, beside the model as it was."""
    model = load_model(made, options.device, arithmetic(options.dtype, made.dtype, options.device))
    windows = measured_windows(calibration, options)
    return measure(model, made.family, windows, trained.sparse, trained.before.dense)
