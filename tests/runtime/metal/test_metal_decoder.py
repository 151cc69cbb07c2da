"""The metal decoder on this processor, on its own kernels; `make test-mps` runs the tests of engines on a Mac."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import write_zigzag
from metal_stand_in import Stream, stand_in
from packed_models import by_neurons, random_model, stock_model, with_levels, with_rules
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.open import read_packed
from sparsepack.formats.packed import PackedModel
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.decoder import choose_backend
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.generate import generate, open_tokenizer, prompt_tokens
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.metal import decoder as metal_decoder
from sparsepack.runtime.metal import library
from sparsepack.runtime.options import EngineOptions, GenerateOptions
from sparsepack.runtime.reference.backend import operations as reference_operations

IDS = torch.randint(300, (9,), generator=torch.Generator().manual_seed(1)).tolist()
GREEDY = Sampling()


@pytest.fixture(autouse=True)
def stream() -> Iterator[Stream]:
    with torch.no_grad(), stand_in() as stream:
        yield stream


@cache
def model(variant: str = "llama") -> PackedModel:
    packed = random_model(variant)
    return with_rules(packed, stock_model(packed), IDS, [0])


def selecting(packed: PackedModel) -> PackedModel:
    """The model with sparse attention in every layer."""
    a = packed.architecture
    heavy = torch.arange(a.head_dim // 2).expand(a.kv_heads, -1)
    policy = TokenPolicy(Fraction(1, 4), sinks=1, recent=3, min_context=8)
    return dataclasses.replace(packed, attention=SparseAttention(policy, (heavy,) * a.layers))


def metal(packed: PackedModel, **options: Any) -> Engine:
    engine = Engine(packed, device="mps", **options)
    assert engine.backend == "metal"
    return engine


def steps(engine: Engine, prompt: int = 4) -> Tensor:
    """Logits after a prompt and after each token behind it."""
    engine.reset()
    return torch.stack([engine.prefill(IDS[:prompt]), *(engine.step(id) for id in IDS[prompt:])])


class Waits(TorchDispatchMode):
    """Counts how often the host reads a number that the device has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dense", [True, False])
def test_the_shipped_model_writes_the_text_that_the_reference_writes(dense: bool, tmp_path: Path) -> None:
    write_zigzag(open_checkpoint("shipped:tiny"), {}, tmp_path / "m.gguf")
    packed, prompt = read_packed(tmp_path / "m.gguf"), "Once upon a time"
    tokenizer = open_tokenizer(packed.tokenizer_json)
    ids = prompt_tokens(tokenizer, prompt, packed.architecture.bos)
    packed = with_rules(packed, stock_model(packed), ids, [0])
    found = generate(metal(packed, context=64, dense=dense), tokenizer, prompt, GenerateOptions(tokens=6)).result()
    reference = OperationsDecoder(packed, reference_operations, torch.device("cpu"), 64, None, "f16")
    expected = [int(reference.prefill(0, torch.tensor(ids)).argmax())]
    for _ in range(5):
        expected.append(int(reference.step(expected[-1:], not dense).argmax()))
    assert found.text == tokenizer.decode(expected)
    assert list(found.tokens) == expected
    assert found.skipped is not None
    assert (found.skipped.overall > 0.3) != dense


@pytest.mark.parametrize(
    "variant",
    [
        "llama tied, biases, llama3 rotary",
        "llama, several bands, tied Q6_K",
        "mistral, sliding window",
        "qwen3, wide heads, yarn",
        "llama, segments",
    ],
)
def test_dense_steps_are_those_of_the_reference(variant: str) -> None:
    packed = model(variant)
    found, expected = (steps(engine) for engine in (metal(packed, dense=True), Engine(packed, dense=True)))
    assert (found - expected).abs().max() < 0.03  # keys and values are half precision


def test_sparse_steps_skip_what_the_reference_skips() -> None:
    packed = model()
    engine, reference = metal(packed), Engine(packed, backend="reference")
    errors = (steps(engine) - steps(reference)).abs().amax(1)
    assert errors.median() < 0.03  # an input may fall on the other side of its threshold
    assert engine.activity() == pytest.approx(reference.activity(), abs=0.01)
    assert 0.3 < engine.activity()[0, "attn_in"] < 0.7


@pytest.mark.parametrize("variant", ["llama, several bands, tied Q6_K", "qwen2, biases, tied"])
def test_planes_are_read_as_the_reference_reads_them(variant: str) -> None:
    packed = with_levels(random_model(variant, block="Q6_P", tails=True, row_scales=True))
    packed = dataclasses.replace(packed, manifest={**packed.manifest, "thresholds": {"sparsity": 0.6}})
    engine = metal(packed)
    # Its keys and values in half precision, too: then no input falls on the other side of a threshold.
    reference = OperationsDecoder(packed, reference_operations, torch.device("cpu"), 64, None, "f16")
    expected = [reference.prefill(0, torch.tensor(IDS[:4])), *(reference.step([id], True)[0] for id in IDS[4:])]
    assert (steps(engine) - torch.stack(expected)).abs().max() < 0.01
    assert engine.counts().active == reference.active()
    assert 0.2 < sum(engine.activity().values()) / len(engine.activity()) < 0.8
    assert (steps(metal(packed, dense=True)) - steps(Engine(packed, dense=True))).abs().max() < 0.03
    at_once = metal(packed).teacher_forced(IDS, 4)
    assert (at_once[3:] - torch.stack(expected)).abs().max() < 0.01
    engine, reference = metal(packed, hold=True), Engine(packed, backend="reference", hold=True)
    steps(engine), steps(reference)
    assert engine.scales == pytest.approx(reference.scales, rel=1e-3)
    assert engine.scales != (1.0,)


