"""The stock model without its weights: what one decoder block is, and which parameters a checkpoint must hold."""

import copy
from collections.abc import Collection
from typing import Any

import torch

from sparsepack.models.families import FAMILIES
from sparsepack.models.own_code import STOCK_ALONE


def single_layer(config: Any, layer: int = 0) -> Any:
    """A copy of a stock configuration that is left with the one decoder block `layer`."""
    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    family = FAMILIES[config.model_type]
    for name, value in layer_kind(config, layer).items():
        setattr(single, name, [value])
    for name in (family.scales_input, family.divides_logits):
        if name:
            setattr(single, name, 1.0)
    return single


def layer_kind(config: Any, layer: int) -> dict[str, Any]:
    """What a stock configuration says of a layer alone: the fields of lists, and their values there."""
    fields = ("layer_types", FAMILIES[config.model_type].rope_layers)
    return {name: kinds[layer] for name in fields if name and (kinds := getattr(config, name, None))}


def parameter_shapes(config: Any, bases: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the stock causal language model of a family that we know; of two tied ones,
    the first.

    bases -- blocks that also have a residual basis (`models.stock.basis`)
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(single_layer(config), **STOCK_ALONE)
    shapes: dict[str, tuple[int, ...]] = {}
    family = FAMILIES[config.model_type]
    for name, parameter in model.named_parameters():
        within = name.removeprefix(f"{family.block(0)}.")
        layers = range(config.num_hidden_layers) if within != name else ()
        names = [f"{family.block(layer)}.{within}" for layer in layers] or [name]
        shapes |= dict.fromkeys(names, tuple(parameter.shape))
    return shapes | {family.basis(layer): (config.hidden_size, config.hidden_size) for layer in bases}
