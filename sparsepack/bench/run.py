"""`bench`: the speed of an artifact, on a text by its name: of decoding, or of the products of a slid folder."""

from pathlib import Path
from typing import Any

from sparsepack.bench.decode import bench_decode
from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.files.text import read_text
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.models.tokenizer.windows import first_tokens
from sparsepack.runtime.generation.generate import open_tokenizer
from sparsepack.runtime.options import EngineOptions


def bench(path: Path, settings: BenchSettings | None = None, text: str | None = None) -> dict[str, Any]:
    """Measure an artifact on the tokens of a text (None: random ones); see `bench_decode`, also for what it raises.

    Of a slid folder its products are measured, see `bench_linears`; raises `UserError` where a text is given, or a
    device that is no NVIDIA GPU.
    """
    settings = settings or BenchSettings()
    artifact = open_artifact(path)
    if artifact.format.weight_sparsity:
        return _bench_products(artifact, settings, text)
    if text and settings.seed != BenchSettings.seed:
        raise UserError(f"seed {settings.seed}: it does nothing with text {text}; leave one of them out")
    packed = read_packed(path)
    ids = None
    if text:
        tokenizer = open_tokenizer(packed.tokenizer_json)
        ids = first_tokens(tokenizer, read_text(text), settings.tokens, packed.architecture.vocabulary)
    return bench_decode(packed, settings, path.name, ids)


def _bench_products(artifact: Artifact, settings: BenchSettings, text: str | None) -> dict[str, Any]:
    from sparsepack.bench.linears import PATTERNS, bench_linears, linears_of
    from sparsepack.formats.slid.artifact import SlidArtifact, value_type

    assert isinstance(artifact, SlidArtifact)
    if text is not None:
        raise UserError(f"{artifact.path}: the products of a slid folder take random inputs; leave --text out")
    if settings.engine.device.partition(":")[0] != "cuda":
        raise UserError(f"{artifact.path}: the products of a slid folder are timed on an NVIDIA GPU; add --device cuda")
    for name in ("prompt", "generate", "seed", "batch"):
        if (value := getattr(settings, name)) != getattr(BenchSettings, name):
            raise UserError(f"{artifact.path}: {name} {value} does nothing with a slid folder; leave it out")
    if settings.engine != EngineOptions(device=settings.engine.device):
        raise UserError(
            f"{artifact.path}: of what is said of the engine, the device alone counts with a slid folder; leave out "
            "backend, cached, vram, policy and threads"
        )
    shapes = {name: artifact.logical_shape(f"{name}.weight") for name in artifact.slides}
    patterns = sorted({*PATTERNS, *(how.pattern for how in artifact.slides.values())}, key=lambda p: (p.of, p.keep))
    linears = linears_of({name: (rows, columns) for name, (rows, columns) in shapes.items()})
    kinds = [*dict.fromkeys(("INT8", "FP8", value_type(artifact.format).kind))]
    return bench_linears(
        linears, patterns=patterns, rounds=settings.repetitions, device=settings.engine.device, kinds=kinds
    )
