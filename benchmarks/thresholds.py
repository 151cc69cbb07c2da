"""Thresholds of a Llama or a mixture of experts with random weights: real ones for it.

For each site in the order of execution it is the quantile of |x| over random tokens, everything upstream already
sparse. The columns that are active then spread at random from token to token; a trained model's cluster more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsepack.formats.codecs import zigzag
from sparsepack.formats.codecs.matrices import decode_rows
from sparsepack.formats.packed import ExpertMlp, PackedModel, PackedSite
from sparsepack.models.records.rule import SiteRule
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.experts import route

CALIBRATION_TOKENS = 256
Thresholds = Mapping[tuple[int, str], float]
"""The threshold of each (layer, site)."""


def with_thresholds(packed: PackedModel, thresholds: Thresholds) -> PackedModel:
    """The same model with the rules replaced; sites not named become dense."""
    layers = []
    for number, layer in enumerate(packed.layers):
        sites = {}
        for name, site in layer.sites.items():
            value = thresholds.get((number, name))
            rule = None if value is None else SiteRule(torch.tensor(value, dtype=torch.float32))
            sites[name] = replace(site, rule=rule)
        mlp = replace(layer.mlp, sites={name: sites.pop(name) for name in layer.mlp.sites})
        layers.append(replace(layer, attention=sites, mlp=mlp))
    return replace(packed, layers=tuple(layers))


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
        dense = {name: site for name, site in layer.sites.items() if isinstance(site, PackedSite)}
        weights = {name: zigzag.unpack(site.matrix.blocks, site.matrix.rows) for name, site in dense.items()}
        for sparsity, hidden in states.items():

            def kept(name: str, x: Tensor, sparsity: float = sparsity, number: int = number) -> Tensor:
                size = x.abs()
                threshold = size.flatten().kthvalue(max(1, round(sparsity * size.numel()))).values
                found[sparsity][number, name] = float(threshold)
                return torch.where(size > threshold, x, 0)

            def product(name: str, x: Tensor, weights: Mapping[str, Tensor] = weights) -> Tensor:
                return F.linear(kept(name, x), weights[name])

            def heads(x: Tensor, norm: Tensor | None = None) -> Tensor:
                x = x.view(len(x), -1, a.head_dim).transpose(0, 1)
                return x if norm is None else reference.rms_norm(x, norm, a.norm_eps)

            x = reference.rms_norm(hidden, layer.norms["attn_norm"], a.norm_eps)
            parts = list(layer.sites["attn_in"].parts)
            norms = (layer.norms.get("q_norm"), layer.norms.get("k_norm"), None)
            qkv = product("attn_in", x).split(parts, dim=-1)
            q, k, v = (heads(part, norm) for part, norm in zip(qkv, norms, strict=True))
            mixed = reference_attention.attention(
                reference_attention.rotate(q, cos, sin), reference_attention.rotate(k, cos, sin), v, seen
            )
            hidden = hidden + product("attn_out", mixed)
            x = reference.rms_norm(hidden, layer.norms["mlp_norm"], a.norm_eps)
            if isinstance(layer.mlp, ExpertMlp):
                states[sparsity] = hidden + _of_experts(layer.mlp, x, kept)
                continue
            gate, up = product("mlp_in", x).chunk(2, dim=-1)
            states[sparsity] = hidden + product("mlp_mid", F.silu(gate) * up)
    return dict(found)


def _of_experts(mlp: ExpertMlp, x: Tensor, kept: Callable[[str, Tensor], Tensor]) -> Tensor:
    """What experts make of x [S, hidden], of the inputs that are kept."""

    def weight(name: str, expert: int) -> Tensor:
        matrix = mlp.sites[name].matrix
        return zigzag.unpack(matrix.blocks[expert], matrix.rows)

    chosen, shares = route(x, mlp.router, mlp.used, mlp.normalised)
    places = [(expert, *torch.where(chosen == expert)) for expert in chosen.unique().tolist()]
    x = kept("mlp_in", x)
    inner = x.new_empty(*chosen.shape, mlp.sites["mlp_mid"].matrix.columns)
    for expert, token, slot in places:
        gate, up = F.linear(x[token], weight("mlp_in", expert)).chunk(2, dim=-1)
        inner[token, slot] = F.silu(gate) * up
    inner, output = kept("mlp_mid", inner), torch.zeros_like(x)
    for expert, token, slot in places:
        made = F.linear(inner[token, slot], weight("mlp_mid", expert))
        output.index_add_(0, token, made * shares[token, slot, None])
    return output
