"""`distil`: its options, what it declares, and what was trained as text for people."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sparsepack.calibrate.collect import DTYPES, CalibrateOptions
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.errors import DistillationError
from sparsepack.operation import Cost, Input, Operation
from sparsepack.option import LARGEST_SEED, check_options, option
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Distilled, Figures, Provenance

RATE_OF_WEIGHTS, RATE_OF_UPDATES, RATE_OF_PRUNED = 3e-5, 3e-4, 1e-4
"""The rates of all weights, of updates of a rank and of what pruning left, where none is asked for."""

SPARSITY = 0.5
"""The sparsity where none is asked for, of a model that was not pruned."""


@dataclass(frozen=True)
class DistilOptions:
    """What the weights are trained for, how, and how the distilled model is stored."""

    sparsity: float | None = option(
        f"The share of weights that a decoded token will skip (default: {SPARSITY}; of a pruned model 0).",
        default=None,
        least=0,
        below=1,
    )
    offsets: bool = option(
        "What inactive channels stand at is learnt, too: for a model that is packed with --offsets.", default=False
    )
    rank: int | None = option(
        "Train an update of this rank for each matrix of the blocks, which takes little memory beside the model "
        "(default: all of their weights, 16 more bytes for each; of a pruned model always).",
        default=None,
        least=1,
    )
    rate: float | None = option(
        f"Learning rate (default: {RATE_OF_WEIGHTS:g} of all weights, {RATE_OF_UPDATES:g} of updates, "
        f"{RATE_OF_PRUNED:g} of a pruned model).",
        default=None,
        above=0,
        below=1,
    )
    prompt: float = option(
        "How much the divergence of prompts, which are dense, counts beside that of what is decoded; as much where "
        "nothing is skipped.",
        default=0.5,
        least=0,
    )
    steps: int = option("Optimiser steps.", default=400, least=1)
    batch: int = option("Windows per step.", default=4, least=1)
    length: int = option("Tokens per window.", default=1024, least=2)
    seed: int = option("Which windows are drawn, and how updates begin.", default=0, least=0, most=LARGEST_SEED)
    weights: str = option(
        "The type in which the weights are stored; auto: the model's own, or float32 where that has 16 bits, which "
        "would round small changes away.",
        default="auto",
        choices=DTYPES,
    )
    device: str = CalibrateOptions.device
    dtype: str = CalibrateOptions.dtype

    def check(self) -> None:
        """Raise `DistillationError` for values that make no sense."""
        check_options(self, DistillationError)

    def of_model(self, pruned: bool) -> Self:
        """The options with a sparsity and a rate that suit a model, where none was asked for.

        Raises `DistillationError` for values that make no sense, or not of such a model.
        """
        self.check()
        sparsity = self.sparsity
        if sparsity is None:
            sparsity = 0.0 if pruned else SPARSITY
        if not sparsity and not pruned:
            raise DistillationError(
                "sparsity 0: the model would learn to say what it says; expected above 0, or a model that was pruned"
            )
        if not sparsity and self.offsets:
            raise DistillationError(
                "offsets: no channel is skipped that could have one; leave it out, or give a sparsity above 0"
            )
        if pruned and self.rank is not None:
            raise DistillationError(
                f"rank {self.rank}: an update of a rank would make numbers of a pruned model's zeros; leave it out"
            )
        usual = RATE_OF_PRUNED if pruned else RATE_OF_WEIGHTS if self.rank is None else RATE_OF_UPDATES
        return replace(self, sparsity=sparsity, rate=self.rate or usual)

    @property
    def allocation(self) -> AllocationOptions:
        """What the training and the thresholds that are trained along are asked for: as those of `global`."""
        shared = {name: getattr(self, name) for name in ("steps", "batch", "length", "seed", "device", "dtype")}
        return AllocationOptions(self.sparsity or 0.0, "global", offsets=self.offsets, **shared)


def cost(checkpoint: "Checkpoint", options: DistilOptions, windows: tuple[int, int], pruned: bool = False) -> Cost:
    """What the training takes, which trains on first halves, too, and measuring the model before and after it. In
    memory are the model, its teacher where that is another, what is trained with its gradients and Adam's moments, what
    enters each block, and the larger of a block's activations and a part of the logits.

    pruned -- whether the model was pruned, or will be
    """
    from math import prod

    from sparsepack.calibrate.distillation import MEASURED, matrices
    from sparsepack.calibrate.teal import LOGITS
    from sparsepack.calibrate.training import trained_tokens
    from sparsepack.files.tensors import arithmetic
    from sparsepack.models.family import SITES
    from sparsepack.models.hf_model.forecast import LIVE, model_parameters

    options = options.of_model(pruned)
    length = min(options.length, windows[1])
    first_halves = 3 * options.steps * options.batch * (length // 2)
    measured = MEASURED * (length + 2 * (length + (length - length // 2 if options.sparsity else 0)))
    size = arithmetic(options.dtype, checkpoint.dtype, options.device).itemsize
    shapes = [checkpoint.source.shapes[name] for name in matrices(checkpoint)]
    trained = sum(prod(shape) if options.rank is None else options.rank * sum(shape) for shape in shapes)
    tokens = options.batch * length
    hidden, vocabulary = int(checkpoint.config.hidden_size), int(checkpoint.config.vocab_size)
    kept = tokens * hidden * size * (checkpoint.layers + 4)
    at_once = tokens // 2 if options.sparsity else tokens
    block = at_once * sum(sum(checkpoint.stacked_shape(site)) for site in SITES) * 4 * LIVE
    logits = 8 * 4 * min(LOGITS, at_once * vocabulary)
    models = (2 if pruned else 1) * model_parameters(checkpoint) * size
    return Cost(
        trained_tokens(options.steps, options.batch, length) + first_halves + measured,
        models + 16 * trained + kept + max(block, logits),
    )


def predict(
    checkpoint: "Checkpoint", options: DistilOptions, pruned: bool = False
) -> tuple["Checkpoint", "Provenance"]:
    """The distilled model and its record before its weights are known. pruned -- as `cost` takes it"""
    from sparsepack.calibrate.distillation import matrices
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.files.tensors import type_name
    from sparsepack.models.checkpoint.writer import distilled
    from sparsepack.models.provenance import Provenance

    source = {"model": checkpoint.name, "model_sha256": checkpoint.sha256, "calibration_sha256": NO_HASH}
    how = {"sparsity": options.of_model(pruned).sparsity, "rank": options.rank, "offsets": options.offsets}
    figures = {name: {"sparse": 0.12345678901234567, "prompt": 0.00123456789012345} for name in ("before", "after")}
    changes = dict.fromkeys(matrices(checkpoint), 0.0012345)
    made = distilled(checkpoint, {}, options.weights)
    found = {"weights": type_name(made.dtype), **figures, "changes": changes}
    return made, Provenance({**how, **found, **source, "teacher": checkpoint.name if pruned else None})


def distilled_text(made: "Distilled", output: Path) -> str:
    """What was trained, and how far the result is from the model, before and after."""
    from sparsepack.models.provenance import trained_in_words

    sparsity = made.options["sparsity"]
    trained = trained_in_words(made.options["rank"], made.teacher is not None)
    largest = max(made.changes, key=lambda name: made.changes[name])
    return markdown(
        f"{output}: {trained} of {len(made.changes)} matrices of {made.model}, trained"
        f"{f' for {100 * sparsity:.3g} % skipped' if sparsity else ''}, stored in {made.weights}",
        _table(made, ", uniform thresholds", ", those trained along") if sparsity else _table(made),
        f"over {made.tokens:,} tokens of the calibration; matrices changed by {100 * made.changes[largest]:.2g} % of "
        f"their size at most ({largest})",
    )


def _table(made: "Distilled", first: str = "", last: str = "") -> Table:
    """How far both are from the teacher."""
    rows = [_row(f"before{first}", made.before), _row(f"after{last}", made.after)]
    return Table([f"KL divergence from {made.teacher or made.model}", "decoded", "dense, prompts", "skipped"], rows)


def _row(when: str, figures: "Figures") -> list[str]:
    return [when, f"{figures.sparse:.4f}", f"{figures.prompt:.4f}", f"{100 * figures.skipped:.1f} %"]


DISTIL = Operation(
    name="distil",
    summary="Train weights so that skipping or pruning loses less.",
    help="""
Train the weights of MODEL to say, with channels skipped, what MODEL says with all of them. The weights that stay
in a pruned MODEL learn to say what the model from before says, whether channels are skipped or not; its zeros stay.

The result is an ordinary checkpoint; calibrate that one for what follows. Thresholds are trained along and let go:
`pack --allocation global` learns them on the result. The whole model is on one device, and a GPU is wanted. At the
end MODEL and the result are compared with what they learn from, on the calibration's text. A run that was killed
goes on from the step that was kept last when the same command is given again.
""",
    options=DistilOptions,
    groups={"Training": ("rank", "rate", "prompt", "steps", "batch", "length", "seed")},
    inputs={
        "calibration": Input(
            "A folder made by `sparsepack calibrate` of MODEL, on whose text it is trained; where nothing is skipped, "
            "one of its teacher will do.",
            required=True,
        ),
        "teacher": Input(
            "The model that MODEL was pruned from (default: the one that its record names, if it is still there)."
        ),
    },
    run="sparsepack.calibrate.distillation:distil",
    cost=cost,
    predict=predict,
    table=distilled_text,
    output="The checkpoint to make, a folder.",
)
