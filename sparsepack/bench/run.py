"""`bench`: the speed of an artifact in a file, on a text by its name."""

from pathlib import Path
from typing import Any

from sparsepack.artifacts.open import read_packed
from sparsepack.bench.decode import bench_decode
from sparsepack.bench.options import BenchSettings
from sparsepack.files.text import read_text
from sparsepack.runtime.generate import open_tokenizer


def bench(path: Path, settings: BenchSettings | None = None, text: str | None = None) -> dict[str, Any]:
    """Measure an artifact on the tokens of a text (None: random ones); see `bench_decode`, also for what it raises."""
    packed = read_packed(path)
    ids = None
    if text:
        ids = open_tokenizer(packed.tokenizer_json).encode(read_text(text).joined, add_special_tokens=False).ids
    return bench_decode(packed, settings or BenchSettings(), path.name, ids)
