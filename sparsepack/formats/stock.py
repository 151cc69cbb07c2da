"""The stock transformers model that an artifact stands for: what its accuracy is measured on.

Whether the two descriptions of a model in an artifact agree: its stock configuration, by which accuracy is measured,
and the numbers that engines take.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.stored import shown
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.formats.packed import ExpertMlp, PackedModel
from sparsepack.models.activity import sparse_sites_of
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.config_files import config_of
from sparsepack.models.checkpoint.experts import as_shared
from sparsepack.models.family import HEAD, Family
from sparsepack.models.found import family_of_config
from sparsepack.models.hf_config import architecture_of, token_ids
from sparsepack.models.sites import Rules, SiteKey
from sparsepack.models.sparse_attention import SparseAttention
from sparsepack.models.tokenizer.chat import DEFAULT, TOOL_USE, template_setting
from sparsepack.models.tokenizer.tokenizer import check_tokenizer, wrapped

_SAME = {
    "model_type": "model_type",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "norm_eps",
    "hidden_act": "activation",
    "tie_word_embeddings": "tied",
    "max_position_embeddings": "named_context",
}
"""Keys of a configuration, and the fields of `Architecture` that repeat them."""

_TOKENS = ("bos", "eos")
"""An artifact's tokenizer and generation_config.json say more of these than a configuration does."""

_TOLERANCE = 1e-4
"""Releases of transformers may compute rotary frequencies with other roundings."""


def check_config(config_json: str, architecture: Architecture) -> None:
    """Raise ValueError where a configuration's text says another number, as far as that can be told without
    transformers."""
    values = json.loads(config_json)
    if not isinstance(values, dict):
        raise ValueError("config.json is no JSON object")
    family = architecture.row
    for key, name in _SAME.items():
        if key == "head_dim" and architecture.latent is not None:
            continue  # that of the part which turns
        own = family.fields.get(key, key)
        if key == "intermediate_size" and family.mlp_width is not None:
            continue
        _compare(own, values.get(own), getattr(architecture, name))


def check_architecture(found: Architecture, architecture: Architecture) -> None:
    """Raise ValueError where the numbers that a configuration means are others."""
    expected = asdict(architecture)
    for name, value in asdict(found).items():
        if name not in _TOKENS:
            _compare(name, value, expected[name])


def _compare(name: str, found: Any, expected: Any) -> None:
    if found is not None and not _equal(found, expected):
        raise ValueError(f"{name} is {str(found)[:60]} in config.json, {str(expected)[:60]} for engines")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        try:
            return math.isclose(one, other, rel_tol=_TOLERANCE)
        except (TypeError, OverflowError):
            return False
    return bool(one == other and type(one) is type(other))


@dataclass(frozen=True)
class StockModel:
    """What `models.hf_model.model.build_model` takes, and what runs beside it.

    config -- the stock transformers configuration
    tensor -- the logical weights by their Hugging Face names, decoded to float32 when asked for
    rules  -- of the sites; sparsity -- what they were made for; sparse_sites -- those that may be sparse
    inputs -- what the inputs of sites are quantised to, token by token, before they are multiplied
    attention -- which tokens decoded positions read; None: all
    bases -- the blocks before which the residual stream changes its basis
    of_levels -- of sites whose rules have levels, what `eval.scorer.OfLevels` says; None: no rules have
    """

    config: Any
    tensor: Callable[[str], Tensor]
    tokenizer: Any
    rules: Rules = field(default_factory=dict)
    sparsity: float = 0.0
    sparse_sites: Collection[Any] = ()
    inputs: Mapping[SiteKey, torch.dtype] = field(default_factory=dict)
    attention: SparseAttention | None = None
    bases: Collection[int] = ()
    of_levels: Callable[[int, str, int | None, torch.device], tuple[Sequence[Tensor], Sequence[int]]] | None = None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, by the configuration."""
        return tuple(token_ids(getattr(self.config, "eos_token_id", None)))

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def family(self) -> Family:
        """The model's family."""
        return family_of_config(self.config)


