"""Whether stock transformers computes the model that a checkpoint holds, from every tensor of it and no other."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from sparsepack.errors import CheckpointError
from sparsepack.files.stored import shown
from sparsepack.models.families import FAMILIES
from sparsepack.models.stock.skeleton import parameter_shapes

_DERIVED = "rotary_emb.inv_freq"  # old exports carry the rotary frequencies; transformers computes them


def check_stock_model(
    config: Any,
    found: Mapping[str, tuple[int, ...]],
    bases: Collection[int],
    name: str,
) -> None:
    """Raise `CheckpointError` unless every tensor has its place in the stock model, in its shape, and every place its
    tensor.

    found -- name and shape of every tensor of the checkpoint
    bases -- the blocks that have a residual basis
    """
    _check_activation(config, name)
    try:
        expected = parameter_shapes(config, bases)
    except Exception as error:  # transformers' own code, on numbers that it did not check
        raise CheckpointError(f"{name}: its configuration is not understood ({shown(error)})") from error
    unknown = sorted(n for n in found if n not in expected and not n.endswith(_DERIVED))
    if unknown:
        _check_blocks(config, unknown, name)
        raise CheckpointError(
            f"{name}: the tensor {unknown[0]} is not understood in a {config.model_type} model "
            f"of this configuration ({len(unknown)} such tensors); packing it would lose it"
        )
    missing = sorted(set(expected) - set(found))
    if missing:
        raise CheckpointError(f"{name}: the tensor {missing[0]} is missing ({len(missing)} in all)")
    for tensor, shape in expected.items():
        if found[tensor] != shape:
            raise CheckpointError(
                f"{name}: {tensor} is {list(found[tensor])}, its configuration means {list(shape)}; "
                "weights and config.json do not belong together"
            )


def _check_blocks(config: Any, unknown: Collection[str], name: str) -> None:
    """Raise `CheckpointError` where one of the tensors without a place is of a block behind the last one."""
    number = re.compile(re.escape(FAMILIES[config.model_type].block("")) + r"(\d{1,9})\.")
    blocks = {int(found[1]): tensor for tensor in sorted(unknown, reverse=True) if (found := number.match(tensor))}
    last, count = max(blocks, default=-1), config.num_hidden_layers
    if last >= count:
        raise CheckpointError(
            f"{name}: the tensor {blocks[last]} is there, its configuration means {count} block{'s' * (count > 1)} "
            "(num_hidden_layers), of which the first one is 0; weights and config.json do not belong together"
        )


def _check_activation(config: Any, name: str) -> None:
    """Models with an activation of their own bring code for it, which is not run."""
    from transformers.activations import ACT2FN

    activation = str(FAMILIES[config.model_type].setting(config, "hidden_act"))
    if activation not in ACT2FN:
        raise CheckpointError(
            f"{name}: activation {activation[:60]!r} is not one of transformers' own, and code that comes with a "
            "model is not run; expected a model that stock transformers computes"
        )
