"""A packed model in memory: what an engine runs, from an artifact of any format that one can run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import DENSE, EXPERTS, MLP_GATE, MLP_RECORDS, NEURONS, PLAIN_NEURONS, MlpKind
from sparsepack.formats.matrix import PackedExperts, PackedMatrix, decode_experts, decode_matrix, zigzag_rows
from sparsepack.formats.orders import neuron as neurons
from sparsepack.models.activity import Skipped, bits_read, shown, skipped, sparse_sites_of
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import Router
from sparsepack.models.checkpoint.experts import as_shared
from sparsepack.models.family import BASIS, Family
from sparsepack.models.parts import PerLayerNames
from sparsepack.models.sites import Rules, SiteKey, SiteRule
from sparsepack.models.sparse_attention import SparseAttention

Weights = Mapping[str, Callable[[], Tensor]]
"""By the names of their modules' tensors, what decodes them to float32."""


@dataclass(frozen=True)
class PackedSite:
    """One site: its stacked matrix, the bias of its rows (float32 [rows] or None), its rule (None: always dense).

    parts -- output rows of each projection, in stacking order
    """

    matrix: PackedMatrix
    bias: Tensor | None
    rule: SiteRule | None
    parts: tuple[int, ...]

    def weights(self, projections: Sequence[str]) -> Weights:
        """The weights and biases of the site's projections."""
        found: dict[str, Callable[[], Tensor]] = {}
        for projection, rows, stop in zip(projections, self.parts, accumulate(self.parts), strict=True):
            found[f"{projection}.weight"] = partial(zigzag_rows, self.matrix, stop - rows, stop)
            if self.bias is not None:
                found[f"{projection}.bias"] = partial(_same, self.bias[stop - rows : stop])
        return found


@dataclass(frozen=True)
class DenseMlp:
    """An MLP of the sites mlp_in (gate and up, stacked) and mlp_mid (down), whose rules say what a token skips. A block
    without an MLP has one without sites."""

    kind: ClassVar[MlpKind] = DENSE
    reached: ClassVar[float] = 1.0
    always: ClassVar[tuple[Tensor, ...]] = ()

    sites: Mapping[str, PackedSite]

    @property
    def gated(self) -> bool:
        """Whether mlp_in has a gate beside what is multiplied with it."""
        return bool(self.sites) and self.sites["mlp_in"].matrix.rows > self.sites["mlp_mid"].matrix.columns

    @property
    def matrices(self) -> Mapping[str, PackedMatrix]:
        """The MLP's part of `PackedLayer.matrices`."""
        return {name: site.matrix for name, site in self.sites.items()}

    @property
    def units(self) -> Mapping[str, int]:
        """The MLP's part of `PackedLayer.units`."""
        return {name: matrix.units for name, matrix in self.matrices.items()}

    def weights(self, family: Family) -> Weights:
        """The stock model's tensors of the MLP, decoded when asked for."""
        return _weights_of(self.sites, family.projections)


@dataclass(frozen=True)
class NeuronMlp:
    """An MLP by neurons, stored by falling frequency; only what its activation makes exactly zero is skipped.

    gate      -- zigzag matrix, or Q4_K by rows, [neurons, hidden]: who is active; without gates the rows of up
    records   -- Q4_K by rows [neurons, 2 * hidden]: of each neuron its row of up and its column of down; without gates
                 [neurons, hidden], the column alone
    frequency -- float32 [neurons]: share of the calibration's tokens at which each was active
    order     -- int64 [neurons]: the model's number of each
    """

    reached: ClassVar[float] = 1.0
    always: ClassVar[tuple[Tensor, ...]] = ()
    sites: ClassVar[Mapping[str, PackedSite]] = {}

    gate: PackedMatrix
    records: PackedMatrix
    frequency: Tensor
    order: Tensor

    @property
    def gated(self) -> bool:
        """Whether neurons have a gate beside their row of up."""
        return self.records.columns > self.gate.columns

    @property
    def kind(self) -> MlpKind:
        """How it is stored."""
        return NEURONS if self.gated else PLAIN_NEURONS

    @property
    def matrices(self) -> Mapping[str, PackedMatrix]:
        """The MLP's part of `PackedLayer.matrices`."""
        return {MLP_GATE: self.gate, MLP_RECORDS: self.records}

    @property
    def units(self) -> Mapping[str, int]:
        """The MLP's part of `PackedLayer.units`."""
        return {MLP_GATE: self.gate.columns, MLP_RECORDS: self.records.rows}

    def weights(self, family: Family) -> Weights:
        """The stock model's tensors of the MLP, the neurons in the model's order, decoded when asked for."""
        stored_at = neurons.original_order(self.order)
        into, (down,) = family.projections["mlp_in"], family.projections["mlp_mid"]

        def gates() -> Tensor:
            return decode_matrix(self.gate)[stored_at]

        def ups() -> Tensor:
            rows = neurons.unpack(self.records.blocks)[0]
            assert rows is not None
            return rows[stored_at]

        fused = len(into) == 1 and self.gated
        made = (lambda: torch.cat([gates(), ups()]),) if fused else (gates, ups)[: len(into)]
        found = {f"{name}.weight": weight for name, weight in zip(into, made, strict=True)}
        return found | {f"{down}.weight": lambda: neurons.unpack(self.records.blocks, self.gated)[1][:, stored_at]}


