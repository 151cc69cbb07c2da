"""Engines with resident neurons: the same logits whoever has slots, the same bits for the same history."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import SHARE, engine_of, every_backend_that
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_models import by_neurons, random_model, stock_logits, stock_model
from tokenizers import Tokenizer
from torch import Tensor
from watched_policies import Watched, start_of

from sparsepack.errors import UserError
from sparsepack.files.text import read_text
from sparsepack.formats.packed import PackedModel
from sparsepack.placement.links import Links
from sparsepack.placement.names import ONLINE
from sparsepack.placement.placement import Placement
from sparsepack.placement.policies import POLICIES, Policy, Start, play
from sparsepack.runtime.chained import decoder as operations_decoder
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.hybrid import mlps
from sparsepack.runtime.hybrid.following import Moves

IDS = torch.randint(300, (20,), generator=torch.Generator().manual_seed(1)).tolist()
EXACT = {"reference": 1e-5, "cpu": 2e-3, "cuda": 1e-2}
"""Relative, of all logits. The cpu backend multiplies in 16 bits and keeps keys and values in half precision; the cuda
backend rounds what enters the products of prefill, so that an input near its threshold may fall on the other side."""

every_backend = every_backend_that(lambda row: row.slots)
links = st.builds(Links, *[st.sampled_from([1e-3, 1.0, 1e3])] * 3, st.sampled_from([0.0, 1.0, 1e9]))


@cache
def model(intermediate: int = 300) -> PackedModel:
    changes = {"hidden_size": 256, "intermediate_size": intermediate, "hidden_act": "relu"}
    return by_neurons(random_model("llama", **changes))


@cache
def dense_logits(backend: str) -> Tensor:
    return engine_of(model(), backend, dense=True).teacher_forced(IDS, len(IDS))


def by_chance(seed: int, every: int) -> Policy:
    """Anybody has slots, others after each `every` tokens, up to all of the slots and down to none."""

    def begin(start: Start) -> tuple[Placement, Any]:
        generator = np.random.default_rng(seed)

        def anybody() -> np.ndarray:
            resident = np.zeros(start.frequency.shape, np.bool_)
            count = generator.choice([0, start.slots // 2, start.slots])
            resident.ravel()[generator.permutation(resident.size)[:count]] = True
            return resident

        def move(token: int, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
            return resident if (token + 1) % every else anybody()

        return Placement(anybody(), 1), move

    return begin


def run(engine: Engine, prompt: int, ids: list[int] = IDS) -> Tensor:
    engine.reset()
    logits = [engine.prefill(ids[:prompt])] if prompt else []
    return torch.stack(logits + [engine.step(id) for id in ids[prompt:]])


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@every_backend
@settings(max_examples=12, deadline=None)
@given(
    cached=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    every=st.integers(1, 8),
    prompt=st.integers(0, len(IDS) - 1),
    links=links,
)
def test_logits_are_the_dense_ones_whoever_has_slots_and_whatever_moves(
    backend: str, cached: float, seed: int, every: int, prompt: int, links: Links
) -> None:
    engine = engine_of(model(), backend, cached=cached, begin=by_chance(seed, every), links=links)
    found = run(engine, prompt)
    assert difference(found, dense_logits(backend)[-len(found) :]) < EXACT[backend]
    assert torch.equal(run(engine, prompt), found), "the same text, other bits"
    again = engine_of(model(), backend, cached=cached, begin=by_chance(seed, every), links=links)
    assert torch.equal(run(again, prompt), found), "the same text, other bits in another engine"


@every_backend
@pytest.mark.parametrize("start", [0, 7, len(IDS)])
def test_a_text_at_once_is_that_of_steps(backend: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = engine_of(model(), backend, cached=0.3, begin=by_chance(5, 3))
    at_once = engine_of(model(), backend, cached=0.3, begin=by_chance(5, 3))
    monkeypatch.setattr(operations_decoder, "PREFILL_TOKENS", 4)
    logits = at_once.teacher_forced(IDS, start)
    assert difference(logits, dense_logits(backend)) < EXACT[backend]
    run(steps, start)
    assert steps.hit_counts is not None
    assert at_once.hit_counts is not None
    assert at_once.hit_counts.tokens == len(IDS) - start
    close = {"abs": SHARE[backend] * max(steps.hit_counts.needed, 1)}
    assert dataclasses.astuple(at_once.hit_counts) == pytest.approx(dataclasses.astuple(steps.hit_counts), **close)


@every_backend
@pytest.mark.parametrize("bytes_at_once", [1, 7 * 288, 100 * 288])
def test_prefill_is_the_same_whoever_has_slots(
    backend: str, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlps, "STAGED_BYTES", bytes_at_once)
    found = [
        engine_of(model(), backend, cached=cached, begin=by_chance(seed, 1)).prefill(IDS)
        for cached, seed in [(0.0, 0), (0.3, 1), (1.0, 2), (1.0, 3)]
    ]
    assert difference(found[0], dense_logits(backend)[-1]) < EXACT[backend]
    assert all(torch.equal(other, found[0]) for other in found)


@every_backend
def test_a_dense_engine_reads_every_neuron(backend: str) -> None:
    engine = engine_of(model(), backend, dense=True, cached=0.3)
    assert difference(run(engine, 5), dense_logits(backend)[4:][: len(IDS) - 4]) < EXACT[backend]
    assert set(engine.activity().values()) == {1.0}


@every_backend
@pytest.mark.parametrize("policy", ONLINE)
def test_what_is_served_and_moved_is_what_the_simulator_says(backend: str, policy: str) -> None:
    watched = Watched(POLICIES[policy].begin)
    engine = engine_of(model(), backend, cached=0.3, begin=watched.begin)
    ids = (IDS * 3)[:60]
    run(engine, 21, ids)
    start = start_of(model(), np.stack(watched.rows), 21, 0.3)
    outcome, hits = play(POLICIES[policy].begin, start), engine.hit_counts
    assert hits is not None
    assert hits == outcome
    assert hits.hits > 0
    by_name = engine_of(model(), backend, cached=0.3, policy=policy)
    run(by_name, 21, ids)
    assert by_name.hit_counts == hits


def test_who_is_served_is_who_is_active_in_the_stock_model() -> None:
    watched = Watched(POLICIES["slow"].begin)
    engine = engine_of(model(), "reference", cached=0.3, begin=watched.begin)
    run(engine, 0)
    _, stock = stock_logits(stock_model(model()), model(), IDS, 0)
    for number in range(len(model().layers)):
        found = torch.from_numpy(np.stack(watched.rows)[:, number]).bool()
        assert torch.equal(found, stock.inputs[number, "mlp_mid"] != 0)
    assert engine.hit_counts is not None
    records = sum(n for (_, name), n in engine.counts().active.items() if name == "mlp_records")
    assert engine.hit_counts.needed == records


def dies(after: int, ffn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    left = [after]

    def failing(*asked: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory")
        return ffn(*asked)

    return failing


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_worker_that_dies_ends_in_an_error(after: int) -> None:
    engine = engine_of(model(), "reference", cached=0.1)
    divided = engine._decoder._mlps  # type: ignore[attr-defined]
    divided._beside = dies(after, divided._beside)
    with pytest.raises(RuntimeError, match="the worker of the offloaded neurons failed: MemoryError"):
        run(engine, 0)
    engine.reset()
    with pytest.raises(RuntimeError, match="the worker of the offloaded neurons failed"):
        engine.step(1)
    with pytest.raises(RuntimeError, match="the worker of the offloaded neurons failed"):
        engine.prefill([1, 2])


def test_an_interrupted_step_leaves_an_engine_that_can_be_reset() -> None:
    engine = engine_of(model(), "reference", cached=0.3, begin=by_chance(3, 2))
    expected = run(engine, 3)
    divided = engine._decoder._mlps  # type: ignore[attr-defined]

    def interrupted(*asked: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided._operations, "neuron_ffn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(1)
    assert torch.equal(run(engine, 3), expected)


def test_a_text_goes_on_after_moves_that_were_interrupted() -> None:
    """The policy knows of them; they were not made."""
    engine = engine_of(model(), "cpu", cached=0.3, policy="lru")
    divided = engine._decoder._mlps  # type: ignore[attr-defined]

    def interrupted(moves: Moves) -> None:
        raise KeyboardInterrupt

    run(engine, 3, IDS[:7])
    for done in (7, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(divided, "move", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step(IDS[done])
        assert engine.common(IDS) == 0, "the cache is not known"
        engine.keep(IDS[:8])
        engine.prefill(IDS[: done + 1])
    found = torch.stack([engine.step(id) for id in IDS[9:]])
    assert difference(found, dense_logits("cpu")[9:]) < EXACT["cpu"]
    assert engine.hit_counts is not None
    assert engine.hit_counts.tokens == len(IDS) - 9


def test_slots_may_change_while_the_worker_still_has_work_of_an_interrupted_prefill() -> None:
    engine = engine_of(model(), "cpu", cached=0.3, begin=by_chance(3, 2))
    expected = engine.prefill(IDS)
    engine.reset()
    divided, left = engine._decoder._mlps, list[Callable[[], Any]]()  # type: ignore[attr-defined]

    def interrupted(work: Callable[[], Any]) -> int:
        left.append(work)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided._worker, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(IDS)
    for nobody in (1, 0, 1):
        resident = divided.residency.resident
        resident[:, nobody:] = False
        divided.residency.change(resident, divided._copy)
    left[0]()
    engine.reset()
    assert torch.equal(engine.prefill(IDS), expected)


@pytest.mark.parametrize("options", [{}, {"cached": 0.3, "begin": by_chance(3, 2)}], ids=["whole", "divided"])
def test_no_interrupt_is_lost_on_the_way_to_a_kernel(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """nanobind asks a tensor for its memory in Python, and goes on whatever is raised there."""
    engine, asked = engine_of(model(), "cpu", **options), list[int]()
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda *_, **__: asked.append(1))
    run(engine, 5)
    engine.teacher_forced(IDS[:4], 2)
    assert not asked


def test_two_workers_on_another_device_than_a_cpu_are_refused() -> None:
    with pytest.raises(UserError, match="cached on device meta: this backend's two workers share the CPU; use"):
        Engine(model(), cached=0.3, backend="reference", device="meta")


def test_a_model_without_neurons_is_refused() -> None:
    with pytest.raises(UserError, match="cached: the model's MLPs are not stored by neurons; pack it with --format"):
        Engine(random_model("llama, one head, relu"), backend="cpu", cached=0.3)
    with pytest.raises(UserError, match=r"with the activation 'silu' none is exactly inactive; slots are for .* relu"):
        Engine(random_model(), backend="cpu", cached=0.3)


@every_backend
@pytest.mark.long
def test_a_trained_model_says_the_same_and_serves_what_the_simulator_says(
    backend: str, trained: PackedModel, shared: Path
) -> None:
    text = read_text(str(shared / "text" / "books.validation.jsonl.xz"))
    ids = [0, *Tokenizer.from_str(trained.tokenizer_json).encode(next(text.pieces())[:4000]).ids][:120]
    dense = engine_of(trained, backend, dense=True)
    dense.prefill(ids)
    watched = Watched(POLICIES["slow"].begin)
    engine = engine_of(trained, backend, cached=0.3, begin=watched.begin)
    engine.prefill(ids)
    greedy, mine, theirs = Sampler(Sampling()), [11], [11]
    for _ in range(256):
        theirs.append(dense.decode_next(theirs[-1], greedy))
        mine.append(engine.decode_next(mine[-1], greedy))
    assert mine == theirs
    hits = engine.hit_counts
    assert hits is not None
    outcome = play(POLICIES["slow"].begin, start_of(trained, np.stack(watched.rows), len(ids), 0.3))
    assert (hits.needed, hits.hits, hits.moves) == (outcome.needed, outcome.hits, outcome.moves)
    assert 0.5 < hits.hit_rate < 0.8
    assert hits.moves > 0