def stock_of(packed: PackedModel) -> StockModel:
    """The stock model of what an engine runs. Raises `ArtifactError` where its configuration is not understood."""
    config = stock_config(packed)
    sites, rules = sparse_sites_of(packed.manifest, packed.rules), packed.rules
    return StockModel(
        config,
        dequantised(packed),
        stock_tokenizer(packed),
        rules,
        packed.sparsity,
        sites,
        attention=packed.attention,
        bases=tuple(packed.bases),
        of_levels=partial(_of_levels, packed) if any(rule.of_levels for rule in rules.values()) else None,
    )


def _of_levels(
    packed: PackedModel, layer: int, site: str, expert: int | None, device: torch.device
) -> tuple[Sequence[Tensor], Sequence[int]]:
    mlp, matrix = packed.layers[layer].mlp, packed.layers[layer].matrices[site]
    lower = range(1, len(matrix.levels))
    if isinstance(matrix, PackedMatrix):
        here = matrix.to(device)
        return [decode_matrix(here, level) for level in lower], matrix.levels
    assert isinstance(mlp, ExpertMlp)
    assert expert is not None
    last = expert + 1 if expert < len(mlp.router) else matrix.experts
    each = [matrix.expert(number).to(device) for number in range(expert, last)]
    of_level = [torch.stack([decode_matrix(one, level) for one in each]) for level in lower]
    if expert < len(mlp.router):
        return [weights[0] for weights in of_level], matrix.levels
    parts = 1 + packed.architecture.family(layer).gated
    return [torch.cat(as_shared(site, weights, parts)) for weights in of_level], matrix.levels


def stock_config(packed: PackedModel) -> Any:
    """The stock transformers configuration of the model inside; `ArtifactError` where it is not understood."""
    try:
        config = config_of(json.loads(packed.config_json))
    except Exception as error:  # transformers checks fields in several ways, each with its own kind
        raise ArtifactError(
            f"config.json inside the artifact is not understood ({shown(error)}); pack it again"
        ) from error
    try:
        check_architecture(architecture_of(config, packed.architecture.bos), packed.architecture)
    except Exception as error:  # as above, of a configuration that no model can be made of
        raise ArtifactError(
            f"config.json inside the artifact means another model than its tensors are ({shown(error)}); pack it again"
        ) from error
    return config


def stock_tokenizer(packed: PackedModel) -> Any:
    """The tokenizer inside, as transformers wraps it."""
    from tokenizers import Tokenizer

    templates = {DEFAULT: packed.chat_template, TOOL_USE: packed.tool_template}
    setting = template_setting({name: text for name, text in templates.items() if text is not None})
    try:
        check_tokenizer(packed.tokenizer_json)
        special_tokens = packed.special_tokens or packed.named_tokens(Tokenizer.from_str(packed.tokenizer_json))
        return wrapped(packed.tokenizer_json, special_tokens, setting)
    except Exception as error:  # the libraries raise bare Exception
        raise ArtifactError(f"the artifact's tokenizer.json cannot be read ({shown(error)}); pack it again") from error


def dequantised(packed: PackedModel) -> Callable[[str], Tensor]:
    """The logical weights by their Hugging Face names, decoded to float32 when asked for.

    The function raises `ArtifactError` for a name that the model does not have.
    """
    family = packed.architecture.row
    makers: dict[str, Callable[[], Tensor]] = {
        family.embedding: lambda: decode_matrix(packed.embedding),
        HEAD: lambda: decode_matrix(packed.output),
        family.last_norm: lambda: packed.output_norm - family.norm_offset,
    }
    if (bias := packed.output_norm_bias) is not None:
        makers[family.last_norm_bias] = lambda: bias
    if (inputs := packed.per_layer) is not None and (own := family.per_layer) is not None:
        matrices = partial(decode_matrix, inputs.embedding), partial(decode_matrix, inputs.projection)
        for module, maker in zip(own.outside, (*matrices, partial(torch.clone, inputs.norm)), strict=True):
            makers[f"{family.backbone}.{module}.weight"] = maker
    for index, layer in enumerate(packed.layers):
        prefix = f"model.layers.{index}"
        names = packed.architecture.family(index)
        makers |= {f"{prefix}.{name}": maker for name, maker in layer.weights(names).items()}

    def tensor(name: str) -> Tensor:
        if name not in makers:
            raise ArtifactError(f"{name}: no such tensor in the artifact of {packed.manifest['model']['name']}")
        return makers[name]()

    return tensor
