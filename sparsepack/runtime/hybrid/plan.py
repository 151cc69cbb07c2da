"""What of a packed model lies on the card and what in the host's memory, for what an engine was asked."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from sparsepack.errors import PlacementError
from sparsepack.formats.blocks.labels import padded_channels
from sparsepack.formats.kinds import DENSE, EXPERTS
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders.gates import copy_bytes
from sparsepack.formats.orders.neuron import record_bytes
from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.formats.packed import (
    DenseMlp,
    ExpertMlp,
    NeuronMlp,
    PackedExpertsSite,
    PackedLayer,
    PackedModel,
    PackedSite,
)
from sparsepack.placement.budget import Parts, Plan, format_bytes, plan_of_share, plan_within, work_of
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.products.tile_config import planes_tile_bands
from sparsepack.runtime.decoder import kept_latents
from sparsepack.runtime.features import not_by_neurons
from sparsepack.runtime.free_memory import cache_bytes, free_host_bytes
from sparsepack.runtime.options import EngineOptions


def make_plan(packed: PackedModel, context: int, cache_type: str, options: EngineOptions) -> Plan:
    """What lies where for the options' `vram` or `cached`; without either, all on the card.

    context, cache_type -- what the engine made of those in the options

    Raises `PlacementError`: the budget is below the least, or the host's memory does not hold the rest.
    """
    copies = options.gate_copy is not None
    parts = parts_of(packed, context, cache_type, options.sequences or 1, gate_copies=copies)
    budget = options.vram_bytes
    found = plan_of_share(parts, 1.0 if options.cached is None else options.cached)
    if budget is not None:
        found = plan_within(parts, budget)
    check_host(found, free_host_bytes())
    return found


OF_PROCESSOR = (136, 136, 136, 72, 72, 0)
"""Bytes that the processor's kernels hold of a superblock of planes where none, one, .. all of these lie on the card:
scales, and planes in twos (`cpu/native/layout/planes.h`)."""

LEAST_CONTEXT = 16


def context_within(packed: PackedModel, context: int, cache_type: str, sequences: int, budget: int) -> int:
    """The context to make room for where nobody asked for one: halved until keys and values of all sequences take at
    most a quarter of the budget, but no further than `LEAST_CONTEXT`."""
    while context > LEAST_CONTEXT and 4 * sequences * _cache_bytes(packed, context, cache_type) > budget:
        context = max(LEAST_CONTEXT, context // 2)
    return context


def parts_of(
    packed: PackedModel, context: int, cache_type: str, sequences: int = 1, *, gate_copies: bool = False
) -> Parts:
    """What a model takes whose MLPs are stored by neurons or as sites of zigzag matrices, for sequences of so many
    tokens side by side. Of sites the columns of the down matrices are the records.

    gate_copies -- whether copies of gates (`codecs.gate_copy`, two bits a weight) may take their place

    Raises `PlacementError` for another model, and with copies for one whose gates cannot be read one by one.
    """
    a = packed.architecture
    if packed.mlp_kind is EXPERTS:
        raise PlacementError(not_by_neurons(packed))
    if packed.mlp_kind is DENSE:
        if gate_copies:
            raise PlacementError(f"--gate-copy: {not_by_neurons(packed)}")
        mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, DenseMlp)]
        downs = [_card_bytes(mlp.sites["mlp_mid"].matrix) for mlp in mlps]
        gates = tuple(_of_sites(mlp.sites) - down for mlp, down in zip(mlps, downs, strict=True))
        record = downs[0] // a.intermediate  # a column, of whole bands
        parts = _parts(
            packed, context, cache_type, sequences, gates, record, a.intermediate, a.intermediate, together=True
        )
        return _of_planes(packed, parts) if packed.plane_bits is not None else parts
    gates = tuple(layer.mlp.gate.padded_nbytes for layer in packed.layers if isinstance(layer.mlp, NeuronMlp))
    parts = _parts(
        packed, context, cache_type, sequences, gates, record_bytes(a.hidden), a.intermediate, a.intermediate
    )
    if not gate_copies:
        return parts
    if any(isinstance(layer.mlp, NeuronMlp) and layer.mlp.gate.format.order == "zigzag" for layer in packed.layers):
        raise PlacementError(
            "--gate-copy: it reads the gates of single neurons, and this file has gates in zigzag order; pack the "
            "model again with --gates rows"
        )
    return replace(parts, copies=(copy_bytes(a.intermediate, a.hidden),) * a.layers, gate=gates[0] // a.intermediate)


def _of_planes(packed: PackedModel, parts: Parts) -> Parts:
    """The same of a model of planes, of which a card may hold the first ones alone."""
    mlps = [layer.mlp for layer in packed.layers if isinstance(layer.mlp, DenseMlp)]
    attention = tuple(_matrices(layer.attention) for layer in packed.layers)
    gates = tuple(_matrices({name: of for name, of in mlp.sites.items() if name != "mlp_mid"}) for mlp in mlps)
    levels = packed.layers[0].attention["attn_in"].matrix.levels
    sites = [site for layer in packed.layers for site in layer.sites.values()]
    of_levels = [site.rule for site in sites if site.rule is not None and site.rule.of_levels]
    return replace(
        parts,
        attention=attention,
        gates=gates,
        fixed=sum(parts.attention)
        + sum(parts.gates)
        - sum(attention)
        - sum(gates)
        + sum((len(levels) - 1) * rule.unit.nbytes for rule in of_levels),  # a card has the products with all steps
        levels=levels,
        of_processor=OF_PROCESSOR,
    )


def parts_of_experts(packed: PackedModel, context: int, cache_type: str) -> Parts:
    """What a model with experts takes, each of which is one record of its matrices, for one text of so many tokens."""
    gates, records = [], []
    for layer in packed.layers:
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMlp)
        matrices = sum(matrix.padded_nbytes for matrix in mlp.matrices.values())
        record = matrices // (len(mlp.router) + mlp.shared)
        records.append(record)
        gates.append(record * mlp.shared + sum(tensor.nbytes for tensor in mlp.always) + _rules(mlp.sites.values()))
    experts = packed.architecture.experts
    assert experts is not None
    wide = experts.of_token * packed.architecture.intermediate
    parts = _parts(packed, context, cache_type, 1, tuple(gates), max(records), experts.count, wide)
    return replace(parts, spare=experts.used)


def _parts(
    packed: PackedModel,
    context: int,
    cache_type: str,
    sequences: int,
    gates: tuple[int, ...],
    record: int,
    neurons: int,
    wide: int,
    together: bool = False,
) -> Parts:
    """What a model takes; wide -- channels of its MLP that a token has; together: as `Parts` has it."""
    a = packed.architecture
    tied = packed.output is packed.embedding
    embedding = 0 if tied else packed.embedding.blocks.nbytes
    output = packed.output.blocks.nbytes + packed.output_norm.nbytes
    attention = tuple(_attention_bytes(layer) for layer in packed.layers)
    weights = embedding + output + sum(attention) + sum(gates) + record * neurons * a.layers
    rotary = 4 * a.head_dim * context
    work, least_work = (
        work_of(
            hidden=max(a.hidden, a.heads * a.head_dim),
            intermediate=wide,
            blocks=a.layers,
            vocabulary=a.vocabulary,
            sequences=sequences,
            record=record,
            model=model,
            slots=not together,
        )
        for model in (weights, 0)
    )
    cache = sequences * (_cache_bytes(packed, context, cache_type) + _label_bytes(packed, context)) + rotary
    return Parts(
        *(embedding, output, attention, gates, record, neurons, cache, work),
        least_work=least_work,
        together=together,
    )


def _cache_bytes(packed: PackedModel, context: int, cache_type: str) -> int:
    """The bytes of a sequence's keys and values, or latents, on a card."""
    return cache_bytes(packed.architecture, context, cache_type, kept_latents(packed, find_backend("cuda")))


