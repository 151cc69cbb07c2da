"""Random models of every family, packed in memory, beside the stock model with the same weights."""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from model_table import SMALL, VARIANTS
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedExperts, PackedMatrix, decode_matrix
from sparsepack.formats.orders import neuron as neurons
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
from sparsepack.formats.stock import dequantised
from sparsepack.models.checkpoint.experts import as_experts
from sparsepack.models.families import FAMILIES
from sparsepack.models.family import MLP_SITES
from sparsepack.models.found import family_of_config
from sparsepack.models.hf_config import architecture_of, per_layer_width, state_layers
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import build_model, parameter_shapes
from sparsepack.models.sites import SiteRule, sparsify


def random_model(variant: str = "llama", seed: int = 0, **changes: Any) -> PackedModel:
    """A packed model with random weights, large enough for attention and thresholds to matter; every site dense.

    tails, row_scales -- among the changes: whether last rows are tails, as artifacts have them, or padded bands, and
                         whether rows have scales, likewise
    block             -- likewise: the type of the superblocks
    """
    from transformers import AutoConfig

    values = {**SMALL, **VARIANTS[variant], **changes}
    bases, block = values.pop("bases", ()), values.pop("block", "Q4_K")
    encode, row_scales = encoder(values.pop("tails", False), block), values.pop("row_scales", False)
    zigzag_order = MatrixFormat(block, "zigzag")
    config = AutoConfig.for_model(**values)
    family = family_of_config(config)
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(config)

    def weight(name: str) -> Tensor:
        if name not in shapes and (family.bare_norms or not family.norm_biases):
            return torch.full((config.hidden_size,), float(name.endswith(".weight")))
        x = torch.randn(shapes[name], generator=generator)
        if re.search(r"norm(_\d)?\.weight$", name):
            return 1 + 0.2 * x
        return 0.3 * x if x.dim() == 1 or name.endswith("bias") else x * 2 / x.shape[-1] ** 0.5

    def site(prefix: str, projections: tuple[str, ...]) -> PackedSite:
        weights = [weight(f"{prefix}.{p}.weight") for p in projections]
        parts = tuple(len(w) for w in weights)
        has = [f"{prefix}.{p}.bias" in shapes for p in projections]
        bias = torch.cat([weight(f"{prefix}.{p}.bias") for p in projections]) if all(has) else None
        stacked = torch.cat(weights)
        blocks, tail = encode(stacked)
        row_scale = 0.5 + torch.rand(len(stacked), generator=generator) if row_scales else None
        return PackedSite(PackedMatrix(blocks, zigzag_order, *stacked.shape, tail, row_scale), bias, None, parts)

    def norms_of(layer: int) -> dict[str, Tensor]:
        names = {name: f"model.layers.{layer}.{of}" for name, of in family.at(config, layer).norms.items()}
        found = {name: weight(f"{module}.weight") for name, module in names.items()}
        biased = names if family.layer_norms else {}
        return found | {f"{name}_bias": weight(f"{module}.bias") for name, module in biased.items()}

    def delta_net(layer: int) -> dict[str, Tensor]:
        names = family.state
        if names is None or layer not in state_layers(config):
            return {}
        found = {name: weight(f"model.layers.{layer}.{tensor}") for name, tensor in names.tensors.items()}
        return {name: value[:, 0] if value.dim() == 3 else value for name, value in found.items()}

    def experts(prefix: str) -> ExpertMlp:
        numbers = architecture_of(config, None).experts
        assert numbers is not None
        assert family.experts is not None
        sites = {}
        for name in MLP_SITES:
            first, *shared = (weight(f"{prefix}.{family.weight(each)}") for each in family.projections[name])
            stacked = torch.cat([first, as_experts(name, shared, config.moe_intermediate_size)]) if shared else first
            blocks, tails = zip(*(encode(matrix) for matrix in stacked), strict=True)
            tail = None if tails[0] is None else torch.stack(tails)
            rows = stacked.shape[1]
            parts = (rows // 2, rows // 2) if name == "mlp_in" and family.gated else (rows,)
            matrix = PackedExperts(torch.stack(blocks), zigzag_order, rows, stacked.shape[2], tail)
            bias = weight(f"{prefix}.{family.bias(family.projections[name][0])}") if family.experts.biased else None
            sites[name] = PackedExpertsSite(matrix, None, parts, bias)
        router, shared_of = weight(f"{prefix}.{family.experts.router}.weight"), family.experts.shared
        gate = None if shared_of is None or not shared_of.gate else weight(f"{prefix}.{shared_of.gate}.weight")
        bias = weight(f"{prefix}.{family.experts.router}.bias") if family.experts.biased else None
        routing = family.experts.routing
        correction = weight(f"{prefix}.{routing.correction}") if routing is not None and routing.correction else None
        own, how = family.experts.own_norms, (gate, bias, numbers.router, correction)
        scale = None if own is None else 0.5 + weight(f"{prefix}.{own.experts}").abs()
        return ExpertMlp(router, numbers.used, numbers.normalised, sites, *how, scale)

    def by_rows(name: str, type: str) -> PackedMatrix:
        value = weight(name)
        return PackedMatrix(BLOCKS[type].encode(value), MatrixFormat(type), *value.shape)

    has_inputs = per_layer_width(config) > 0

    def per_layer(layer: int) -> PackedPerLayer | None:
        if family.per_layer is None or not has_inputs:
            return None
        prefix, names = f"model.layers.{layer}", family.per_layer
        gate, out = (by_rows(f"{prefix}.{module}.weight", "F16") for module in (names.gate, names.out))
        return PackedPerLayer(gate, out, weight(f"{prefix}.{names.out_norm}.weight"))

    def per_layer_inputs() -> PackedPerLayerInputs | None:
        if family.per_layer is None or not has_inputs:
            return None
        table, projection, norm = (f"model.{module}.weight" for module in family.per_layer.outside)
        return PackedPerLayerInputs(by_rows(table, "F16"), by_rows(projection, "F16"), weight(norm))

    def sites_of(layer: int) -> dict[str, PackedSite]:
        names = family.at(config, layer)
        of_experts = MLP_SITES if names.experts is not None else ()
        return {
            name: site(f"model.layers.{layer}", projections)
            for name, projections in names.projections.items()
            if name not in of_experts
        }

    layers = tuple(
        layer_of(
            sites_of(i),
            norms_of(i),
            None if family.experts_of(i) is None else experts(f"model.layers.{i}"),
            weight(f"model.layers.{i}.{family.sinks}") if family.sinks else None,
            delta_net(i),
            0.5 + weight(f"model.layers.{i}.{family.layer_scalar}").abs() if family.layer_scalar else None,
            per_layer(i),
            torch.tensor([0.3, -1.0, 0.5, -1e-3]) + 0.2 * i if family.activation_parameters else None,
        )
        for i in range(config.num_hidden_layers)
    )
    embedding = by_rows(family.embedding, "F16" if config.hidden_size % 256 else "Q6_K")
    packed = PackedModel(
        architecture=architecture_of(config, config.bos_token_id),
        layers=layers,
        embedding=embedding,
        output_norm=weight(family.last_norm),
        output_norm_bias=weight(family.last_norm_bias) if family.layer_norms else None,
        output=embedding if config.tie_word_embeddings else by_rows("lm_head.weight", "BF16"),
        config_json=config.to_json_string(),
        tokenizer_json="{}",
        manifest={"kind": str(zigzag_order), "model": {"name": f"random {variant}"}},
        per_layer=per_layer_inputs(),
    )
    return with_bases(packed, bases)


def encoder(tails: bool, block: str = "Q4_K") -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """What quantises a matrix in zigzag order."""
    return lambda weight: zigzag.pack_with_tail(weight, block) if tails else (zigzag.pack(weight, block), None)


def with_bases(packed: PackedModel, starts: Collection[int], type: str = "Q8_0") -> PackedModel:
    """The model with a random change of basis before some blocks, of which it is another model."""
    hidden, layers = packed.architecture.hidden, [*packed.layers]
    for layer in starts:
        generator = torch.Generator().manual_seed(layer)
        q = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
        basis = PackedMatrix(BLOCKS[type].encode(q), MatrixFormat(type), hidden, hidden)
        layers[layer] = dataclasses.replace(layers[layer], basis=basis)
    return dataclasses.replace(packed, layers=tuple(layers))


def layer_of(
    sites: Mapping[str, Any],
    norms: Mapping[str, Tensor],
    mlp: ExpertMlp | None = None,
    sinks: Tensor | None = None,
    delta_net: Mapping[str, Tensor] = MappingProxyType({}),
    scalar: Tensor | None = None,
    per_layer: PackedPerLayer | None = None,
    xielu: Tensor | None = None,
) -> PackedLayer:
    """A block whose MLP is dense, or is given."""
    attention = _without_mlp(sites)
    mlp = mlp or DenseMlp({name: sites[name] for name in MLP_SITES if name in sites})
    more = {"sinks": sinks, "delta_net": delta_net, "scalar": scalar, "per_layer": per_layer, "xielu": xielu}
    return PackedLayer(attention, norms, mlp, **more)  # type: ignore[arg-type]


def _without_mlp(sites: Mapping[str, Any]) -> dict[str, Any]:
    return {name: site for name, site in sites.items() if name not in MLP_SITES}


def with_sites(layer: PackedLayer, changed: Mapping[str, Any]) -> PackedLayer:
    """The same block with these sites in place of their namesakes."""
    sites = {**layer.sites, **changed}
    if isinstance(layer.mlp, DenseMlp):
        more = {
            "delta_net": layer.delta_net,
            "scalar": layer.scalar,
            "per_layer": layer.per_layer,
            "xielu": layer.xielu,
        }
        return dataclasses.replace(layer_of(sites, layer.norms, **more), basis=layer.basis)  # type: ignore[arg-type]
    if isinstance(layer.mlp, ExpertMlp):
        mlp = dataclasses.replace(layer.mlp, sites={name: sites[name] for name in MLP_SITES})
        return dataclasses.replace(layer, attention=_without_mlp(sites), mlp=mlp)
    return dataclasses.replace(layer, attention=sites)


def by_neurons(packed: PackedModel, seed: int = 0, gates: str = "zigzag", tails: bool = False) -> PackedModel:
    """The same model, quantised once more, its MLPs stored by neurons in a random order, their gates in this one."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for layer in packed.layers:
        sites = dict(layer.sites)
        down = decode_matrix(sites.pop("mlp_mid").matrix)
        gate, *ups = decode_matrix(sites.pop("mlp_in").matrix).split(down.shape[1])
        width = (1 + len(ups)) * len(down)
        order = torch.randperm(len(gate), generator=generator)
        blocks, tail = encoder(tails)(gate[order])
        mlp = NeuronMlp(
            gate=(
                PackedMatrix(blocks, MatrixFormat("Q4_K", "zigzag"), *gate.shape, tail)
                if gates == "zigzag"
                else PackedMatrix(BLOCKS["Q4_K"].encode(gate[order]), MatrixFormat("Q4_K"), *gate.shape)
            ),
            records=PackedMatrix(
                neurons.pack(ups[0] if ups else None, down, order), MatrixFormat("Q4_K"), len(gate), width
            ),
            frequency=torch.linspace(1, 0, len(gate)),
            order=order,
        )
        layers.append(dataclasses.replace(layer, attention=sites, mlp=mlp))
    return dataclasses.replace(packed, layers=tuple(layers), manifest={**packed.manifest, "kind": "neuron-q4_k"})


def stock_model(packed: PackedModel) -> Any:
    """The stock transformers model with the packed weights, float32."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**json.loads(packed.config_json))
    return build_model(config, dequantised(packed), bases=packed.bases)


class Sparsifier:
    """A site function that sparsifies positions from `sparse_from` on, and keeps what those put in."""

    def __init__(self, packed: PackedModel, sparse_from: int) -> None:
        self.packed, self.sparse_from = packed, sparse_from
        self.inputs: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, site: str, x: Tensor) -> Tensor:
        sparse = x[:, self.sparse_from :]
        self.inputs[layer, site] = sparse[0]
        stored = self.packed.layers[layer].sites.get(site)
        rule = None if stored is None else stored.rule
        return x if rule is None else torch.cat([x[:, : self.sparse_from], sparsify(sparse, rule)], dim=1)


