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
    kinds = getattr(config, "layer_types", None)
    if kinds:
        single.layer_types = [kinds[layer]]
    return single


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
