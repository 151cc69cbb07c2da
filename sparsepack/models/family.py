"""What a model family is: the sites, projections, norms and tensors of a model and of each of its blocks.

Each family is a file (`models/llama.py`), whose rows `models/families.py` collects; what a row may say is in
`models/family_fields.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from sparsepack.models.family_fields import FamilyFields
from sparsepack.models.parts import (
    LATENT_NORMS,
    LATENT_QUERIES,
    NORMS,
    DeltaNetNames,
    Experts,
    MambaNames,
    ShortConvNames,
)

SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
"""A site is where one hidden vector enters one or more projections of a decoder block; the sites stand in order of
execution."""

ATTENTION_SITES, MLP_SITES = SITES[:2], SITES[2:]
LATENT_SITES = ("attn_q_b", "attn_kv_b")
"""The sites between these of attention by latents (`blocks.Latent`), which stand before attn_out."""
ALL_SITES = (SITES[0], *LATENT_SITES, *SITES[1:])
"""Every site that a block of some family has, in order of execution."""

BASIS = "residual_basis"
"""The module of a decoder block that changes the basis of the residual stream before anything else in it: h' = h W^T.
No Hugging Face model has such a module (`hf_model.model.add_basis`)."""

ATTN_OUT = "attn_out"
"""The site whose channels are those of the attention heads' outputs, head by head."""
MLP_MID = "mlp_mid"
"""The site whose channels are the neurons of the MLP."""


