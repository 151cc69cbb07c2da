"""The choice of types for the embedding and the output matrix."""

from sparsepack.errors import PackingError
from sparsepack.formats.codecs.matrices import fitting_type, relative_error
from sparsepack.formats.codecs.types import BLOCKS, type_that_fits
from sparsepack.formats.plan import naming
from sparsepack.models.checkpoint.checkpoint import EMBEDDING, HEAD, Checkpoint

LARGEST_ERROR = 0.03
"""A type may cause an error of this share of the weights. Weights that are normally distributed lose 0.017 in Q6_K and
0.005 in Q8_0."""
SAMPLED_ROWS = 1024
"""The error is measured on this many rows."""

_SMALLEST_FIRST = ("Q6_K", "Q8_0", "F16")
_SOURCES = {"token_embd.weight": EMBEDDING, "output.weight": HEAD}


def embedding_types(
    checkpoint: Checkpoint, embedding: str, output: str, auto: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """GGUF name -> ggml's type of the embedding and, where it is a matrix of its own, the output; and notes.

    embedding, output -- what the user asked for
    auto -- what "auto" stands for where it fits the width, else what llama-quantize takes; None: the smallest of Q6_K,
            Q8_0 and F16 that fits the width and whose error on rows of the matrix is at most `LARGEST_ERROR`

    Raises `PackingError` where one tied matrix is asked to have two types, a type does not fit, or weights are not
    finite.
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
    chosen: dict[str, tuple[str, str | None]] = {}
    for name, kind in asked.items():
        if kind != "auto":
            chosen[name] = fitting_type(kind, width, name), None
        elif auto is not None:
            chosen[name] = fallen_back(auto, width, name)
        else:
            chosen[name] = _measured(checkpoint, name, width)
    return {name: kind for name, (kind, _) in chosen.items()}, [note for _, note in chosen.values() if note]


def _measured(checkpoint: Checkpoint, name: str, width: int) -> tuple[str, str | None]:
    """The smallest type that loses little of a matrix, and a note where it is not the smallest of all."""
    weights = checkpoint.tensor(_SOURCES[name])
    sample = weights[:: -(-len(weights) // SAMPLED_ROWS)]
    reasons = []
    for type in _SMALLEST_FIRST[:-1]:
        if width % (block := BLOCKS[type][0]):
            reasons.append(f"{type} needs a multiple of {block} columns, it has {width}")
            continue
        with naming(name):
            error = relative_error(sample, type)
        if error <= LARGEST_ERROR:
            break
        reasons.append(f"{type} would lose {error:.1%} of it")
    else:
        type = _SMALLEST_FIRST[-1]
    return type, f"{name} is {type}: {', '.join(reasons)}" if reasons else None


def fallen_back(type: str, columns: int, name: str) -> tuple[str, str | None]:
    """The type in which llama-quantize stores a matrix that should be of `type`, and a note where it is another."""
    found = type_that_fits(type, columns)
    if found == type:
        return type, None
    return found, f"{name} is {found}: {columns} columns, {type} needs a multiple of {BLOCKS[type][0]}"
