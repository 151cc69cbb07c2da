"""Read a zigzag GGUF, mapped and checked: the names and shapes that it must hold, for the writer too."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import GgufFile, TensorInfo
from sparsepack.files.stored import shown
from sparsepack.formats.attention import sparse_attention_of
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.containers.gguf import ARCHITECTURE
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, PackedMatrix, decode_matrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import (
    DenseMlp,
    ExpertMlp,
    Mlp,
    PackedExpertsSite,
    PackedLayer,
    PackedModel,
    PackedPerLayer,
    PackedPerLayerInputs,
    PackedSite,
)
from sparsepack.formats.plan import PlannedTensor
from sparsepack.formats.stock import check_config
from sparsepack.formats.table import FORMATS
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import XIELU, Attention, DeltaNet, Mamba, ShortConv
from sparsepack.models.checkpoint.config_files import GENERATION, read_suggested
from sparsepack.models.checkpoint.gguf_config import OWN_CONFIG
from sparsepack.models.family import MLP_MID, MLP_SITES, Family
from sparsepack.models.sites import SiteRule
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE, SPECIAL_TOKENS, TOOL_USE, read_special_tokens
from sparsepack.models.tokenizer.gguf_tokenizer import OWN_TOKENIZER

WEIGHT, TAIL = ".weight", ".tail.weight"
"""The names of the tensors of a matrix in zigzag order, after its own: its bands, and the rows after them."""

ROW_SCALE = ".row_scale"
"""The name of the tensor with what each row of a matrix in zigzag order is multiplied by, after the matrix's own."""

ROUTER = "router.weight"
"""The name of the matrix that chooses among the experts of a block's MLP, after the block's own."""

SHARED_GATE = "shared_gate.weight"
"""The name of what says how much of the shared expert a token has."""

ROUTER_BIAS = "router.bias"
CORRECTION = "router.correction"
EXPERT_SCALE = "expert_scale.weight"
"""The name of what is added to the products of that matrix."""

SINKS = "attn_sinks.weight"
"""The name of the scores that query heads have beside those of keys, after the block's own."""

SCALAR = "layer_scalar.weight"
"""The name of what all that leaves a block is multiplied by."""

XIELU_PARAMETERS = "mlp_xielu.weight"
"""The name of what a block has learned of its xIELU, as `PackedLayer.xielu` has it."""

PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_NORM = (
    f"per_layer_{name}.weight" for name in ("token_embd", "model_proj", "proj_norm")
)
"""The names of what makes the inputs that each token has for each block."""

PER_LAYER_GATE, PER_LAYER_OUT, PER_LAYER_OUT_NORM = (f"per_layer_{name}.weight" for name in ("gate", "out", "norm"))
"""The names of what makes of such an input what a block adds, after the block's own."""

NUMBERS = "sparsepack.architecture"

BASIS = "basis.weight"
"""The name of a block's change of basis, after the block's own."""

RULE_VECTORS = (".threshold", ".steps", ".offset")
"""The names of the tensors that hold a site's rule end so."""


