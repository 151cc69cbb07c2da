"""`load` and `generate`: an artifact in memory, ready to continue texts."""

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsepack.artifacts.open import read_packed
from sparsepack.models.packed import PackedModel
from sparsepack.runtime.backends import batch_backend
from sparsepack.runtime.batch import BatchEngine
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generate import generate, generate_together
from sparsepack.runtime.options import GenerateOptions


@dataclass(frozen=True)
class Model:
    """An artifact and the engine that runs it, one text at a time."""

    packed: PackedModel
    engine: Engine

    def generate(self, prompt: str, options: GenerateOptions | None = None) -> Generator[str, None, str]:
        """Continue a prompt, piece by piece as it is made; see `runtime.generate.generate`, also for what it raises."""
        values = asdict(options or GenerateOptions())
        return generate(self.engine, self.packed.tokenizer_json, prompt, values.pop("tokens"), **values)

    def continued(self, prompt: str, options: GenerateOptions | None = None) -> tuple[str, str]:
        """The continuation as a whole, and why it ended: "eos", "tokens" or "context"."""
        pieces, stream = [], self.generate(prompt, options)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as stop:
                return "".join(pieces), stop.value


@dataclass(frozen=True)
class ModelOfSeveral:
    """An artifact and the engine that runs it, several texts together."""

    packed: PackedModel
    engine: BatchEngine

    def generate(self, prompts: Sequence[str], options: GenerateOptions | None = None) -> list[str]:
        """Continue a prompt in each sequence; see `runtime.generate.generate_together`."""
        values = asdict(options or GenerateOptions())
        return generate_together(self.engine, self.packed.tokenizer_json, prompts, values.pop("tokens"), **values)


def load(
    path: Path,
    device: str = "cpu",
    context: int | None = None,
    *,
    dense: bool = False,
    backend: str | None = None,
    threads: int | None = None,
    verify: bool = True,
) -> Model:
    """Open an artifact to run it; see `runtime.engine.Engine` for the options.

    verify -- check the hash of every tensor first

    Raises `ArtifactError` for a file that is damaged or cannot be run, `UserError` for what the engine refuses.
    """
    packed = read_packed(path, verify=verify)
    return Model(packed, Engine(packed, device, context, dense=dense, backend=backend, threads=threads))


def load_several(
    path: Path,
    sequences: int,
    device: str = "cuda",
    context: int | None = None,
    *,
    dense: bool = False,
    backend: str | None = None,
) -> ModelOfSeveral:
    """Open an artifact to continue so many texts together; see `runtime.batch.BatchEngine`. Raises as `load`."""
    batch_backend(sequences, device, backend)  # before a large file is read
    packed = read_packed(path)
    engine = BatchEngine(packed, device, context, sequences=sequences, dense=dense, backend=backend)
    return ModelOfSeveral(packed, engine)


def what_runs(engine: Engine | BatchEngine) -> tuple[str, ...]:
    """What runs a model, and why where that is not the best for the device: lines for people."""
    return f"runtime: {engine.description}{', dense' if engine.dense else ''}", *engine.notes
