"""`bench`: the speed of an artifact in a file, on a text by its name."""

from pathlib import Path
from typing import Any

from sparsepack.artifacts.open import read_packed
from sparsepack.bench.decode import bench_decode
from sparsepack.bench.options import BenchSettings
from sparsepack.files.text import read_text
from sparsepack.models.windows import tokenise
from sparsepack.runtime.generate import open_tokenizer


def bench(path: Path, settings: BenchSettings | None = None, text: str | None = None) -> dict[str, Any]:
    """Measure an artifact on the tokens of a text (None: random ones); see `bench_decode`, also for what it raises."""
    packed, settings = read_packed(path), settings or BenchSettings()
    ids = None
    if text:
        ids = tokenise(open_tokenizer(packed.tokenizer_json), read_text(text), settings.tokens).tolist()
    return bench_decode(packed, settings, path.name, ids)
