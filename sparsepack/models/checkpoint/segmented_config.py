"""config.json of a checkpoint whose residual stream changes its basis before some blocks, so that it has segments.

    {
      "model_type": "sparsepack-segments",
      "hidden_size": 0,
      "family": "llama",                 the model type of the family
      "residual_basis": [4, 8],          blocks that have a tensor `model.layers.I.residual_basis.weight`
      "config": {...}                    what the family's config.json says, without its model type
    }

A stock model would leave these tensors out and compute something else. So no program but this one may take the folder
for the family's: transformers knows no such model type, and a class of its own that is told to load the folder all the
same finds no configuration in it (it looks for parts that have its model type) and a width of 0, with which none can be
built.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from sparsepack.files.stored import Count, Name, Stored, checked

SEGMENTS = "sparsepack-segments"
"""The model type of such a configuration."""


class _Segmented(Stored):
    family: Name
    residual_basis: Annotated[list[Count], Field(min_length=1)]
    config: dict[str, Any]


def segmented_config(config_json: str, bases: Sequence[int]) -> str:
    """The config.json of a checkpoint of segments.

    config_json -- the one that the family's stock model has
    bases       -- the blocks that have a residual basis
    """
    values = json.loads(config_json)
    family = values.pop("model_type")
    wrapped = {"model_type": SEGMENTS, "hidden_size": 0, "family": family}
    return f"{json.dumps({**wrapped, 'residual_basis': [*bases], 'config': values}, indent=2, ensure_ascii=False)}\n"


def segments_summary(bases: Sequence[int]) -> dict[str, Any] | None:
    """The blocks that have a residual basis, JSON-able and in words; None where there are none."""
    if not bases:
        return None
    blocks = f"block{'s' if len(bases) > 1 else ''} {', '.join(map(str, bases))}"
    return {"bases": [*bases], "in_words": f"the residual stream changes its basis before {blocks}"}


def stock_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What the family's config.json says, and the blocks that have a residual basis; none of an ordinary one.

    Raises ValueError where a configuration of segments is not understood.
    """
    if values.get("model_type") != SEGMENTS:
        return dict(values), ()
    read = checked(_Segmented, dict(values))
    bases = tuple(read.residual_basis)
    layers = read.config.get("num_hidden_layers")
    if sorted(set(bases)) != [*bases] or type(layers) is not int or bases[-1] >= layers:
        raise ValueError(f"residual_basis: {list(bases)[:10]} are not numbers of {str(layers)[:20]} blocks, ascending")
    return {"model_type": read.family, **read.config}, bases
