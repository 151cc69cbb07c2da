"""The decoder on a GPU with the processor beside it, also with kernels in plain torch; the worker is the native one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from backends import largest_difference
from decoder_steps import steps
from hybrid_decoders import EVEN, IDS, LINKS, ROUNDED, decoder, model
from native_build import skip_without_kernels
from pairwise import each_value
from tokenizers import Tokenizer
from watched_policies import Watched, start_of

from sparsepack.files.text import read_text
from sparsepack.formats.packed import PackedModel
from sparsepack.placement import policies
from sparsepack.placement.machine import MACHINES, BandwidthProfile
from sparsepack.placement.options import ONLINE
from sparsepack.placement.policies import POLICIES, play
from sparsepack.runtime.cpu import operations
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.hybrid import cpu_gpu
from sparsepack.runtime.hybrid.cpu_gpu import default_profile
from sparsepack.runtime.hybrid.policy import Moves

skip_without_kernels()


@each_value({"cached": [0.3, 0.0, 1.0], "bandwidth": list(LINKS)})
def test_steps_compute_what_the_reference_computes(kernels: Kernels, cached: float, bandwidth: str) -> None:
    packed = model()
    engine, reference = decoder(packed, kernels, cached, LINKS[bandwidth]), Engine(packed, backend="reference")
    assert largest_difference(steps(engine, IDS), reference.teacher_forced(IDS.tolist(), 0)) < 0.05
    counts = {key: share * 13 * packed.layers[key[0]].units[key[1]] for key, share in reference.activity().items()}
    assert engine.active() == pytest.approx(counts, abs=2)
    counted = engine.hit_counts
    assert counted is not None
    assert counted.tokens == 13
    records = sum(count for (_, name), count in engine.active().items() if name == "mlp_records")
    assert counted.needed == records
    traffic = engine.traffic_stats.traffic
    assert (traffic.resident, traffic.bus + traffic.worker) == (counted.hits, counted.needed - counted.hits)
    assert bandwidth != "bus alone" or traffic.worker == traffic.handed == 0
    assert bandwidth != "processor alone" or traffic.bus == 0
    assert cached == 1.0 or (traffic.worker > 0) == (traffic.handed > 0) == (bandwidth != "bus alone")
    assert cached in (0.0, 1.0) or 0 < counted.hits < counted.needed
    assert cached not in (0.0, 1.0) or counted.hits == cached * counted.needed
    engine.reset()
    reference.dense = True
    assert largest_difference(steps(engine, IDS, sparse=False), reference.teacher_forced(IDS.tolist(), 0)) < 0.05


@pytest.mark.parametrize("most", [None, 3])
def test_moves_that_are_prepared_beside_a_step_change_nothing_but_time(
    kernels: Kernels, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed natively, decisions are known before they are due."""
    if most is not None:
        monkeypatch.setattr(policies, "spare_of", lambda slots: most)
    ids, native = IDS.repeat(3), operations.slow_policy()
    prepared = list[int]()
    at_once, beside = (decoder(model(), kernels, 0.3, policy="slow", slow=slow) for slow in (None, native))
    prepare = beside.cpu_gpu.slots.prepare

    def counted(moves: Moves) -> None:
        prepared.append(len(moves.coming))
        prepare(moves)

    monkeypatch.setattr(beside.cpu_gpu.slots, "prepare", counted)
    monkeypatch.setattr(beside.cpu_gpu.boundaries.follows, "ahead", lambda: waited(beside))
    for _ in range(2):
        assert torch.equal(steps(beside, ids), steps(at_once, ids))
        assert beside.hit_counts == at_once.hit_counts
        beside.reset()
        at_once.reset()
    assert sum(prepared) > 0
    assert most is None or max(prepared) == most


def waited(engine: CudaDecoder) -> Moves | None:
    """What is ahead, as soon as the policy has counted all tokens: on a machine that is busy it may come too late."""
    assert engine.hit_counts is not None
    return type(engine.cpu_gpu.boundaries.follows).ahead(engine.cpu_gpu.boundaries.follows)


