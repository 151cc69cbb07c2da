"""The training: weights and thresholds together, at a fixed sparsity, against the teacher: the model as it was, or that
from before it was pruned.

The loss of a window is the KL divergence of its sparse second half from the dense teacher, and a share of that of its
dense first half, whose keys and values the second half reads. Both halves are computed with the weights that are
trained. Thresholds and offsets of channels are trained along and let go at the end, since `pack` learns them on the
distilled model. Where nothing is skipped, the loss is the divergence of the whole window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsepack.calibration.folder import Calibration
from sparsepack.distillation.measure import dense_states, measure
from sparsepack.distillation.options import DistilOptions
from sparsepack.distillation.updates import Update, first_updates, trained_with
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.precision import arithmetic
from sparsepack.models.records.distilled import Figures
from sparsepack.models.records.pruned import pruning_record
from sparsepack.models.stock.halves import Change, dense_pass
from sparsepack.models.stock.whole import load_model
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.progress import say
from sparsepack.sparsity.allocation import weights_of
from sparsepack.sparsity.divergence import Teacher, dense_divergence, divergence
from sparsepack.sparsity.learned import first_channels, sparse_at
from sparsepack.sparsity.training import Training
from sparsepack.workers.resume import ResumeState

MEASURED = 8
"""The model is measured on so many windows of the calibration, before and after."""

STATE_BYTES = 12
"""The bytes on disk that keep one number that is trained: itself and what Adam knows of it."""

_WORTH_SAYING = 1 << 30


@dataclass(frozen=True)
class Trained:
    """What a training leaves.

    updates -- of each matrix, by the name of its tensor
    sparse  -- the channels that were skipped at the end; None: none
    wanted  -- the teacher's states at the measured windows
    before  -- the model as it was, with the thresholds that the training began with
    """

    updates: dict[str, Update]
    sparse: Change | None
    wanted: tuple[Tensor, ...]
    before: Figures


def measured_windows(calibration: Calibration, options: DistilOptions) -> Tensor:
    """The windows on which a model is measured: int64 [N, S]."""
    return spread_windows(calibration.windows, MEASURED)[:, : options.length].to(options.device)


def train(
    checkpoint: Checkpoint,
    calibration: Calibration,
    options: DistilOptions,
    resume: ResumeState,
    source: Checkpoint | None = None,
) -> Trained:
    """Train the matrices of a model's blocks. Holds the whole model on one device.

    source -- what it was pruned from and learns from, held there, too; None: it was not, and learns from itself

    A run that was killed goes on from `resume`, which keeps the state of the training.
    """
    family, windows = checkpoint.family, measured_windows(calibration, options)
    model = _loaded(checkpoint, options)
    other = None if source is None else _loaded(source, options)
    wanted = dense_states(model if other is None else other, windows)
    groups: list[dict[str, Any]] = []
    sparse = None
    if options.sparsity:
        weights = weights_of(checkpoint, [(layer, site) for layer in range(checkpoint.layers) for site in SITES])
        channels = first_channels(checkpoint, calibration, options.allocation, model, weights)
        groups, sparse = channels.groups(), sparse_at(channels, weights)
    before = measure(model, family, windows, sparse, wanted)
    updates = first_updates(checkpoint, options.rank, options.seed, options.device, _pruned(checkpoint))
    trained = [tensor for update in updates.values() for tensor in update.trained]
    _say_size(trained, resume)
    # One matrix at a time in each step: together, a GPU would hold several copies of all.
    groups = [*groups, {"params": trained, "lr": options.rate, "foreach": False}]
    with trained_with(model, updates) as as_it_was:

        def dense(ids: Tensor) -> Tensor:
            if other is not None:
                return dense_pass(other, ids)[0]
            with as_it_was():
                return dense_pass(model, ids)[0]

        def loss(ids: Tensor) -> tuple[Tensor, Tensor]:
            teacher = Teacher(dense, options.prompt)
            if sparse is None:
                return dense_divergence(model, family, ids, teacher)
            return divergence(model, family, ids, sparse, teacher)

        Training(groups, options.allocation, resume).run("distilling", calibration.windows, loss)
    return Trained(updates, sparse, wanted, before)


def _loaded(checkpoint: Checkpoint, options: DistilOptions) -> Any:
    return load_model(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))


def _pruned(checkpoint: Checkpoint) -> frozenset[str]:
    """The names of the tensors that were pruned."""
    record = pruning_record(checkpoint.path)
    return frozenset(f"{name}.weight" for name in record.patterns) if record else frozenset()


def _say_size(trained: list[Tensor], resume: ResumeState) -> None:
    """Say how much the state takes on the disk, where that is much: the one before stays until the next is there."""
    most = 2 * STATE_BYTES * sum(tensor.numel() for tensor in trained)
    if most >= _WORTH_SAYING and resume.path is not None:
        say(f"distilling: what goes on after a kill takes up to {most / 1e9:.0f} GB in {resume.path} until it ends")


@torch.no_grad()
def measured_after(made: Checkpoint, calibration: Calibration, options: DistilOptions, trained: Trained) -> Figures:
    """Measure the distilled model, as it will be stored, beside its teacher."""
    windows = measured_windows(calibration, options)
    return measure(_loaded(made, options), made.family, windows, trained.sparse, trained.wanted)
