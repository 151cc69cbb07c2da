"""A packed model in memory: what an engine runs, from an artifact of any format that one can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsepack.codecs.matrices import PackedMatrix
from sparsepack.models.architecture import Architecture
from sparsepack.models.rule import Rules, SiteRule
from sparsepack.models.sparse_attention import SparseAttention


@dataclass(frozen=True)
class PackedSite:
    """One site: its stacked matrix, the bias of its rows (float32 [rows] or None), its rule (None: always dense).

    parts -- output rows of each projection, in stacking order
    """

    matrix: PackedMatrix
    bias: torch.Tensor | None
    rule: SiteRule | None
    parts: tuple[int, ...]


@dataclass(frozen=True)
class PackedLayer:
    """One decoder block: its four sites, and its norms (attn_norm, mlp_norm, q_norm, k_norm) as float32."""

    sites: Mapping[str, PackedSite]
    norms: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PackedModel:
    """Everything that running a model needs. `output` is the embedding itself where the two are tied.

    attention     -- which tokens decoded positions read; None: all
    chat_template -- how a conversation becomes text (`models.chat.render_chat`); None: the model brings none
    """

    architecture: Architecture
    layers: tuple[PackedLayer, ...]
    embedding: PackedMatrix
    output_norm: torch.Tensor
    output: PackedMatrix
    config_json: str
    tokenizer_json: str
    manifest: Mapping[str, Any]
    chat_template: str | None = None
    attention: SparseAttention | None = None

    @property
    def rules(self) -> Rules:
        """The rules of the sites that have one."""
        sites = {(n, name): site for n, layer in enumerate(self.layers) for name, site in layer.sites.items()}
        return {key: site.rule for key, site in sites.items() if site.rule is not None}
