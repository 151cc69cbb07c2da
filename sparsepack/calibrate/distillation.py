"""The training of `distil`: weights and thresholds together, at a fixed sparsity, against the teacher: the model as it
was, or that from before it was pruned.

The loss of a window is the KL divergence of its sparse second half from the dense teacher, and a share of that of its
dense first half, whose keys and values the second half reads. Both halves are computed with the weights that are
trained. Thresholds and offsets of channels are trained along and let go at the end, since `pack` learns them on the
distilled model. Where nothing is skipped, the loss is the divergence of the whole window.

All weights of a matrix W [rows, columns] are trained, as a copy in float32, or a low-rank update (LoRA, 2106.09685)

    W' x = W x + B A x,   A [rank, columns], B [rows, rank]

of which B begins at zero, so that the model begins as it was. Zeros of a pruned matrix stay zeros: they have no
gradient, and Adam leaves a number alone that never had one.

The state of the training is kept beside the output, in `.NAME.unfinished`, from which a run that was killed goes on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsepack.calibrate.distil import DistilOptions
from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.folder import load as load_calibration
from sparsepack.calibrate.learned import first_channels, sparse_at
from sparsepack.calibrate.teal import Teacher, dense_divergence, divergence, mean_divergence
from sparsepack.calibrate.training import Training
from sparsepack.calibrate.uniform import weights_of
from sparsepack.errors import CheckpointError, DistillationError
from sparsepack.files.atomic import check_inputs, check_output
from sparsepack.files.hashing import fingerprint
from sparsepack.files.tensors import arithmetic, type_name
from sparsepack.models.checkpoint.checkpoint import Checkpoint, checkpoint_of
from sparsepack.models.checkpoint.writer import distilled, texts_of_distilled, write_checkpoint
from sparsepack.models.families import check_taken
from sparsepack.models.family import SITES, Family
from sparsepack.models.hf_config import multipliers
from sparsepack.models.hf_model.halves import Change, changed_pass, dense_pass
from sparsepack.models.hf_model.model import load_model
from sparsepack.models.provenance import (
    DISTILLATION_FILE,
    Distilled,
    Figures,
    distillation_record,
    pruning_record,
    records_beside,
)
from sparsepack.models.tokenizer.windows import spread_windows
from sparsepack.option import check_type
from sparsepack.progress import say
from sparsepack.version import __version__
from sparsepack.workers.shard import ALONE, Shard


@torch.no_grad()
def dense_states(model: Any, windows: Tensor) -> tuple[Tensor, ...]:
    """What enters a model's output matrix at each of the windows [N, S], with nothing skipped: [1, S, H] on the CPU."""
    return tuple(dense_pass(model, ids[None])[0].cpu() for ids in windows)


@torch.no_grad()
def measure(model: Any, family: Family, windows: Tensor, sparse: Change | None, wanted: Sequence[Tensor]) -> Figures:
    """Measure a model on windows [N, S]: the second half of each sparse behind a dense first half.

    sparse -- None: nothing is skipped
    wanted -- the `dense_states` of the model that it should follow
    """
    head, half, cap = model.get_output_embeddings(), windows.shape[1] // 2, multipliers(model.config).logit_cap
    sums = torch.zeros(3, dtype=torch.float64)
    for ids, dense in zip(windows, wanted, strict=True):
        states, context = dense_pass(model, ids[None])
        second, skipped = states[:, half:], states.new_zeros(())
        if sparse is not None:
            second, shares = changed_pass(model, family, ids[None], context, sparse)
            skipped = torch.stack(shares).sum()
        dense = dense.to(states)
        decoded = mean_divergence(head, dense[:, half:], second, cap)
        prompt = mean_divergence(head, dense[:, :half], states[:, :half], cap)
        sums += torch.stack([decoded, prompt, skipped.to(decoded)]).double().cpu()
    return Figures(*(sums / len(windows)).tolist())


def teacher_of(checkpoint: Checkpoint, given: Checkpoint | str | Path | None = None) -> Checkpoint | None:
    """The model that a model was pruned from; None for one that was not pruned, which learns from itself.

    given -- that model, or where it lies (default: where the record of pruning says)

    Raises `DistillationError` where it is not there, is another model or has no use, `CheckpointError` where what was
    given cannot be opened.
    """
    record = pruning_record(checkpoint.path)
    if record is None:
        if given is not None:
            name = given.name if isinstance(given, Checkpoint) else given
            raise DistillationError(
                f"teacher {name}: {checkpoint.name} was not pruned and learns from itself; leave --teacher out"
            )
        return None
    name, digest = record.summary["model"], record.summary["model_sha256"]
    try:
        found = checkpoint_of(name if given is None else given)
    except CheckpointError as error:
        if given is not None:
            raise
        raise DistillationError(
            f"{checkpoint.name}: it learns from the model that it was pruned from, and {name} is not there; "
            "give --teacher"
        ) from error
    if found.sha256 != digest:
        raise DistillationError(
            f"{found.name} (SHA-256 {found.sha256[:12]}): {checkpoint.name} was pruned from another model, {name} "
            f"({digest[:12]}); give that one as --teacher"
        )
    return found


