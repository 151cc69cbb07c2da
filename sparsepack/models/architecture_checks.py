"""Which numbers an architecture may have: those of files and configurations are checked before anything is made of
them."""

from dataclasses import asdict

from sparsepack.models.architecture import Architecture
from sparsepack.models.blocks import GATE_ACTIVATIONS, PLAIN_ACTIVATIONS, ExpertNumbers
from sparsepack.models.families import FAMILIES, taken_by
from sparsepack.models.family import Family

MOST_EXPERTS = 1 << 14
_LARGEST = 3.4e38  # float32


def activations_of(family: Family) -> tuple[str, ...]:
    """The activations that models of a family may have."""
    if family.activation:
        return (family.activation,)
    return GATE_ACTIVATIONS if family.gated else PLAIN_ACTIVATIONS


def check_numbers(architecture: Architecture) -> None:
    """Raise ValueError where a number could not be a model's."""
    sizes = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "context")
    for name in sizes:
        value = getattr(architecture, name)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"{name} {repr(value)[:60]}, expected a positive integer below 2**31")
    a, long = architecture, architecture.long_texts
    real: tuple[float, ...] = (
        a.norm_eps,
        a.rotary_scale,
        *a.inv_freq,
        *a.local_inv_freq,
        a.embedding_scale,
        a.logit_scale,
        *a.query_growth,
    )
    least_0: tuple[float, ...] = (a.mamba_eps, a.attention_scale, a.attention_cap, a.logit_cap)
    if long is not None:
        real, least_0 = (*real, *long.inv_freq), (*least_0, long.base, long.factor, long.tokens - 1)
    if not all(type(value) in (int, float) and -_LARGEST <= value <= _LARGEST for value in (*real, *least_0)):
        raise ValueError("norm_eps, rotary_scale, inv_freq, long_texts, caps or scales are something else than numbers")
    if len(a.query_growth) not in (0, 2) or min(a.query_growth, default=1) <= 0:
        raise ValueError(f"query_growth is {str(a.query_growth)[:60]}, expected none or two numbers above 0")
    if min(least_0) < 0:
        raise ValueError("attention_scale, attention_cap, logit_cap or long_texts hold numbers below 0")
    more = (() if a.global_heads else a.local_inv_freq, () if long is None else long.inv_freq)
    if not {len(of) for of in more} <= {0, len(a.inv_freq)}:
        raise ValueError(f"{len(more[0])} local, {len(more[1])} long frequencies, expected {len(a.inv_freq)} or none")
    if not all(
        type(value) is int and 0 <= value < 2**31 for value in (*architecture.sliding_windows, *architecture.eos)
    ):
        raise ValueError("sliding_windows or eos hold something else than integers from 0 to below 2**31")
    bos = architecture.bos
    if bos is not None and not (type(bos) is int and 0 <= bos < architecture.vocabulary):
        raise ValueError(f"bos {str(bos)[:60]}, expected a token of the {architecture.vocabulary}")
    if type(architecture.qk_norm) is not bool or type(architecture.tied) is not bool:
        raise ValueError("qk_norm or tied is neither true nor false")
    if not isinstance(architecture.model_type, str) or architecture.model_type not in taken_by("pack"):
        known = ", ".join(taken_by("pack"))
        raise ValueError(f"model type {str(architecture.model_type)[:60]!r}, expected one of {known}")
    able = activations_of(FAMILIES[architecture.model_type])
    if architecture.activation not in able:
        raise ValueError(f"activation {str(architecture.activation)[:60]!r}, expected one of {', '.join(able)}")
    if not all(type(layer) is int and 0 <= layer < architecture.layers for layer in architecture.ropeless):
        raise ValueError(f"ropeless holds something else than numbers of the {architecture.layers} layers")
    _check_experts(architecture)
    _check_delta_net(architecture)
    _check_latent(architecture)
    _check_short_conv(architecture)
    _check_mamba(architecture)
    windows = len(architecture.sliding_windows)
    if windows != architecture.layers:
        raise ValueError(f"{architecture.layers} layers, {windows} sliding windows")
    _check_heads(architecture)
    _check_shared(architecture)


