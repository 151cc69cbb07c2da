"""The stock transformers model that an artifact stands for: what its accuracy is measured on."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.codecs import neurons
from sparsepack.codecs.matrices import decode_matrix, zigzag_rows
from sparsepack.errors import ArtifactError
from sparsepack.files.stored import shown
from sparsepack.models.checkpoint import EMBEDDING, FINAL_NORM, HEAD
from sparsepack.models.families import FAMILIES, Family
from sparsepack.models.packed import PackedModel, PackedNeurons, PackedSite
from sparsepack.models.rule import Rules, SiteKey
from sparsepack.models.skipped import sparse_sites_of
from sparsepack.models.sparse_attention import SparseAttention
from sparsepack.models.tokenizer_check import check_tokenizer


@dataclass(frozen=True)
class StockModel:
    """What `models.whole.build_model` takes, and what runs beside it.

    config -- the stock transformers configuration
    tensor -- the logical weights by their Hugging Face names, decoded to float32 when asked for
    rules  -- of the sites; target_sparsity -- what they were made for; sparse_sites -- those that may be sparse
    inputs -- what the inputs of sites are quantised to, token by token, before they are multiplied
    attention -- which tokens decoded positions read; None: all
    """

    config: Any
    tensor: Callable[[str], Tensor]
    tokenizer: Any
    rules: Rules = field(default_factory=dict)
    target_sparsity: float = 0.0
    sparse_sites: Collection[Any] = ()
    inputs: Mapping[SiteKey, torch.dtype] = field(default_factory=dict)
    attention: SparseAttention | None = None

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def family(self) -> Family:
        """The model's family."""
        return FAMILIES[self.config.model_type]


def stock_of(packed: PackedModel) -> StockModel:
    """The stock model of what an engine runs. Raises `ArtifactError` where its configuration is not understood."""
    config = stock_config(packed)
    sites, rules = sparse_sites_of(packed.manifest, packed.rules), packed.rules
    return StockModel(
        config,
        dequantised(packed),
        stock_tokenizer(packed),
        rules,
        target_sparsity(packed),
        sites,
        attention=packed.attention,
    )


def target_sparsity(packed: PackedModel) -> float:
    """The sparsity that the rules were made for."""
    return float((packed.manifest.get("thresholds") or {}).get("sparsity", 0.0))


def stock_config(packed: PackedModel) -> Any:
    """The stock transformers configuration of the model inside; `ArtifactError` where it is not understood."""
    from transformers import AutoConfig

    try:
        values = json.loads(packed.config_json)
        config = AutoConfig.for_model(**values)
    except Exception as error:  # transformers checks fields in several ways, each with its own kind
        raise ArtifactError(
            f"config.json inside the artifact is not understood ({shown(error)}); pack it again"
        ) from error
    numbers, blocks = packed.architecture, getattr(config, "num_hidden_layers", None)
    if (config.model_type, blocks) != (numbers.model_type, numbers.layers):
        raise ArtifactError(
            f"config.json inside the artifact means {blocks} blocks of a {config.model_type} model, its tensors are "
            f"{numbers.layers} of a {numbers.model_type} model; pack it again"
        )
    return config


def stock_tokenizer(packed: PackedModel) -> Any:
    """The tokenizer inside, as transformers wraps it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    numbers = packed.architecture
    try:
        check_tokenizer(packed.tokenizer_json)
        backend = Tokenizer.from_str(packed.tokenizer_json)
        special = {"bos_token": numbers.bos, "eos_token": numbers.eos[0] if numbers.eos else None}
        words = {name: backend.id_to_token(id) for name, id in special.items() if id is not None}
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=packed.chat_template, **words)
    except Exception as error:  # the libraries raise bare Exception
        raise ArtifactError(f"the artifact's tokenizer.json cannot be read ({shown(error)}); pack it again") from error


def dequantised(packed: PackedModel) -> Callable[[str], Tensor]:
    """The logical weights by their Hugging Face names, decoded to float32 when asked for.

    The function raises `ArtifactError` for a name that the model does not have.
    """
    makers: dict[str, Callable[[], Tensor]] = {
        EMBEDDING: lambda: decode_matrix(packed.embedding),
        HEAD: lambda: decode_matrix(packed.output),
        FINAL_NORM: lambda: packed.output_norm,
    }
    family = FAMILIES[packed.architecture.model_type]
    for index, layer in enumerate(packed.layers):
        prefix = f"model.layers.{index}"
        for norm, module in family.norms.items():
            makers[f"{prefix}.{module}.weight"] = partial(_same, layer.norms[norm])
        for name, site in layer.sites.items():
            makers |= _site_makers(prefix, family.projections[name], site)
        if layer.neurons is not None:
            makers |= _neuron_makers(prefix, family, layer.neurons)

    def tensor(name: str) -> Tensor:
        if name not in makers:
            raise ArtifactError(f"{name}: no such tensor in the artifact of {packed.manifest['model']['name']}")
        return makers[name]()

    return tensor


def _neuron_makers(prefix: str, family: Family, packed: PackedNeurons) -> Mapping[str, Callable[[], Tensor]]:
    """The matrices of an MLP that is stored by neurons, these in the order of the model."""
    places = neurons.original_order(packed.order)
    (gate, up), (down,) = family.projections["mlp_in"], family.projections["mlp_mid"]
    makers = {
        gate: lambda: decode_matrix(packed.gate)[places],
        up: lambda: neurons.unpack(packed.records.blocks)[0][places],
        down: lambda: neurons.unpack(packed.records.blocks)[1][:, places],
    }
    return {f"{prefix}.{projection}.weight": maker for projection, maker in makers.items()}


def _same(value: Tensor) -> Tensor:
    return value


def _site_makers(prefix: str, projections: tuple[str, ...], site: PackedSite) -> Mapping[str, Callable[[], Tensor]]:
    makers: dict[str, Callable[[], Tensor]] = {}
    start = 0
    for projection, rows in zip(projections, site.parts, strict=True):
        stop = start + rows
        makers[f"{prefix}.{projection}.weight"] = partial(zigzag_rows, site.matrix, start, stop)
        if site.bias is not None:
            makers[f"{prefix}.{projection}.bias"] = partial(_same, site.bias[start:stop])
        start = stop
    return makers