def _label_bytes(packed: PackedModel, context: int) -> int:
    """Bytes of the labels of a sequence's keys, at most; 0 where no tokens are selected by labels."""
    heavy = () if packed.attention is None else packed.attention.channels
    of_a_head = (padded_channels(each.shape[1]) // 2 + 2 for each in heavy if each is not None)
    return packed.architecture.kv_heads * context * sum(of_a_head)


def check_host(plan: Plan, free: int | None) -> None:
    """Raise `PlacementError` where the host has fewer bytes free than a plan takes there; None: nobody knows."""
    if free is not None and plan.host_bytes > free:
        remedy = "end what takes it" if plan.budget is None else "give a larger --vram, or end what takes it"
        raise PlacementError(
            f"{format_bytes(plan.host_bytes)} of the host's memory for what has no room on the card: "
            f"{free / 1e9:.2f}GB are free; {remedy}"
        )


def _attention_bytes(layer: PackedLayer) -> int:
    tensors: list[Tensor | None] = [*layer.norms.values(), None if layer.basis is None else layer.basis.blocks]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) + _of_sites(layer.attention)


def _of_sites(sites: Mapping[str, PackedSite]) -> int:
    """Bytes of matrices, as a card holds them, scales of rows, biases and rules."""
    of_rows = [of for site in sites.values() for of in (site.bias, site.matrix.row_scale) if of is not None]
    return _matrices(sites) + sum(of.nbytes for of in of_rows) + _rules(sites.values())


def _matrices(sites: Mapping[str, PackedSite]) -> int:
    return sum(_card_bytes(site.matrix) for site in sites.values())


def _card_bytes(matrix: PackedMatrix) -> int:
    """Bytes of a matrix on a card; of planes there are bands up to whole tiles."""
    if not matrix.levels:
        return matrix.padded_nbytes
    bands = -(-matrix.rows // BAND_ROWS)
    return matrix.columns * -(-bands // planes_tile_bands(bands)) * planes_tile_bands(bands) * matrix.levels[-1]


def _rules(sites: Iterable[PackedSite | PackedExpertsSite]) -> int:
    rules = [site.rule for site in sites if site.rule is not None]
    return sum(tensor.nbytes for rule in rules for tensor in (rule.unit, rule.steps, rule.offset) if tensor is not None)
