"""A packed model in memory: what an engine runs, from an artifact of any format that one can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsepack.codecs.matrices import PackedMatrix
from sparsepack.models.architecture import Architecture
from sparsepack.models.rule import Rules, SiteRule
from sparsepack.models.sparse_attention import SparseAttention

MLP_GATE, MLP_RECORDS = "mlp_gate", "mlp_records"
"""What stands in place of the sites mlp_in and mlp_mid where an MLP is stored by neurons."""


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
class PackedNeurons:
    """An MLP by neurons, stored by falling frequency; only what its activation makes exactly zero is skipped.

    gate      -- zigzag matrix [neurons, hidden]: who is active
    records   -- Q4_K by rows [neurons, 2 * hidden]: of each neuron its row of up and its column of down
    frequency -- float32 [neurons]: share of the calibration's tokens at which each was active
    order     -- int64 [neurons]: the model's number of each
    """

    gate: PackedMatrix
    records: PackedMatrix
    frequency: torch.Tensor
    order: torch.Tensor


@dataclass(frozen=True)
class PackedLayer:
    """One decoder block: its sites, its norms (attn_norm, mlp_norm, q_norm, k_norm) as float32, and, where its MLP is
    stored by neurons, these in place of the sites mlp_in and mlp_mid."""

    sites: Mapping[str, PackedSite]
    norms: Mapping[str, torch.Tensor]
    neurons: PackedNeurons | None = None

    @property
    def matrices(self) -> dict[str, PackedMatrix]:
        """All of the block, each under the name by which what of it was read is counted."""
        found = {name: site.matrix for name, site in self.sites.items()}
        if self.neurons is not None:
            found |= {MLP_GATE: self.neurons.gate, MLP_RECORDS: self.neurons.records}
        return found

    @property
    def units(self) -> dict[str, int]:
        """Of each of `matrices`, how many pieces there are that may be left out: columns, or records."""
        return {name: m.rows if name == MLP_RECORDS else m.columns for name, m in self.matrices.items()}


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

    @property
    def by_neurons(self) -> bool:
        """Whether its MLPs are stored by neurons."""
        return any(layer.neurons is not None for layer in self.layers)
