"""From a calibration to sparse attention: heavy channels, and which layers stay dense (Double Sparsity, 4.1)."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from sparsepack.calibrate.folder import Calibration
from sparsepack.calibrate.statistics import MEASURED, importance, missed
from sparsepack.calibrate.thresholds import AttentionOptions
from sparsepack.errors import CalibrationError, PackingError
from sparsepack.files.hashing import NO_HASH
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.hf_config import attention_layers, heads_of_config
from sparsepack.models.sparse_attention import SparseAttention

MOST_MISSED = 0.5
"""A layer that misses more than this share of its attention weight at best stays dense, unless the user says which."""


@dataclass(frozen=True)
class FoundAttention:
    """Sparse attention, the hash of the calibration that it is from, and what the user should be told, a sentence
    each."""

    sparse: SparseAttention
    calibration_sha256: str
    notes: tuple[str, ...] = ()


def find_attention(checkpoint: Checkpoint, calibration: Calibration, options: AttentionOptions) -> FoundAttention:
    """The sparse attention that `options` ask for.

    Raises `PackingError` for channels or layers that the model does not have, or where every layer is dense,
    `CalibrationError` for a calibration of another model.
    """
    count = channels_asked(checkpoint, options)
    calibration.check_model(checkpoint)
    layers = importance(calibration)
    heads = heads_of_config(checkpoint.config).to_json()
    if (found := {name: calibration.manifest["attention"][name] for name in heads}) != heads:
        raise CalibrationError(
            f"{checkpoint.name}: the calibration's heads are {found}, its own {heads}; calibrate again"
        )
    notes: tuple[str, ...] = ()
    if (dense := options.dense) is None:
        dense, notes = _dense_by_themselves(checkpoint, calibration, options)
    channels = tuple(None if layer in dense else heaviest(of.product, count) for layer, of in enumerate(layers))
    return FoundAttention(SparseAttention(options.policy, channels), calibration.sha256, notes)


def predicted_attention(checkpoint: Checkpoint, options: AttentionOptions) -> FoundAttention:
    """Sparse attention of about as many channels as there will be: which layers are dense is not known before the
    calibration is read. Raises `PackingError` as `find_attention`."""
    heads, count = heads_of_config(checkpoint.config), channels_asked(checkpoint, options)
    channels = torch.arange(heads.head_dim - count, heads.head_dim).expand(heads.kv_heads, -1)
    dense = options.dense or ()
    layers = tuple(None if layer in dense else channels for layer in range(checkpoint.layers))
    return FoundAttention(SparseAttention(options.policy, layers), NO_HASH)


def channels_asked(checkpoint: Checkpoint, options: AttentionOptions) -> int:
    """How many heavy channels each KV head gets. Raises `PackingError` for what does not go with the model."""
    options.check()
    if checkpoint.family.state is not None:
        raise PackingError(
            f"attention: {checkpoint.name} keeps a state in most of its layers, from which no tokens are selected; "
            "leave it out"
        )
    if checkpoint.family.latent:
        raise PackingError(
            f"attention: {checkpoint.name} makes keys and values of latents, from which no tokens are selected; leave "
            "it out"
        )
    if len(attention_layers(checkpoint.config)) < checkpoint.layers:
        raise PackingError(
            f"attention: {checkpoint.name} has heads of two sizes, of which tokens are not selected; leave it out"
        )
    head_dim = heads_of_config(checkpoint.config).head_dim
    count = max(1, head_dim // 4) if options.channels is None else options.channels
    if count > head_dim:
        raise PackingError(f"channels {count}: expected at most {head_dim}, what a head of {checkpoint.name} has")
    dense = options.dense or frozenset()
    if beyond := sorted(layer for layer in dense if layer >= checkpoint.layers):
        raise PackingError(f"dense layers {beyond[0]}: {checkpoint.name} has layers 0 to {checkpoint.layers - 1}")
    if len(dense) == checkpoint.layers:
        raise PackingError("dense layers: all of them, so no token would be left out; leave --attention out")
    return count


def heaviest(product: Tensor, count: int) -> Tensor:
    """The channels with the largest importance, float64 [kv_heads, D]: int64 [kv_heads, count], ascending; the first
    of equal ones."""
    return product.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values


def measured_for(tokens: Fraction) -> int | None:
    """Which of `MEASURED` tells what a share of tokens misses: the next larger one; None where there is none."""
    return max((n for n, share in enumerate(MEASURED) if share >= tokens), default=None)


def _dense_by_themselves(
    checkpoint: Checkpoint, calibration: Calibration, options: AttentionOptions
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The layers that miss too much, and what the user should be told of them; none for a share so large that it was
    not measured, since what a smaller one misses says nothing of it."""
    at = measured_for(options.policy.tokens)
    if at is None:
        return frozenset(), ()
    lost = [layer[at] for layer in missed(calibration)]
    dense = [layer for layer, share in enumerate(lost) if share > MOST_MISSED]
    if len(dense) == checkpoint.layers:
        raise PackingError(
            f"tokens {options.tokens}: the best {MEASURED[at]} of them miss more than half of the attention weight in "
            f"every layer of {checkpoint.name}; give a larger share, or name the dense layers"
        )
    if not dense:
        return frozenset(), ()
    named, shares = ", ".join(map(str, dense)), ", ".join(f"{lost[layer]:.0%}" for layer in dense)
    note = (
        f"attention: {f'layers {named} read' if len(dense) > 1 else f'layer {named} reads'} every token: the best "
        f"{MEASURED[at]} of them would miss {shares} of the attention weight there"
    )
    return frozenset(dense), (note,)
