"""The Hugging Face model of a configuration: what one decoder block is, which parameters a checkpoint must hold, and
the whole model with its weights, on one device or spread over several GPUs."""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sparsepack.errors import CheckpointError, UserError, requires_extra
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint.config_files import STOCK_ALONE
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import BASIS, HEAD, Family
from sparsepack.models.found import family_of_config, meta_model
from sparsepack.models.hf_config import kv_sources, multipliers
from sparsepack.models.hf_model.hooks import ONE_BY_ONE, order_parameters
from sparsepack.progress import say
from sparsepack.workers.launch import several


class BlockSource(Protocol):
    """A model whose tensors are read one at a time: a checkpoint, or what an artifact stands for."""

    @property
    def config(self) -> Any:
        """The stock transformers configuration."""

    @property
    def family(self) -> Family: ...

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""

    @property
    def bases(self) -> Collection[int]:
        """The blocks before which the residual stream changes its basis."""

    @property
    def tensor(self) -> Callable[[str], torch.Tensor]:
        """One tensor by its Hugging Face name, on the CPU."""


def single_layer(config: Any, layer: int = 0) -> Any:
    """A copy of a stock configuration that is left with the one decoder block `layer`."""
    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    family = FAMILIES[config.model_type]
    for name in ("layer_types", family.rope_layers):
        if name and (kinds := getattr(config, name, None)):
            setattr(single, name, [kinds[layer]])
    if family.dense_mlps is not None and not family.mlp_kinds:
        setattr(single, family.dense_mlps.key, family.dense_mlps.setting(layer in family.of(config).dense_layers))
    if (shared := family.row(config).shared_kv) is not None:
        kind = layer_kind(config, layer)["kv"]
        setattr(single, shared.count, int(kind == "read"))
        if kind == "read":  # which stands behind one that has its own
            single.num_hidden_layers = 2
            single.layer_types *= 2
    if family.global_heads:
        of_layer = config.per_layer_config[layer]
        heads = {name: getattr(of_layer, name) for name in ("head_dim", "num_key_value_heads")}
        single.per_layer_config = dict.fromkeys(range(single.num_hidden_layers), heads)
    for name in (family.scales_input, family.divides_logits):
        if name:
            setattr(single, name, 1.0)
    return single


def layer_kind(config: Any, layer: int) -> dict[str, Any]:
    """What a stock configuration says of a layer alone: the fields of lists, and their values there."""
    family = FAMILIES[config.model_type]
    fields = ("layer_types", family.rope_layers)
    dense: dict[str, Any] = {} if family.dense_mlps is None else {"dense": layer in family.of(config).dense_layers}
    if family.row(config).shared_kv is not None:
        own = config.num_hidden_layers - len(sources := kv_sources(config))
        dense["kv"] = "read" if layer >= own else "given" if layer in sources else "own"
    return dense | {name: kinds[layer] for name in fields if name and (kinds := getattr(config, name, None))}


def keep_block(backbone: Any, config: Any, kind: Mapping[str, Any]) -> None:
    """Leave a stock backbone of `single_layer` that block alone, and let it take what else it is given as it is.

    kind -- of the layer, as `layer_kind` has it
    """
    backbone.layers = backbone.layers[-1:]
    if kind.get("kv") == "given":
        backbone.layers[0].self_attn.store_full_length_kv = True
    names = FAMILIES[config.model_type].row(config).per_layer
    if names is not None and names.of(config):
        backbone.project_per_layer_inputs = lambda _, inputs: inputs


