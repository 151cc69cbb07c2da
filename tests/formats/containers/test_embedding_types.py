"""Which types the embedding and the output matrix get by themselves."""

import pytest
import torch

from sparsepack.formats.containers.gguf_writer import embedding_types
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.family import HEAD


def widened(checkpoint: Checkpoint, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """One weight in 64 of a matrix so many times as large, so that its neighbours in a block are lost."""
    read = type(checkpoint.source).tensor

    def tensor(source: object, asked: str) -> torch.Tensor:
        value = read(source, asked)  # type: ignore[arg-type]
        if asked == name:
            value = value.clone()
            value[:, ::64] *= factor
        return value

    monkeypatch.setattr(type(checkpoint.source), "tensor", tensor)
    return checkpoint


@pytest.mark.parametrize(
    ("factor", "type", "note"),
    [
        (1, "Q6_K", None),
        (24, "Q8_0", "output.weight is Q8_0: Q6_K would lose 3.3% of it"),
        (2**9, "Q6_K", None),  # what is lost is nothing beside what is kept
    ],
)
def test_auto_takes_the_smallest_type_that_loses_little(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch, factor: float, type: str, note: str | None
) -> None:
    types, notes = embedding_types(widened(checkpoints["llama"], HEAD, factor, monkeypatch), "auto", "auto")
    assert types == {"token_embd.weight": "Q6_K", "output.weight": type}
    assert notes == [note] * (note is not None)
