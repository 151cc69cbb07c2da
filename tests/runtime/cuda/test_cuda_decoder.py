"""The cuda decoder on a GPU: graphs, caches, memory. test_engine and test_chain see to what it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Thread

import pytest
import torch
from artifacts_for_tests import write_zigzag
from backends import engine_of
from model_table import VARIANTS
from packed_models import random_model, stock_model, with_rules
from rounding import check_logits
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.runtime.cuda.decoder import decoder as cuda_decoder
from sparsepack.runtime.cuda.decoder import run_ahead
from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.sampling import Sampler, Sampling

pytestmark = pytest.mark.gpu

IDS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LARGE = {"hidden_size": 512, "intermediate_size": 2816, "vocab_size": 4100, "max_position_embeddings": 256}
"""Several bands and groups of every product, gate and up in one of them."""


@cache
def model() -> PackedModel:
    packed = random_model("llama", **LARGE)
    return with_rules(packed, stock_model(packed), IDS, [0])


@cache
def segments() -> PackedModel:
    packed = random_model("llama", **LARGE, num_hidden_layers=5, bases=(0, 2, 3))
    return with_rules(packed, stock_model(packed), IDS, [0])


@pytest.fixture(scope="module")
def books(shared_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    path = tmp_path_factory.mktemp("cuda") / "books.gguf"
    write_zigzag(open_checkpoint(shared_model("books-26m-silu")), {}, path)
    return read_packed(path)


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(engine: Engine, prompt: int = 5) -> Tensor:
    engine.reset()
    return torch.stack([engine.prefill(IDS[:prompt]), *(engine.step(id) for id in IDS[prompt:])])


@pytest.mark.parametrize("dense", [False, True])
def test_a_change_of_basis_has_the_same_bits_every_time_and_those_of_the_reference_nearly(dense: bool) -> None:
    """Also where a step begins ahead, and behind one that left its words in plain memory."""
    engine = Engine(segments(), device="cuda", dense=dense, cache_type="f32")
    expected = run(engine)
    for _ in range(20):
        assert torch.equal(run(engine), expected)
    engine.reset()
    engine.prefill(IDS[:5])
    sampler, chosen = Sampler(Sampling()), [IDS[5]]
    for _ in range(30):
        chosen.append(engine.decode_next(chosen[-1], sampler))
    engine.reset()
    logits = [engine.prefill(IDS[:5]), *(engine.step(id) for id in chosen[:-1])]
    assert [int(row.argmax()) for row in logits[1:]] == chosen[1:]
    if dense:
        reference = Engine(segments(), backend="reference", dense=True).teacher_forced(IDS, 5)
        assert (expected.cpu() - reference[4:]).norm() < 5e-3 * reference[4:].norm()


def test_a_step_of_segments_never_waits_for_the_device() -> None:
    engine = Engine(segments(), device="cuda")
    engine.prefill(IDS[:5])
    engine.step(3)
    with nothing_waits():
        for id in IDS[5:15]:
            engine.step(id)


@pytest.mark.parametrize("dense", [False, True])
def test_a_step_never_waits_for_the_device(dense: bool) -> None:
    engine = Engine(model(), device="cuda", dense=dense)
    engine.prefill(IDS[:5])
    engine.step(3)  # makes the graph
    with nothing_waits():
        for id in IDS[5:15]:
            engine.step(id)
    assert engine.position == 16


def test_engines_on_streams_of_their_own_take_turns() -> None:
    """Products of two graphs at one time would write the same words, and might wait for each other for ever."""
    engines = [Engine(model(), device="cuda") for _ in range(2)]
    expected = [run(engine) for engine in engines]
    found: dict[int, list[Tensor] | Exception] = {}
    torch.cuda.synchronize()

    def work(n: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                found[n] = [run(engines[n]) for _ in range(10)]
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            found[n] = error

    threads = [Thread(target=work, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for n, texts in found.items():
        assert not isinstance(texts, Exception), texts
        assert all(torch.equal(logits, expected[n]) for logits in texts)


def test_steps_are_what_teacher_forcing_does() -> None:
    engine = Engine(model(), device="cuda")
    expected = engine.teacher_forced(IDS, 5)
    activity = engine.activity()
    found = run(engine)
    assert torch.equal(found[1:], expected[5:])
    # The output matrix adds one row up in another order than many.
    assert (found[0] - expected[4]).abs().max() < 1e-3
    assert engine.activity() == activity


@pytest.mark.parametrize("variant", VARIANTS)
def test_short_prompts_have_the_same_bits_recorded_or_not(variant: str) -> None:
    """Whatever stood behind their end before."""
    packed = random_model(variant)
    engine, reference = engine_of(packed, "cuda", context=64), Engine(packed, context=64, backend="reference")
    found: dict[int, Tensor] = {}
    for length in (5, 13, 16, 5, 1, 13, 5, 40, 33, 40):
        engine.reset()
        logits = engine.prefill(IDS[:length])
        assert torch.equal(logits, found.setdefault(length, logits)), length
    for length, logits in found.items():
        reference.reset()
        expected = reference.prefill(IDS[:length])
        check_logits(logits[None], expected[None], "cuda", packed, IDS[:length], length)


def test_a_recorded_prompt_never_waits_for_the_device() -> None:
    engine = Engine(model(), device="cuda")
    ids = torch.tensor(IDS, dtype=torch.int32, device="cuda")
    for attempt in range(3):
        engine.reset()
        with nothing_waits() if attempt == 2 else nullcontext():
            engine._decoder.prefill(0, ids)


@pytest.mark.parametrize("chunk", [7, 16])
def test_prefill_in_chunks_is_prefill(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model()
    whole = {
        type: Engine(packed, device="cuda", cache_type=type).teacher_forced(IDS, 40) for type in ("f32", "f16", "bf16")
    }
    monkeypatch.setattr(cuda_decoder, "PREFILL_TOKENS", chunk)
    for type, expected in whole.items():
        found = Engine(packed, device="cuda", cache_type=type).teacher_forced(IDS, 40)
        assert (found - expected).norm() < {"f32": 2e-3, "f16": 5e-3, "bf16": 3e-2}[type] * expected.norm()


def test_matrices_larger_than_the_scratch_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Engine(model(), device="cuda", cache_type="f32").prefill(IDS)
    monkeypatch.setattr(zigzag, "SCRATCH_BYTES", 3 * 512 * 512)
    parts = Engine(model(), device="cuda", cache_type="f32").prefill(IDS)
    assert (parts - whole).norm() < 2e-3 * whole.norm()


@pytest.mark.parametrize(("cache_type", "bound"), [("f32", 0.02), ("f16", 0.03), ("bf16", 0.08)])
def test_caches_of_every_type_come_close_to_the_reference(cache_type: str, bound: float, books: PackedModel) -> None:
    """Of logits up to 15; 0.009, 0.008 and 0.03 calculated with kernels in plain torch."""
    expected = Engine(books, context=64, backend="reference").teacher_forced(IDS, 20)
    engine = Engine(books, device="cuda", context=64, cache_type=cache_type)
    assert engine.cache_type == cache_type
    assert (engine.teacher_forced(IDS, 20).cpu() - expected).abs().max() < bound
    engine.reset()
    found = torch.stack([engine.step(id) for id in IDS])
    assert (found.cpu() - expected).abs().max() < bound


def test_many_ways_of_sampling_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "MOST_SAMPLERS", 2)
    engine = Engine(model(), device="cuda")
    for n, temperature in enumerate((0.5, 1.0, 2.0, 0.5, 1.0, 2.0)):
        samplers = [Sampler(Sampling(temperature, seed=n)) for _ in range(2)]
        engine.reset()
        expected = samplers[0].choose(engine.step(IDS[n]))
        engine.reset()
        assert engine.decode_next(IDS[n], samplers[1]) == expected


def test_a_model_takes_its_stored_size_and_the_cache() -> None:
    packed = random_model("llama", hidden_size=1024, intermediate_size=4096, vocab_size=4100, num_hidden_layers=4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = Engine(packed, device="cuda", context=64)
    matrices = [site.matrix.blocks for layer in packed.layers for site in layer.sites.values()]
    stored = sum(x.nbytes for x in [*matrices, packed.embedding.blocks, packed.output.blocks])
    kept = 4 * 2 * 2 * 128 * 64 * 2
    scratch = 2 * 1024 * 8192
    assert torch.cuda.memory_allocated() - before < 1.1 * stored + kept + scratch + (8 << 20)
    del engine


def test_the_cuda_decoder_is_the_default_on_gpus_and_says_what_runs() -> None:
    engine = Engine(random_model("llama"), device="cuda")
    assert engine.backend == "cuda"
    assert engine.description == f"cuda, {torch.cuda.get_device_name()}"
    assert engine.cache_type == "bf16"
    assert engine.notes == ()
    assert Engine(random_model("llama"), device="cuda:0").step(3).device == torch.device("cuda:0")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match="expected at most cuda:"):
        Engine(random_model("llama"), device="cuda:99", backend="cuda")