class Update(ABC):
    """A matrix as far as it is trained."""

    @property
    @abstractmethod
    def trained(self) -> list[Tensor]:
        """Everything that an optimiser trains, float32 leaves on the device."""

    @abstractmethod
    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """What the linear makes of x [..., columns] with the trained matrix in place of its own: [..., rows]."""

    @abstractmethod
    def merged(self, weight: Tensor) -> Tensor:
        """The trained matrix, from the one that it was: float64 [rows, columns] each, on the CPU."""


@dataclass(frozen=True)
class AllWeights(Update):
    """weight -- of the matrix itself, float32 [rows, columns]."""

    weight: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.weight]

    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype), linear.bias)

    def merged(self, weight: Tensor) -> Tensor:
        return self.weight.detach().cpu().double()


@dataclass(frozen=True)
class LowRank(Update):
    """down, up -- A and B, float32 [rank, columns] and [rows, rank]."""

    down: Tensor
    up: Tensor

    @property
    def trained(self) -> list[Tensor]:
        return [self.down, self.up]

    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        few = functional.linear(x, self.down.to(x.dtype))
        return functional.linear(x, linear.weight, linear.bias) + functional.linear(few, self.up.to(x.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        return weight + self.up.detach().cpu().double() @ self.down.detach().cpu().double()


def matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of the tensors that are trained: the matrices of all blocks, in order of execution."""
    blocks = ((checkpoint.family.block(layer), checkpoint.family_at(layer)) for layer in range(checkpoint.layers))
    return [
        f"{block}.{name}.weight" for block, family in blocks for each in family.projections.values() for name in each
    ]


def first_updates(
    checkpoint: Checkpoint, rank: int | None, seed: int, device: str, pruned: Collection[str] = ()
) -> dict[str, Update]:
    """What is trained of each matrix, as it begins; it changes nothing yet.

    rank   -- None: all weights
    pruned -- the names of matrices whose zeros stay zeros, where all weights are trained
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Update] = {}
    for name in matrices(checkpoint):
        if rank is None:
            weight = checkpoint.tensor(name).to(device, torch.float32, copy=True)
            zeros = weight == 0 if name in pruned else None
            made[name] = AllWeights(weight.requires_grad_(True))
            if zeros is not None:
                weight.register_hook(partial(_without, zeros))  # type: ignore[no-untyped-call]
        else:
            rows, columns = checkpoint.source.shapes[name]
            down = (torch.randn(rank, columns, generator=generator) * columns**-0.5).to(device)
            up = torch.zeros(rows, rank, device=device)
            made[name] = LowRank(down.requires_grad_(True), up.requires_grad_(True))
    return made


def _without(zeros: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that is zero where the matrix is."""
    return gradient.masked_fill(zeros, 0.0)


@contextmanager
def trained_with(model: Any, updates: Mapping[str, Update]) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within the context a stock model computes with updates, by the names of their tensors. Yields what gives it its
    own weights for a while."""
    own = False

    @contextmanager
    def as_it_was() -> Iterator[None]:
        nonlocal own
        own = True
        try:
            yield
        finally:
            own = False

    def forward_of(linear: nn.Linear, update: Update) -> Callable[[Tensor], Tensor]:
        plain = linear.forward
        return lambda x: plain(x) if own else update.product(linear, x)

    linears = {name: model.get_submodule(name.removesuffix(".weight")) for name in updates}
    for name, linear in linears.items():
        linear.forward = forward_of(linear, updates[name])
    try:
        yield as_it_was
    finally:
        for linear in linears.values():
            del linear.forward  # the class's own


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
    shard: Shard,
    source: Checkpoint | None = None,
) -> Trained:
    """Train the matrices of a model's blocks. Holds the whole model on one device.

    source -- what it was pruned from and learns from, held there, too; None: it was not, and learns from itself

    A run that was killed goes on from the state, which keeps that of the training.
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
    _say_size(trained, shard.state.path)
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

        Training(groups, options.allocation, shard).run("distilling", calibration.windows, loss)
    return Trained(updates, sparse, wanted, before)


def _loaded(checkpoint: Checkpoint, options: DistilOptions) -> Any:
    return load_model(checkpoint, options.device, arithmetic(options.dtype, checkpoint.dtype, options.device))


def _pruned(checkpoint: Checkpoint) -> frozenset[str]:
    """The names of the tensors that were pruned."""
    record = pruning_record(checkpoint.path)
    return frozenset(f"{name}.weight" for name in record.patterns) if record else frozenset()


def _say_size(trained: list[Tensor], state: Path | None) -> None:
    """Say how much the state takes on the disk, where that is much: the one before stays until the next is there."""
    most = 2 * STATE_BYTES * sum(tensor.numel() for tensor in trained)
    if most >= _WORTH_SAYING and state is not None:
        say(f"distilling: what goes on after a kill takes up to {most / 1e9:.0f} GB in {state} until it ends")


@torch.no_grad()
def measured_after(made: Checkpoint, calibration: Calibration, options: DistilOptions, trained: Trained) -> Figures:
    """Measure the distilled model, as it will be stored, beside its teacher."""
    windows = measured_windows(calibration, options)
    return measure(_loaded(made, options), made.family, windows, trained.sparse, trained.wanted)


def distil(
    model: Checkpoint | str | Path,
    calibration: Path,
    output: Path,
    options: DistilOptions | None = None,
    overwrite: bool = False,
    teacher: Checkpoint | str | Path | None = None,
) -> Distilled:
    """Write a model whose weights were trained so that skipping, or having been pruned, changes its output least: an
    ordinary checkpoint, a Hugging Face folder. What it learns from is the model itself, dense, on the calibration's
    text; a pruned model, whose zeros stay zeros, learns from the model that it was pruned from.

    calibration -- a folder made by `calibrate` of this model; where nothing is skipped, one of the teacher will do
    teacher     -- what a pruned model was pruned from (default: where its record says)

    Raises `DistillationError` for options that make no sense, a model that was distilled before, a teacher that is not
    there or another model, a calibration with too few windows, and weights that training took too far;
    `CalibrationError` for a calibration of another model; `OutputError`.
    """
    options = options or DistilOptions()
    check_type("model", model, Checkpoint | Path, DistillationError)
    check_type("calibration", calibration, Path, DistillationError)
    check_type("output", output, Path, DistillationError)
    check_type("options", options, DistilOptions, DistillationError)
    check_type("teacher", teacher, Checkpoint | Path | None, DistillationError)
    options.check()
    output = Path(output)
    check_output(output, overwrite, folder=True, marker=DISTILLATION_FILE)
    checkpoint = checkpoint_of(model)
    check_inputs(output, [checkpoint.path, Path(calibration)])
    check_model(checkpoint)
    source = teacher_of(checkpoint, teacher)
    options = options.of_model(source is not None)
    read = load_calibration(calibration)
    # Where nothing is skipped, only its text counts, and the model was pruned on that of its teacher.
    texts_of = (checkpoint,) if options.sparsity or source is None else (source, checkpoint)
    read.check_model(next((of for of in texts_of if read.manifest["model"]["sha256"] == of.sha256), checkpoint))
    check_windows(len(read.windows), read.windows.shape[1], options, str(calibration))
    asked = {"model": checkpoint.sha256, "calibration": read.sha256, "options": asdict(options)}
    with ALONE.saved_beside(output) as shard:
        shard = shard.resume(fingerprint({"sparsepack": __version__, **asked}))
        trained = train(checkpoint, read, options, shard, source)
        merged = {name: update.merged for name, update in trained.updates.items()}
        made = distilled(checkpoint, merged, options.weights)
        changes = {name: _change(checkpoint.tensor(name), made.tensor(name)) for name in matrices(checkpoint)}
        _check_changes(changes)
        record = Distilled(
            model=checkpoint.name,
            model_sha256=checkpoint.sha256,
            teacher=None if source is None else source.name,
            calibration_sha256=read.sha256,
            options=asdict(options),
            weights=type_name(made.dtype),
            tokens=measured_windows(read, options).numel(),
            before=trained.before,
            after=measured_after(made, read, options, trained),
            changes=changes,
        )
        records = {**records_beside(checkpoint.path), DISTILLATION_FILE: record.to_json()}
        write_checkpoint(made, texts_of_distilled(checkpoint, made), records, output, overwrite)
    return record


def check_model(checkpoint: Checkpoint) -> None:
    """Raise `DistillationError` for a model that was distilled before, `CheckpointError` for one with experts."""
    check_taken("distil", checkpoint.family, checkpoint.name)
    if (before := distillation_record(checkpoint.path)) is not None:
        raise DistillationError(
            f"{checkpoint.name}: distilled already, from {before.summary['model']}; distil that model, with more "
            "--steps if need be"
        )


def check_windows(count: int, length: int, options: DistilOptions, where: str) -> None:
    """Raise `DistillationError` for fewer calibration windows than a step takes, or too short ones.

    where -- whose windows they are, for the message
    """
    if count < options.batch:
        raise DistillationError(
            f"{where}: {count} windows, of which a step takes {options.batch}; calibrate with more --samples or a "
            "longer text, or give a smaller --batch"
        )
    if length < 2:
        raise DistillationError(
            f"{where}: windows of {length} token; expected 2 or more: calibrate with more --context"
        )


def _change(own: Tensor, made: Tensor) -> float:
    """How far a tensor is from what it was, relative, to five digits."""
    own = own.double()
    norm = float(own.norm())
    moved = float((made.double() - own).norm())
    return float(f"{moved / norm if norm else moved:.5g}")


def _check_changes(changes: dict[str, float]) -> None:
    name, largest = max(changes.items(), key=lambda change: change[1])
    if not largest < 1:
        raise DistillationError(
            f"{name}: training changed it by {largest:.3g} of its size, and it is no longer the model; give a smaller "
            "--rate"
        )