def _check_heads(architecture: Architecture) -> None:
    """Raise ValueError where heads, of all layers or of those without a window, do not go with their numbers."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.k_eq_v) is not bool or (a.k_eq_v and not family.k_eq_v):
        raise ValueError(f"k_eq_v {str(a.k_eq_v)[:60]} in a {a.model_type} model")
    if len(a.global_heads) not in ((0, 2) if family.global_heads else (0,)) or not all(
        type(value) is int and 1 <= value < 2**31 for value in a.global_heads
    ):
        raise ValueError(f"global_heads is {str(a.global_heads)[:60]} in a {a.model_type} model")
    kinds = [(a.kv_heads, a.head_dim, a.local_inv_freq or a.inv_freq)]
    kinds.append((*a.global_heads, a.inv_freq) if len(a.global_heads) == 2 else (a.kv_heads, a.head_dim, a.inv_freq))
    for kv_heads, head_dim, inv_freq in kinds:
        if a.heads % kv_heads or not 0 < 2 * len(inv_freq) <= head_dim:
            raise ValueError(
                f"{a.heads} heads, {kv_heads} of keys, {len(inv_freq)} frequencies for heads of {head_dim}"
            )


def _check_shared(a: Architecture) -> None:
    """Raise ValueError where the numbers of layers that read others' keys and values, or of inputs of each layer, could
    not be a model's."""
    family, sources = a.row, a.kv_sources
    own = a.layers - len(sources)
    if not all(type(layer) is int and 0 <= layer < own for layer in sources) or (sources and family.shared_kv is None):
        raise ValueError(f"kv_sources {str(sources)[:60]}, expected none or numbers of layers with keys and values")
    for layer, source in enumerate(sources, own):
        if a.sliding_windows[layer] != a.sliding_windows[source]:
            raise ValueError(f"layer {layer} reads keys and values of layer {source}, which has another window")
    for name, able in (("shared_intermediate", bool(sources)), ("per_layer", family.per_layer is not None)):
        value = getattr(a, name)
        if type(value) is not int or not 0 <= value < 2**31 or (value and not able):
            raise ValueError(f"{name} {str(value)[:60]} in a {a.model_type} model")


def _check_experts(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of experts could not be a model's."""
    experts, of_family = architecture.experts, architecture.row.experts
    if (experts is None) != (of_family is None):
        raise ValueError(f"experts {str(experts)[:60]} in a {architecture.model_type} model")
    if experts is None or of_family is None:
        return
    if type(experts.count) is not int or not 1 <= experts.count <= MOST_EXPERTS:
        raise ValueError(f"{str(experts.count)[:60]} experts, expected 1 to {MOST_EXPERTS}")
    if type(experts.used) is not int or not 1 <= experts.used <= experts.count:
        raise ValueError(f"{str(experts.used)[:60]} experts for a token, expected 1 to {experts.count}")
    shared = of_family.shared is not None
    if type(experts.shared) is not int or not shared <= experts.shared <= shared * MOST_EXPERTS:
        raise ValueError(f"{str(experts.shared)[:60]} shared experts in a {architecture.model_type} model")
    if type(experts.normalised) is not bool:
        raise ValueError("experts.normalised is neither true nor false")
    _check_router(architecture, experts)


def _check_router(a: Architecture, experts: ExpertNumbers) -> None:
    """Raise ValueError where a router, or the blocks without one, could not be a model's."""
    family = a.row
    layers = a.dense_layers
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in layers):
        raise ValueError(f"dense_layers holds something else than numbers of the {a.layers} layers")
    if layers and (family.dense_mlps is None or len(set(layers)) == a.layers):
        raise ValueError(f"{len(layers)} layers with a dense MLP of {a.layers} in a {a.model_type} model")
    if type(a.dense_intermediate) is not int or not bool(layers) <= a.dense_intermediate < 2**31:
        raise ValueError(f"dense_intermediate {str(a.dense_intermediate)[:60]}, expected a positive integer")
    router, names = experts.router, None if family.experts is None else family.experts.routing
    if (router is None) != (names is None):
        raise ValueError(f"experts.router {str(router)[:60]} in a {a.model_type} model")
    if router is None or names is None:
        return
    if router.sigmoid is not names.sigmoid or type(router.scale) not in (int, float) or not 0 < router.scale < 2**20:
        raise ValueError(f"experts.router {str(router)[:80]} in a {a.model_type} model")
    if type(router.groups) is not int or type(router.groups_used) is not int or router.groups < 1:
        raise ValueError("experts.router.groups and groups_used are something else than positive integers")
    of_group, odd = divmod(experts.count, router.groups)
    least = 2 if router.sigmoid and router.groups > 1 else 1
    if odd or of_group < least or not experts.used <= of_group * router.groups_used <= experts.count:
        raise ValueError(
            f"{router.groups_used} of {router.groups} groups of {experts.count} experts, {experts.used} for a token"
        )


