"""Write a checkpoint that was made from another: an ordinary Hugging Face folder, tensor by tensor, there as a whole or
not at all; and the texts beside a checkpoint's weights, from its folder, or made again where it is a GGUF."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsepack.errors import CheckpointError
from sparsepack.files.atomic import atomic_folder, write_json
from sparsepack.files.tensors import (
    INDEX,
    SHARD_BYTES,
    TensorEntry,
    all_finite,
    file_names,
    index_text,
    split,
    stored_type,
    type_name,
    write_tensors,
)
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.configuration import QUANTISED, segmented_config, stock_values
from sparsepack.models.checkpoint.converted import released_source
from sparsepack.models.checkpoint.delta_net import grouped_source
from sparsepack.models.checkpoint.experts import apart_source
from sparsepack.models.checkpoint.sources import changed_source
from sparsepack.models.families import TEXT_PARTS
from sparsepack.models.family import Family
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE_FILE, DEFAULT, template_setting, templates_of
from sparsepack.models.tokenizer.tokenizer import only_sentencepiece
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

    texts       -- the files that describe it, by name (`texts_of`)
    records     -- of what was done to it, JSON-able, by the names of their files
    shard_bytes -- of tensors in one file at most
    """
    family = checkpoint.family
    if family.has_row:
        source = grouped_source(apart_source(checkpoint.source, family), family, checkpoint.config)
    else:
        source = released_source(checkpoint.config, checkpoint.source, family)
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


CONFIG = "config.json"


def config_json(checkpoint: Checkpoint) -> str:
    """The content of the config.json that the family's stock model has; of whether the embedding is the output matrix
    it says what the tensors do, and of quantised ones the type that they are read in."""
    path = checkpoint.path / CONFIG
    if not path.is_file():
        return str(checkpoint.config.to_json_string())
    text = path.read_text(encoding="utf-8")
    values = json.loads(text)
    if values.get("model_type") in TEXT_PARTS:
        return str(checkpoint.config.to_json_string())
    stock = stock_values(values)[0]
    quantised = any(stock.get(key) for key in QUANTISED)
    stock = {key: value for key, value in stock.items() if key not in QUANTISED}
    if quantised:
        stock["torch_dtype" if "torch_dtype" in stock else "dtype"] = type_name(checkpoint.dtype)
    tied = stock.get("tie_word_embeddings", getattr(type(checkpoint.config)(), "tie_word_embeddings", None))
    if tied is not checkpoint.tied:
        stock["tie_word_embeddings"] = checkpoint.tied
    elif not checkpoint.bases and not quantised:
        return text
    return json.dumps(stock, indent=2, ensure_ascii=False)


_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE_FILE,
    "generation_config.json",
)
"""transformers reads these, where a folder has them, beside config.json and tokenizer.json."""


def texts_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The files that describe a model, by name: config.json, the tokenizer's, and what else there is. Raises as
    `tokenizer_config`."""
    config = config_json(checkpoint)
    if checkpoint.bases:
        config = segmented_config(config, checkpoint.bases)
    texts = {CONFIG: config, "tokenizer.json": checkpoint.tokenizer_json()}
    if checkpoint.path.is_dir() and not only_sentencepiece(checkpoint.path):
        beside = [checkpoint.path / name for name in _BESIDE]
        texts |= {path.name: path.read_text(encoding="utf-8") for path in beside if path.is_file()}
        templates = checkpoint.chat_templates
        if templates == templates_of(checkpoint.tokenizer_config):
            return texts
        if templates.keys() == {DEFAULT}:
            return texts | {CHAT_TEMPLATE_FILE: templates[DEFAULT]}
        texts.pop(CHAT_TEMPLATE_FILE, None)  # it would count alone
    of_tokenizer = json.dumps(tokenizer_config(checkpoint), indent=2, ensure_ascii=False)
    return texts | {"tokenizer_config.json": f"{of_tokenizer}\n"}


def tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tokenizer_config.json says, with the texts of the special tokens that the tokenizer has, and the model's
    chat templates from wherever it keeps them as `chat_template`. Raises as `Checkpoint.chat_templates`."""
    setting = template_setting(checkpoint.chat_templates)
    return {**checkpoint.tokenizer_config, **checkpoint.special_tokens, "chat_template": setting}


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The model's chat template, the default one of several; None where it brings none. Raises as
    `tokenizer_config`."""
    return checkpoint.chat_templates.get(DEFAULT)


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
