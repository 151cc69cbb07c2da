"""What a benchmark is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass, field, replace

from sparsepack.errors import UserError
from sparsepack.option import LARGEST_SEED, check_options, not_with, option
from sparsepack.runtime.backends import backend_named, most_sequences
from sparsepack.runtime.features import backend_asked
from sparsepack.runtime.options import EngineOptions


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
            backend_named(engine.backend).check_device(engine.device)
        if self.batch > 1 and self.prompt not in (0, type(self).prompt):
            raise UserError(f"prompt {self.prompt}: there is no prefill test with batch {self.batch}; leave it out")
        if self.batch > 1 and not self.generate:
            raise UserError(f"batch {self.batch}: nothing to decode; give generate tokens")
        if self.batch > 1:
            backend_asked(replace(engine, sequences=self.batch))
        if not self.prompt and not self.generate:
            raise UserError("nothing to measure: prompt and generate are both 0; give one of them tokens")
