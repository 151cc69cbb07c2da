"""The stock model without its weights: what one decoder block is, and which parameters a checkpoint must hold."""

import copy
import re
from typing import Any

import torch


def single_layer(config: Any, layer: int = 0) -> Any:
    """A copy of a stock configuration that is left with the one decoder block `layer`."""
    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    kinds = getattr(config, "layer_types", None)
    if kinds:
        single.layer_types = [kinds[layer]]
    return single


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the stock causal language model; of two tied ones, the first."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(single_layer(config))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        match = re.fullmatch(r"(model\.layers\.)0(\..*)", name)
        names = [f"{match[1]}{n}{match[2]}" for n in range(config.num_hidden_layers)] if match else [name]
        shapes |= dict.fromkeys(names, tuple(parameter.shape))
    return shapes
