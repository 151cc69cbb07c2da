"""Tensors in several safetensors files with an index, named as Hugging Face names them; in one file where they fit."""

import json
from collections.abc import Mapping, Sequence

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
"""A file holds at most this many bytes of tensors: a system lets one thread write to a file at a time, and one thread
hashes the file; files of this size are enough to keep a machine's threads from waiting for each other."""


def split(sizes: Sequence[int], most: int = SHARD_BYTES) -> list[slice]:
    """Which of some pieces, in their order, lie in each file: at most `most` bytes; a larger piece has one of its
    own."""
    starts, held = [0], 0
    for number, size in enumerate(sizes):
        if number > starts[-1] and held + size > most:
            starts.append(number)
            held = 0
        held += size
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def file_names(count: int) -> list[str]:
    """The names of `count` files that together hold a model's tensors."""
    return [WEIGHTS] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def index_text(file_of: Mapping[str, str], nbytes: int) -> str:
    """The index, as JSON, by which other programs find the file that holds a tensor.

    file_of -- the name of each tensor's file
    nbytes  -- how many bytes all tensors take
    """
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def check_index(text: str, file_of: Mapping[str, str]) -> None:
    """Raise ValueError unless an index names the file of each tensor, `file_of`, and no other tensor."""
    weight_map = json.loads(text)["weight_map"]
    for name in {**file_of, **weight_map}:
        said, found = weight_map.get(name), file_of.get(name)
        if said != found:
            raise ValueError(
                f"{INDEX} has {name[:60]} in {str(said)[:60] if said else 'no file'}, it is in {found or 'none'}"
            )
