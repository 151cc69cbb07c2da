"""What families compute of their own, together: long texts, several of them, MLPs by neurons between norms. Runs on a
GPU, and without one on simulated kernels."""

from functools import partial

import pytest
import torch
from backends import TOLERANCE, engine_of, largest_difference
from packed_models import by_neurons, random_model, stock_model, with_rules
from pairwise import each_value
from sparse_decoders import device_of
from test_long_texts import CHANGES, SHORT, by_steps

from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda import backend
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = Sampler(Sampling())


@pytest.fixture(autouse=True)
def _engines_take(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run on these kernels."""
    if kernels is KERNELS:
        return
    monkeypatch.setattr(backend, "CudaDecoder", partial(CudaDecoder, kernels=kernels))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@each_value({"kind": CHANGES, "prompt": [5, SHORT + 1]})
def test_texts_that_become_long_turn_as_long_ones(kind: str, prompt: int) -> None:
    engine = engine_of(random_model(kind, **CHANGES[kind]), "cuda")
    found = [engine.prefill(IDS[:prompt]), *(engine.step(id) for id in IDS[prompt:])]
    assert largest_difference(torch.stack(found), by_steps(kind, prompt)) < TOLERANCE["cuda"]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_that_began_before_its_text_became_long_is_undone(kind: str) -> None:
    """Of one text the next step begins before the host has the token: by rows that may change when it has."""
    packed = random_model(kind, **CHANGES[kind])
    engine, reference = (engine_of(packed, name) for name in ("cuda", "reference"))
    for each in (engine, reference):
        each.prefill(IDS[: SHORT - 3])
    id = IDS[SHORT - 3]
    for _ in range(8):
        logits, id = reference.step(id), engine.decode_next(id, GREEDY)
        assert logits.max() - logits[id] < TOLERANCE["cuda"]  # random weights make near ties
    assert largest_difference(engine.step(id), reference.step(id)) < TOLERANCE["cuda"]


def test_texts_side_by_side_turn_by_their_own_lengths() -> None:
    packed = random_model("phi3, a part of each head, longrope")
    engine, reference = (engine_of(packed, name, sequences=2) for name in ("cuda", "reference"))
    for each in (engine, reference):
        each.prefill(IDS[:30], 0)
        each.prefill(IDS[: SHORT - 2], 1)
    for step in range(5):
        ids = [IDS[30 + step], IDS[SHORT - 2 + step]]
        found, expected = (each.step_all(ids) for each in (engine, reference))
        assert largest_difference(found, expected) < TOLERANCE["cuda"]
    for each in (engine, reference):
        each.copy(0, 1, 30)
        each.truncate(9, 0)
    found, expected = (each.step_all([IDS[9], IDS[30]]) for each in (engine, reference))
    assert largest_difference(found, expected) < TOLERANCE["cuda"]


BETWEEN_NORMS = {
    "gemma2, soft caps": {"hidden_activation": "relu"},
    "nemotron, LayerNorm, without a gate": {},
}


def between_norms(kind: str, rules: bool, gates: str = "zigzag") -> PackedModel:
    changes = {"hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 3, **BETWEEN_NORMS[kind]}
    packed = by_neurons(random_model(kind, **changes), gates=gates)
    return with_rules(packed, stock_model(packed), IDS[:13], [0]) if rules else packed


@each_value({"kind": BETWEEN_NORMS, "rules": [False, True], "gates": ["zigzag", "rows"]})
def test_neurons_stand_between_norms(kernels: Kernels, kind: str, rules: bool, gates: str) -> None:
    packed = between_norms(kind, rules, gates)
    ours = CudaDecoder(packed, device_of(kernels), 64, 1, "f32", kernels)
    reference = Engine(packed, backend="reference")
    assert largest_difference(ours.prefill(0, torch.tensor(IDS[:6])), reference.prefill(IDS[:6])) < TOLERANCE["cuda"]
    ours.reset()
    reference.reset()
    expected = torch.stack([reference.step(id) for id in IDS[:13]])
    assert largest_difference(torch.cat([ours.step([id], True) for id in IDS[:13]]), expected) < 1e-3


@pytest.mark.parametrize("kind", BETWEEN_NORMS)
def test_neurons_of_several_texts_stand_between_norms(kernels: Kernels, kind: str) -> None:
    packed = between_norms(kind, rules=False)
    ours = CudaDecoder(packed, device_of(kernels), 64, 3, "f32", kernels)
    reference = Engine(packed, backend="reference", sequences=3)
    for sequence in range(3):
        text = IDS[: 6 + sequence]
        found, expected = ours.prefill(sequence, torch.tensor(text)), reference.prefill(text, sequence)
        assert largest_difference(found, expected) < TOLERANCE["cuda"]
    for first in range(9, 15):
        ids = IDS[first : first + 3]
        assert largest_difference(ours.step(ids, True), reference.step_all(ids)) < TOLERANCE["cuda"]
