"""A checkpoint with some of its matrices trained, in the type in which it is stored."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from sparsepack.errors import CheckpointError
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import segmented_config
from sparsepack.models.checkpoint.rotated import stored_type
from sparsepack.models.checkpoint.source_files import CONFIG, config_json, texts_of
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.precision import type_name


def distilled(
    checkpoint: Checkpoint, merged: Mapping[str, Callable[[Tensor], Tensor]], weights: str = "auto"
) -> Checkpoint:
    """The checkpoint with trained tensors; they are made as they are read. Its hash is that of the checkpoint itself.

    merged  -- by name, what makes a trained tensor of the one that it was, float64 both
    weights -- the type in which tensors are stored, as `stored_type` has it

    Reading raises `CheckpointError` for what `weights` cannot hold.
    """
    source = checkpoint.source
    types = {name: stored_type(weights, source.dtypes[name]) for name in source.shapes}

    def tensor(name: str) -> Tensor:
        own = checkpoint.tensor(name)
        made = (merged[name](own.double()) if name in merged else own).to(types[name])
        if not all_finite(made):
            raise CheckpointError(
                f"{checkpoint.name}: {name} has values that {type_name(types[name])} cannot hold once it is trained; "
                "store it in float32"
            )
        return made

    config = copy.deepcopy(checkpoint.config)
    config.dtype = stored_type(weights, checkpoint.dtype)
    entries = {name: (types[name], shape) for name, shape in source.shapes.items()}
    return replace(checkpoint, config=config, source=changed_source(source, tensor, entries))


def texts_of_distilled(checkpoint: Checkpoint, made: Checkpoint) -> dict[str, str]:
    """The files that describe `made` of a checkpoint, by name: its own, with the type of the weights."""
    config = json.loads(config_json(checkpoint))
    dtype = "torch_dtype" if "torch_dtype" in config else "dtype"  # its name in files of older programs
    text = json.dumps({**config, dtype: type_name(made.dtype)}, indent=2, ensure_ascii=False) + "\n"
    return {**texts_of(checkpoint), CONFIG: segmented_config(text, made.bases) if made.bases else text}