def site_shapes(architecture: Architecture, layer: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """For each site of a block: output rows of its projections in stacking order, and input columns; of an MLP with
    experts those of each expert."""
    mixer, mlp = architecture.blocks[layer].mixer, architecture.blocks[layer].mlp
    into: tuple[int, ...]
    if mixer is None:
        into, inner = (), 0
    elif isinstance(mixer, Mamba):
        into, inner = (mixer.rows,), mixer.inner
    elif isinstance(mixer, DeltaNet):
        into, inner = (mixer.channels, mixer.values), mixer.values
    elif isinstance(mixer, ShortConv):
        into, inner = (3 * mixer.channels,), mixer.channels
    elif mixer.latent is not None:
        into, inner = mixer.latent.into(architecture.heads), architecture.heads * mixer.latent.value
    else:
        inner, keys = architecture.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        own = () if mixer.source is not None else (keys,) if mixer.k_eq_v else (keys, keys)
        into = (inner * (1 + mixer.gated), *own)
    apart: dict[str, tuple[tuple[int, ...], int]] = {
        "attn_in": (into, architecture.hidden),
        "attn_out": ((architecture.hidden,), inner),
    }
    if mlp is not None:
        apart["mlp_in"] = ((mlp.width,) * (2 if mlp.gated else 1), architecture.hidden)
        apart["mlp_mid"] = ((architecture.hidden,), mlp.width)
    if architecture.latent is not None:
        of = architecture.latent
        apart["attn_q_b"] = ((architecture.heads * of.query,), of.q_rank)
        apart["attn_kv_b"] = ((architecture.heads * (of.plain + of.value),), of.kv_rank)
    projections = architecture.family(layer).projections
    return {
        site: (parts if len(projections[site]) == len(parts) else (sum(parts),), columns)
        for site, (parts, columns) in apart.items()
        if site in projections
    }


def zigzag_tensors(
    name: str, block: str, rows: int, columns: int, experts: Sequence[int] = (), tail: bool = True
) -> tuple[PlannedTensor, ...]:
    """The tensors of a matrix in zigzag order: its bands, if it has whole ones, and its tail, if it has one.

    block   -- the type of their superblocks
    experts -- how many such matrices lie in each, where they are experts'
    tail    -- False: all rows lie in bands, the last of them padded, as files of before schema 5 have it
    """
    last = zigzag.tail_rows(rows) if tail else 0
    whole, found = rows - last, []
    # A type that ggml does not have stands as the bytes that it is.
    type, width = (block, zigzag.BAND_ROWS) if BLOCKS[block].gguf else ("I8", zigzag.superblock_bytes(block))
    if whole:
        shape = (*experts, zigzag.bands(whole), columns, width)
        padding = -whole % zigzag.BAND_ROWS
        found.append(PlannedTensor(name + WEIGHT, shape, type, (*experts, whole, columns), padding_rows=padding))
    if last:
        shape = (*experts, zigzag.tail_blocks(rows, columns), width)
        padding = -last % zigzag.PIECE_ROWS
        found.append(PlannedTensor(name + TAIL, shape, type, (*experts, last, columns), padding_rows=padding))
    return tuple(found)


def stored_tensors(name: str, blocks: Tensor, tail: Tensor | None) -> dict[str, Tensor]:
    """The bytes of a matrix in zigzag order by the names of its tensors."""
    bands = {name + WEIGHT: blocks} if len(blocks) or tail is None else {}
    return bands if tail is None else {**bands, name + TAIL: tail}


def delta_shapes(architecture: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a mixer that keeps a state has beside its sites, by our names; empty for a block with
    attention."""
    mixer = architecture.blocks[layer].mixer
    if isinstance(mixer, Mamba):
        heads = dict.fromkeys(("mamba_a_log", "mamba_dt_bias", "mamba_skip"), (mixer.heads,))
        convolution = {"mamba_conv": (mixer.channels, mixer.taps), "mamba_conv_bias": (mixer.channels,)}
        return {**convolution, **heads, "mamba_norm": (mixer.inner,)}
    if isinstance(mixer, ShortConv):
        return {"short_conv": (mixer.channels, mixer.taps)}
    if not isinstance(mixer, DeltaNet):
        return {}
    gates = mixer.value_heads, architecture.hidden
    return {
        "delta_beta": gates,
        "delta_alpha": gates,
        "delta_conv": (mixer.channels, mixer.taps),
        "delta_a_log": gates[:1],
        "delta_dt_bias": gates[:1],
        "delta_norm": (mixer.value_dim,),
    }


def per_layer_sources(family: Family, layer: int | None = None) -> dict[str, str]:
    """For each tensor by which each block has an input of its own, or by which a block makes something of that, the
    checkpoint's tensor; empty in families without."""
    names = family.per_layer
    if names is None:
        return {}
    prefix = family.backbone if layer is None else family.block(layer)
    if layer is None:
        stored = (PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, PER_LAYER_NORM)
        modules = (names.embedding, names.projection, names.norm)
    else:
        stored = (PER_LAYER_GATE, PER_LAYER_OUT, PER_LAYER_OUT_NORM)
        modules = (names.gate, names.out, names.out_norm)
    return {name: f"{prefix}.{module}.weight" for name, module in zip(stored, modules, strict=True)}


def norm_widths(architecture: Architecture, layer: int) -> dict[str, int]:
    """For each norm of a block, the number of channels that the norm scales."""
    mixer, heads = architecture.blocks[layer].mixer, dict[str, int]()
    if isinstance(mixer, Attention):
        of_rows = {"q_row_norm": architecture.heads, "k_row_norm": mixer.kv_heads}
        heads = {name: count * mixer.head_dim for name, count in {"q_norm": 1, "k_norm": 1, **of_rows}.items()}
    heads |= {"attn_sub_norm": architecture.heads * architecture.value_dim, "mlp_sub_norm": architecture.intermediate}
    if architecture.latent is not None:
        heads |= {"q_a_norm": architecture.latent.q_rank, "kv_a_norm": architecture.latent.kv_rank}
    return {name: heads.get(name, architecture.hidden) for name in architecture.family(layer).norms}


_MATRIX_TYPES = ("Q8_0", "Q6_K", "Q4_K", "F16", "BF16", "F32")


class ModelReader:
    """Takes the tensors of a file one after the other, and notices missing, wrong and unknown ones.

    Matrices stay in the file, mapped; norms, biases and rules are copied. Raises `ArtifactError` where it is
    inconsistent.
    """

    def __init__(self, file: GgufFile, manifest: Mapping[str, Any]) -> None:
        self.file, self.manifest = file, manifest
        if file.metadata.get("general.architecture") != ARCHITECTURE:
            raise self.wrong(f"general.architecture is not {ARCHITECTURE!r}")
        self.left = set(file.tensors)
        self.architecture = self._architecture()
        self.zigzag = MatrixFormat(FORMATS[manifest["kind"]].matrices.block, "zigzag")

    def model(self) -> PackedModel:
        """What an engine runs."""
        architecture = self.architecture
        layers = tuple(self.layer(i) for i in range(architecture.layers))
        embedding = self.embedding("token_embd.weight")
        output = embedding if architecture.tied else self.embedding("output.weight")
        output_norm = self.vector("output_norm.weight", architecture.hidden)
        centred = architecture.blocks[-1].layer_norms
        output_norm_bias = self.vector("output_norm.bias", architecture.hidden) if centred else None
        per_layer = self.per_layer_inputs()
        if self.left:
            raise self.wrong(f"the tensor {min(self.left)} is not understood ({len(self.left)} such tensors)")
        return PackedModel(
            architecture=architecture,
            layers=layers,
            embedding=embedding,
            output_norm=output_norm,
            output_norm_bias=output_norm_bias,
            output=output,
            config_json=self._config(),
            tokenizer_json=self.text(OWN_TOKENIZER),
            manifest=self.manifest,
            chat_template=self._template(CHAT_TEMPLATE),
            tool_template=self._template(f"{CHAT_TEMPLATE}.{TOOL_USE}"),
            special_tokens=self._special_tokens(),
            generation=self._generation(),
            attention=sparse_attention_of(self.manifest, architecture, self.file.path),
            per_layer=per_layer,
        )

    def layer(self, layer: int) -> PackedLayer:
        """A block, by its number."""
        sites = [site for site in self.architecture.family(layer).projections if site not in MLP_SITES]
        parts = self.sites(layer, sites), self.norms(layer), self.mlp(layer), self.basis(layer)
        mixer = self.architecture.blocks[layer].mixer
        sinks = isinstance(mixer, Attention) and mixer.sinks
        of_heads = self.vector(f"blk.{layer}.{SINKS}", self.architecture.heads) if sinks else None
        scalar = self.vector(f"blk.{layer}.{SCALAR}", 1) if self.architecture.blocks[layer].scaled else None
        of_mlp = self.architecture.blocks[layer].mlp
        has_xielu = of_mlp is not None and of_mlp.activation == XIELU
        xielu = self.vector(f"blk.{layer}.{XIELU_PARAMETERS}", 4) if has_xielu else None
        return PackedLayer(*parts, of_heads, self.delta_net(layer), scalar, self.per_layer(layer), xielu)

    def per_layer(self, layer: int) -> PackedPerLayer | None:
        """What a block adds by an input of its own; None: it has none."""
        width, hidden = self.architecture.per_layer, self.architecture.hidden
        if not width:
            return None
        gate = self.rows_matrix(f"blk.{layer}.{PER_LAYER_GATE}", _MATRIX_TYPES, (width, hidden))
        out = self.rows_matrix(f"blk.{layer}.{PER_LAYER_OUT}", _MATRIX_TYPES, (hidden, width))
        return PackedPerLayer(gate, out, self.vector(f"blk.{layer}.{PER_LAYER_OUT_NORM}", hidden))

    def per_layer_inputs(self) -> PackedPerLayerInputs | None:
        """Where these inputs come from; None: there are none."""
        a = self.architecture
        if not a.per_layer:
            return None
        row = a.layers * a.per_layer
        embedding = self.rows_matrix(PER_LAYER_EMBEDDING, _MATRIX_TYPES, (a.vocabulary, row))
        projection = self.rows_matrix(PER_LAYER_PROJECTION, _MATRIX_TYPES, (row, a.hidden))
        return PackedPerLayerInputs(embedding, projection, self.vector(PER_LAYER_NORM, a.per_layer))

    def delta_net(self, layer: int) -> Mapping[str, Tensor]:
        """What a gated delta net has beside its sites; empty for a block with attention."""
        found = {}
        for name, shape in delta_shapes(self.architecture, layer).items():
            stored = f"blk.{layer}.{name}.weight"
            if len(shape) == 1:
                found[name] = self.vector(stored, shape[0])
            else:
                found[name] = decode_matrix(self.rows_matrix(stored, ("F32",), (shape[0], shape[1]))).clone()
        return found

    def basis(self, layer: int) -> PackedMatrix | None:
        """The change of basis before a block; None: there is none."""
        name, hidden = f"blk.{layer}.{BASIS}", self.architecture.hidden
        return self.rows_matrix(name, _MATRIX_TYPES, (hidden, hidden)) if name in self.file.tensors else None

    def mlp(self, layer: int) -> Mlp:
        """The MLP of a block."""
        mlp, routing = self.architecture.blocks[layer].mlp, self.architecture.family(layer).experts
        if mlp is None:
            return DenseMlp({})
        experts = mlp.experts
        if experts is None or routing is None:
            return DenseMlp(self.sites(layer, MLP_SITES))
        router, shapes = self.router(layer, ROUTER, experts.count), site_shapes(self.architecture, layer)
        gated = routing.shared is not None and routing.shared.gate
        shared = self.router(layer, SHARED_GATE, 1) if gated else None
        sites = {site: self.experts_site(f"blk.{layer}.{site}", experts.stored, *shapes[site]) for site in MLP_SITES}
        bias = self.vector(f"blk.{layer}.{ROUTER_BIAS}", experts.count) if mlp.biased else None
        corrected = routing.routing is not None and routing.routing.correction
        correction = self.vector(f"blk.{layer}.{CORRECTION}", experts.count) if corrected else None
        scale = self.vector(f"blk.{layer}.{EXPERT_SCALE}", experts.count) if routing.own_norms is not None else None
        numbers = experts.used, experts.normalised
        return ExpertMlp(router, *numbers, sites, shared, bias, experts.router, correction, scale)

    def router(self, layer: int, name: str, rows: int) -> Tensor:
        """What says of experts how much of them a token has."""
        stored = self.rows_matrix(f"blk.{layer}.{name}", ("F32",), (rows, self.architecture.hidden))
        return decode_matrix(stored).clone()

    def experts_site(self, name: str, experts: int, parts: tuple[int, ...], columns: int) -> PackedExpertsSite:
        """A site of so many experts."""
        rows = sum(parts)
        blocks, tail = self.zigzag_bytes(name, rows, columns, (experts,))
        matrix = PackedExperts(blocks, self.zigzag, rows, columns, tail)
        rule = self.rule(name, columns, experts if name.endswith(MLP_MID) else None)
        if rule is not None and rule.offset is not None:
            raise self.wrong(f"{name} has offsets, which experts have no place for")
        if not any(block.mlp is not None and block.mlp.biased for block in self.architecture.blocks):
            return PackedExpertsSite(matrix, rule, parts)
        bias = self.rows_matrix(f"{name}.bias", ("F32",), (experts, rows))
        return PackedExpertsSite(matrix, rule, parts, decode_matrix(bias).clone())

    def norms(self, layer: int) -> dict[str, Tensor]:
        """The norms of a block, and their biases where they have any."""
        widths, found = norm_widths(self.architecture, layer), dict[str, Tensor]()
        for name, width in widths.items():
            found[name] = self.vector(f"blk.{layer}.{name}.weight", width)
            if self.architecture.blocks[layer].layer_norms:
                found[f"{name}_bias"] = self.vector(f"blk.{layer}.{name}.bias", width)
        return found

    def sites(self, layer: int, names: Sequence[str]) -> dict[str, PackedSite]:
        """Some sites of a block."""
        shapes = site_shapes(self.architecture, layer)
        return {site: self.site(f"blk.{layer}.{site}", *shapes[site]) for site in names}

    def site(self, name: str, parts: tuple[int, ...], columns: int) -> PackedSite:
        rows = sum(parts)
        matrix = replace(self.zigzag_matrix(name, rows, columns), row_scale=self.row_scale(name + ROW_SCALE, rows))
        bias = self.vector(f"{name}.bias", rows) if f"{name}.bias" in self.file.tensors else None
        return PackedSite(matrix, bias, self.rule(name, columns), parts)

    def zigzag_matrix(self, name: str, rows: int, columns: int) -> PackedMatrix:
        """A matrix in zigzag order, by the name of its site or gate and its logical shape."""
        blocks, tail = self.zigzag_bytes(name, rows, columns)
        return PackedMatrix(blocks, self.zigzag, rows, columns, tail)

    def row_scale(self, name: str, rows: int) -> Tensor | None:
        """The scales of a matrix's rows; None: it has none."""
        if name not in self.file.tensors:
            return None
        scales = self.vector(name, rows)
        if not (scales.isfinite() & (scales > 0)).all():
            raise self.wrong(f"{name} has a scale that is not a positive number")
        return scales

    def zigzag_bytes(
        self, name: str, rows: int, columns: int, experts: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """The bands of a matrix, or of each expert's, and its tail, as `PackedMatrix` and `PackedExperts` have them."""
        size, tail = zigzag.superblock_bytes(self.zigzag.block), None
        blocks = torch.empty(*experts, 0, columns, size, dtype=torch.uint8)
        has_tail = name + TAIL in self.file.tensors
        for tensor in zigzag_tensors(name, self.zigzag.block, rows, columns, experts, has_tail):
            info = self.take(tensor.name, (tensor.type,), tensor.shape)
            self.check_logical(tensor.name, *tensor.logical_shape)
            stored = self.mapped(info).view(*tensor.shape[:-1], size)
            if tensor.name.endswith(TAIL):
                tail = stored
            else:
                blocks = stored
        return blocks, tail

    def rule(self, name: str, columns: int, experts: int | None = None) -> SiteRule | None:
        """The rule of a site; None: it is always dense. experts: of a site where each has an input of its own, how
        many there are."""
        threshold = self.file.tensors.get(f"{name}.threshold")
        if threshold is None:
            return None
        steps = self.steps(f"{name}.steps")
        if steps is not None and experts is not None:
            info = self.take(threshold.name, ("F32",), (experts, columns))
            return SiteRule(self.mapped(info).clone().view(torch.float32).view(experts, columns), steps=steps)
        width = 1 if threshold.shape == (1,) and steps is None else columns
        value = self.vector(threshold.name, width)
        offset = self.vector(f"{name}.offset", columns) if f"{name}.offset" in self.file.tensors else None
        return SiteRule(value.reshape(()) if width == 1 else value, offset, steps=steps)

    def steps(self, name: str) -> Tensor | None:
        """What thresholds are multiplied by at each level: float32 [levels], never falling; None: there are none."""
        levels = len(BLOCKS[self.zigzag.block].levels)
        if name not in self.file.tensors or not levels:
            return None
        if (found := self.file.tensors[name].shape) != (levels,):
            raise self.wrong(f"{name} is {list(found)}, {self.zigzag.block} has {levels} levels")
        steps = self.vector(name, levels)
        if not (steps[1:] >= steps[:-1]).all():
            raise self.wrong(f"{name} falls from level to level, expected ascending numbers")
        return steps

    def embedding(self, name: str) -> PackedMatrix:
        return self.rows_matrix(name, _MATRIX_TYPES, (self.architecture.vocabulary, self.architecture.hidden))

    def rows_matrix(self, name: str, types: tuple[str, ...], shape: tuple[int, int]) -> PackedMatrix:
        """A matrix stored by rows."""
        info = self.take(name, types, shape)
        self.check_logical(name, *shape)
        return PackedMatrix(self.mapped(info).view(shape[0], -1), MatrixFormat(info.type), *shape)

    def vector(self, name: str, width: int) -> Tensor:
        return self.mapped(self.take(name, ("F32",), (width,))).clone().view(torch.float32)

    def take(self, name: str, types: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
        info = self.file.tensors.get(name)
        if info is None:
            raise self.wrong(f"the tensor {name} is missing")
        if info.shape != shape or info.type not in types:
            raise self.wrong(
                f"{name} is {info.type} {list(info.shape)}, the architecture means {'/'.join(types)} {list(shape)}"
            )
        self.left.discard(name)
        return info

    def mapped(self, info: TensorInfo) -> Tensor:
        with warnings.catch_warnings():
            # The mapping is read-only, and nothing here or in a runtime writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.file.bytes(info.name))

    def check_logical(self, name: str, *expected: int) -> None:
        shape = self.manifest["tensors"].get(name, {}).get("shape")
        if shape != list(expected):
            raise self.wrong(f"the manifest gives {name} the logical shape {shape}, expected {list(expected)}")

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(f"{key} is {'missing' if value is None else 'no text'}")
        return value

    def _template(self, key: str) -> str | None:
        return self.text(key) if key in self.file.metadata else None

    def _special_tokens(self) -> dict[str, str]:
        if SPECIAL_TOKENS not in self.file.metadata:
            return {}
        try:
            return read_special_tokens(self.text(SPECIAL_TOKENS))
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"{SPECIAL_TOKENS} is not understood ({shown(error)})") from error

    def _generation(self) -> dict[str, float]:
        if GENERATION not in self.file.metadata:
            return {}
        try:
            return read_suggested(self.text(GENERATION))
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"{GENERATION} is not understood ({shown(error)})") from error

    def wrong(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.file.path}: {what}; pack the model again")

    def _config(self) -> str:
        """The stock configuration, which must mean the model that engines run."""
        text = self.text(OWN_CONFIG)
        try:
            check_config(text, self.architecture)
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"{OWN_CONFIG} and {NUMBERS} contradict each other ({shown(error)})") from error
        return text

    def _architecture(self) -> Architecture:
        try:
            numbers = json.loads(self.text(NUMBERS))
            architecture = Architecture.from_json(numbers)
            check_numbers(architecture)
            if architecture.layers > len(self.file.tensors):
                raise ValueError(f"{architecture.layers} layers, {len(self.file.tensors)} tensors")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.wrong(f"{NUMBERS} is not understood ({shown(error)})") from error
        return architecture