@dataclass(frozen=True)
class PackedExpertsSite:
    """A site of all experts of an MLP: their matrices, and the one rule that they share (None: always dense). At
    mlp_mid, where each has an input of its own, each has levels of its own.

    parts -- output rows of each projection of one expert, in stacking order
    bias  -- float32 [experts, rows] or None
    """

    matrix: PackedExperts
    rule: SiteRule | None
    parts: tuple[int, ...]
    bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertMlp:
    """An MLP that is a mixture of experts: mlp_in (gate and up of each, stacked) has one input and one list of active
    columns for all experts that a token has, mlp_mid (down) an input of each of them.

    router      -- float32 [experts, hidden]: the softmax of its products chooses
    used        -- experts that a token is given so
    normalised  -- whether their weights are made to add up to one
    shared_gate -- float32 [1, hidden], where each token has the experts too that the sites have after these: the
                   sigmoid of its product is the weight of them all; None: it is 1, where there are any
    router_bias -- float32 [experts], of the router; None: there is none
    routing     -- how the router chooses; None: by the softmax of its products
    correction  -- float32 [experts], added to scores to decide who is chosen; None: there is none
    scale       -- float32 [experts], by which the weights of the chosen ones are multiplied in the end; None: they are
                   not
    """

    kind: ClassVar[MlpKind] = EXPERTS

    router: Tensor
    used: int
    normalised: bool
    sites: Mapping[str, PackedExpertsSite]
    shared_gate: Tensor | None = None
    router_bias: Tensor | None = None
    routing: Router | None = None
    correction: Tensor | None = None
    scale: Tensor | None = None

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self.sites["mlp_in"].matrix.rows > self.sites["mlp_mid"].matrix.columns

    @property
    def shared(self) -> int:
        """Experts that each token has."""
        return self.sites["mlp_in"].matrix.experts - len(self.router)

    @property
    def of_token(self) -> int:
        """Experts that a token has, chosen or not."""
        return self.used + self.shared

    @property
    def matrices(self) -> Mapping[str, PackedExperts]:
        """The MLP's part of `PackedLayer.matrices`."""
        return {name: site.matrix for name, site in self.sites.items()}

    @property
    def units(self) -> Mapping[str, int]:
        """The MLP's part of `PackedLayer.units`: those of the experts that a token has."""
        return {name: self.of_token * matrix.units for name, matrix in self.matrices.items()}

    @property
    def reached(self) -> float:
        """The share of its matrices' weights that a token has to do with, were nothing skipped."""
        return self.of_token / (len(self.router) + self.shared)

    @property
    def always(self) -> tuple[Tensor, ...]:
        """What every token reads beside the matrices."""
        all = self.router, self.shared_gate, self.correction, self.scale
        return tuple(each for each in all if each is not None)

    def weights(self, family: Family) -> Weights:
        """The stock model's tensors of the MLP, decoded when asked for."""
        assert family.experts is not None
        count, found = len(self.router), {f"{family.experts.router}.weight": partial(_same, self.router)}
        if self.router_bias is not None:
            found[f"{family.experts.router}.bias"] = partial(_same, self.router_bias)
        if family.experts.routing is not None and self.correction is not None:
            found[family.experts.routing.correction] = partial(_same, self.correction)
        for name, site in self.sites.items():
            stored, *shared = map(family.weight, family.projections[name])
            found[stored] = partial(decode_experts, site.matrix, 0, count)
            if site.bias is not None:
                found[family.bias(family.projections[name][0])] = partial(_same, site.bias)
            for number, part in enumerate(shared):
                found[part] = partial(_of_shared, name, site.matrix, count, number, len(shared))
        if family.experts.own_norms is not None and self.scale is not None:
            found[family.experts.own_norms.experts] = partial(_same, self.scale)
        if family.experts.shared is not None and self.shared_gate is not None:
            found[f"{family.experts.shared.gate}.weight"] = partial(_same, self.shared_gate)
        return found


