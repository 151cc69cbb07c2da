"""The zigzag GGUF: one file with everything to run a model that skips the columns of inactive channels.

    token_embd.weight              [vocabulary, hidden]    Q8_0, Q6_K, Q4_K, F16, BF16 or F32
    blk.I.basis.weight             [hidden, hidden]        Q8_0 or F16, where the residual stream changes its basis
    blk.I.SITE.weight              [bands, columns, 256]   blocks in zigzag order; SITE: attn_in, attn_out, ...
                                   [experts, bands, columns, 256]    of the MLP, where it is a mixture of experts
    blk.I.SITE.tail.weight         [superblocks, 256]      where at most 192 rows come after the whole bands:
                                   [experts, superblocks, 256]       pieces of 64 of them, column by column; without
                                                           whole bands it stands alone
    blk.I.SITE.row_scale           [rows]                  F32: what each row is multiplied by; not where there are
                                                           experts
    blk.I.router.weight            [experts, hidden]       F32, likewise
    blk.I.shared_gate.weight       [1, hidden]             F32, where the last of the experts are of every token
    blk.I.SITE.bias                [rows]                  F32, where the model has one; [experts, rows] of experts
    blk.I.router.bias              [experts]               F32, likewise
    blk.I.expert_scale.weight      [experts]               F32, likewise: by which the weight of each is multiplied
    blk.I.attn_sinks.weight        [heads]                 F32, likewise: a score of each query head
    blk.I.layer_scalar.weight      [1]                     F32, likewise: what leaves the block is multiplied by it
    blk.I.mlp_xielu.weight         [4]                     F32, likewise: a, b, beta and eps of xIELU (docs/format.md)
    blk.I.SITE.threshold           [1] or [columns]        F32, where the site is sparse
                                   [experts, columns]      at mlp_mid of experts that are read at levels
    blk.I.SITE.steps               [levels]                F32, where columns are read at levels
    blk.I.SITE.offset              [columns]               F32, where inactive channels take a value other than 0
    blk.I.delta_beta.weight        [value_heads, hidden]   F32, of a gated delta net in place of attention, whose sites
    blk.I.delta_alpha.weight       [value_heads, hidden]   are attn_in (queries, keys, values, output gates) and
    blk.I.delta_conv.weight        [channels, taps]        attn_out
    blk.I.delta_a_log.weight       [value_heads]
    blk.I.delta_dt_bias.weight     [value_heads]
    blk.I.delta_norm.weight        [value_dim]
    blk.I.short_conv.weight        [hidden, taps]          F32, of a short convolution, likewise
    blk.I.mamba_conv.weight        [channels, taps]        F32, of a state-space model, likewise
    blk.I.mamba_conv_bias.weight   [channels]
    blk.I.mamba_a_log.weight       [heads]
    blk.I.mamba_dt_bias.weight     [heads]
    blk.I.mamba_skip.weight        [heads]
    blk.I.mamba_norm.weight        [inner]
    blk.I.NORM.weight              [width]                 F32; NORM: attn_norm, mlp_norm, and in some families
                                                           q_norm, k_norm, q_row_norm, k_row_norm,
                                                           attn_post_norm, mlp_post_norm, experts_norm,
                                                           shared_norm
    blk.I.per_layer_gate.weight    [width, hidden]         Q8_0 or F16, where each token has an input for each block,
    blk.I.per_layer_out.weight     [hidden, width]         which makes of it what it adds last
    blk.I.per_layer_norm.weight    [hidden]                F32
    per_layer_token_embd.weight    [vocabulary, blocks * width]    as token_embd
    per_layer_model_proj.weight    [blocks * width, hidden]        Q8_0 or F16
    per_layer_proj_norm.weight     [width]                 F32
    output_norm.weight             [hidden]                F32
    output_norm.bias               [hidden]                F32, where norms are LayerNorm, as blk.I.attn_norm.bias
    output.weight                  [vocabulary, hidden]    as token_embd; absent where the two are tied

`general.architecture` is "sparsepack", which no other program runs by mistake; every tensor is a valid one of its type,
which any of them can show. The model's config.json and tokenizer.json, the numbers an engine needs and the manifest
stand in `sparsepack.*` strings, the chat template of a model that has one in `tokenizer.chat_template`. Sparse
attention is a section of the manifest (`formats.attention`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import PackingError
from sparsepack.files.gguf import GgufFile
from sparsepack.files.transfer import stacked_on, tensors_at_once
from sparsepack.formats import gptq, gptq_planes
from sparsepack.formats.artifact import Artifact
from sparsepack.formats.blocks.table import BLOCKS, type_that_fits
from sparsepack.formats.containers.gguf import ARCHITECTURE, manifest_values, string
from sparsepack.formats.containers.gguf_writer import GgufPlan, embedding_types
from sparsepack.formats.manifest import make_manifest
from sparsepack.formats.orders import zigzag
from sparsepack.formats.plan import (
    Encoded,
    EncodedSite,
    PlannedGroup,
    PlannedTensor,
    PlanRequest,
    SiteEncoder,
    alone,
    manifest_shapes,
    tensors_of,
)
from sparsepack.formats.table import Format
from sparsepack.formats.zigzag.artifact import ZigzagArtifact
from sparsepack.formats.zigzag.reader import (
    BASIS,
    CORRECTION,
    EXPERT_SCALE,
    NUMBERS,
    PER_LAYER_EMBEDDING,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    ROUTER,
    ROUTER_BIAS,
    ROW_SCALE,
    SCALAR,
    SHARED_GATE,
    SINKS,
    TAIL,
    XIELU_PARAMETERS,
    delta_shapes,
    per_layer_sources,
    site_shapes,
    stored_tensors,
    zigzag_tensors,
)
from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import ExpertNumbers
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.checkpoint.config_files import GENERATION
from sparsepack.models.checkpoint.gguf_config import OWN_CONFIG
from sparsepack.models.checkpoint.writer import chat_template, config_json
from sparsepack.models.family import HEAD, MLP_MID, MLP_SITES
from sparsepack.models.hf_config import expert_numbers
from sparsepack.models.sites import Rules, SiteRule
from sparsepack.models.tokenizer.chat import CHAT_TEMPLATE, SPECIAL_TOKENS, TOOL_USE
from sparsepack.models.tokenizer.gguf_tokenizer import OWN_TOKENIZER
from sparsepack.reconstruction import Inputs

ALIGNMENT = 64  # a cache line: what the kernels load

BASIS_TYPE = "Q8_0"
"""A change of basis is stored in this type where it fits the width."""

Block = Callable[[Architecture, int], Iterator[PlannedGroup]]
"""The function makes the matrices of a block, by the block's number, and what belongs to them."""