@dataclass(frozen=True)
class Family(FamilyFields):
    """A model family: its row, and what follows from it for a model, its blocks and their tensors.

    mixture      -- the row of models of its `model_type` that have experts; None: all models are of this row
    layer_kinds  -- where there are `mlp_kinds`, the type of each block in a configuration's model, which `of` fills in
    dense_layers -- the numbers of blocks of `dense_mlps` in a configuration's model, which `of` fills in
    """

    mixture: "Family | None" = None
    layer_kinds: tuple[str, ...] = ()
    dense_layers: tuple[int, ...] = ()

    def row(self, config: Any) -> "Family":
        """The row of a stock configuration of its `model_type`."""
        return self.mixture if self.mixture is not None and getattr(config, self.mixes, False) else self

    def of(self, config: Any) -> "Family":
        """The names in the model of a stock configuration, as far as these depend on it."""
        family = self.row(config)
        family = family.plain_queries if self.latent and config.q_lora_rank is None else family
        layers, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
        if self.predicts and more:
            behind = {f"{self.block(layer)}.": self.predicts for layer in range(layers, layers + more)}
            family = replace(family, left_out=MappingProxyType({**self.left_out, **behind}))
        if self.per_layer is not None and self.per_layer.of(config):
            family = replace(family, gguf=None)
        if self.shared_kv is not None and (sources := self.shared_kv.sources(config)):
            shared = {
                f"{self.block(layer)}.self_attn.{name}": "keys and values of a block that reads another's"
                for layer in range(layers - len(sources), layers)
                for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
            }
            family = replace(family, gguf=None, left_out=MappingProxyType({**family.left_out, **shared}))
        if self.mamba is not None and self.residual is not None and self.mamba.kind in config.layer_types:
            family = replace(
                family, gguf=None, residual=None, unrotatable="state-space models stand between its matrices"
            )
        if self.dense_mlps is None:
            return family
        family = replace(family, dense_layers=self.dense_mlps.layers(config))
        if not self.mlp_kinds:
            return family
        family = replace(family, layer_kinds=tuple(config.layer_types))
        mixtures = {*self.mlp_kinds} - {self.dense_mlps.kind}
        return family if mixtures & {*family.layer_kinds} else family.dense_block

    @cached_property
    def plain_queries(self) -> "Family":
        """The names of a model with latents of keys and values alone."""
        projections = {site: names for site, names in self.projections.items() if site != LATENT_SITES[0]}
        norms = {name: module for name, module in self.norms.items() if name != LATENT_NORMS[0]}
        into = (LATENT_QUERIES, *projections["attn_in"][1:])
        return replace(
            self, projections=MappingProxyType({**projections, "attn_in": into}), norms=MappingProxyType(norms)
        )

    @cached_property
    def dense_block(self) -> "Family":
        """The names of a block whose MLP has no experts."""
        if self.dense_mlps is None:
            raise ValueError(f"{self.model_type} models have no blocks of their own with a dense MLP")
        projections = MappingProxyType({**self.projections, **self.dense_mlps.projections})
        return replace(self, projections=projections, experts=None, dense_mlps=None, dense_layers=())

    @cached_property
    def of_kinds(self) -> Mapping[str, "Family"]:
        """The names of a block of each type, in a family whose blocks are a mixer or an MLP alone."""
        one = replace(self, layer_kinds=(), mlp_kinds=(), dense_layers=())

        def part(of_mlp: bool) -> Family:
            sites = {site: names for site, names in self.projections.items() if (site in MLP_SITES) is of_mlp}
            norms = {name: module for name, module in self.norms.items() if (name == "mlp_norm") is of_mlp}
            return replace(one, projections=MappingProxyType(sites), norms=MappingProxyType(norms))

        mlp, mixer = part(True), replace(part(False), experts=None, dense_mlps=None)
        found = {"full_attention": mixer} | ({} if self.state is None else {self.state.kind: mixer.state_block})
        for kind in self.mlp_kinds:
            dense = self.dense_mlps is not None and kind == self.dense_mlps.kind
            found[kind] = mlp.dense_block if dense else mlp
        return MappingProxyType(found)

    @cached_property
    def expert_block(self) -> "Family":
        """The names of a block whose MLP has experts, whatever its number."""
        return replace(self, dense_mlps=None, dense_layers=())

    @property
    def state(self) -> DeltaNetNames | ShortConvNames | MambaNames | None:
        """The names of what some blocks have in place of attention."""
        return self.delta_net or self.short_conv or self.mamba

    @cached_property
    def state_block(self) -> "Family":
        """The names of a block that keeps a state in place of keys and values."""
        names = self.state
        if names is None:
            raise ValueError(f"{self.model_type} models have attention in every block")
        norms = {name: module for name, module in self.norms.items() if name in NORMS}
        return replace(
            self,
            projections=MappingProxyType({**self.projections, **names.projections}),
            norms=MappingProxyType(norms),
            reads_attn_in=tuple(names.gates.values()),
        )

    @cached_property
    def k_eq_v_block(self) -> "Family":
        """The names of a block whose values are its keys."""
        without = self.projections["attn_in"][:-1]
        return replace(self, projections=MappingProxyType({**self.projections, "attn_in": without}))

    @cached_property
    def shared_kv_block(self) -> "Family":
        """The names of a block that reads another's keys and values."""
        queries = self.projections["attn_in"][:1]
        norms = {name: module for name, module in self.norms.items() if name != "k_norm"}
        return replace(
            self,
            projections=MappingProxyType({**self.projections, "attn_in": queries}),
            norms=MappingProxyType(norms),
        )

    @property
    def kinds(self) -> tuple["Family", ...]:
        """The names of each kind of block that its models may have."""
        if self.mlp_kinds:
            return tuple(self.of_kinds.values())
        others = () if self.state is None else (self.state_block,)
        shared = () if self.shared_kv is None else (self.shared_kv_block,)
        return (self, *others, *((self.k_eq_v_block,) if self.k_eq_v else ()), *shared)

    def at(self, config: Any, layer: int) -> "Family":
        """The names of a block of a stock configuration's model."""
        family = self.of(config)
        if family.layer_kinds:
            return family.of_kinds[family.layer_kinds[layer]]
        if self.state is not None and config.layer_types[layer] == self.state.kind:
            family = family.state_block
        if layer in family.dense_layers:
            return family.dense_block
        if self.shared_kv is not None and layer >= config.num_hidden_layers - len(self.shared_kv.sources(config)):
            return family.shared_kv_block
        if self.k_eq_v and getattr(config, self.k_eq_v) and config.layer_types[layer] == "full_attention":
            return family.k_eq_v_block
        return family

    def of_block(self, block: Any) -> "Family":
        """The names of a stock decoder block."""
        if self.mixture is not None and self.mixture.experts and hasattr(block, self.mixture.experts.module):
            return self.mixture.of_block(block)
        if self.mlp_kinds:
            return self.of_kinds[getattr(block, self.block_kind)]
        if self.shared_kv is not None and not hasattr(block.self_attn, "k_proj"):
            return self.shared_kv_block
        if self.k_eq_v and block.self_attn.v_proj is None:
            return self.k_eq_v_block
        has_state = self.state is not None and getattr(block, self.state.module, None) is not None
        family = self.state_block if has_state else self
        if self.latent and getattr(block.self_attn, LATENT_QUERIES.rpartition(".")[2]) is not None:
            family = self.plain_queries
        if self.dense_mlps is None or self.experts is None:
            return family
        mlp, _, experts = self.experts.module.rpartition(".")
        return family.expert_block if hasattr(block.get_submodule(mlp), experts) else family.dense_block

    @property
    def qk_norm(self) -> Literal["heads", "rows"] | None:
        """How queries and keys are RMS-normalised before the rotary embedding, as `blocks.Attention` has it."""
        return "heads" if "q_norm" in self.norms else "rows" if "q_row_norm" in self.norms else None

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        into = self.projections["mlp_in"]
        if self.experts is not None:
            return self.experts.gated
        return len(into) > 1 or "gate" in into[0] or into[0] in self.split

    @property
    def has_row(self) -> bool:
        """Whether it is one of `families.FAMILIES`; the others are found in the stock model (`models.found`)."""
        return True

    @property
    def uniform(self) -> bool:
        """Whether every block has the sites `SITES`, beside which it may have others."""
        return self.has_row and not self.mlp_kinds

    def projections_of(self, layer: int) -> Mapping[str, tuple[str, ...]]:
        """The sites of a block, in order of execution, and the projections of each."""
        if self.layer_kinds:
            return self.of_kinds[self.layer_kinds[layer]].projections
        return self.dense_block.projections if layer in self.dense_layers else self.projections

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a block; None: its MLP is dense."""
        if self.layer_kinds:
            return self.of_kinds[self.layer_kinds[layer]].experts
        return None if layer in self.dense_layers else self.experts

    def readers(self, layer: int, site: str) -> tuple[str, ...]:
        """The modules of a block that are given what enters a site: its projections, or the module that has experts.
        What enters the down matrices of experts is given to no module."""
        experts = self.experts_of(layer)
        if experts is None or site not in MLP_SITES:
            return self.projections_of(layer)[site]
        if site == MLP_MID:
            return ()
        return (experts.module,)

    def of_experts(self, layer: int, site: str) -> bool:
        """Whether experts read a site of a block."""
        return self.experts_of(layer) is not None and site in MLP_SITES

    @property
    def head(self) -> str:
        """The name of the output matrix's tensor, where it is not the embedding."""
        return HEAD

    @property
    def last_norm(self) -> str:
        """The name of the last norm's tensor."""
        return f"{self.backbone}.{self.after[-1]}.weight"

    @property
    def last_norm_bias(self) -> str:
        """The name of that norm's bias, of a family that has `layer_norms`."""
        return f"{self.backbone}.{self.after[-1]}.bias"

    @property
    def decoder(self) -> str:
        """The module of the base model that is the backbone; empty where the base model is that itself."""
        return self.backbone.partition(".")[2]

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return f"{self.backbone}.{self.embedding_module}.weight"

    def block(self, layer: int | str) -> str:
        """The name of a decoder block; "" for what the names of all begin with."""
        return f"{self.backbone}.layers.{layer}"

    def weight(self, projection: str) -> str:
        """The name of a projection's tensor: what `projections` names is a module, but for experts, whose projections
        are parameters."""
        of_experts = self.experts is not None and projection in self.experts.parameters
        return projection if of_experts else f"{projection}.weight"

    def bias(self, projection: str) -> str:
        """The name of the tensor that would be a projection's bias."""
        of_experts = self.experts is not None and projection in self.experts.parameters
        return f"{projection}_bias" if of_experts else f"{projection}.bias"

    def routers(self, site: str) -> tuple[str, ...]:
        """The modules that read what enters a site beside its projections: what says which experts a token has, and how
        much of a shared one; or what makes the gates of a delta net."""
        if site == SITES[0]:
            return self.reads_attn_in
        if self.experts is None or site != MLP_SITES[0]:
            return ()
        shared = self.experts.shared
        return self.experts.router, *(() if shared is None or not shared.gate else (shared.gate,))

    def basis(self, layer: int) -> str:
        """The name of the tensor [hidden, hidden] that changes the basis of the residual stream before a block."""
        return f"{self.block(layer)}.{BASIS}.weight"

    def norm_offset_of(self, name: str) -> float:
        """What is added to a tensor before it multiplies: `norm_offset` for the weights of norms, else 0."""
        module = name.removesuffix(".weight")
        outside = tuple(f"{self.backbone}.{after}" for after in self.after)
        inside = tuple(f".{norm}" for norm in self.norms.values())
        return self.norm_offset if module in outside or module.endswith(inside) else 0.0

    def setting(self, config: Any, name: str) -> Any:
        """What a stock configuration of the family says under Llama's `name`; None where it says nothing."""
        if name == "intermediate_size" and self.mlp_width is not None:
            return self.mlp_width(config)
        return config_value(config, self.fields.get(name, name))


def config_value(config: Any, name: str) -> Any:
    """What a stock configuration says of a model; of most layers where some have another value. None: nothing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers', of a field that differs among layers
        return vars(config).get(name)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The names of the tensors outside of the blocks in packable families; the last one is the output matrix in all of
them."""