def _check_latent(a: Architecture) -> None:
    """Raise ValueError where the numbers of latents could not be a model's."""
    if (a.latent is None) == FAMILIES[a.model_type].latent:
        raise ValueError(f"latent {str(a.latent)[:60]} in a {a.model_type} model")
    if a.latent is None:
        return
    for name, value in asdict(a.latent).items():
        if type(value) is not int or not (name != "q_rank") <= value < 2**20:
            raise ValueError(f"latent.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.heads != a.kv_heads or a.head_dim != a.latent.head_dim or 2 * len(a.inv_freq) != a.latent.turning:
        raise ValueError(
            f"{a.heads} heads, {a.kv_heads} of keys, of {a.head_dim} channels, {2 * len(a.inv_freq)} of which turn; "
            f"the latents mean {a.heads} of {a.latent.head_dim}, {a.latent.turning}"
        )


def _check_delta_net(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers that keep a state could not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.gated_attention) is not bool or a.gated_attention != family.gated_attention:
        raise ValueError(f"gated_attention {str(a.gated_attention)[:60]} in a {a.model_type} model")
    if (a.delta_net is None) != (not a.delta_layers) or (a.delta_net is not None and family.delta_net is None):
        raise ValueError(f"delta_net {str(a.delta_net)[:60]} in a {a.model_type} model")
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in a.delta_layers):
        raise ValueError(f"delta_layers holds something else than numbers of the {a.layers} layers")
    if a.delta_net is None:
        return
    if len(set(a.delta_layers)) == a.layers:
        raise ValueError("no layer has attention")
    for name, value in asdict(a.delta_net).items():
        if type(value) is not int or not 1 <= value < 2**20:
            raise ValueError(f"delta_net.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.delta_net.value_heads % a.delta_net.key_heads:
        raise ValueError(f"{a.delta_net.value_heads} value heads for {a.delta_net.key_heads} of keys")


def _check_short_conv(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers with a short convolution could not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    if type(a.short_conv) is not int or not 0 <= a.short_conv < 2**20:
        raise ValueError(f"short_conv {str(a.short_conv)[:60]}, expected an integer from 0 to below 2**20")
    if (not a.short_conv) != (not a.conv_layers) or (a.short_conv and family.short_conv is None):
        raise ValueError(f"short_conv {a.short_conv} in a {a.model_type} model")
    if not all(type(layer) is int and 0 <= layer < a.layers for layer in a.conv_layers):
        raise ValueError(f"conv_layers holds something else than numbers of the {a.layers} layers")
    if len(set(a.conv_layers)) == a.layers:
        raise ValueError("no layer has attention")


def _check_mamba(architecture: Architecture) -> None:
    """Raise ValueError where the numbers of layers with a state-space model, or of those that are an MLP alone, could
    not be a model's."""
    a, family = architecture, FAMILIES[architecture.model_type]
    for name in ("mamba_layers", "mlp_layers"):
        if not all(type(layer) is int and 0 <= layer < a.layers for layer in getattr(a, name)):
            raise ValueError(f"{name} holds something else than numbers of the {a.layers} layers")
    if bool(a.mlp_layers) != bool(family.mlp_kinds) or {*a.mlp_layers} & {*a.mamba_layers}:
        raise ValueError(f"mlp_layers {str(a.mlp_layers)[:60]} in a {a.model_type} model")
    if a.mlp_layers and not {*a.dense_layers} <= {*a.mlp_layers}:
        raise ValueError("dense_layers holds numbers of layers without an MLP")
    if (a.mamba is None) != (not a.mamba_layers) or (a.mamba is not None and family.mamba is None):
        raise ValueError(f"mamba {str(a.mamba)[:60]} in a {a.model_type} model")
    if not a.attention_layers:
        raise ValueError("no layer has attention")
    if a.mamba is None:
        return
    for name, value in asdict(a.mamba).items():
        if type(value) is not int or not 1 <= value < 2**20:
            raise ValueError(f"mamba.{name} {str(value)[:60]}, expected a positive integer below 2**20")
    if a.mamba.heads % a.mamba.groups or a.mamba.inner % a.mamba.norms:
        raise ValueError(
            f"{a.mamba.heads} heads of {a.mamba.head_dim} in {a.mamba.groups} groups, {a.mamba.norms} norms"
        )