@each_value({"policy": ["static", "slow", "lru", "momentum-letter"], "neurons": [300, 301, 33]})
def test_whatever_moves_logits_are_the_same_but_for_rounding(kernels: Kernels, policy: str, neurons: int) -> None:
    packed = model(intermediate_size=neurons)
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 5)
    engine = decoder(packed, kernels, 0.3, policy=policy)
    found = engine.teacher_forced(IDS, 5, True)
    assert largest_difference(found, expected) < ROUNDED
    counted = engine.hit_counts
    assert counted is not None
    assert counted.tokens == 8
    assert (counted.moves > 0) == (policy in ("lru", "momentum-letter"))
    engine.reset()
    assert torch.equal(engine.teacher_forced(IDS, 5, True), found), "the same text since a reset has the same bits"


@pytest.mark.parametrize("policy", ONLINE)
def test_what_is_served_and_moved_is_what_the_simulator_says(kernels: Kernels, policy: str) -> None:
    packed, ids = model(), IDS.repeat(3)
    watched = Watched(POLICIES[policy].begin)
    engine = decoder(packed, kernels, 0.3, begin=watched.begin)
    engine.teacher_forced(ids, 21, True)
    hits = engine.hit_counts
    assert hits is not None
    assert hits == play(POLICIES[policy].begin, start_of(packed, np.stack(watched.rows), 21, 0.3))
    assert 0 < hits.hits < hits.needed
    by_name = decoder(packed, kernels, 0.3, policy=policy, slow=operations.slow_policy())
    by_name.teacher_forced(ids, 21, True)
    assert by_name.hit_counts == hits


@pytest.mark.long
def test_a_trained_model_is_served_as_the_simulator_says(kernels: Kernels, trained: PackedModel, shared: Path) -> None:
    text = read_text(str(shared / "text" / "books.validation.jsonl.xz"))
    ids = torch.tensor(Tokenizer.from_str(trained.tokenizer_json).encode(next(text.pieces())[:2000]).ids[:160])
    watched = Watched(POLICIES["slow"].begin)
    engine = decoder(trained, kernels, 0.3, begin=watched.begin, context=160)
    found = engine.teacher_forced(ids, 80, True)
    hits = engine.hit_counts
    assert hits is not None
    assert hits == play(POLICIES["slow"].begin, start_of(trained, np.stack(watched.rows), 80, 0.3))
    assert 0.3 < hits.hit_rate < 0.8
    assert hits.moves > 0
    dense = Engine(trained, backend="reference", dense=True).teacher_forced(ids.tolist(), len(ids))
    assert int((found.cpu().argmax(-1) == dense.argmax(-1)).sum()) >= len(ids) - 1


@pytest.mark.parametrize("staged", [1 << 20, 4 * 288])
def test_prefill_streams_the_records(kernels: Kernels, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gpu, "STAGED_BYTES", staged)
    packed = model()
    expected = Engine(packed, backend="reference").teacher_forced([*IDS.tolist(), *IDS[:3].tolist()], 13)
    engine = decoder(packed, kernels, 0.3)
    assert largest_difference(engine.prefill(0, IDS), expected[12]) < ROUNDED
    assert largest_difference(steps(engine, IDS[:3]), expected[13:]) < ROUNDED


def test_who_was_active_is_seen_as_the_reference_sees_it(kernels: Kernels) -> None:
    packed = model(intermediate_size=301)
    engine = decoder(packed, kernels, 0.3)
    seen: list[np.ndarray] = []
    follows = engine.cpu_gpu.boundaries.follows
    saw = follows.saw
    follows.saw = lambda bits, prompt: (seen.append(bits.copy()), saw(bits, prompt))[1]  # type: ignore[method-assign]
    engine.prefill(0, IDS[:5])
    engine.step([int(IDS[5])], True)
    prompt, token = seen
    assert (prompt.shape, token.shape) == ((5, 2, 38), (1, 2, 40))
    bits = np.unpackbits(token, axis=2, bitorder="little")
    assert not bits[..., 301:].any()
    active = [count for (_, name), count in engine.active().items() if name == "mlp_records"]
    assert bits.sum(2)[0].tolist() == active
    share = np.unpackbits(prompt, axis=2, count=301, bitorder="little").mean()
    assert 0.3 < share < 0.7


