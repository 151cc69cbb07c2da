"""Packed models of any family and size, made in memory in seconds, with random weights.

Weights have a real model's size and spread: variance 1 / columns, what a block adds scaled down. Routers are sharper,
as trained ones are: else rounding would choose other experts.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared.shapes import CONTEXT, SHARPER, Size, llama_config
from sparsepack.formats.blocks.table import BLOCKS, type_that_fits
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, PackedMatrix
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import (
    DenseMlp,
    ExpertMlp,
    NeuronMlp,
    PackedExpertsSite,
    PackedLayer,
    PackedModel,
    PackedPerLayer,
    PackedPerLayerInputs,
    PackedSite,
)
from sparsepack.formats.zigzag.reader import delta_shapes, norm_widths, site_shapes
from sparsepack.models.blocks import Attention, ExpertNumbers
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES
from sparsepack.models.hf_config import architecture_of

_ADDED = ("attn_out", "mlp_mid")
"""What these sites make is added to the residual stream."""


def random_model(size: Size, layers: int | None = None, device: str = "cuda", block: str = "Q4_K") -> PackedModel:
    """A Llama of a size, of so many layers or its own; all of it on the device. block: as `random_of` has it"""
    config = llama_config(size, num_hidden_layers=layers or size.layers, max_position_embeddings=CONTEXT)
    return random_of(config, size.name, size.layers, device, block)


def random_of(config: Any, name: str, depth: int, device: str = "cuda", block: str = "Q4_K") -> PackedModel:
    """A model of any family, by its configuration, on the device; every site dense.

    depth -- layers of the model whose part it may be: what a block adds is as small as there
    block -- of its matrices in zigzag order, Q4_K or Q6_P
    """
    a, narrow = architecture_of(config, None), 1 / math.sqrt(2 * depth)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=generator, device=device)

    def norm(width: int, size: float = 1.0) -> Tensor:
        return size * (1 + normal(width, size=0.2))

    def site(number: int, of: str) -> PackedSite:
        parts, columns = site_shapes(a, number)[of]
        scale = narrow if of in _ADDED else 1.0
        return PackedSite(random_zigzag(sum(parts), columns, scale, generator, block), None, None, parts)

    def experts_site(number: int, of: str, numbers: ExpertNumbers, biased: bool) -> PackedExpertsSite:
        parts, columns = site_shapes(a, number)[of]
        shape = numbers.stored, zigzag.bands(sum(parts)), columns
        deviation = (narrow if of in _ADDED else 1.0) * columns**-0.5
        blocks = random_superblocks(shape, deviation, generator, block)
        matrix = PackedExperts(blocks, MatrixFormat(block, "zigzag"), sum(parts), columns)
        bias = normal(numbers.stored, sum(parts), size=0.1 * deviation) if biased else None
        return PackedExpertsSite(matrix, None, parts, bias)

    def mlp(number: int) -> DenseMlp | ExpertMlp:
        described = a.blocks[number].mlp
        if described is None:
            return DenseMlp({})
        if a.experts is None or described.experts is None:
            return DenseMlp({of: site(number, of) for of in MLP_SITES})
        biased = described.biased
        sites = {of: experts_site(number, of, a.experts, biased) for of in MLP_SITES}
        router = normal(a.experts.count, a.hidden, size=SHARPER * a.hidden**-0.5)
        names = a.family(number).experts
        gated = names is not None and names.shared is not None and names.shared.gate
        shared = normal(1, a.hidden, size=a.hidden**-0.5) if gated else None
        bias = normal(a.experts.count, size=0.1) if biased else None
        scale = norm(a.experts.count) if names is not None and names.own_norms is not None else None
        numbers = a.experts.used, a.experts.normalised
        return ExpertMlp(router, *numbers, sites, shared, bias, a.experts.router, scale=scale)

    def delta_net(number: int) -> dict[str, Tensor]:
        made = {}
        for name, shape in delta_shapes(a, number).items():
            made[name] = normal(*shape, size=shape[-1] ** -0.5) if len(shape) > 1 else norm(*shape)
        return made

    def layer(number: int) -> PackedLayer:
        units, mixer = mlp(number), a.blocks[number].mixer
        attention = {} if mixer is None else {of: site(number, of) for of in ATTENTION_SITES}
        # What a block adds is small beside the stream, as a trained model's.
        widths = norm_widths(a, number)
        norms = {of: norm(width, narrow if "post" in of else 1.0) for of, width in widths.items()}
        sinks = normal(a.heads) if isinstance(mixer, Attention) and mixer.sinks else None
        scalar = norm(1) if a.blocks[number].scaled else None
        return PackedLayer(attention, norms, units, None, sinks, delta_net(number), scalar, per_layer())

    def per_layer() -> PackedPerLayer | None:
        if not a.per_layer:
            return None
        gate = random_rows(a.per_layer, a.hidden, a.hidden**-0.5, generator, type_that_fits("Q8_0", a.hidden))
        out = random_rows(a.hidden, a.per_layer, a.per_layer**-0.5, generator, type_that_fits("Q8_0", a.per_layer))
        return PackedPerLayer(gate, out, norm(a.hidden, narrow))

    def per_layer_inputs() -> PackedPerLayerInputs | None:
        if not a.per_layer:
            return None
        rows = a.layers * a.per_layer
        projection = random_rows(rows, a.hidden, 1.0, generator, type_that_fits("Q8_0", a.hidden))
        return PackedPerLayerInputs(
            random_rows(a.vocabulary, rows, a.per_layer**-0.5, generator), projection, norm(a.per_layer)
        )

    return PackedModel(
        architecture=a,
        layers=tuple(map(layer, range(a.layers))),
        embedding=random_rows(a.vocabulary, a.hidden, 1 / a.embedding_scale, generator),
        output_norm=norm(a.hidden),
        output=random_rows(a.vocabulary, a.hidden, a.hidden**-0.5, generator),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"model": {"name": f"random {name}"}},
        per_layer=per_layer_inputs(),
    )


def random_zigzag(
    rows: int, columns: int, scale: float, generator: torch.Generator, block: str = "Q4_K"
) -> PackedMatrix:
    """Weights evenly between two sizes, with the standard deviation scale / sqrt(columns)."""
    blocks = random_superblocks((zigzag.bands(rows), columns), scale * columns**-0.5, generator, block)
    return PackedMatrix(blocks, MatrixFormat(block, "zigzag"), rows, columns)


def random_superblocks(
    shape: tuple[int, ...], deviation: float, generator: torch.Generator, block: str = "Q4_K"
) -> Tensor:
    """Superblocks of Q4_K or Q6_P, uint8 [*shape, bytes], whose weights have a standard deviation."""
    device, size = generator.device, BLOCKS[block].bytes
    blocks = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, device=device, generator=generator)
    varied = 1 + 0.1 * torch.randn(shape, device=device, generator=generator)  # scales of superblocks
    if block == "Q6_P":
        step = deviation / 73.9 * varied  # the standard deviation of 4 q - 126
        blocks[..., :4] = (8 * (step.clamp_min(2.0**-20).log2() + 24)).round()[..., None].to(torch.uint8)
        # Centres two above and two below by turns: a mean of all weights would grow from block to block.
        blocks[..., 4:8] = torch.tensor([0, 63, 0, 63], dtype=torch.uint8, device=device)
        return blocks
    step = deviation / 4.61 * varied  # the standard deviation of 0 .. 15
    # Scales and minima are all 32; dmin = 7.5 d.
    blocks[..., :4] = torch.stack([step / 32, 7.5 * step / 32], dim=-1).half().view(torch.uint8)
    blocks[..., 4:12] = 160
    blocks[..., 12:16] = 0
    return blocks


def random_rows(
    rows: int, columns: int, scale: float, generator: torch.Generator, type: str | None = None
) -> PackedMatrix:
    """Weights with a standard deviation, in a type, or in Q6_K or what takes its place for so many columns."""
    type = type or type_that_fits("Q6_K", columns)
    parts = [
        BLOCKS[type].encode(
            scale * torch.randn(min(16384, rows - at), columns, device=generator.device, generator=generator)
        )
        for at in range(0, rows, 16384)
    ]
    return PackedMatrix(torch.cat(parts), MatrixFormat(type), rows, columns)


def random_neurons(
    size: Size, frequency: np.ndarray, device: str = "cpu", seed: int = 0, *, rows: bool = False
) -> PackedModel:
    """A model of a size, in host memory.

    frequency -- float64 [blocks, neurons], falling: the file would say so
    rows      -- whether gates are stored by rows
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    config = llama_config(size, hidden_act="relu")
    kv, narrow = size.kv_heads * config.head_dim, 1 / math.sqrt(2 * size.layers)

    def zigzag(rows: int, scale: float = 1.0) -> PackedMatrix:
        return _to_host(random_zigzag(rows, size.hidden, scale, generator))

    attention = {
        "attn_in": PackedSite(zigzag(size.hidden + 2 * kv), None, None, (size.hidden, kv, kv)),
        "attn_out": PackedSite(zigzag(size.hidden, narrow), None, None, (size.hidden,)),
    }
    superblocks = 2 * size.hidden // 256
    records = random_superblocks((size.intermediate, superblocks), size.hidden**-0.5 * narrow, generator)
    gate = gate_by_rows(size, generator) if rows else zigzag(size.intermediate)
    stored = PackedMatrix(records.flatten(1).cpu(), MatrixFormat("Q4_K"), size.intermediate, 2 * size.hidden)
    norm = torch.ones(size.hidden)
    layers = tuple(
        PackedLayer(
            attention,
            {"attn_norm": norm, "mlp_norm": norm},
            NeuronMlp(gate, stored, torch.from_numpy(row).float(), torch.arange(size.intermediate)),
        )
        for row in frequency
    )
    return PackedModel(
        architecture=architecture_of(config, None),
        layers=layers,
        embedding=_to_host(random_rows(size.vocabulary, size.hidden, 1.0, generator)),
        output_norm=norm,
        output=_to_host(random_rows(size.vocabulary, size.hidden, size.hidden**-0.5, generator)),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"kind": "neuron-q4_k", "model": {"name": f"random {size.name}"}},
    )


def gate_by_rows(size: Size, generator: torch.Generator) -> PackedMatrix:
    """A random gate by rows."""
    superblocks = random_superblocks((size.intermediate, size.hidden // 256), size.hidden**-0.5, generator)
    return PackedMatrix(superblocks.flatten(1).cpu(), MatrixFormat("Q4_K"), size.intermediate, size.hidden)


def _to_host(matrix: PackedMatrix) -> PackedMatrix:
    return PackedMatrix(matrix.blocks.cpu(), matrix.format, matrix.rows, matrix.columns)
