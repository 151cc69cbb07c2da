"""The pruned checkpoint: an ordinary Hugging Face folder, written tensor by tensor, there as a whole or not at all."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from sparsepack.files.atomic import atomic_folder, write_json
from sparsepack.files.shards import INDEX, SHARD_BYTES, file_names, index_text, split
from sparsepack.files.tensors import TensorEntry, write_tensors
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.source_files import texts_of
from sparsepack.models.families import Family
from sparsepack.models.records.pruned import RECORD, Pruned
from sparsepack.progress import progress


def write_checkpoint(
    checkpoint: Checkpoint,
    block: Callable[[int], Mapping[str, Tensor]],
    made: Pruned,
    output: Path,
    overwrite: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint with some of its tensors changed.

    block       -- of each layer the tensors that changed, by their names within the block; one block is held at a time
    shard_bytes -- of tensors in one file at most
    """
    source = checkpoint.source
    # Block by block, so that each block's new tensors are read once.
    family = checkpoint.family
    names = sorted(source.shapes, key=lambda name: (_layer_of(family, name), name))
    entries = [TensorEntry(name, source.dtypes[name], source.shapes[name]) for name in names]
    held: dict[int, Mapping[str, Tensor]] = {}

    def tensor(name: str) -> Tensor:
        layer = _layer_of(family, name)
        if layer < 0:
            return source.tensor(name)
        if layer not in held:
            held.clear()
            held[layer] = block(layer)
        changed = held[layer].get(name.removeprefix(f"{family.block(layer)}."))
        return source.tensor(name) if changed is None else changed

    with atomic_folder(output, overwrite) as folder, progress("writing", len(names)) as advance:
        for name, text in texts_of(checkpoint).items():
            (folder / name).write_bytes(text.encode())
        parts = [entries[part] for part in split([entry.nbytes for entry in entries], shard_bytes)]
        files = dict(zip(file_names(len(parts)), parts, strict=True))
        for name, of_file in files.items():
            write_tensors(folder / name, of_file, tensor, advance)
        if len(files) > 1:
            file_of = {entry.name: name for name, of_file in files.items() for entry in of_file}
            (folder / INDEX).write_text(index_text(file_of, sum(entry.nbytes for entry in entries)))
        write_json(folder / RECORD, made.to_json())


def _layer_of(family: Family, name: str) -> int:
    """The decoder block of a tensor; -1 for the others."""
    within = name.removeprefix(family.block(""))
    return int(within.partition(".")[0]) if within != name else -1
