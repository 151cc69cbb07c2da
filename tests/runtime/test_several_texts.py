"""Several texts that an engine decodes together, on the backends of the CPU: what cuda/test_batch.py tests on GPUs."""

from functools import cache

import pytest
import torch
from backends import SHARE, TOLERANCE, engine_of, every_backend_that, largest_difference
from packed_models import by_neurons, random_model, stock_model, with_rules
from torch import Tensor
from union import Union, union_logits

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import requested_backend
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.options import EngineOptions

every_backend = every_backend_that(lambda row: "cpu" in row.devices or not row.devices)
VARIANTS = ["llama", "llama tied, biases, llama3 rotary", "qwen3, tied"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
threads = pytest.mark.parametrize("threads", [1, 3])
TEXTS = torch.randint(300, (8, 13), generator=torch.Generator().manual_seed(3)).tolist()
LENGTHS = (1, 5, 8)


@cache
def model(variant: str) -> PackedModel:
    packed = random_model(variant)
    return with_rules(packed, stock_model(packed), TEXTS[0], [0, 6, 12])


@cache
def neurons() -> PackedModel:
    return by_neurons(random_model("llama, one head, relu", hidden_size=256, num_hidden_layers=3))


@cache
def oracle(variant: str, sequences: int) -> tuple[Tensor, Tensor, Union]:
    return union_logits(model(variant), sequences, 5, clear=2e-3)  # keys and values in half precision


def steps_alone(engine: Engine, ids: list[int]) -> Tensor:
    return torch.stack([engine.step(id) for id in ids])


@every_backend
@pytest.mark.parametrize("variant", [*VARIANTS, "qwen3.5, states", "lfm2, short convolutions"])
@threads
def test_dense_texts_of_different_lengths_are_those_of_engines_alone(backend: str, variant: str, threads: int) -> None:
    engine = engine_of(model(variant), backend, sequences=3, dense=True, threads=threads)
    for n, length in enumerate(LENGTHS):
        engine.prefill(TEXTS[n][:length], n)
    found = torch.stack([engine.step_all([TEXTS[n][length + i] for n, length in enumerate(LENGTHS)]) for i in range(5)])
    assert engine.positions == (6, 10, 13)
    assert set(engine.activity().values()) == {1.0}
    for n, length in enumerate(LENGTHS):
        alone = engine_of(model(variant), backend, dense=True)
        alone.prefill(TEXTS[n][:length])
        expected = steps_alone(alone, TEXTS[n][length : length + 5])
        assert largest_difference(found[:, n], expected) < TOLERANCE[backend]


@every_backend
@every_variant
@threads
@pytest.mark.parametrize("sequences", [3, 8])
def test_a_step_multiplies_what_is_active_in_any_text(backend: str, variant: str, threads: int, sequences: int) -> None:
    texts, expected, watch = oracle(variant, sequences)
    engine = engine_of(model(variant), backend, sequences=sequences, threads=threads)
    found = torch.stack([engine.step_all(column) for column in texts.t().tolist()], dim=1)
    assert largest_difference(found, expected) < TOLERANCE[backend]
    shares = {
        (layer, site): count / (5 * model(variant).layers[layer].sites[site].matrix.columns)
        for (layer, site), count in watch.counts.items()
    }
    assert engine.activity() == pytest.approx(shares, abs=SHARE[backend])


@every_backend
@threads
def test_texts_of_a_model_by_neurons_are_those_of_engines_alone(backend: str, threads: int) -> None:
    engine = engine_of(neurons(), backend, sequences=3, threads=threads)
    singles = [engine_of(neurons(), backend) for _ in range(3)]
    found = torch.stack([engine.step_all(list(ids)) for ids in zip(*TEXTS[:3], strict=True)])
    for n, single in enumerate(singles):
        assert largest_difference(found[:, n], steps_alone(single, TEXTS[n])) < TOLERANCE[backend]
    shares = [single.activity() for single in singles]
    for key, share in engine.activity().items():
        assert max(of[key] for of in shares) <= share + SHARE[backend]
        assert share <= sum(of[key] for of in shares) + SHARE[backend]


@every_backend
@pytest.mark.parametrize("by_neurons", [False, True])
def test_a_text_beside_others_that_stand_still_has_the_bits_of_a_text_alone(backend: str, by_neurons: bool) -> None:
    packed = neurons() if by_neurons else model("llama")
    engine, alone = engine_of(packed, backend, sequences=4), engine_of(packed, backend)
    for n, length in ((0, 3), (1, 7), (2, 4)):
        engine.prefill(TEXTS[n][:length], n)
    assert torch.equal(alone.prefill(TEXTS[2][:4]), engine.prefill(TEXTS[2][:4], 3))
    for id in TEXTS[2][4:]:
        assert torch.equal(engine.step_all([None, None, id, None])[2], alone.step(id))
    assert engine.positions == (3, 7, 13, 4)
    assert engine.activity() == alone.activity()


@every_backend
@pytest.mark.parametrize("by_neurons", [False, True])
def test_a_copied_text_has_the_bits_of_one_that_was_prefilled(backend: str, by_neurons: bool) -> None:
    packed = neurons() if by_neurons else model("llama")
    engine, apart = (engine_of(packed, backend, sequences=3) for _ in range(2))
    for each in (engine, apart):
        each.prefill(TEXTS[0][:9], 0)
        each.prefill(TEXTS[1][:11], 2)
    engine.step_all([5, None, None])  # what is decoded is no part of the copy
    apart.step_all([5, None, None])
    engine.copy(0, 2, 9)
    engine.copy(0, 1, 4)
    apart.truncate(0, 2)
    apart.prefill(TEXTS[0][:9], 2)
    apart.prefill(TEXTS[0][:9], 1)  # products of 4 rows may differ from those of 9 in their last bits
    apart.truncate(4, 1)
    assert engine.positions == apart.positions == (10, 4, 9)
    assert engine.common(TEXTS[0], 2) == 9
    for ids in ([1, 2, 3], [4, None, 6], [None, 8, None]):
        assert torch.equal(engine.step_all(ids), apart.step_all(ids))


@every_backend
def test_a_copy_of_more_than_there_is_is_refused_and_one_that_is_interrupted_is_not_trusted(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model("llama"), backend, sequences=2)
    engine.prefill(TEXTS[0][:5], 0)
    engine.prefill(TEXTS[0][:7], 1)
    with pytest.raises(UserError, match="length 6 of sequence 0: expected 0 to 5"):
        engine.copy(0, 1, 6)
    with pytest.raises(UserError, match="sequence 2: expected 0 to 1"):
        engine.copy(2, 1, 1)
    assert engine.common(TEXTS[0], 1) == 7
    monkeypatch.setattr(engine._decoder.cache, "copy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.copy(0, 1, 5)
    assert engine.common(TEXTS[0], 1) == 0


@every_backend
def test_texts_join_and_leave_between_steps(backend: str) -> None:
    packed = model("llama")
    engine = engine_of(packed, backend, sequences=3, dense=True)
    here: dict[int, list[int]] = {}
    plan = [{0}, {0, 2}, {0, 1, 2}, {1, 2}, {1}, {1, 0}, {0, 1, 2}]
    for step, moving in enumerate(plan):
        ids = [TEXTS[n][step] if n in moving else None for n in range(3)]
        logits = engine.step_all(ids)
        for n in moving:
            here.setdefault(n, []).append(TEXTS[n][step])
            expected = engine_of(packed, backend, dense=True).teacher_forced(here[n], 0)[-1]
            assert largest_difference(logits[n], expected) < TOLERANCE[backend]
    assert engine.positions == tuple(len(here[n]) for n in range(3))


@every_backend
def test_each_text_has_its_own_sampler_and_one_that_stands_still_needs_none(backend: str) -> None:
    packed = model("llama")
    engine, oracle = (engine_of(packed, backend, sequences=3) for _ in range(2))
    how = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.8, top_k=9, top_p=0.9, seed=6)]
    ours, theirs = ([Sampler(sampling) for sampling in how] for _ in range(2))
    ids: list[int | None] = [1, 2, 3]
    for moving in ({0, 1, 2}, {1, 2}, {0, 2}, {2}, {0, 1, 2}):
        ids = [id if n in moving else None for n, id in enumerate(ids)]
        chosen = engine.decode_all(ids, [ours[n] if n in moving else None for n in range(3)])
        logits = oracle.step_all(ids)
        assert chosen == [theirs[n].choose(logits[n]) if n in moving else None for n in range(3)]
        ids = [7 if id is None else id for id in chosen]


@every_backend
def test_a_full_text_that_stands_still_does_not_keep_the_others_from_a_step(backend: str) -> None:
    engine = engine_of(model("llama"), backend, sequences=2, context=6)
    engine.prefill(TEXTS[0][:6], 0)
    engine.step_all([None, 3])
    with pytest.raises(UserError, match="6 are in it and 1 more do not fit"):
        engine.step_all([3, 3])
    assert engine.positions == (6, 1)


def test_a_step_of_no_text_and_slots_for_several_texts_are_refused() -> None:
    engine = engine_of(model("llama"), "reference", sequences=2)
    with pytest.raises(UserError, match="a step of no sequence"):
        engine.step_all([None, None])
    for device, backend in (("cpu", None), ("cpu", "reference"), ("cuda", "reference")):
        with pytest.raises(UserError, match=r"cached: the .* backend gives neurons no slots"):
            requested_backend(EngineOptions(device=device, backend=backend, cached=0.3, sequences=2))
    assert requested_backend(EngineOptions(device="cuda", cached=0.3, sequences=8)).name == "cuda"
