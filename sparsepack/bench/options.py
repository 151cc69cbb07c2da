"""What a benchmark is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.errors import UserError
from sparsepack.operation import Cost, Input, Operation
from sparsepack.option import LARGEST_SEED, check_options, not_with, option
from sparsepack.runtime.backends import find_backend, most_sequences
from sparsepack.runtime.features import requested_backend
from sparsepack.runtime.options import EngineOptions

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class BenchSettings:
    """What to measure. Prefill and decoding each begin with an empty cache.

    engine -- what runs it; how many sequences and how much room it has depends on the tests

    Raises `UserError` for a value out of range.
    """

    prompt: int = option("Tokens of the prefill test; 0: none.", default=512, least=0)
    generate: int = option("Tokens of the decoding test; 0: none.", default=128, least=0)
    repetitions: int = option("How often each test is run, in turns.", default=5, least=1)
    seed: int = option("Of the random tokens.", default=0, least=0, most=LARGEST_SEED, counts=(not_with("text"),))
    batch: int = option(
        "Decode so many sequences together, skipping what is inactive in all of them. No prefill test then.",
        default=1,
        least=1,
        most=most_sequences(),
    )
    engine: EngineOptions = field(default_factory=EngineOptions)

    @property
    def longest(self) -> int:
        """Tokens of the longest test."""
        return max(self.prompt if self.batch == 1 else 0, self.generate)

    @property
    def tokens(self) -> int:
        """Tokens that the tests take, of all sequences together."""
        return self.longest * self.batch

    def __post_init__(self) -> None:
        check_options(self, UserError)
        engine = self.engine
        if engine.backend is not None:
            find_backend(engine.backend).check_device(engine.device)
        if self.batch > 1 and self.prompt not in (0, type(self).prompt):
            raise UserError(f"prompt {self.prompt}: there is no prefill test with batch {self.batch}; leave it out")
        if self.batch > 1 and not self.generate:
            raise UserError(f"batch {self.batch}: nothing to decode; give generate tokens")
        if self.batch > 1:
            requested_backend(replace(engine, sequences=self.batch))
        if not self.prompt and not self.generate:
            raise UserError("nothing to measure: prompt and generate are both 0; give one of them tokens")


def cost(checkpoint: "Checkpoint", settings: BenchSettings) -> Cost:
    """The tokens of prefill, and of decoding, dense and sparse; with slots for a share of the neurons all of it again.
    In memory are the file and the engine's own order of it, and the array on which the memory's bandwidth is measured.
    """
    from sparsepack.bench.bandwidth import ARRAY_BYTES
    from sparsepack.models.hf_model.forecast import model_parameters

    runs = settings.repetitions if settings.engine.cached is None else 2 * settings.repetitions
    prefilled = settings.prompt if settings.batch == 1 else 0
    tokens = runs * (prefilled + 2 * settings.generate * settings.batch)
    return Cost(tokens, ARRAY_BYTES + model_parameters(checkpoint) * 9 // 8)


def _table(result: Any, output: Path) -> str:
    from sparsepack.bench.run import bench_table, linears_table

    return (linears_table if "products" in result else bench_table)(result)


BENCH = Operation(
    name="bench",
    summary="Measure tokens per second, dense and sparse.",
    help="""
Measure tokens per second of an artifact, dense and sparse in turns, with the bytes that each token needs.

With --cached or --vram also how many of the active neurons of a token had slots, what a token took of each memory,
and how long the device waited for the worker.

Of a slid folder, with --device cuda: the products of its Linears at 64 to 16384 tokens, beside dense BF16, INT8 and
FP8 and other patterns; of the options, --repetitions and --device count.
""",
    subject=("path", "what `sparsepack pack` made"),
    options=BenchSettings,
    inputs={
        "text": Input("Run this text's tokens (default: random ones, which skip less than text does).", before="seed")
    },
    flags={"prompt": ("-p", "--prompt"), "generate": ("-n", "--generate"), "repetitions": ("-r", "--repetitions")},
    run="sparsepack.bench.run:bench",
    table=_table,
)
