"""The whole stock transformers model, for work that needs the model's own output."""

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from sparsepack.models.architecture import multipliers
from sparsepack.models.checkpoint.checkpoint import HEAD, Checkpoint
from sparsepack.models.families import FAMILIES
from sparsepack.models.own_code import STOCK_ALONE
from sparsepack.models.stock.basis import add_basis
from sparsepack.models.stock.experts import ONE_BY_ONE
from sparsepack.models.stock.spread import Places, place_of, spread


def build_model(
    config: Any,
    tensor: Callable[[str], torch.Tensor],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bases: Collection[int] = (),
    places: Callable[[Any], Places | None] = lambda model: None,
) -> Any:
    """A stock causal language model with every parameter taken from `tensor(name)`, frozen, in eval mode.

    bases  -- the blocks before which the residual stream changes its basis
    places -- where the parts of the model go, which the function sees on the meta device; None: all to `device`
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        attention = FAMILIES[config.model_type].attention
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation=ONE_BY_ONE, dtype=dtype, **STOCK_ALONE
        )
    backbone = backbone_of(model)
    for layer in bases:
        add_basis(backbone.layers[layer], config.hidden_size)
    found = places(model)
    where = (lambda name: device) if found is None else partial(place_of, places=found)
    for name, _ in list(model.named_parameters()):
        if name == HEAD and config.tie_word_embeddings:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        value = tensor(name).to(where(name), dtype)
        setattr(module, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    first = model.get_input_embeddings().weight.device
    if (scale := multipliers(config).embedding) != 1:
        model.get_input_embeddings().embed_scale = torch.tensor(
            scale, device=model.get_input_embeddings().weight.device
        )
    family = FAMILIES[config.model_type]
    if family.divides_logits:
        # What enters the output matrix is scaled in place of what leaves it: whoever multiplies gets the logits.
        factor = multipliers(config).logits
        backbone.get_submodule(family.after[-1]).register_forward_hook(lambda _, __, output: output * factor)
        model.config = copy.deepcopy(model.config)
        setattr(model.config, family.divides_logits, 1.0)
    if family.rotary != "none":
        backbone.rotary_emb = type(backbone.rotary_emb)(config).to(first)
    if found is not None:
        spread(model, found)
    return model.eval()


def backbone_of(model: Any) -> Any:
    """The module with the decoder blocks, `layers`, of a stock causal language model or of its base model."""
    return model.base_model.get_submodule(FAMILIES[model.config.model_type].decoder)


def load_model(checkpoint: Checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The whole checkpoint as a stock transformers model on one device."""
    return build_model(checkpoint.config, checkpoint.tensor, device, dtype, checkpoint.bases)
