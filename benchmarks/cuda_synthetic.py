"""Llamas of 7 and 8 billion parameters made on the GPU in seconds, with random weights and real thresholds.

Weights have a real model's size and spread: variance 1 / columns, what a block adds scaled down. Thresholds are those
of this model (`thresholds.py`).
"""

import math

import torch
from synthetic import Size, llama_config
from torch import Tensor

from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix, encode_rows
from sparsepack.formats.codecs.types import type_that_fits
from sparsepack.formats.packed import DenseMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of
from sparsepack.models.family import ATTENTION_SITES, MLP_SITES

LLAMA_8B = Size("Llama-3-8B", 4096, 32, 14336, 32, 8, 128256)
LLAMA_7B = Size("Llama-2-7B", 4096, 32, 11008, 32, 32, 32000)
LLAMA_1B = Size("Llama-3.2-1B", 2048, 16, 8192, 32, 8, 128256)
CONTEXT = 8192


def random_model(size: Size, layers: int | None = None, device: str = "cuda") -> PackedModel:
    """A model of a size, with fewer layers if asked; all of it on the device."""
    config = llama_config(size, num_hidden_layers=layers or size.layers, max_position_embeddings=CONTEXT)
    generator = torch.Generator(device=device).manual_seed(0)
    kv, narrow = size.kv_heads * config.head_dim, 1 / math.sqrt(2 * size.layers)
    shapes = {
        "attn_in": ((size.hidden, kv, kv), size.hidden, 1.0),
        "attn_out": ((size.hidden,), size.hidden, narrow),
        "mlp_in": ((size.intermediate, size.intermediate), size.hidden, 1.0),
        "mlp_mid": ((size.hidden,), size.intermediate, narrow),
    }

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(size.hidden, generator=generator, device=device)

    def layer() -> PackedLayer:
        sites = {
            name: PackedSite(random_zigzag(sum(parts), columns, scale, generator), None, None, parts)
            for name, (parts, columns, scale) in shapes.items()
        }
        attention, mlp = ({name: sites[name] for name in names} for names in (ATTENTION_SITES, MLP_SITES))
        return PackedLayer(attention, {"attn_norm": norm(), "mlp_norm": norm()}, DenseMlp(mlp))

    return PackedModel(
        architecture=architecture_of(config, None),
        layers=tuple(layer() for _ in range(config.num_hidden_layers)),
        embedding=random_rows(size.vocabulary, size.hidden, 1.0, generator),
        output_norm=norm(),
        output=random_rows(size.vocabulary, size.hidden, size.hidden**-0.5, generator),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"model": {"name": f"random {size.name}"}},
    )


def random_zigzag(rows: int, columns: int, scale: float, generator: torch.Generator) -> PackedMatrix:
    """Weights between -7.5 and 7.5 steps, with the standard deviation scale / sqrt(columns)."""
    blocks = random_superblocks((zigzag.bands(rows), columns), scale * columns**-0.5, generator)
    return PackedMatrix(blocks, ZIGZAG, rows, columns)


def random_superblocks(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Superblocks of Q4_K, uint8 [*shape, 144], whose weights have a standard deviation."""
    blocks = torch.randint(0, 256, (*shape, 144), dtype=torch.uint8, device=generator.device, generator=generator)
    step = deviation / 4.61  # the standard deviation of 0 .. 15
    # Scales and minima are all 32; d varies by a tenth from superblock to superblock, dmin = 7.5 d.
    varied = step / 32 * (1 + 0.1 * torch.randn(shape, device=generator.device, generator=generator))
    blocks[..., :4] = torch.stack([varied, 7.5 * varied], dim=-1).half().view(torch.uint8)
    blocks[..., 4:12] = 160
    blocks[..., 12:16] = 0
    return blocks


def random_rows(rows: int, columns: int, scale: float, generator: torch.Generator) -> PackedMatrix:
    """Weights with a standard deviation, in Q6_K or what takes its place for so many columns."""
    type = type_that_fits("Q6_K", columns)
    parts = [
        encode_rows(
            scale * torch.randn(min(16384, rows - at), columns, device=generator.device, generator=generator), type
        )
        for at in range(0, rows, 16384)
    ]
    return PackedMatrix(torch.cat(parts), type, rows, columns)