def parameter_shapes(config: Any, bases: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the stock causal language model of a family that we know; of two tied ones,
    the first.

    bases -- blocks that also have a residual basis (`models.hf_model.model`)
    """
    from transformers import AutoModelForCausalLM

    family = family_of_config(config)
    if not family.has_row or family.shared_kv is not None or family.per_layer is not None:
        state = {name: tuple(value.shape) for name, value in meta_model(config).state_dict().items()}
        return {name: shape for name, shape in state.items() if name != family.head or not config.tie_word_embeddings}
    shapes: dict[str, tuple[int, ...]] = {}
    alike: dict[Any, list[int]] = {}  # layers, by their kinds
    for layer in range(config.num_hidden_layers):
        alike.setdefault(tuple(layer_kind(config, layer).values()), []).append(layer)
    for layers in alike.values():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(single_layer(config, layers[0]), **STOCK_ALONE)
        order_parameters(backbone_of(model).layers, family)
        for name, parameter in placed_in(model):
            within = name.removeprefix(f"{family.block(0)}.")
            of_layers = [f"{family.block(layer)}.{within}" for layer in layers if within != name]
            shapes |= dict.fromkeys(of_layers or [name], tuple(parameter.shape))
    return shapes | {family.basis(layer): (config.hidden_size, config.hidden_size) for layer in bases}


def placed_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name every tensor of a stock model that a checkpoint has: parameters, of two tied ones the first, and buffers
    that are not computed."""
    yield from model.named_parameters()
    stored = model.state_dict(keep_vars=True)
    yield from ((name, value) for name, value in model.named_buffers() if name in stored)


def add_basis(block: nn.Module, hidden: int) -> None:
    """Let a stock decoder block begin with h' = h W^T, W [hidden, hidden] the weight of its module `BASIS`, which is
    without memory until it is loaded."""
    block.add_module(BASIS, nn.Linear(hidden, hidden, bias=False, device="meta"))
    block.register_forward_pre_hook(_change)


def _change(block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    hidden, *more = inputs
    return block.get_submodule(BASIS)(hidden), *more


ROOM = 0.8
"""A model takes at most this share of a GPU's free memory; the rest is for what it computes."""

Places = Mapping[str, int | str]
"""The device of each module, by its name or by that of one that it is in: what accelerate calls a device map."""


def places_of(model: Any, device: str, dtype: torch.dtype) -> Places | None:
    """Say where each part of a model goes that does not fit on `device`, a GPU; None: all of it goes to `device`.

    model -- a stock model on the meta device
    device -- "cuda" stands for all GPUs; another is that device alone

    Raises `UserError` for a model that all GPUs together cannot hold, and where this process is one of several workers,
    each of which has one GPU.
    """
    if not device.startswith("cuda"):
        return None
    free = _free()
    own = torch.device(device).index or 0
    need = sum(value.numel() for value in model.parameters()) * dtype.itemsize  # a tied matrix is counted once
    if need <= free[own] * (1 if several() else ROOM):
        return None
    if several():
        raise UserError(
            f"{_size(need)} in {_name(dtype)} do not fit on {device}, which has {_size(free[own])} free, and each "
            "worker holds the whole model; run it in one process with --device cuda, which spreads it over all GPUs"
        )
    if device != "cuda" or len(free) == 1:
        return None  # what the allocator has to say of it is known
    places = _places(model, free, dtype)
    cards = sorted({place for place in places.values() if isinstance(place, int)})
    if any(not isinstance(place, int) for place in places.values()):
        raise UserError(
            f"{_size(need)} in {_name(dtype)} do not fit on {len(free)} GPUs, which have {_size(sum(free.values()))} "
            "free; end what else uses them, or use --device cpu, which reads texts' windows block by block"
        )
    say(
        f"note: {_size(need)} in {_name(dtype)} are more than one GPU has room for: spread over {len(cards)} GPUs by "
        "accelerate's device map, which take turns"
    )
    return places


def place_of(name: str, places: Places) -> int | str:
    """The device of a parameter or module."""
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def spread(model: Any, places: Places) -> None:
    """Let each part of a model compute where it is placed, and take what it is given there."""
    with requires_extra("cuda", "a model on several GPUs"):
        from accelerate import dispatch_model

    dispatch_model(model, dict(places), force_hooks=True)


def _free() -> dict[int, int]:
    """The free memory of each GPU, in bytes."""
    return {number: torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}


def _places(model: Any, free: Mapping[int, int], dtype: torch.dtype) -> dict[str, int | str]:
    with requires_extra("cuda", "a model on several GPUs"):
        from accelerate import infer_auto_device_map

    most = {number: int(ROOM * nbytes) for number, nbytes in free.items()}
    whole = sorted(model._no_split_modules or ())
    found: dict[str, int | str] = infer_auto_device_map(model, most, no_split_module_classes=whole, dtype=dtype)
    return found


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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

    config = copy.deepcopy(config)  # transformers writes into it what it computes in
    with torch.device("meta"):
        attention = FAMILIES[config.model_type].attention
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation=ONE_BY_ONE, dtype=dtype, **STOCK_ALONE
        )
    backbone = backbone_of(model)
    order_parameters(backbone.layers, FAMILIES[config.model_type])
    for layer in bases:
        add_basis(backbone.layers[layer], config.hidden_size)
    found = places(model)
    where = (lambda name: device) if found is None else partial(place_of, places=found)
    for name, place in list(placed_in(model)):
        if name == HEAD and config.tie_word_embeddings:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        parameter = isinstance(place, nn.Parameter)
        value = tensor(name).to(where(name), dtype if parameter else place.dtype)
        of_kind = nn.Parameter(value, requires_grad=False) if parameter else value
        setattr(module, name.rpartition(".")[2], of_kind)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    first = model.get_input_embeddings().weight.device
    if (scale := multipliers(config).embedding) != 1:
        model.get_input_embeddings().embed_scale = torch.tensor(
            scale, device=model.get_input_embeddings().weight.device
        )
    family = FAMILIES[config.model_type]
    if (names := family.per_layer) is not None and (width := names.of(config)):
        table = backbone.get_submodule(names.embedding)
        table.embed_scale = torch.tensor(width**0.5, device=table.weight.device)
    if family.divides_logits:
        # What enters the output matrix is scaled in place of what leaves it: whoever multiplies gets the logits.
        factor = multipliers(config).logits
        backbone.get_submodule(family.after[-1]).register_forward_hook(lambda _, __, output: output * factor)
        model.config = copy.deepcopy(model.config)
        setattr(model.config, family.divides_logits, 1.0)
        if hasattr(model, family.divides_logits):  # some models read it once
            setattr(model, family.divides_logits, 1.0)
    if (rotary := getattr(backbone, family.rotary_module, None)) is not None:
        setattr(backbone, family.rotary_module, type(rotary)(config).to(first))
    if found is not None:
        spread(model, found)
    return model.eval()


def backbone_of(model: Any) -> Any:
    """The module with the decoder blocks, `layers`, of a stock causal language model or of its base model."""
    return model.base_model.get_submodule(FAMILIES[model.config.model_type].decoder)


def load_model(source: BlockSource, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The whole of a model as a Hugging Face model on one device."""
    return build_model(source.config, source.tensor, device, dtype, source.bases)


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
        raise CheckpointError(
            f"{name}: the tensor {missing[0]} is missing ({len(missing)} in all), which its configuration means; "
            "download the weights again, or the config.json that belongs to them"
        )
    for tensor, shape in expected.items():
        if found[tensor] != shape:
            raise CheckpointError(
                f"{name}: {tensor} is {list(found[tensor])}, its configuration means {list(shape)}; "
                "weights and config.json do not belong together"
            )


def _check_blocks(config: Any, unknown: Collection[str], name: str) -> None:
    """Raise `CheckpointError` where one of the tensors without a place is of a block behind the last one."""
    number = re.compile(re.escape(family_of_config(config).block("")) + r"(\d{1,9})\.")
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

    family = family_of_config(config)
    if family.activation or not family.has_row:
        return
    activation = str(family.setting(config, "hidden_act"))
    if activation not in ACT2FN:
        raise CheckpointError(
            f"{name}: activation {activation[:60]!r} is not one of transformers' own, and code that comes with a "
            "model is not run; expected a model that stock transformers computes"
        )