Mlp = DenseMlp | NeuronMlp | ExpertMlp


@dataclass(frozen=True)
class PackedPerLayer:
    """What a block adds in the end by an input of its own (`blocks.Block.per_layer`).

    gate, out -- [width, hidden] and [hidden, width], by rows
    norm      -- float32 [hidden], of what is added
    """

    gate: PackedMatrix
    out: PackedMatrix
    norm: Tensor

    def weights(self, names: PerLayerNames) -> Weights:
        """The tensors of the stock model's decoder block, decoded when asked for."""
        return {
            f"{names.gate}.weight": partial(decode_matrix, self.gate),
            f"{names.out}.weight": partial(decode_matrix, self.out),
            f"{names.out_norm}.weight": partial(_same, self.norm),
        }


@dataclass(frozen=True)
class PackedPerLayerInputs:
    """Where these inputs come from (`parts.PerLayerNames`).

    embedding  -- [vocabulary, layers * width], by rows
    projection -- [layers * width, hidden], by rows
    norm       -- float32 [width], of each layer's part of the product
    """

    embedding: PackedMatrix
    projection: PackedMatrix
    norm: Tensor

    @property
    def row_scale(self) -> float:
        """What rows of the table are multiplied by."""
        return float((len(self.norm) / 2) ** 0.5)

    @property
    def sum_norm(self) -> Tensor:
        """The norm, by which its part of the sum has the sum's scale."""
        scaled: Tensor = self.norm * 0.5**0.5
        return scaled

    def norm_eps(self, eps: float) -> float:
        """The epsilon of the norm of a product that is not divided by sqrt(hidden)."""
        return eps * self.projection.columns


@dataclass(frozen=True)
class PackedLayer:
    """One decoder block: the sites of its attention, the norms that it has (of attn_norm, mlp_norm, attn_post_norm,
    mlp_post_norm, attn_sub_norm, mlp_sub_norm, experts_norm, shared_norm, q_norm, k_norm, q_row_norm, k_row_norm,
    q_a_norm, kv_a_norm) as float32, and its MLP.
    Where norms are LayerNorm, there are their biases, too, as attn_norm_bias and mlp_norm_bias.

    basis -- [hidden, hidden], by rows: the hidden state is multiplied by it before anything else in the block; None:
             it stays in the basis that it has
    sinks -- float32 [heads]: of each query head a score for which nothing is added; None: there are none
    delta_net -- of a block that keeps a state in place of keys and values, whose sites are in `attention` all the same.
                 With a short convolution float32 short_conv [channels, taps]; with a gated delta net
                 float32 delta_beta and delta_alpha [value_heads, hidden], delta_conv [channels, taps], delta_a_log and
                 delta_dt_bias [value_heads], delta_norm [value_dim]; with a state-space model float32 mamba_conv
                 [channels, taps], mamba_conv_bias [channels], mamba_a_log, mamba_dt_bias and mamba_skip [heads],
                 mamba_norm [inner]; empty: it has attention, or no mixer
    scalar -- float32 [1], by which all that leaves the block is multiplied; None: it is not
    per_layer -- what it adds by an input of its own; None: it has none
    xielu -- float32 [4], what the MLP has learned of its xIELU, as `activations.xielu_coefficients` takes it; None: it
             has another function
    """

    attention: Mapping[str, PackedSite]
    norms: Mapping[str, Tensor]
    mlp: Mlp
    basis: PackedMatrix | None = None
    sinks: Tensor | None = None
    delta_net: Mapping[str, Tensor] = field(default_factory=dict)
    scalar: Tensor | None = None
    per_layer: PackedPerLayer | None = None
    xielu: Tensor | None = None

    @property
    def always(self) -> tuple[Tensor, ...]:
        """What every token reads beside the matrices and norms."""
        own = self.per_layer
        added = () if own is None else (own.gate.blocks, own.out.blocks, own.norm)
        return *self.delta_net.values(), *self.mlp.always, *added

    @property
    def sites(self) -> dict[str, PackedSite | PackedExpertsSite]:
        """All sites of the block."""
        return {**self.attention, **self.mlp.sites}

    @property
    def matrices(self) -> dict[str, PackedMatrix | PackedExperts]:
        """All matrices of the block, each by the name under which its columns or records that were read are counted."""
        return {**{name: site.matrix for name, site in self.attention.items()}, **self.mlp.matrices}

    @property
    def reached(self) -> dict[str, float]:
        """For each of `matrices`, the share of its weights that a token has to do with, were nothing skipped."""
        return {**dict.fromkeys(self.attention, 1.0), **dict.fromkeys(self.mlp.matrices, self.mlp.reached)}

    @property
    def units(self) -> dict[str, int]:
        """For each of `matrices`, the pieces that a token may leave out: `PackedMatrix.units`, or records."""
        return {**{name: site.matrix.units for name, site in self.attention.items()}, **self.mlp.units}

    def weights(self, family: Family) -> Weights:
        """The tensors of the stock model's decoder block, decoded when asked for.

        family -- the names of such a block (`Architecture.family`)
        """
        norms = {
            f"{module}.weight": partial(_same, self.norms[name] - family.norm_offset)
            for name, module in family.norms.items()
        }
        biases = {name: f"{name}_bias" for name in family.norms if f"{name}_bias" in self.norms}
        norms |= {f"{family.norms[name]}.bias": partial(_same, self.norms[bias]) for name, bias in biases.items()}
        if self.delta_net and family.state is not None:
            names = family.state.tensors
            norms |= {names[name]: partial(_same, value) for name, value in self.delta_net.items()}
            for name in {"delta_conv", "short_conv", "mamba_conv"} & self.delta_net.keys():
                norms[names[name]] = partial(_same, self.delta_net[name][:, None])
        if family.experts is not None and (own := family.experts.own_norms) is not None:
            read, size = self.norms["mlp_norm"], len(self.norms["mlp_norm"])
            norms[f"{own.shared}.weight"] = partial(_same, read)
            norms[own.channels] = partial(_same, read * size**0.5)
        bases = {} if self.basis is None else {f"{BASIS}.weight": partial(decode_matrix, self.basis)}
        vectors = {family.sinks: self.sinks, family.layer_scalar: self.scalar}
        more = {name: partial(_same, value) for name, value in vectors.items() if value is not None}
        if self.xielu is not None:
            of_function = (self.xielu[:1], self.xielu[1:2], *self.xielu[2:])
            more |= {n: partial(_same, v) for n, v in zip(family.activation_parameters, of_function, strict=True)}
        sites = {**_weights_of(self.attention, family.projections), **self.mlp.weights(family)}
        added: Weights = {}
        if self.per_layer is not None and family.per_layer is not None:
            added = self.per_layer.weights(family.per_layer)
        return {**norms, **bases, **more, **sites, **added}