@each_value({"bandwidth": list(LINKS), "sequences": [2, 5, 8]})
def test_several_texts_share_the_slots_and_the_union(kernels: Kernels, sequences: int, bandwidth: str) -> None:
    """Of prompts of different lengths; one text stands still for a step."""
    packed = model(intermediate_size=301)
    texts = torch.randint(300, (sequences, 9), generator=torch.Generator().manual_seed(2))
    engine = decoder(packed, kernels, 0.3, LINKS[bandwidth], policy="lru", sequences=sequences)
    reference = Engine(packed, backend="reference", sequences=sequences)
    for _ in range(2):
        for n, ids in enumerate(texts[:, :4]):
            length = 1 + n % 4
            expected = reference.prefill(ids[:length].tolist(), n)
            assert largest_difference(engine.prefill(n, ids[:length]), expected) < ROUNDED
        for step, ids in enumerate(texts[:, 4:].t().tolist()):
            given = [None if step == 2 and n == 1 else id for n, id in enumerate(ids)]
            expected, found = reference.step_all(given), engine.step(given, True)
            moving = [n for n, id in enumerate(given) if id is not None]
            assert largest_difference(found[moving], expected[moving]) < ROUNDED
        counted, traffic = engine.hit_counts, engine.traffic_stats.traffic
        assert counted is not None
        assert counted.tokens == 5
        assert counted.needed == sum(count for (_, name), count in engine.active().items() if name == "mlp_records")
        assert (traffic.resident, traffic.bus + traffic.worker) == (counted.hits, counted.needed - counted.hits)
        assert bandwidth == "both" or (traffic.worker > 0) == (bandwidth == "processor alone")
        engine.reset()
        reference.reset()


def test_tokens_are_chosen_as_without_slots(kernels: Kernels) -> None:
    packed = model()
    engine = decoder(packed, kernels, 0.5)
    sampler, chosen = Sampler(Sampling()), [int(IDS[0])]
    for _ in range(6):
        (id,) = engine.decode_next([chosen[-1]], True, [sampler])
        assert id is not None
        chosen.append(id)
    expected = Engine(packed, backend="reference").teacher_forced(chosen[:-1], 0)
    assert chosen[1:] == expected.argmax(-1).tolist()


def test_where_the_links_come_from_is_told(kernels: Kernels) -> None:
    def said(**bandwidth: BandwidthProfile | None) -> str:
        return decoder(model(), kernels, 0.3, **bandwidth).description

    assert said().endswith("with slots, slow, links given")
    assert said(bandwidth=None, measured=EVEN).endswith("with slots, slow, links measured")
    assert said(bandwidth=None).endswith("with slots, slow, links assumed as of pcie5")


def test_assumed_links_are_those_of_kernels_and_not_of_copies() -> None:
    of_copies = MACHINES["pcie5"].rates(9216).bandwidth
    assumed = default_profile(9216)
    assert assumed.bus * 9216 == pytest.approx(46.75e9)
    assert assumed.far_bus == pytest.approx(49.5e9)
    assert replace(assumed, bus=of_copies.bus, far_bus=of_copies.far_bus) == of_copies


def test_a_trace_says_who_is_active_in_place_of_the_gates(kernels: Kernels) -> None:
    packed = model(intermediate_size=301)
    generator = torch.Generator().manual_seed(3)
    bits = (torch.rand(4, 2, 38 * 8, generator=generator) < 0.2).numpy()
    bits[..., 301:] = False
    engine = decoder(packed, kernels, 0.3, activity=torch.from_numpy(np.packbits(bits, axis=2, bitorder="little")))
    seen: list[np.ndarray] = []
    follows = engine.cpu_gpu.boundaries.follows
    saw = follows.saw
    follows.saw = lambda bits, prompt: (seen.append(bits.copy()), saw(bits, prompt))[1]  # type: ignore[method-assign]
    for _ in range(2):
        engine.reset()
        steps(engine, IDS[:6])
        expected = [*range(4), 0, 1]
        found = [np.unpackbits(row[0], axis=1, bitorder="little")[:, :301] for row in seen]
        assert all(np.array_equal(row, bits[n, :, :301]) for row, n in zip(found, expected, strict=True))
        counted = engine.hit_counts
        assert counted is not None
        assert counted.needed == sum(int(bits[n].sum()) for n in expected)
        seen.clear()
