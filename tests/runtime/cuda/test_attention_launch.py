"""What an attention launch is given, and how it is divided: all that is reckoned before anything runs on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsepack.runtime.cuda.attention.attention import (
    KV_MACROS,
    STAGES,
    AttentionParameters,
    _magic,
    attend,
    splits_for,
)
from sparsepack.runtime.cuda.driver import device as gpu
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention

EPS = 1e-6


@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 11, 16, 128, 341, 2048])
def test_divisions_are_multiplications(divisor: int) -> None:
    """As the kernel does them: by slices of few pairs."""
    for dividend in (0, 1, divisor - 1, divisor, 30 * divisor - 1, 30 * divisor, 2**16 // divisor * divisor - 1):
        assert dividend * _magic(divisor) >> 32 == dividend // divisor


@pytest.mark.parametrize(
    ("rows", "context", "expected"),
    [
        *((8, 4096, 16), (8, 512, 8), (8, 127, 1), (4, 65536, 32), (1, 65536, 32)),
        *((32, 65536, 4), (40, 65536, 4), (64, 65536, 2), (200, 65536, 1)),
    ],
)
def test_splits_fill_the_processors_but_leave_none_idle(rows: int, context: int, expected: int) -> None:
    assert splits_for(rows, context, processors=132, at_once=264) == expected
    assert splits_for(rows, context, processors=132, at_once=rows - 1) == 1


def on_cpu() -> dict[str, Any]:
    cached = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16)
    table = torch.zeros(64, 8)
    return {
        "qkv": torch.zeros(1, 8 * 16),
        "keys": cached,
        "values": cached.clone(),
        "positions": torch.zeros(1, dtype=torch.int32),
        "cos": table,
        "sin": table,
        "out": torch.zeros(1, 4 * 16),
        "heads": 4,
        "kv_heads": 2,
        "window": 0,
        "q_norm": None,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "qkv: on cpu, expected a CUDA device"),
        ({"heads": 3}, "heads: 3 with 2 key heads"),
        ({"heads": 34}, "heads: 34 with 2 key heads"),
        ({"qkv": torch.zeros(1, 9)}, r"qkv: float32 \[1, 9\], expected contiguous float32 \[1, 128\]"),
        ({"keys": torch.zeros(1, 2, 64, 16, dtype=torch.float64)}, "keys: float64"),
        ({"keys": torch.zeros(1, 2, 64, 15, dtype=torch.float16)}, "keys: head dimension 15"),
        ({"values": torch.zeros(1, 2, 64, 16)}, "values: float32"),
        ({"values": torch.zeros(1, 64, 2, 16, dtype=torch.bfloat16).transpose(1, 2)}, "values: .*not contiguous"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, "positions: int64"),
        ({"cos": torch.zeros(63, 8)}, "cos: 63 positions, expected 64 or more"),
        ({"sin": torch.zeros(64, 9)}, "sin: "),
        ({"cos": torch.zeros(64, 9)}, "cos: 18 channels of a head turn, expected 2 to 16"),
        ({"out": torch.zeros(2, 64)}, "out: "),
        ({"q_norm": torch.zeros(8)}, "q_norm: "),
        ({"window": -1}, "window: -1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, Any], message: str) -> None:
    of = {**on_cpu(), **changed}
    with pytest.raises(ValueError, match=message):
        layer = LayerAttention(of["window"], of["q_norm"])
        shape = AttentionShape(of["heads"], of["kv_heads"], 16, EPS, of["cos"], of["sin"], (layer,))
        parameters = AttentionParameters(shape, layer, of["keys"], of["values"])
        attend(parameters, of["qkv"], of["positions"], of["out"])


def test_every_variant_fits_the_smallest_shared_memory_with_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """99 KiB, as GPUs of compute capability 8.6 and 8.9 have."""
    monkeypatch.setattr(gpu, "shared_limit", lambda device: 99 << 10)
    for dtype in KV_MACROS:
        for head_dim in (2, 64, 96, 128, 130, 256):
            for ratio in range(1, 17):
                layer, table = LayerAttention(), torch.zeros(1, head_dim // 2)
                shape = AttentionShape(ratio, 1, head_dim, EPS, table, table, (layer,))
                cached = torch.zeros(1, 1, 1, head_dim, dtype=dtype)
                variant = AttentionParameters(shape, layer, cached, cached).variant
                assert variant.shared_bytes <= 99 << 10
                deeper = [n for n in STAGES if n > variant.stages]
                assert all(replace(variant, stages=n).shared_bytes > 99 << 10 for n in deeper), "as many as fit"
                assert variant.stages == STAGES[0] or (head_dim, ratio) != (128, 4)
