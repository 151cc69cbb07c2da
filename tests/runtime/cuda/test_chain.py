"""The chain of the cuda decoder, with its kernels in plain torch on the CPU: what can go wrong without a GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import simulated
import torch
from backends import largest_difference, skip_lacking
from decoder_steps import steps
from model_table import NEMOTRON_H
from model_table import VARIANTS as COMMON
from packed_models import random_model, stock_model, with_rules
from pairwise import each_value
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.cuda.decoder import run_ahead
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

pytestmark = pytest.mark.usefixtures("simulated_launches")

IDS = torch.randint(300, (13,), generator=torch.Generator().manual_seed(1))
STARTS = [0, 6, 12]
INTERLEAVED = "gate and up in one product"
SEGMENTS = "segments of one block"
BLOCKS = {"hidden_size": 128, "intermediate_size": 768, "attention_bias": True, "mlp_bias": True}
ALONE = "blocks that are a mixer or an MLP alone"
KINDS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
OTHERS: dict[str, dict[str, Any]] = {
    INTERLEAVED: BLOCKS,
    SEGMENTS: {"num_hidden_layers": 3, "bases": (1, 2)},
    ALONE: {**NEMOTRON_H, "layers_block_type": KINDS},
    "norms within blocks, gate and up in one product": {
        "model_type": "bitnet",
        "hidden_size": 128,
        "intermediate_size": 768,
    },
}
ROUNDED = 0.1
"""Largest difference of a logit after a prefill, whose inputs are rounded to float16; 0.025 measured, 0.07 where that
decides about a column."""


@cache
def model(variant: str) -> PackedModel:
    packed = random_model("llama", **OTHERS[variant]) if variant in OTHERS else random_model(variant)
    skip_lacking("cuda", packed)
    return with_rules(packed, stock_model(packed), IDS.tolist(), STARTS)


def decoder(packed: PackedModel, cache_type: str = "f32", context: int = 64) -> CudaDecoder:
    return CudaDecoder(packed, torch.device("cuda"), context, 1, cache_type, simulated.KERNELS)


def decode_next(engine: CudaDecoder, id: int, sampler: Sampler) -> int:
    return engine.decode_next([id], True, [sampler])[0]


VARIANTS = [*COMMON, *OTHERS]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
def test_steps_compute_what_the_reference_computes(variant: str) -> None:
    packed = model(variant)
    engine, reference = decoder(packed), Engine(packed, backend="reference")
    assert largest_difference(steps(engine, IDS), reference.teacher_forced(IDS.tolist(), 0)) < 1e-3
    counts = {
        key: share * engine.stepped * packed.layers[key[0]].units[key[1]] for key, share in reference.activity().items()
    }
    assert engine.active() == pytest.approx(counts)
    engine.reset()
    reference.dense = True
    assert largest_difference(steps(engine, IDS, sparse=False), reference.teacher_forced(IDS.tolist(), 0)) < 1e-3
    shares = {key: count / engine.stepped for key, count in engine.active().items()}
    assert shares == {(n, name): count for n, x in enumerate(packed.layers) for name, count in x.units.items()}


@each_value({"variant": VARIANTS, "chunk": [2048, 4]})
def test_prefill_computes_what_the_reference_computes(
    variant: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", chunk)
    packed = model(variant)
    engine = decoder(packed, context=len(IDS))
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 6)
    assert largest_difference(engine.teacher_forced(IDS, 6, True), expected) < ROUNDED
    assert (engine.cache.lengths[0], engine.stepped) == (13, 7)
    engine.reset()
    assert largest_difference(engine.prefill(0, IDS[:6]), expected[5]) < ROUNDED
    assert engine.stepped == 0
    assert largest_difference(steps(engine, IDS[6:]), expected[6:]) < ROUNDED


@each_value(
    {"cache_type": ["bf16", "f16"], "variant": ["llama", "mistral, sliding window", "qwen2, every second layer slides"]}
)
def test_prefill_and_steps_read_the_same_cache(variant: str, cache_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, too: a prefill in chunks, where windows hide positions, and in one."""
    engine = decoder(model(variant), cache_type)
    assert engine.cache.type == cache_type
    whole = engine.prefill(0, IDS)
    stepped = decoder(model(variant), cache_type)
    bound = 0.5 if cache_type == "bf16" else 0.1
    assert largest_difference(steps(stepped, IDS, sparse=False)[-1], whole) < bound
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", 4)
    engine.reset()
    assert largest_difference(engine.prefill(0, IDS), whole) < bound