def stock_logits(model: Any, packed: PackedModel, ids: list[int], sparse_from: int) -> tuple[Tensor, Sparsifier]:
    """Teacher-forced logits [S, V] of the stock model, sparsified by the packed model's rules."""
    watch = Sparsifier(packed, sparse_from)
    blocks = list(enumerate(model.model.layers))
    with torch.no_grad(), site_hooks(blocks, FAMILIES[packed.architecture.model_type], watch):
        return model(torch.tensor([ids])).logits[0], watch


MARGIN = 0.03
"""How near a score comes to a threshold of `with_rules`: ten times as far as rounding moves it, and near enough that a
threshold that is 5 % off is noticed."""


def with_rules(packed: PackedModel, model: Any, ids: list[int], starts: list[int], seed: int = 0) -> PackedModel:
    """The model with a rule at every site but one, about half of the channels active on `ids`.

    Kinds alternate: a scalar threshold, a threshold per channel, either with an offset. Each channel's threshold lies
    in a gap of the scores that the stock model really has, sparse from any of `starts`, so that rounding never decides.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(packed.layers)):
        for number, site in enumerate(packed.layers[layer].sites):
            if (layer, number) == (1, 2):
                continue
            kind = layer + number
            seen = [stock_logits(model, packed, ids, start)[1].inputs[layer, site] for start in starts]
            x = torch.cat(seen).flatten(0, -2)  # [positions, columns]
            fixed = isinstance(packed.layers[layer].mlp, ExpertMlp) and site in MLP_SITES  # experts have no offsets
            if kind == 0:  # before any product, so that a narrow gap does
                rule = SiteRule(_amid_gaps(x.abs().reshape(-1, 1))[0])
            elif kind % 2 == 0 and not fixed:
                rule = _scalar_rule(x)
            else:
                shift = kind % 3 == 1 and not fixed
                offset = x.mean(0) + 0.1 * torch.randn(x.shape[1], generator=generator) if shift else None
                rule = SiteRule(_amid_gaps((x if offset is None else x - offset).abs()), offset)
            packed = _with_rule(packed, layer, site, rule)
    return packed


def _amid_gaps(scores: Tensor) -> Tensor:
    """Of each column of scores [positions, columns] a threshold, in the widest gap between neighbours near the median:
    of every second column at its upper end, else at its lower one, `MARGIN` or half of the gap away."""
    ordered = scores.sort(0).values
    middle = ordered[len(ordered) * 3 // 10 : len(ordered) * 7 // 10 + 2]
    widest = middle.diff(dim=0).argmax(0, keepdim=True)
    below, above = middle.gather(0, widest)[0], middle.gather(0, widest + 1)[0]
    near = torch.minimum(MARGIN * above, (above - below) / 2)
    return torch.where(torch.arange(scores.shape[1]) % 2 == 0, above - near, below + near)


def _scalar_rule(x: Tensor) -> SiteRule:
    """One threshold for all columns of x [positions, columns], with offsets by which each column's nearest score is
    just `MARGIN` away, or as far as it can be."""
    mean = x.mean(0)
    threshold = (x - mean).abs().median()
    tried = mean + threshold * torch.linspace(-0.5, 0.5, 65)[:, None]  # [65, columns]
    distances = torch.stack([((x - offset).abs() - threshold).abs().amin(0) for offset in tried])
    beyond = distances.where(distances >= MARGIN * threshold, torch.inf)
    best = torch.where(beyond.isinf().all(0), distances.argmax(0), beyond.argmin(0))
    return SiteRule(threshold, tried.gather(0, best[None])[0])


def with_levels(packed: PackedModel, seed: int = 0) -> PackedModel:
    """A model of blocks with planes with thresholds of levels at every site but one, other ones for each column."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(packed.layers)):
        for name, site in packed.layers[layer].sites.items():
            if (layer, name) == (1, "attn_out"):
                continue
            shape: tuple[int, ...] = (site.matrix.columns,)
            if isinstance(site, PackedExpertsSite) and name == "mlp_mid":
                shape = (site.matrix.experts, *shape)
            of_site = 2 if name in ("attn_in", "mlp_in") else 0.5
            threshold = of_site * torch.rand(shape, generator=generator)
            steps = 0.2 + torch.rand(len(site.matrix.levels), generator=generator).sort().values
            packed = _with_rule(packed, layer, name, SiteRule(threshold, steps=steps))
    return packed


def _with_rule(packed: PackedModel, layer: int, site: str, rule: SiteRule) -> PackedModel:
    layers = [*packed.layers]
    layers[layer] = with_sites(layers[layer], {site: dataclasses.replace(layers[layer].sites[site], rule=rule)})
    return dataclasses.replace(packed, layers=tuple(layers))