def test_the_order_of_threads_changes_no_bit() -> None:
    packed, found = model("llama tied, biases, llama3 rotary"), []
    for seed in (0, 5):
        with stand_in(seed):
            engine = metal(packed)
            engine.prefill(IDS[:3])
            found.append(torch.stack([engine.step(id) for id in IDS[3:5]]))
    assert torch.equal(*found)


def test_a_token_of_32_blocks_takes_292_kernels_and_no_wait_but_for_itself(stream: Stream) -> None:
    packed = random_model("llama", num_hidden_layers=32, hidden_size=32, intermediate_size=48, num_attention_heads=2)
    engine = metal(packed)
    engine.prefill(IDS[:1])
    stream.order.launched.clear()
    stream.submitted.clear()
    with Waits() as waits:
        engine.step(IDS[1])
    assert waits.count == 0
    assert len(stream.order.launched) == engine._decoder.dispatches == 9 * 32 + 4 < 300
    assert len(stream.submitted) > 1, "the GPU begins before the host has put all of a token on the stream"
    stream.order.launched.clear()
    with Waits() as waits:
        engine.decode_next(IDS[2], Sampler(GREEDY))
    assert waits.count <= 3, "the token, its logit, and whether that is a number"
    assert len(stream.order.launched) == 292


def test_tokens_are_drawn_on_the_device_as_the_host_draws_them() -> None:
    engine = metal(model())
    for how in (Sampling(temperature=0.7, seed=1), Sampling(1.1, 20, 0.9, 2), Sampling(5.0, None, 0.5, 3), GREEDY):
        engine.reset()
        engine.prefill(IDS[:2])
        chosen = engine.decode_next(IDS[2], Sampler(how))
        assert chosen == Sampler(how).choose(engine._decoder._step.logits)
        engine.decode_next(chosen, Sampler(how))  # the token is there already
        engine.truncate(3)
        again = engine.step(chosen)
        engine.truncate(3)
        engine._decoder._known = None
        assert torch.equal(engine.step(chosen), again)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    packed = model()
    broken = dataclasses.replace(packed, output_norm=packed.output_norm * math.nan)
    with pytest.raises(ArtifactError, match="largest logit is nan"):
        metal(broken).decode_next(IDS[0], Sampler(GREEDY))


def test_counts_of_many_steps_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = model()
    expected = metal(packed)
    steps(expected)
    monkeypatch.setattr(metal_decoder, "MOST_COUNTED", 2 * packed.architecture.intermediate)
    engine = metal(packed)
    steps(engine)
    assert engine.counts() == expected.counts()


def test_a_held_share_scales_thresholds_as_the_reference_does() -> None:
    packed = model()
    manifest = {**packed.manifest, "thresholds": {"sparsity": 0.6}}
    packed = dataclasses.replace(packed, manifest=manifest)
    engine, reference = metal(packed, hold=True), Engine(packed, backend="reference", hold=True)
    steps(engine), steps(reference)
    assert engine.scales == pytest.approx(reference.scales, rel=1e-3)
    assert engine.scales != (1.0,)
    engine.reset()
    assert engine.scales == (1.0,)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: by_neurons(random_model("llama, one head, relu", hidden_size=256)), "does not run models by neurons"),
        (lambda: selecting(model()), "reads every cached token, and the model was packed to read a part of them"),
    ],
    ids=["neurons", "sparse attention"],
)
def test_models_that_it_does_not_run_go_to_the_reference_which_says_so(
    made: Callable[[], PackedModel], why: str
) -> None:
    name, (note,) = choose_backend(EngineOptions(device="mps"), made())
    assert name == "reference"
    assert note.startswith("note: the reference backend runs: the metal backend ")
    assert why in note


def test_heads_and_numbers_of_texts_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(UserError, match="heads of 258 channels, 1 for each key head: the metal backend runs"):
        metal(random_model("qwen3, tied", head_dim=258, num_attention_heads=1, num_key_value_heads=1))
    with pytest.raises(UserError, match="a batch of 2 by the metal backend: it runs at most 1"):
        Engine(model(), device="mps", sequences=2)


def test_kernels_that_do_not_compile_leave_the_reference_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str) -> None:
        raise SyntaxError("program_source:3: error: unknown type name 'bfloat'\nmore")

    monkeypatch.setattr(torch.mps, "compile_shader", fails)
    library.library.cache_clear()
    name, (note,) = choose_backend(EngineOptions(device="mps"), model())
    assert name == "reference"
    assert "do not compile here (program_source:3: error: unknown type name 'bfloat')" in note
    assert "more" not in note


def test_without_an_apple_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="device mps: torch finds no Apple GPU on this machine; it needs macOS"):
        Engine(model(), device="mps", backend="metal")
    with pytest.raises(UserError, match="device cpu: the metal backend runs on Apple GPUs; use device mps"):
        Engine(model(), backend="metal")