UNLIKE = (
    "llama",
    "qwen2, every second layer slides",
    "gemma2, soft caps",
    "phi3, a part of each head, longrope",
    "gpt_oss, sinks",
    "qwen3.5, states",
    "lfm2, short convolutions",
    "gemma4, inputs of each layer, shared keys and values",
    "cohere2, attention and MLP side by side",
    SEGMENTS,
)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.long][: name not in UNLIKE]) for name in VARIANTS]
)
def test_short_prompts_that_come_again_are_recorded(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    kept = simulated.capture_graph
    monkeypatch.setattr(
        simulated.SimulatedKernels,
        "capture_graph",
        staticmethod(lambda *of: (recorded.append(of), kept(*of))[1]),
    )
    packed = model(variant)
    engine, alone = decoder(packed), decoder(packed, context=15)  # too short for a prompt that is filled up
    for length in (6, 13, 1, 7, 6):
        engine.reset()
        alone.reset()
        assert largest_difference(engine.prefill(0, IDS[:length]), alone.prefill(0, IDS[:length])) < ROUNDED
        assert engine.cache.lengths == alone.cache.lengths == [length]
    assert len(recorded) == 1
    assert largest_difference(steps(engine, IDS[6:]), steps(alone, IDS[6:])) < ROUNDED
    engine.reset()
    engine.prefill(0, IDS[:4])
    alone.reset()
    alone.prefill(0, IDS[:4])
    assert largest_difference(engine.prefill(0, IDS[4:9]), alone.prefill(0, IDS[4:9])) < ROUNDED  # further positions


def test_matrices_larger_than_the_scratch_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model("llama, several bands, tied Q6_K")
    whole = decoder(packed).prefill(0, IDS)
    monkeypatch.setattr(zigzag, "SCRATCH_BYTES", 2 * 256 * 300 + 5)
    assert torch.equal(decoder(packed).prefill(0, IDS), whole)


def test_steps_before_after_and_between_prefills() -> None:
    packed = model("mistral, sliding window")
    engine = decoder(packed)
    expected = Engine(packed, dense=True, backend="reference").teacher_forced(IDS.tolist(), 13)
    found = [*steps(engine, IDS[:3], sparse=False), engine.prefill(0, IDS[3:7])]
    found += [
        *steps(engine, IDS[7:9], sparse=False),
        engine.prefill(0, IDS[9:12]),
        *steps(engine, IDS[12:], sparse=False),
    ]
    assert largest_difference(torch.stack(found), expected[[0, 1, 2, 6, 7, 8, 11, 12]]) < ROUNDED
    assert (engine.cache.lengths[0], engine.stepped) == (13, 6)
    engine.reset()
    assert (engine.cache.lengths[0], engine.stepped, set(engine.active().values())) == (0, 0, {0})
    assert largest_difference(steps(engine, IDS, sparse=False), expected) < 1e-3


def test_an_id_and_a_position_that_are_there_already_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler, written = decoder(model("llama")), Sampler(Sampling()), []
    fill = Tensor.fill_
    monkeypatch.setattr(Tensor, "fill_", lambda x, value: [written.append(value), fill(x, value)][1])
    id = decode_next(engine, 3, sampler)
    written.clear()
    following = decode_next(engine, id, sampler)
    assert written == []
    decode_next(engine, (following + 1) % 300, sampler)
    assert written == [(following + 1) % 300, 2]
    engine.reset()
    engine.step([5], True)
    assert written[2:] == [5, 0]


AFTER = {
    "prefill": lambda engine, id: engine.prefill(0, IDS[:3]),
    "the token chosen": lambda engine, id: engine.step([id], True)[0],
    "another token": lambda engine, id: engine.step([(id + 1) % 300], True)[0],
    "dense": lambda engine, id: engine.step([id], False)[0],
    "teacher-forced": lambda engine, id: engine.teacher_forced(IDS, 4, True),
    "a shorter text": lambda engine, id: engine.truncate(0, 2),
    "reset": lambda engine, id: engine.reset(),
    "a choice without its token": lambda engine, id: torch.tensor(decode_next(engine, 9, Sampler(Sampling()))),
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER.keys())
def test_nothing_sees_the_step_that_runs_ahead_of_a_choice(after: Callable[[CudaDecoder, int], Tensor | None]) -> None:
    packed = model("mistral, sliding window")
    seen = []
    for chosen in (True, False):
        engine, sampler, id = decoder(packed), Sampler(Sampling()), 3
        for _ in range(4):
            id = decode_next(engine, id, sampler) if chosen else sampler.choose(engine.step([id], True)[0])
        counts = [engine.active()]
        result = after(engine, id)
        following = engine.step([5], True)[0]
        seen.append(([] if result is None else result.tolist(), following.tolist(), counts, engine.active()))
        assert engine.active() == engine.active()
    assert seen[0] == seen[1]


def test_the_last_position_of_the_context_can_be_chosen_from() -> None:
    engine, sampler = decoder(model("llama"), context=5), Sampler(Sampling())
    engine.prefill(0, IDS[:3])
    id = decode_next(engine, decode_next(engine, 3, sampler), sampler)
    assert (engine.cache.lengths[0], engine.stepped) == (5, 2)
    other = decoder(model("llama"), context=6)
    other.prefill(0, IDS[:3])
    assert decode_next(other, decode_next(other, 3, sampler), sampler) == id
    assert engine.active() == other.active()


def test_graphs_of_many_settings_make_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "MOST_SAMPLERS", 2)
    engine = decoder(model("llama"))
    for temperature in (0.5, 0.6, 0.7, 0.5):
        decode_next(engine, 3, Sampler(Sampling(temperature)))
    assert [key[0] for key in engine._ahead._samplers] == [0.7, 0.5]


