"""The dense cache of the cuda backend by itself, and another one in its place."""

from dataclasses import replace

import pytest
import simulated
import torch
from kv_cache_backends import appended, stepped
from packed_models import random_model
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.attention.kv_cache import CudaDenseKvCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.reference import attention as reference_attention
from sparsepack.runtime.reference import products as reference

HEADS, KV_HEADS, HEAD_DIM, CONTEXT, EPS = 4, 2, 8, 32, 1e-5
ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM
NEAR = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}


def shape(device: torch.device, sequences: int = 1) -> AttentionShape:
    """A layer that sees everything, and one with a window and norms."""
    cos, sin = (x.to(device) for x in reference_attention.rotary_table(torch.rand(HEAD_DIM // 2), 1.0, CONTEXT))
    norms = (torch.rand(HEAD_DIM, device=device) + 0.5 for _ in range(2))
    return AttentionShape(
        HEADS, KV_HEADS, HEAD_DIM, EPS, cos, sin, (LayerAttention(), LayerAttention(5, *norms)), sequences
    )


def attention(of: AttentionShape, layer: int, qkv: Tensor) -> Tensor:
    """Of a whole text at once: float32 [S, rows] -> [S, heads * head_dim]."""
    here = of.layers[layer]
    heads = qkv.view(len(qkv), -1, HEAD_DIM).transpose(0, 1).split([HEADS, KV_HEADS, KV_HEADS])
    q, k = (
        reference_attention.rotate(
            x if norm is None else reference.rms_norm(x, norm, EPS), of.cos[: len(qkv)], of.sin[: len(qkv)]
        )
        for x, norm in zip(heads[:2], (here.q_norm, here.k_norm), strict=True)
    )
    return reference_attention.attention(
        q, k, heads[2], reference_attention.visible(0, len(qkv), 0, here.window, qkv.device)
    )


def of_layers(cache: CudaDenseKvCache, qkv: Tensor, sequence: int) -> Tensor:
    """Attention of positions at once: [layers, S, rows] -> [layers, S, heads * head_dim]."""
    found = [appended(cache, n, x, sequence) for n, x in enumerate(qkv)]
    cache.advance(qkv.shape[1], sequence)
    return torch.stack(found)


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
def test_positions_at_once_and_steps_see_the_same_text(type: str, kernels: Kernels) -> None:
    torch.manual_seed(1)
    device = kernels.usable("cuda")
    of = shape(device, sequences=2)
    cache = CudaDenseKvCache(of, type, device, kernels)
    assert cache.type == type
    texts = torch.randn(2, 2, 20, ROWS, device=device)  # [sequence, layer, position, rows]
    expected = torch.stack([torch.stack([attention(of, n, text[n]) for n in range(2)]) for text in texts])
    for _ in range(2):
        pieces = [[of_layers(cache, texts[0, :, :7], 0), of_layers(cache, texts[0, :, 7:11], 0)]]
        pieces.append([of_layers(cache, texts[1, :, :6], 1)])
        assert list(cache.lengths) == [11, 6]
        for _ in range(9):
            new = torch.stack([text[:, at] for text, at in zip(texts, cache.lengths, strict=True)], dim=1)
            found = torch.stack([stepped(cache, n, x) for n, x in enumerate(new)])  # [layer, sequence, width]
            for sequence in range(2):
                cache.advance(1, sequence)
                pieces[sequence].append(found[:, sequence, None])
        for sequence, parts in enumerate(pieces):
            whole = torch.cat(parts, dim=1)
            assert (whole - expected[sequence, :, : whole.shape[1]]).abs().max() < NEAR[type]
        cache.reset()
        assert list(cache.lengths) == [0, 0]


def test_what_is_forgotten_is_not_seen(kernels: Kernels) -> None:
    torch.manual_seed(2)
    device = kernels.usable("cuda")
    of = shape(device)
    cache = CudaDenseKvCache(of, "f32", device, kernels)
    text = torch.randn(2, 9, ROWS, device=device)
    of_layers(cache, torch.cat([text[:, :4], torch.randn(2, 8, ROWS, device=device)], dim=1), 0)
    cache.truncate(4)
    assert list(cache.lengths) == [4]
    found = of_layers(cache, text[:, 4:], 0)
    expected = torch.stack([attention(of, n, text[n])[4:] for n in range(2)])
    assert (found - expected).abs().max() < NEAR["f32"]


@pytest.mark.parametrize("type", ["f32", "bf16"])
def test_a_copied_text_has_the_bits_of_its_source(type: str, kernels: Kernels) -> None:
    torch.manual_seed(5)
    device = kernels.usable("cuda")
    cache = CudaDenseKvCache(shape(device, sequences=3), type, device, kernels)
    text = torch.randn(2, 12, ROWS, device=device)
    of_layers(cache, text[:, :9], 0)
    of_layers(cache, torch.randn(2, 15, ROWS, device=device), 2)
    cache.copy(0, 2, 7)
    assert list(cache.lengths) == [9, 0, 7]
    cache.truncate(7, 0)
    assert torch.equal(of_layers(cache, text[:, 9:], 2), of_layers(cache, text[:, 9:], 0))


def test_what_the_kernels_do_not_know_is_an_error() -> None:
    of = shape(torch.device("cpu"))
    with pytest.raises(UserError, match="cache type 'f8': expected one of bf16, f16, f32"):
        CudaDenseKvCache(of, "f8", torch.device("cpu"), simulated.KERNELS)
    with pytest.raises(UserError, match="17 for each key head"):
        CudaDenseKvCache(replace(of, heads=17, kv_heads=1), "f32", torch.device("cpu"), simulated.KERNELS)


class WaitingCache(CudaDenseKvCache):
    """Takes no words, and notes what it is asked for."""

    flag_in_data = False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.asked = []

    def step(self, layer: int, qkv: Tensor, sparse: bool, out: Tensor, flag_in_data: bool = False) -> None:
        assert not flag_in_data
        self.asked.append(layer)
        super().step(layer, qkv, sparse, out)


@pytest.mark.parametrize("sequences", [1, 3])
def test_another_cache_takes_its_place(kernels: Kernels, sequences: int) -> None:
    packed, made, logits = random_model("mistral, sliding window"), [], []

    def waiting(*arguments: object) -> WaitingCache:
        made.append(WaitingCache(*arguments))
        return made[-1]

    for new_cache in (CudaDenseKvCache, waiting):
        options = {"cache_type": "f32", "kernels": kernels, "new_cache": new_cache}
        decoder = CudaDecoder(packed, torch.device("cuda"), 32, sequences, **options)
        rows = [decoder.prefill(sequences // 2, torch.arange(3, 9))]
        rows += [row for id in range(5) for row in decoder.step([id, id + 1, id + 2][:sequences], True)]
        logits.append(torch.stack(rows))
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    layers = list(range(packed.architecture.layers))
    assert made[0].asked[: len(layers)] == layers
