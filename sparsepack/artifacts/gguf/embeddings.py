"""Which types the embedding and the output matrix get."""

from sparsepack.codecs.matrices import fitting_type
from sparsepack.codecs.types import BLOCKS, type_that_fits
from sparsepack.errors import PackingError
from sparsepack.models.checkpoint import Checkpoint


def embedding_types(
    checkpoint: Checkpoint, embedding: str, output: str, auto: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """GGUF name -> ggml's type of the embedding and, where it is a matrix of its own, the output; and notes.

    embedding, output -- what the user asked for
    auto -- what "auto" stands for where it fits the width, else what llama-quantize takes; None: what engines run
    Raises `PackingError` where one tied matrix is asked to have two types, or a type does not fit.
    """
    if checkpoint.tied:
        if embedding != output and "auto" not in (embedding, output):
            raise PackingError(
                f"{checkpoint.name}: output type {output} and embedding type {embedding}, but the output matrix is the "
                "embedding itself (tied): one tensor has one type; give the same type twice, or one of the two"
            )
        asked = {"token_embd.weight": output if embedding == "auto" else embedding}
    else:
        asked = {"token_embd.weight": embedding, "output.weight": output}
    width = checkpoint.config.hidden_size
    chosen = {
        name: fitting_type(kind, width, name) if auto is None or kind != "auto" else fallen_back(auto, width, name)
        for name, kind in asked.items()
    }
    return {name: kind for name, (kind, _) in chosen.items()}, [note for _, note in chosen.values() if note]


def fallen_back(type: str, columns: int, name: str) -> tuple[str, str | None]:
    """The type in which llama-quantize stores a matrix that should be of `type`, and a note where it is another."""
    found = type_that_fits(type, columns)
    if found == type:
        return type, None
    return found, f"{name} is {found}: {columns} columns, {type} needs a multiple of {BLOCKS[type][0]}"
