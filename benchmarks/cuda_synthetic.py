"""Llamas of 7 and 8 billion parameters made on the GPU in seconds, with random weights and real thresholds.

Weights have a real model's size and spread: variance 1 / columns, what a block adds scaled down. Thresholds are those
of this model: for each site in the order of execution the quantile of |x| over random tokens, everything upstream
already sparse. Which columns are then active is random from token to token; a trained model's cluster more.
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from synthetic import Size, with_thresholds
from torch import Tensor

from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.matrices import ZIGZAG, PackedMatrix, decode_rows, encode_rows
from sparsepack.formats.packed import DenseMlp, PackedLayer, PackedModel, PackedSite
from sparsepack.models.architecture import architecture_of
from sparsepack.models.families import ATTENTION_SITES, MLP_SITES
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference

LLAMA_8B = Size("Llama-3-8B", 4096, 32, 14336, 32, 8, 128256)
LLAMA_7B = Size("Llama-2-7B", 4096, 32, 11008, 32, 32, 32000)
LLAMA_1B = Size("Llama-3.2-1B", 2048, 16, 8192, 32, 8, 128256)
CALIBRATION_TOKENS = 256
CONTEXT = 8192
Thresholds = Mapping[tuple[int, str], float]

__all__ = [
    "CONTEXT",
    "LLAMA_1B",
    "LLAMA_7B",
    "LLAMA_8B",
    "Thresholds",
    "find_thresholds",
    "random_model",
    "with_thresholds",
]


def random_model(size: Size, layers: int | None = None, device: str = "cuda") -> PackedModel:
    """A model of a size, with fewer layers if asked; all of it on the device."""
    from transformers import LlamaConfig

    head_dim = size.hidden // size.heads
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers or size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    generator = torch.Generator(device=device).manual_seed(0)
    kv, narrow = size.kv_heads * head_dim, 1 / math.sqrt(2 * size.layers)
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
        embedding=_random_rows(size.vocabulary, size.hidden, 1.0, generator),
        output_norm=norm(),
        output=_random_rows(size.vocabulary, size.hidden, size.hidden**-0.5, generator),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"model": {"name": f"random {size.name}"}},
    )


def random_zigzag(rows: int, columns: int, scale: float, generator: torch.Generator) -> PackedMatrix:
    """Weights between -7.5 and 7.5 steps, with the standard deviation scale / sqrt(columns)."""
    shape = (zigzag.bands(rows), columns, 144)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=generator.device, generator=generator)
    step = scale * columns**-0.5 / 4.61  # the standard deviation of 0 .. 15
    # Scales and minima are all 32; d varies by a tenth from column to column, dmin = 7.5 d.
    varied = step / 32 * (1 + 0.1 * torch.randn(shape[:2], device=generator.device, generator=generator))
    blocks[..., :4] = torch.stack([varied, 7.5 * varied], dim=-1).half().view(torch.uint8)
    blocks[..., 4:12] = 160
    blocks[..., 12:16] = 0
    return PackedMatrix(blocks, ZIGZAG, rows, columns)


def _random_rows(rows: int, columns: int, scale: float, generator: torch.Generator) -> PackedMatrix:
    parts = [
        encode_rows(
            scale * torch.randn(min(16384, rows - at), columns, device=generator.device, generator=generator), "Q6_K"
        )
        for at in range(0, rows, 16384)
    ]
    return PackedMatrix(torch.cat(parts), "Q6_K", rows, columns)


@torch.inference_mode()
def find_thresholds(packed: PackedModel, sparsities: Iterable[float]) -> dict[float, Thresholds]:
    """For each sparsity a threshold per (layer, site): one pass over random tokens each, in float32, sites in turn."""
    a, device = packed.architecture, packed.output_norm.device
    generator = torch.Generator(device=device).manual_seed(1)
    ids = torch.randint(a.vocabulary, (CALIBRATION_TOKENS,), device=device, generator=generator)
    embedded = decode_rows(packed.embedding.blocks[ids], packed.embedding.type)
    cos, sin = (
        t.to(device) for t in reference_attention.rotary_table(torch.tensor(a.inv_freq), a.rotary_scale, len(ids))
    )
    seen = reference_attention.visible(0, len(ids), 0, 0, device)
    states = {sparsity: embedded.clone() for sparsity in sparsities}
    found: dict[float, dict[tuple[int, str], float]] = {sparsity: {} for sparsity in states}
    for number, layer in enumerate(packed.layers):
        weights = {name: zigzag.unpack(site.matrix.blocks, site.matrix.rows) for name, site in layer.sites.items()}
        for sparsity, hidden in states.items():

            def product(
                name: str,
                x: Tensor,
                sparsity: float = sparsity,
                number: int = number,
                weights: Mapping[str, Tensor] = weights,
            ) -> Tensor:
                size = x.abs()
                threshold = size.flatten().kthvalue(max(1, round(sparsity * size.numel()))).values
                found[sparsity][number, name] = float(threshold)
                return F.linear(torch.where(size > threshold, x, 0), weights[name])

            def heads(x: Tensor) -> Tensor:
                return x.view(len(x), -1, a.head_dim).transpose(0, 1)

            x = reference.rms_norm(hidden, layer.norms["attn_norm"], a.norm_eps)
            parts = list(layer.sites["attn_in"].parts)
            q, k, v = (heads(part) for part in product("attn_in", x).split(parts, dim=-1))
            mixed = reference_attention.attention(
                reference_attention.rotate(q, cos, sin), reference_attention.rotate(k, cos, sin), v, seen
            )
            hidden = hidden + product("attn_out", mixed)
            x = reference.rms_norm(hidden, layer.norms["mlp_norm"], a.norm_eps)
            gate, up = product("mlp_in", x).chunk(2, dim=-1)
            states[sparsity] = hidden + product("mlp_mid", F.silu(gate) * up)
    return dict(found)