def test_logits_that_later_steps_do_not_overwrite() -> None:
    engine = decoder(model("llama"))
    first = engine.step([3], True)[0]
    kept = first.clone()
    engine.step([4], True)
    assert torch.equal(first, kept)


def test_what_the_kernels_do_not_know_is_an_error() -> None:
    with pytest.raises(UserError, match="cache type 'f8': expected one of bf16, f16, f32"):
        decoder(model("llama"), "f8")
    with pytest.raises(UserError, match=r"17 for each key head: .* use the reference backend"):
        decoder(random_model("llama", num_attention_heads=17, num_key_value_heads=1, hidden_size=34))
    with pytest.raises(UserError, match="heads of 514 channels"):
        decoder(random_model("qwen3, tied", head_dim=514))


@pytest.mark.parametrize("chunk", [1, 4, 6, 13])
def test_prompts_go_through_layers_without_keys_of_their_own_at_their_end_alone(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", chunk)
    packed = model("gemma4, inputs of each layer, shared keys and values")
    expected = Engine(packed, backend="reference").teacher_forced(IDS.tolist(), 6)
    for context in (15, 64):  # shorter and longer than a prompt that is filled up
        engine = decoder(packed, context=context)
        assert largest_difference(engine.prefill(0, IDS[:6]), expected[5]) < ROUNDED
        assert engine.cache.lengths == [6]
        assert largest_difference(steps(engine, IDS[6:]), expected[6:]) < ROUNDED
