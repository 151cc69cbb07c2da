"""What tests of the cuda decoder on simulated kernels share: the decoder, its steps, and checks by the reference."""

import pytest
import simulated
import torch
from backends import largest_difference
from decoder_steps import steps

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.decoder import kept_latents
from sparsepack.runtime.engine import Engine

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1))
ROUNDED = 0.1
"""Largest difference of a logit after a prefill, whose inputs are rounded to float16 (`test_chain.py`)."""


def decoder(packed: PackedModel, sequences: int = 1) -> CudaDecoder:
    return CudaDecoder(packed, torch.device("cuda"), 64, sequences, "f32", simulated.KERNELS)


def counts(reference: Engine, steps: int) -> dict[tuple[int, str], float]:
    packed = reference.packed
    return {key: share * steps * packed.layers[key[0]].units[key[1]] for key, share in reference.activity().items()}


def check_steps(packed: PackedModel) -> None:
    """Steps, sparse and dense, compute and count what the reference does. Of cached latents weights are rounded to
    float16."""
    engine, reference = decoder(packed), Engine(packed, backend="reference")
    bound = 2e-2 if kept_latents(packed, find_backend("cuda")) is not None else 1e-3
    assert largest_difference(steps(engine, IDS), reference.teacher_forced(IDS.tolist(), 0)) < bound
    assert engine.active() == pytest.approx(counts(reference, len(IDS)))
    engine.reset()
    reference.dense = True
    assert largest_difference(steps(engine, IDS, sparse=False), reference.teacher_forced(IDS.tolist(), 0)) < bound
    assert engine.active() == pytest.approx(counts(reference, len(IDS)))


def check_prefill(packed: PackedModel) -> None:
    """A prefill, and steps after it, compute what the reference does."""
    engine = decoder(packed)
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 6)
    assert largest_difference(engine.teacher_forced(IDS, 6, True), expected) < ROUNDED
    engine.reset()
    assert largest_difference(engine.prefill(0, IDS[:6]), expected[5]) < ROUNDED
    assert largest_difference(steps(engine, IDS[6:]), expected[6:]) < ROUNDED
