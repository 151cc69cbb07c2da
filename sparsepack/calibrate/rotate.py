"""`rotate`: its options, what it declares, and what was rotated as text for people."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsepack.calibrate.collect import DTYPES, CalibrateOptions
from sparsepack.errors import RotationError
from sparsepack.operation import Cost, Input, Operation
from sparsepack.option import LARGEST_SEED, check_options, only_with, option

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint
    from sparsepack.models.provenance import Provenance, Rotated

BASES = ("pca", "hadamard", "learnt")
"""The names in the table of bases (`bases`)."""

_LEARNT = (only_with("basis", "learnt"),)


@dataclass(frozen=True)
class RotateOptions:
    """Which bases, and how the rotated model is stored."""

    basis: str = option(
        "The directions: by how much of the residual stream lies in each, so that channels differ as far as they can, "
        "which suits skipping (pca); or each spread over all channels, so that they are as even as they can be, which "
        "suits inputs in 8 bits (hadamard); or those of pca, turned on so that skipping changes the output less, "
        "which takes the whole model in memory, and a GPU (learnt).",
        default="pca",
        choices=BASES,
    )
    segments: int = option(
        "Runs of consecutive blocks, each with a basis of its own; a matrix before each but the first takes the stream "
        "into it, and is read for every token.",
        default=1,
        least=1,
        counts=(only_with("basis", "pca", "learnt"),),
    )
    seed: int = option(
        "With hadamard: the signs of the channels; with learnt: which windows are drawn.",
        default=0,
        least=0,
        most=LARGEST_SEED,
        counts=(only_with("basis", "hadamard", "learnt"),),
    )
    sparsity: float = option(
        "With learnt: the share of weights that a decoded token will skip.",
        default=0.5,
        above=0,
        below=1,
        counts=_LEARNT,
    )
    steps: int = option("With learnt: optimiser steps.", default=300, least=1, counts=_LEARNT)
    batch: int = option("With learnt: windows per step.", default=4, least=1, counts=_LEARNT)
    length: int = option("With learnt: tokens per window.", default=1024, least=2, counts=_LEARNT)
    rate: float = option(
        "With learnt: how far one step turns the basis at most, roughly, in radians.",
        default=0.006,
        least=0,
        below=1,
        counts=_LEARNT,
    )
    weights: str = option(
        "The type in which the rotated weights are stored; auto: the model's own, or float32 where that has 16 bits, "
        "since rounding the weights a second time changes the model.",
        default="auto",
        choices=DTYPES,
    )
    device: str = CalibrateOptions.device

    def check(self) -> None:
        """Raise `RotationError` for values that make no sense."""
        check_options(self, RotationError)


def cost(checkpoint: "Checkpoint", options: RotateOptions, windows: tuple[int, int]) -> Cost:
    """Each block is run twice, as it was and rotated, over a few tokens; bases that are learnt are trained. In memory
    are the bases and what is largest beside them: their search, the embedding, or a block; of bases that are trained it
    is not known."""
    from sparsepack.calibrate.bases import ROTATIONS
    from sparsepack.calibrate.folder import residual_of
    from sparsepack.calibrate.rotation import TOKENS, WINDOWS
    from sparsepack.calibrate.training import trained_tokens
    from sparsepack.models.checkpoint.rotated import PIECE
    from sparsepack.models.hf_config import heads_of_config
    from sparsepack.models.hf_model.forecast import block_parameters

    count, context = windows
    tokens = 2 * min(count, WINDOWS) * min(context, TOKENS)
    if ROTATIONS[options.basis].trains:
        return Cost(tokens + trained_tokens(options.steps, options.batch, min(options.length, context)))
    basis = 8 * int(checkpoint.config.hidden_size) ** 2  # a change of it between segments takes no more
    vocabulary, hidden = checkpoint.source.shapes[checkpoint.family.embedding]
    matrices = 2 * 4 * vocabulary * hidden  # two at a time: of the model and rotated
    block = block_parameters(checkpoint) * (2 * 4 + checkpoint.dtype.itemsize) + (basis if options.segments > 1 else 0)
    residual = residual_of(checkpoint)
    moments = residual["runs"] if residual and ROTATIONS[options.basis].needs == "moments" else 0
    heads = heads_of_config(checkpoint.config)
    values = 8 * checkpoint.layers * heads.kv_heads * heads.head_dim**2
    search = (moments + 4) * basis + (values if moments else 0)
    found = options.segments * basis + values
    return Cost(tokens, found + max(search, matrices + 2 * 8 * PIECE, block + 2 * 8 * PIECE))


def predict(checkpoint: "Checkpoint", options: RotateOptions) -> tuple["Checkpoint", "Provenance"]:
    """The rotated model and its record before its bases are known, with segments as long as each other."""
    from sparsepack.files.hashing import NO_HASH
    from sparsepack.files.tensors import type_name
    from sparsepack.models.checkpoint.rotated import Bases, rotated
    from sparsepack.models.provenance import Provenance

    even = tuple(segment * checkpoint.layers // options.segments for segment in range(options.segments))
    source = {"model": checkpoint.name, "model_sha256": checkpoint.sha256, "calibration_sha256": NO_HASH}
    how = {"basis": options.basis, "boundaries": [*even[1:]], "seed": options.seed}
    made = rotated(checkpoint, Bases(even), options.weights)
    found = {"weights": type_name(made.dtype), "error": 1.2345678901234567e-07}
    return made, Provenance({**how, **found, **source})


def rotated_text(made: "Rotated", output: Path) -> str:
    """What was rotated, how far its logits are from the model's, and what it costs."""
    from sparsepack.models.provenance import basis_in_words

    into = basis_in_words(made.options["basis"], made.boundaries)
    lines = [
        f"{output}: {made.model} in {into}; over {made.tokens:,} tokens its logits differ by {made.error:.1e} of their "
        "size",
        *(f"note: {note}" for note in made.notes),
    ]
    return "\n".join(lines)


ROTATE = Operation(
    name="rotate",
    summary="Write a model in coordinates in which skipping loses less.",
    help="""
Write MODEL with its residual stream in another basis: the same function, folded into the weights.

The result is an ordinary checkpoint, or with several segments one that sparsepack alone takes; calibrate that one
for what follows. Its logits are compared with those of MODEL, and nothing is written where they differ. One decoder
block is in memory at a time; a learnt basis needs the whole model there, and is for a GPU. A run that was killed
goes on where it stopped when the same command is given again. With --devices, or under torchrun, several workers
share the blocks, and the windows on which a basis is learnt; the result has the same bytes.
""",
    options=RotateOptions,
    groups={"A learnt basis": ("sparsity", "steps", "batch", "length", "rate")},
    inputs={
        "calibration": Input(
            "A folder made by `sparsepack calibrate` of MODEL, for its statistics and its text.", required=True
        )
    },
    run="sparsepack.calibrate.rotation:rotate",
    forecast="sparsepack.calibrate.rotation:forecast",
    cost=cost,
    predict=predict,
    table=rotated_text,
    output="The checkpoint to make, a folder.",
)
