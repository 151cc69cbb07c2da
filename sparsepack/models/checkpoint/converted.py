"""Tensors of a checkpoint under the names of a stock model without a row, and back: the conversions that transformers
applies when it loads and saves a model, done here for one tensor or one block at a time."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch

from sparsepack.models.checkpoint.sources import MadeSource, TensorSource, entries_of
from sparsepack.models.family import Family
from sparsepack.models.found import meta_model
from sparsepack.progress import say


def found_source(config: Any, source: TensorSource, name: str) -> MadeSource:
    """A source with the names, and the joined experts, of the stock model of a configuration.

    name -- of the checkpoint, for messages. Tensors that the stock model leaves out by itself, such as those of MTP
    heads, are left out, too, and named on stderr.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    model = meta_model(config)
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    stored = entries_of(source)
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    pieces: dict[str, list[tuple[str, str]]] = {}  # of a converter's first tensor: its pattern, and the stored tensor
    alone: dict[str, str] = {}
    left_out = []
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for one in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(one, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and one in state:
            renamed, pattern = one, None
        if renamed not in state and any(each.search(one) for each in ignored):
            left_out.append(one)
        elif pattern is None or renamed not in state:
            alone[renamed], entries[renamed] = one, stored[one]
        else:
            pieces.setdefault(renamed, []).append((pattern, one))
    if left_out:
        say(f"note: {name}: {len(left_out)} tensors are left out, which the stock model does not read ({left_out[0]})")
    targets: dict[str, str] = {}
    for first, of_first in pieces.items():
        dtype = stored[of_first[0][1]][0]
        made = _converted(first, of_first, of_pattern, model, lambda one: torch.empty(stored[one][1], device="meta"))
        for target, value in made.items():
            targets[target], entries[target] = first, (dtype, tuple(value.shape))
    kept: dict[str, Mapping[str, torch.Tensor]] = {}

    def tensor(one: str) -> torch.Tensor:
        if one in alone:
            return source.tensor(alone[one])
        first = targets[one]
        if first not in kept:
            kept.clear()
            kept[first] = _converted(first, pieces[first], of_pattern, model, source.tensor)
        found = kept[first][one]
        if len(kept[first]) == 1:
            kept.clear()
        return found.contiguous()

    return MadeSource(source, entries, tensor)


def _converted(first: str, pieces: Any, of_pattern: Mapping[str, Any], model: Any, read: Any) -> dict[str, Any]:
    """What a converter makes of its pieces, by the stock model's names."""
    converter = copy.deepcopy(of_pattern[pieces[0][0]])
    for pattern, one in pieces:
        converter.add_tensor(first, one, pattern, read(one))
    made = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def released_source(config: Any, source: TensorSource, family: Family) -> MadeSource:
    """The inverse of `found_source`: a source as transformers saves such a model. One block is in memory at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    model = meta_model(config)
    stored = entries_of(source)
    begins = family.block("")
    groups: dict[str, list[str]] = {}
    for name in stored:
        number = name.removeprefix(begins).partition(".")[0] if name.startswith(begins) else ""
        groups.setdefault(f"{begins}{number}" if number else name, []).append(name)
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    group_of: dict[str, str] = {}
    for group, names in groups.items():
        empty = {name: torch.empty(stored[name][1], dtype=stored[name][0], device="meta") for name in names}
        for name, value in revert_weight_conversion(model, empty).items():
            entries[name], group_of[name] = (value.dtype, tuple(value.shape)), group
    kept: dict[str, Mapping[str, torch.Tensor]] = {}

    def tensor(name: str) -> torch.Tensor:
        group = group_of[name]
        if group not in kept:
            kept.clear()
            kept[group] = revert_weight_conversion(model, {one: source.tensor(one) for one in groups[group]})
        return kept[group][name].contiguous()

    return MadeSource(source, entries, tensor)