def _of_shared(site: str, matrix: PackedExperts, first: int, number: int, parts: int) -> Tensor:
    """One of the shared expert's `parts` matrices at a site, which are stored as experts from `first` on."""
    return as_shared(site, decode_experts(matrix, first), parts)[number]


def _same(value: Tensor) -> Tensor:
    return value


def _weights_of(sites: Mapping[str, PackedSite], projections: Mapping[str, Sequence[str]]) -> Weights:
    return {key: made for name, site in sites.items() for key, made in site.weights(projections[name]).items()}


@dataclass(frozen=True)
class PackedModel:
    """Everything that running a model needs. `output` is the embedding itself where the two are tied.

    attention     -- which tokens decoded positions read; None: all
    chat_template -- how a conversation becomes text (`models.tokenizer.chat.render_chat`); None: the model brings none
    tool_template -- the same where there are tools; None: `chat_template`
    special_tokens -- the texts of the tokenizer's, by the names that templates have for them; empty: the file is of a
                     version that kept none
    output_norm_bias -- float32 [hidden], where norms are LayerNorm; None: they are not
    per_layer     -- where inputs of each layer come from; None: layers have none
    generation    -- how its makers would have tokens chosen, fields of `runtime.options.GenerateOptions`; empty: they
                     do not say, or the likeliest each time
    """

    architecture: Architecture
    layers: tuple[PackedLayer, ...]
    embedding: PackedMatrix
    output_norm: Tensor
    output: PackedMatrix
    config_json: str
    tokenizer_json: str
    manifest: Mapping[str, Any]
    chat_template: str | None = None
    tool_template: str | None = None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, float] = field(default_factory=dict)
    attention: SparseAttention | None = None
    output_norm_bias: Tensor | None = None
    per_layer: PackedPerLayerInputs | None = None

    def __repr__(self) -> str:
        return f"PackedModel({self.summary})"

    @property
    def summary(self) -> str:
        """Source, format and size in a few words."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices.values()]
        nbytes = sum(matrix.nbytes for matrix in matrices)
        weights = sum(matrix.rows * matrix.columns * getattr(matrix, "experts", 1) for matrix in matrices)
        return (
            f"{self.manifest['model']['name']}, {self.manifest['kind']}, {len(self.layers)} blocks of "
            f"{weights / 1e6:,.1f} M weights, {nbytes / 1e6:,.1f} MB, {8 * nbytes / weights:.2f} bits a weight"
        )

    @property
    def scaled_output_norm(self) -> Tensor:
        """The weight of the last norm, by which logits have the model's scale."""
        scale = self.architecture.logit_scale
        return self.output_norm if scale == 1 else self.output_norm * scale

    @property
    def scaled_output_norm_bias(self) -> Tensor | None:
        """What the last norm adds, likewise; None: nothing."""
        return None if self.output_norm_bias is None else self.output_norm_bias * self.architecture.logit_scale

    def named_tokens(self, tokenizer: Tokenizer) -> Mapping[str, Any]:
        """`special_tokens`, or what is known of them without: the architecture's BOS and first EOS."""
        numbers = self.architecture
        ids = {"bos_token": numbers.bos, "eos_token": numbers.eos[0] if numbers.eos else None}
        known = {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None}
        return self.special_tokens or {name: token for name, token in known.items() if token}

    @property
    def rules(self) -> Rules:
        """The rules of the sites that have one."""
        sites = {(n, name): site for n, layer in enumerate(self.layers) for name, site in layer.sites.items()}
        return {key: site.rule for key, site in sites.items() if site.rule is not None}

    @property
    def sparsity(self) -> float:
        """The sparsity that the rules were made for; 0 where there are none."""
        table = self.manifest.get("thresholds")
        value = table.get("sparsity") if isinstance(table, Mapping) else None
        return float(value) if isinstance(value, int | float) else 0.0

    @property
    def bases(self) -> dict[int, PackedMatrix]:
        """The change of basis before each block that has one."""
        return {n: layer.basis for n, layer in enumerate(self.layers) if layer.basis is not None}

    @property
    def block(self) -> str:
        """The type of the superblocks of its matrices in zigzag order, all of them alike."""
        return next(iter(of.matrix.format.block for layer in self.layers for of in layer.attention.values()))

    @property
    def block_bits(self) -> float:
        """Bits that a weight of the blocks is stored in, scales included."""
        return BLOCKS[self.block].bits

    @property
    def plane_bits(self) -> float | None:
        """Bits that a weight has in all of its planes, scales included; None: its matrices have no planes."""
        return self.block_bits if BLOCKS[self.block].levels else None

    @property
    def target(self) -> float:
        """The share of all block weights, or of their bits, that the rules were made to leave unread: `sparsity` is of
        the sites that may be sparse."""
        sizes, sparse = self.parameters, sparse_sites_of(self.manifest, self.rules)
        return self.sparsity * sum(size for key, size in sizes.items() if key in sparse) / sum(sizes.values())

    def describe_skipped(self, skipped: Skipped, decoded: bool = True) -> str:
        """What a token skips, for people; of a model with planes, how many bits it reads.

        decoded -- whether it is by the rules, whose target is then told
        """
        if self.plane_bits is None:
            return shown(skipped.overall, skipped.of_sparse_sites)
        return bits_read(self.plane_bits, skipped.overall, self.target if decoded and self.rules else None)

    @property
    def mlp_kind(self) -> MlpKind:
        """How the MLPs are stored, all of them alike but for dense ones beside mixtures of experts."""
        kinds = [layer.mlp.kind for layer in self.layers if layer.mlp.matrices]
        return next((kind for kind in kinds if kind is EXPERTS), kinds[0])

    @property
    def skips(self) -> bool:
        """Whether a decoded token leaves anything out: columns, tokens, or units of MLPs."""
        return bool(self.rules or self.attention is not None or self.mlp_kind.exact)

    @property
    def parameters(self) -> dict[SiteKey, int]:
        """Logical weights that a token has to do with of each matrix of every block, by its name there, and of each
        change of basis: all of them, but of experts those that the token has."""
        found: dict[SiteKey, int] = {}
        for n, layer in enumerate(self.layers):
            reached = layer.reached
            found |= {(n, name): round(matrix.weights * reached[name]) for name, matrix in layer.matrices.items()}
        return found | {(n, BASIS): basis.weights for n, basis in self.bases.items()}


def skipped_weights(packed: PackedModel, activity: Mapping[SiteKey, float]) -> Skipped:
    """What a packed model skipped where so much of each site was active; a site that is not named was so wholly."""
    inactive = {key: 1 - share for key, share in activity.items()}
    return skipped(packed.parameters, inactive, sparse_sites_of(packed.manifest, packed.rules))
