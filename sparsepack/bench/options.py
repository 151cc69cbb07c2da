"""What a benchmark is asked for. Nothing heavy is imported here: the command line and recipes read the defaults."""

from dataclasses import dataclass

from sparsepack.errors import UserError


@dataclass(frozen=True)
class BenchSettings:
    """What to measure.

    n_prompt, n_gen -- tokens of the prefill and of the decoding test, each from an empty cache; 0 leaves it out
    repetitions     -- of every test, in turns
    threads         -- of the engine and of torch; None: torch's number
    seed            -- of the random token ids
    device, backend -- as the engine's
    batch           -- sequences that are decoded together, where a backend does that; prefill is left out then

    Raises `UserError` for a value out of range.
    """

    n_prompt: int = 512
    n_gen: int = 128
    repetitions: int = 5
    threads: int | None = None
    seed: int = 0
    device: str = "cpu"
    backend: str | None = None
    batch: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest test."""
        return max(self.n_prompt if self.batch == 1 else 0, self.n_gen)

    @property
    def tokens(self) -> int:
        """Tokens that the tests take, of all sequences together."""
        return self.longest * self.batch

    def __post_init__(self) -> None:
        from sparsepack.runtime.backends import batch_backend, most_sequences

        for name, least in (("n_prompt", 0), ("n_gen", 0), ("repetitions", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} {value}: expected at least {least}")
        if not 1 <= self.batch <= most_sequences():
            raise UserError(f"batch {self.batch}: expected 1 to {most_sequences()}")
        if self.batch > 1 and not self.n_gen:
            raise UserError(f"batch {self.batch}: nothing to decode; give n_gen tokens")
        if self.batch > 1:
            batch_backend(self.batch, self.device, self.backend)
        if not self.n_prompt and not self.n_gen:
            raise UserError("nothing to measure: n_prompt and n_gen are both 0; give one of them tokens")
