"""Write a checkpoint that was made from another: an ordinary Hugging Face folder, tensor by tensor, there as a whole or
not at all."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsepack.files.atomic import atomic_folder, write_json
from sparsepack.files.tensors import INDEX, SHARD_BYTES, TensorEntry, file_names, index_text, split, write_tensors
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.experts import apart_source
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.family import Family
from sparsepack.progress import progress


def write_checkpoint(
    checkpoint: Checkpoint,
    texts: Mapping[str, str],
    records: Mapping[str, Any],
    output: Path,
    overwrite: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint, its tensors as its source gives them, one at a time, those of a block one after the other;
    experts as most checkpoints have them.

    texts       -- the files that describe it, by name (`source_files.texts_of`)
    records     -- of what was done to it, JSON-able, by the names of their files
    shard_bytes -- of tensors in one file at most
    """
    family = checkpoint.family
    source = apart_source(checkpoint.source, family)
    names = sorted(source.shapes, key=lambda name: (_layer_of(family, name), name))
    entries = [TensorEntry(name, source.dtypes[name], source.shapes[name]) for name in names]
    with atomic_folder(output, overwrite) as folder, progress("writing", len(names)) as advance:
        for name, text in texts.items():
            (folder / name).write_bytes(text.encode())
        parts = [entries[part] for part in split([entry.nbytes for entry in entries], shard_bytes)]
        files = dict(zip(file_names(len(parts)), parts, strict=True))
        for name, of_file in files.items():
            write_tensors(folder / name, of_file, source.tensor, advance)
        if len(files) > 1:
            file_of = {entry.name: name for name, of_file in files.items() for entry in of_file}
            (folder / INDEX).write_text(index_text(file_of, sum(entry.nbytes for entry in entries)))
        for name, record in records.items():
            write_json(folder / name, record)


def made_of_blocks(checkpoint: Checkpoint, block: Callable[[int], Mapping[str, Tensor]]) -> Checkpoint:
    """A checkpoint with the tensors of its blocks that changed; one block's are held at a time.

    block -- of each layer the tensors that changed, by their names within the block
    """
    family = checkpoint.family
    held: dict[int, Mapping[str, Tensor]] = {}

    def changed(name: str) -> Tensor | None:
        layer = _layer_of(family, name)
        if layer < 0:
            return None
        if layer not in held:
            held.clear()
            held[layer] = block(layer)
        return held[layer].get(name.removeprefix(f"{family.block(layer)}."))

    return replace(checkpoint, source=changed_source(checkpoint.source, changed))


def _layer_of(family: Family, name: str) -> int:
    """The decoder block of a tensor; -1 for the others."""
    within = name.removeprefix(family.block(""))
    return int(within.partition(".")[0]) if within != name else -1