def opened(file: GgufFile, manifest: Mapping[str, Any]) -> Artifact:
    """A zigzag GGUF that has been opened."""
    return ZigzagArtifact(manifest, file)


def check_model(format: Format, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a model that no engine can run."""
    _ = checkpoint.architecture


def plan(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> GgufPlan:
    """A model as a zigzag GGUF (SpQt, section 4.1.2).

    An output or embedding of type "auto" is Q6_K, Q8_0 or F16 (`embedding_types`). Writing it holds one matrix in
    memory; a CUDA device holds four, and the host 32 MiB of each. Raises `PackingError` for a type that does not fit
    or a rule of another model; writing raises it naming a tensor whose weights are not finite.
    """

    def block(architecture: Architecture, layer: int) -> Iterator[PlannedGroup]:
        for site in checkpoint.family_at(layer).projections:
            if site == MLP_SITES[0]:
                yield from _planned_router(checkpoint, layer)
            yield from planned_site(format, checkpoint, architecture, layer, site, request)

    return engine_plan(format, checkpoint, request, block)


def engine_plan(
    format: Format,
    checkpoint: Checkpoint,
    request: PlanRequest,
    block: Block,
    neurons: Mapping[str, Any] | None = None,
) -> GgufPlan:
    """A file that an engine runs.

    block   -- the matrices of a block, and what belongs to them
    neurons -- the manifest's section of them

    Raises `PackingError` as `plan`.
    """
    check_rules(checkpoint, request.rules)
    architecture = checkpoint.architecture
    embedding, notes = embedding_types(checkpoint, request.embedding_type, request.output_type)
    groups = tuple(_groups(checkpoint, architecture, block, embedding, request.device))
    shapes = manifest_shapes(sorted(tensors_of(groups), key=lambda tensor: tensor.name in embedding))
    notes += request.notes
    known = checkpoint.source.hash.so_far
    names = [tensor.name for tensor in tensors_of(groups)]
    tails, row_scales = (any(name.endswith(end) for name in names) for end in (TAIL, ROW_SCALE))
    manifest = make_manifest(
        format.name, checkpoint, request.provenance, shapes, notes, known, request.attention, neurons, tails, row_scales
    )
    values = manifest_values(manifest) | {
        OWN_CONFIG: string(config_json(checkpoint)),
        OWN_TOKENIZER: string(checkpoint.tokenizer_json()),
        NUMBERS: string(json.dumps(architecture.to_json())),
        SPECIAL_TOKENS: string(json.dumps(checkpoint.special_tokens)),
    }
    if template := chat_template(checkpoint):
        values[CHAT_TEMPLATE] = string(template)
    if template := checkpoint.chat_templates.get(TOOL_USE):
        values[f"{CHAT_TEMPLATE}.{TOOL_USE}"] = string(template)
    if checkpoint.generation:
        values[GENERATION] = string(json.dumps(checkpoint.generation))
    return GgufPlan(
        format=format.name,
        groups=groups,
        notes=tuple(notes),
        at_once=tensors_at_once(request.device),
        source=checkpoint.source.hash,
        architecture=ARCHITECTURE,
        values=values,
        alignment=ALIGNMENT,
    )


def _groups(
    checkpoint: Checkpoint,
    architecture: Architecture,
    block: Block,
    embedding: Mapping[str, str],
    device: str,
) -> Iterator[PlannedGroup]:
    """Every tensor, in the order in which an engine needs them."""

    def matrix(name: str, source: str, kind: str) -> PlannedGroup:
        def encoded() -> Tensor:
            return BLOCKS[kind].encode(stacked_on(device, [checkpoint.tensor(source)]))

        rows, columns = checkpoint.shape(source)
        return alone(PlannedTensor(name, (rows, columns), kind), encoded)

    yield matrix("token_embd.weight", checkpoint.family.embedding, embedding["token_embd.weight"])
    of_basis = type_that_fits(BASIS_TYPE, architecture.hidden)
    per_layer = checkpoint.family.per_layer if architecture.per_layer else None
    if per_layer is not None:
        row = architecture.layers * architecture.per_layer
        sources = per_layer_sources(checkpoint.family)
        table = type_that_fits(embedding["token_embd.weight"], row)
        yield matrix(PER_LAYER_EMBEDDING, sources[PER_LAYER_EMBEDDING], table)
        yield matrix(PER_LAYER_PROJECTION, sources[PER_LAYER_PROJECTION], of_basis)
        yield _norm(checkpoint, PER_LAYER_NORM, sources[PER_LAYER_NORM])
    for layer in range(checkpoint.layers):
        if layer in checkpoint.bases:
            yield matrix(f"blk.{layer}.{BASIS}", checkpoint.family.basis(layer), of_basis)
        for name, module in checkpoint.family_at(layer).norms.items():
            yield _norm(checkpoint, f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{module}.weight")
            if checkpoint.family.layer_norms:
                yield _in_f32(checkpoint, f"blk.{layer}.{name}.bias", f"model.layers.{layer}.{module}.bias")
        for stored, source in ((SINKS, checkpoint.family.sinks), (SCALAR, checkpoint.family.layer_scalar)):
            if source:
                yield _in_f32(checkpoint, f"blk.{layer}.{stored}", f"{checkpoint.family.block(layer)}.{source}")
        if checkpoint.family.activation_parameters:
            parameters = partial(_encoded, checkpoint.activation_parameters, layer)
            yield alone(PlannedTensor(f"blk.{layer}.{XIELU_PARAMETERS}", (4,), "F32"), parameters)
        yield from _planned_delta_net(checkpoint, architecture, layer)
        yield from block(architecture, layer)
        if per_layer is not None:
            sources = {f"blk.{layer}.{name}": of for name, of in per_layer_sources(checkpoint.family, layer).items()}
            (gate, out, norm), of_out = sources, type_that_fits(BASIS_TYPE, architecture.per_layer)
            yield matrix(gate, sources[gate], of_basis)
            yield matrix(out, sources[out], of_out)
            yield _norm(checkpoint, norm, sources[norm])
    yield _norm(checkpoint, "output_norm.weight", checkpoint.family.last_norm)
    if checkpoint.family.layer_norms:
        yield _in_f32(checkpoint, "output_norm.bias", checkpoint.family.last_norm_bias)
    if "output.weight" in embedding:
        yield matrix("output.weight", HEAD, embedding["output.weight"])


def _encoded(produce: Callable[[int], Tensor], layer: int) -> Tensor:
    return BLOCKS["F32"].encode(produce(layer))


def planned_site(
    format: Format,
    checkpoint: Checkpoint,
    architecture: Architecture,
    layer: int,
    site: str,
    request: PlanRequest,
    row_scales: bool = True,
) -> Iterator[PlannedGroup]:
    """A site's matrix, with scales of its rows unless it is of experts, its bias and its rule. Raises `PackingError`
    where the matrix is not the configuration's."""
    name, device = f"blk.{layer}.{site}", request.device
    rows, columns = checked_shape(checkpoint, architecture, layer, site)
    block = format.matrices.block

    def weight() -> Sequence[Tensor]:
        if experts is None:
            blocks, tail, scales = rounded_site(checkpoint, layer, site, block, request, row_scales)
            tensors = stored_tensors(name, blocks, tail).values()
            return [*tensors, *([] if scales is None else [scales.view(torch.uint8)])]
        size = zigzag.superblock_bytes(block)
        stored = [torch.empty(*t.shape[:-1], size, dtype=torch.uint8, device=device) for t in planned]
        for number, matrix in enumerate(checkpoint.each_expert(layer, site)):
            made = zigzag.pack_with_tail(stacked_on(device, [matrix]), block)
            for into, part in zip(stored, stored_tensors(name, *made).values(), strict=True):
                into[number] = part
        return stored

    def bias() -> Tensor:
        stacked = checkpoint.stacked_bias(layer, site)
        assert stacked is not None
        return BLOCKS["F32"].encode(stacked)

    experts = experts_at(architecture, layer, site)
    leading = () if experts is None else (experts.stored,)
    planned = zigzag_tensors(name, block, rows, columns, leading)
    if row_scales and experts is None:
        planned += (PlannedTensor(name + ROW_SCALE, (rows,), "F32", weights=False),)
    yield planned_matrix(planned, request.encoded, weight)
    if any(stored in checkpoint.source.shapes for stored in checkpoint.bias_names(layer, site)):
        yield alone(PlannedTensor(f"{name}.bias", (*leading, rows), "F32"), bias)
    rule = request.rules.get((layer, site))
    if rule is not None and not rule.dense:
        yield from _planned_rule(name, rule, len(BLOCKS[block].levels))


def rounded_site(
    checkpoint: Checkpoint, layer: int, site: str, block: str, request: PlanRequest, row_scales: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A site's matrix in zigzag order, each weight rounded by itself: its bands, its tail and the scales of its rows,
    float32 [rows]."""
    if torch.device(request.device).type == "cpu":
        stacked = checkpoint.stacked_floats(layer, site, request.workspace)
    else:
        stacked = stacked_on(request.device, checkpoint.projections(layer, site))
    scales = zigzag.row_scales(stacked) if row_scales else None
    return *zigzag.pack_with_tail(stacked, block, scales), scales


def planned_matrix(
    planned: Sequence[PlannedTensor], encoded: Encoded, produce: Callable[[], Sequence[Tensor]]
) -> PlannedGroup:
    """The tensors of one matrix: as they were encoded before, or else as `produce` makes them."""
    before = [encoded[tensor.name] for tensor in planned if tensor.name in encoded]
    return PlannedGroup(tuple(planned), (lambda: [part() for part in before]) if before else produce)


def encoder(format: Format, checkpoint: Checkpoint, request: PlanRequest) -> SiteEncoder:
    """What encodes a model's sites (`Format.encoder`), or each expert's matrix there, whose rows have no scales."""

    def encode(layer: int, site: str, weight: Tensor, inputs: Inputs | None) -> EncodedSite:
        of_experts = checkpoint.family.of_experts(layer, site)
        return encoded_site(format.matrices.block, layer, site, weight, inputs, row_scales=not of_experts)

    return encode


def encoded_site(
    block: str, layer: int, site: str, weight: Tensor, inputs: Inputs | None, row_scales: bool = True
) -> EncodedSite:
    """A site's matrix in zigzag order (`SiteEncoder`), with scales of its rows unless told otherwise."""
    name = f"blk.{layer}.{site}"
    costs = None if inputs is None or inputs.row_costs is None else inputs.row_costs.to(weight.device)
    scales = zigzag.row_scales(weight, costs)[:, None] if row_scales else None
    tensors, decoded = encoded_matrix(name, block, weight, inputs, scales)
    whole = len(weight) - zigzag.tail_rows(len(weight))
    rows = {name: slice(whole, None) if name.endswith(TAIL) else slice(0, whole) for name in tensors}
    if scales is None:
        return EncodedSite(tensors, decoded, rows)
    return EncodedSite(tensors | {name + ROW_SCALE: scales.view(torch.uint8)}, decoded.mul_(scales), rows)


def encoded_matrix(
    name: str, block: str, weight: Tensor, inputs: Inputs | None, divisors: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix in zigzag order, with error feedback where its inputs are known: its tensors by their names, and what
    they decode to.

    divisors -- what each row is divided by first, float32 [rows, 1]; None: nothing
    """
    if inputs is None:
        blocks, tail = zigzag.pack_with_tail(weight, block, None if divisors is None else divisors[:, 0])
    else:
        weight = weight if divisors is None else weight.float() / divisors
        blocks, tail = (gptq_planes if BLOCKS[block].levels else gptq).zigzag_blocks(weight, inputs)
    return stored_tensors(name, blocks, tail), zigzag.unpack(blocks, len(weight), tail=tail, block=block)


def checked_shape(checkpoint: Checkpoint, architecture: Architecture, layer: int, site: str) -> tuple[int, int]:
    """Rows and columns of a site's matrix, or of an expert's there; raises `PackingError` where they are not the
    configuration's."""
    parts, columns = site_shapes(architecture, layer)[site]
    numbers = experts_at(architecture, layer, site)
    experts = 1 if numbers is None else numbers.stored
    expected, found = (experts * sum(parts), columns), checkpoint.stacked_shape(site, layer)
    if found != expected:
        raise PackingError(
            f"blk.{layer}.{site}: the weights are {found}, config.json means {expected}; is it this model's?"
        )
    return sum(parts), columns


def experts_at(architecture: Architecture, layer: int, site: str) -> ExpertNumbers | None:
    """How many experts read a site of a block; None: none do."""
    mlp = architecture.blocks[layer].mlp
    return mlp.experts if mlp is not None and site in MLP_SITES else None


def _planned_router(checkpoint: Checkpoint, layer: int) -> Iterator[PlannedGroup]:
    """What says which experts a token has, and how much of each."""
    experts = checkpoint.family.experts_of(layer)
    if experts is not None:
        gate = "" if experts.shared is None else experts.shared.gate
        if experts.own_norms is not None:
            source = f"{checkpoint.family.block(layer)}.{experts.own_norms.experts}"
            yield _in_f32(checkpoint, f"blk.{layer}.{EXPERT_SCALE}", source)
        modules = {ROUTER: experts.router} | ({SHARED_GATE: gate} if gate else {})
        if experts.routing is not None and experts.routing.correction:
            source = f"{checkpoint.family.block(layer)}.{experts.routing.correction}"
            yield _in_f32(checkpoint, f"blk.{layer}.{CORRECTION}", source)
        for name, module in modules.items():
            source = f"{checkpoint.family.block(layer)}.{module}.weight"
            yield _in_f32(checkpoint, f"blk.{layer}.{name}", source)
        if experts.biased:
            yield _in_f32(
                checkpoint, f"blk.{layer}.{ROUTER_BIAS}", f"{checkpoint.family.block(layer)}.{experts.router}.bias"
            )


def _in_f32(checkpoint: Checkpoint, name: str, source: str) -> PlannedGroup:
    planned = PlannedTensor(name, checkpoint.shape(source), "F32")
    return alone(planned, lambda: BLOCKS["F32"].encode(checkpoint.tensor(source)))


def _planned_delta_net(checkpoint: Checkpoint, architecture: Architecture, layer: int) -> Iterator[PlannedGroup]:
    """What a mixer that keeps a state has beside its two sites."""
    names = checkpoint.family.state
    for name, shape in delta_shapes(architecture, layer).items():
        assert names is not None
        source = f"{checkpoint.family.block(layer)}.{names.tensors[name]}"
        planned = PlannedTensor(f"blk.{layer}.{name}.weight", shape, "F32")
        yield alone(planned, partial(_shaped_f32, checkpoint, source, shape))


def _shaped_f32(checkpoint: Checkpoint, source: str, shape: tuple[int, ...]) -> Tensor:
    return BLOCKS["F32"].encode(checkpoint.tensor(source).reshape(shape))


def planned_vector(name: str, type: str, value: Tensor) -> PlannedGroup:
    """A vector that holds no weights of the model, in memory from the plan on; its dtype is that of `type`."""
    data = value.to("cpu").contiguous()
    return alone(PlannedTensor(name, tuple(data.shape), type, weights=False), partial(data.view, torch.uint8))


def check_levels(name: str, rule: SiteRule, levels: int) -> None:
    """Raise `PackingError` for thresholds of levels that a format does not have so many of."""
    if rule.steps is not None and len(rule.steps) != levels:
        raise PackingError(
            f"{name}: thresholds of {len(rule.steps)} levels, this format has {levels or 'none'}; find thresholds for "
            "this format, or pack as the one that they are for"
        )


def _planned_rule(name: str, rule: SiteRule, levels: int) -> Iterator[PlannedGroup]:
    check_levels(name, rule, levels)
    for part, value in (
        ("threshold", rule.unit if rule.unit.dim() else rule.unit[None]),
        ("steps", rule.steps),
        ("offset", rule.offset),
    ):
        if value is not None:
            yield planned_vector(f"{name}.{part}", "F32", value.detach().float())


def _norm(checkpoint: Checkpoint, name: str, source: str) -> PlannedGroup:
    shape = checkpoint.shape(source)
    return alone(PlannedTensor(name, shape, "F32"), lambda: BLOCKS["F32"].encode(checkpoint.norm(source)))


def check_rules(checkpoint: Checkpoint, rules: Rules) -> None:
    """Raise `PackingError` for rules that cannot be of a model."""
    for (layer, site), rule in rules.items():
        name = f"blk.{layer}.{site}"
        sites = checkpoint.family_at(max(0, min(layer, checkpoint.layers - 1))).projections
        if site not in sites or not 0 <= layer < checkpoint.layers:
            raise PackingError(
                f"{name}: no such site in {checkpoint.name} ({checkpoint.layers} layers of {', '.join(sites)}); "
                "give thresholds of this model"
            )
        columns = checkpoint.stacked_shape(site, layer)[1]
        numbers = expert_numbers(checkpoint.config, layer) if site == MLP_MID and rule.of_levels else None
        shape = (columns,) if numbers is None else (numbers.stored, columns)
        if rule.unit.shape != shape and (rule.unit.numel() != 1 or rule.of_levels):
            one = "" if rule.of_levels else "one number or "
            raise PackingError(
                f"{name}: threshold {list(rule.unit.shape)}, expected {one}{list(shape)}; give thresholds of this model"
            )
        if rule.of_levels and rule.offset is not None:
            raise PackingError(f"{name}: offsets, which thresholds of levels have no place for; find them without")
        if rule.steps is not None and not (rule.steps[1:] >= rule.steps[:-1]).all():
            raise PackingError(f"{name}: steps of levels fall, expected ascending numbers; find thresholds anew")
        if rule.limits.isnan().any():
            raise PackingError(f"{name}: a threshold is NaN, expected a number; calibrate again")
        if rule.offset is not None and tuple(rule.offset.shape) != (columns,):
            raise PackingError(f"{name}: offset {list(rule.offset.shape)}, expected [{columns}]; calibrate again")
        if rule.offset is not None and checkpoint.family.of_experts(layer, site):
            raise PackingError(f"{name}: offsets, which experts have no place for; give thresholds without them")
        if rule.offset is not None and not rule.offset.isfinite().all():
            raise PackingError(f"{name}: an offset is not finite, expected a number; calibrate again")
