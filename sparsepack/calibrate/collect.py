"""`calibrate`: its options, what it declares, and what a calibration was made of as text for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsepack.errors import CalibrationError
from sparsepack.operation import Cost, Operation
from sparsepack.option import LARGEST_SEED, check_options, option
from sparsepack.workers import PARTS

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint

CRITERIA = ("magnitude", "column-norm")
"""The scores of these criteria are counted; see `calibration.criteria`."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""`dtype` may be one of these; "auto" is float32 on a CPU and the model's own type on a GPU."""

MOST_SAMPLES, FEWEST_SAMPLES = 128, 8
"""The number of windows is between these, unless it is given."""

HELD_OUT = 8
"""So many windows are held out unless another number is given."""

FEW_AT_ONCE, TOKENS_AT_ONCE = 2, 16_384
"""So many windows run at a time on a CPU, where fewer tokens do. A GPU that has more of them waits less for the host;
so many workers as there are `PARTS` can have windows of their own."""


@dataclass(frozen=True)
class CalibrateOptions:
    """How much text, and how it is run."""

    context: int | None = option(
        "Tokens per window (default 2048, or what the model was made for if that is less).", default=None, least=2
    )
    samples: int | None = option(
        "Windows drawn at random (of a text beyond 8 million characters, from stretches of it that are drawn first); 0 "
        f"for all but those held out, in order (default: {MOST_SAMPLES}; on a CPU fewer for models beyond 60 million "
        f"weights, and {FEWEST_SAMPLES} from 900 million on).",
        default=None,
        least=0,
    )
    held_out: int = option(
        "Windows of the text that no statistic counts, on which `pack` scores what is lost; at most 1/8 of a text that "
        "has no others left.",
        default=HELD_OUT,
        least=0,
    )
    seed: int = option("Which windows are drawn, and which are held out.", default=0, least=0, most=LARGEST_SEED)
    sinks: int = option("First positions of a window left out of the statistics.", default=4, least=0)
    batch: int | None = option(
        f"Windows at a time (default {FEW_AT_ONCE}; on a CUDA device as many as have {TOKENS_AT_ONCE:,} tokens, at "
        f"most 1/{PARTS} of all).",
        default=None,
        least=1,
    )
    device: str = option("Where models run: cpu, cuda, cuda:1, mps.", default="cpu")
    dtype: str = option(
        "What blocks are computed in; auto: float32 on a CPU, the model's own type on a GPU. Weights are read as they "
        "are stored, a block at a time.",
        default="auto",
        choices=DTYPES,
    )

    def check(self) -> None:
        """Raise `CalibrationError` for values that make no sense."""
        check_options(self, CalibrationError)
        if self.context is not None and self.context <= self.sinks:
            raise CalibrationError(f"context {self.context}, sinks {self.sinks}: expected context > sinks")


def cost(checkpoint: "Checkpoint", options: CalibrateOptions, windows: tuple[int, int]) -> Cost:
    """The text's way through a block, and the sums of products of the residual stream."""
    from sparsepack.calibrate.collection import at_once
    from sparsepack.calibrate.folder import residual_of
    from sparsepack.files.tensors import arithmetic
    from sparsepack.models.hf_model.forecast import block_by_block_bytes

    residual = residual_of(checkpoint)
    # Those of runs of blocks that are over, that of the run at hand, and of a batch what is added to it.
    sums = 0 if residual is None else residual["runs"] + 3
    size = arithmetic(options.dtype, checkpoint.dtype, options.device).itemsize
    way = block_by_block_bytes(checkpoint, size, windows, at_once(options.batch, *windows, options.device))
    return Cost(windows[0] * windows[1], way + sums * 8 * int(checkpoint.config.hidden_size) ** 2)


def calibration_table(manifest: Mapping[str, Any]) -> str:
    """What a calibration was made of."""
    tokens = manifest["tokens"]
    return made_from_table(
        manifest,
        {
            "windows": f"{tokens['windows']} of {tokens['context']} tokens",
            "counted": f"{tokens['counted']:,} tokens; left out: {tokens['sinks_left_out']:,} sinks, "
            f"{tokens['padding_left_out']:,} padding",
            "held out": f"{tokens.get('held_out', 0)} windows, on which pack scores what is lost",
        },
    )


def made_from_table(manifest: Mapping[str, Any], between: Mapping[str, str]) -> str:
    """A line each: the model and the text of a manifest, what is `between`, and the types that were computed in."""
    model = manifest["model"]
    values = {
        "model": f"{model['name']} ({model['model_type']}, {model['layers']} blocks, {model['sha256'][:12]})",
        "text": "; ".join(f"{t['name']} ({t['documents']} documents)" for t in manifest["texts"]),
        **between,
        "computed in": precision(manifest["compute"]),
    }
    width = max(map(len, values))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in values.items())


def precision(compute: Mapping[str, Any]) -> str:
    """The type that was computed in, the device, and the type of the stored weights."""
    return f"{compute['dtype']} on {compute['device']}; weights stored in {compute['weights']}"


CALIBRATE = Operation(
    name="calibrate",
    summary="Collect the statistics of a model over text.",
    help="""
Collect the statistics of MODEL over text; or `calibrate merge A B -o C` of two calibrations of one model.

One pass, one decoder block at work while the next one is read. A run that was killed goes on from what it saved
last when the same command is given again. With --devices, or under torchrun, several workers share the windows; the
calibration has the same bytes.
""",
    options=CalibrateOptions,
    run="sparsepack.calibrate.collection:calibrate",
    forecast="sparsepack.calibrate.collection:forecast",
    cost=cost,
    merge=("calibration folders", "sparsepack.calibrate.folder:merge_folders"),
    table=lambda made, output: calibration_table(made.manifest),
    output="The calibration folder to make.",
)
