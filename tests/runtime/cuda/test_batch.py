"""One sequence and several at once, by kernels in plain torch on the CPU and, marked gpu, on a GPU."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import tokenizers
import torch
from backends import SHARE, TOLERANCE, engine_of, largest_difference
from packed_models import random_model, stock_model, with_rules
from pairwise import each_value
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from union import Union, union_logits

from sparsepack.bench import bandwidth
from sparsepack.bench.decode import bench_decode, bytes_per_token
from sparsepack.bench.options import BenchSettings
from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.cuda import backend
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.generation.generate import generate, generate_together
from sparsepack.runtime.generation.sampling import Sampler, Sampling
from sparsepack.runtime.options import EngineOptions, GenerateOptions

TEXTS = torch.randint(300, (8, 13), generator=torch.Generator().manual_seed(3))
LENGTHS = (1, 5, 8)
INTERLEAVED = "gate and up in one matrix"
LARGE = "several bands and groups"
SEGMENTS = "segments of one and two blocks"
CHANGES: dict[str, dict[str, Any]] = {
    INTERLEAVED: {
        **{"hidden_size": 128, "intermediate_size": 768, "row_scales": True},
        **{"attention_bias": True, "mlp_bias": True},
    },
    LARGE: {"hidden_size": 512, "intermediate_size": 2816, "vocab_size": 4100},
    SEGMENTS: {"num_hidden_layers": 3, "bases": (0, 2)},
}
VARIANTS = [
    "llama",
    "llama tied, biases, llama3 rotary",
    "mistral, sliding window",
    "qwen2, every second layer slides",
    "qwen3, tied",
    "gemma2, soft caps",
    "phi3, a part of each head, longrope",
    "nemotron, LayerNorm, without a gate",
    "bitnet, norms before attn_out and mlp_mid",
    "cohere2, attention and MLP side by side",
    "apertus, xIELU",
    INTERLEAVED,
    LARGE,
    SEGMENTS,
]
ON_GPU = EngineOptions("cuda")


@pytest.fixture(autouse=True)
def _engines_take(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run on these kernels; what they and benchmarks ask of torch, where there is no GPU, is there, too."""
    if kernels is KERNELS:
        return
    use(monkeypatch, kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")


def use(patch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    """Let engines run on these kernels."""
    patch.setattr(backend, "CudaDecoder", partial(CudaDecoder, kernels=kernels))


@cache
def model(variant: str) -> PackedModel:
    packed = random_model("llama", **CHANGES[variant]) if variant in CHANGES else random_model(variant)
    return with_rules(packed, stock_model(packed), TEXTS[0].tolist(), [0, 6, 12])


@cache
def oracle(variant: str, sequences: int) -> tuple[Tensor, Tensor, Union]:
    return union_logits(model(variant), sequences, 6)


def batch_of(packed: PackedModel, sequences: int = 1, **options: Any) -> Engine:
    return engine_of(packed, "cuda", sequences=sequences, **options)


def steps(engine: Engine, ids: Tensor) -> Tensor:
    """Logits of steps over columns of ids [B, S]: [B, S, V], on the CPU."""
    return torch.stack([engine.step_all(column) for column in ids.t().tolist()], dim=1).cpu()


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_sequences_of_different_lengths_are_those_of_engines_alone(variant: str) -> None:
    engine = batch_of(model(variant), 3, dense=True)
    found = [engine.prefill(TEXTS[n, :length].tolist(), n) for n, length in enumerate(LENGTHS)]
    assert engine.positions == LENGTHS
    ids = torch.stack([TEXTS[n, length : length + 5] for n, length in enumerate(LENGTHS)])
    together = steps(engine, ids)
    assert engine.positions == (6, 10, 13)
    assert set(engine.activity().values()) == {1.0}
    for n, length in enumerate(LENGTHS):
        single = batch_of(model(variant), dense=True)
        assert largest_difference(found[n], single.prefill(TEXTS[n, :length].tolist())) < TOLERANCE["cuda"]
        expected = torch.stack([single.step(id) for id in ids[n].tolist()])
        assert largest_difference(together[n], expected) < TOLERANCE["cuda"]


@each_value({"variant": VARIANTS, "sequences": [2, 5, 8]})
def test_steps_keep_what_is_active_in_any_sequence(variant: str, sequences: int) -> None:
    texts, expected, watch = oracle(variant, sequences)
    engine = batch_of(model(variant), sequences)
    assert largest_difference(steps(engine, texts), expected) < TOLERANCE["cuda"]
    shares = {
        (layer, site): count / (6 * model(variant).layers[layer].sites[site].matrix.columns)
        for (layer, site), count in watch.counts.items()
    }
    assert engine.activity() == pytest.approx(shares, abs=SHARE["cuda"])


@each_value({"variant": VARIANTS, "prompt": [0, 6]})
def test_the_same_text_everywhere_is_the_text_alone(variant: str, prompt: int) -> None:
    engine, single = batch_of(model(variant), 3), batch_of(model(variant))
    for n in range(3 if prompt else 0):
        engine.prefill(TEXTS[0, :prompt].tolist(), n)
    if prompt:
        single.prefill(TEXTS[0, :prompt].tolist())
    found = steps(engine, TEXTS[:1, prompt:].expand(3, -1))
    expected = torch.stack([single.step(id) for id in TEXTS[0, prompt:].tolist()]).cpu()
    assert largest_difference(found, expected.expand(3, -1, -1)) < TOLERANCE["cuda"]
    assert engine.activity() == pytest.approx(single.activity(), abs=SHARE["cuda"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_more_columns_are_active_in_a_batch_than_in_the_first_layer_of_any_sequence_alone() -> None:
    packed = model("llama")
    engine = batch_of(packed, 4)
    steps(engine, TEXTS[:4])
    union = engine.activity()
    for text in TEXTS[:4].tolist():
        single = batch_of(packed)
        for id in text:
            single.step(id)
        # What attn_in of the first layer gets does not depend on what was skipped.
        assert union[0, "attn_in"] > single.activity()[0, "attn_in"]
    assert 0.5 < union[0, "attn_in"] < 1


@pytest.mark.parametrize("sequences", [1, 5])
def test_every_run_gives_the_same_bits(sequences: int, kernels: Kernels) -> None:
    packed = model(LARGE if kernels is KERNELS else INTERLEAVED)

    def run(engine: Engine) -> tuple[Tensor, dict[tuple[int, str], float]]:
        engine.reset()
        engine.prefill(TEXTS[1, :4].tolist(), sequences - 1)
        return steps(engine, TEXTS[:sequences]), engine.activity()

    engine = batch_of(packed, sequences)
    first, *others = [run(each) for each in (engine, engine, engine, batch_of(packed, sequences))]
    assert all(torch.equal(logits, first[0]) and activity == first[1] for logits, activity in others)


@pytest.mark.parametrize("sequences", [1, 2])
def test_making_a_graph_changes_nothing(sequences: int) -> None:
    """Sparse and dense steps in turns, each kind for the first time amid the texts."""
    engine, runs = batch_of(model("llama"), sequences), []
    for _ in range(2):
        engine.reset()
        found = []
        for n, column in enumerate(TEXTS[:sequences].t().tolist()):
            engine.dense = n % 2 == 0
            found.append(engine.step_all(column))
        runs.append((torch.stack(found), engine.activity()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert 0.5 < min(runs[0][1].values()) < max(runs[0][1].values()) == 1


@pytest.mark.parametrize(
    "settings",
    [
        [Sampling()],
        [Sampling(0.9, top_p=0.9, seed=4)],
        [Sampling(2.0, top_k=50)],
        [Sampling(0.7)],
        [Sampling(), Sampling(0.9, top_p=0.9, seed=4), Sampling()],
    ],
    ids=str,
)
def test_choose_is_step_and_samplers(settings: list[Sampling]) -> None:
    sequences, runs = len(settings), []
    engine = batch_of(model("qwen3, tied"), sequences)
    for chosen in (True, False):
        engine.reset()
        engine.prefill(TEXTS[0, :3].tolist())
        samplers = [Sampler(each) for each in settings]
        ids, rows = [5, 6, 7][:sequences], []
        for n in range(20):
            if n == 10:
                ids = [8, 9, 10][:sequences]  # not what was chosen last
            if chosen:
                ids = engine.decode_all(ids, samplers)
            else:
                ids = [sampler.choose(row) for sampler, row in zip(samplers, engine.step_all(ids), strict=True)]
            rows.append(ids)
        assert (engine.positions, engine.counts().stepped) == ((23, 20, 20)[:sequences], 20)
        runs.append((rows, engine.activity()))
    assert runs[0] == runs[1]


def test_a_truncated_sequence_goes_on_from_there() -> None:
    engine = batch_of(model("llama"), 2, dense=True)
    expected = steps(engine, TEXTS[:2, :6])
    engine.truncate(2, 1)
    assert engine.positions == (6, 2)
    found = steps(engine, torch.stack([TEXTS[0, 6:9], TEXTS[1, 2:5]]))
    assert largest_difference(found[1], expected[1, 2:5]) < TOLERANCE["cuda"]
    with pytest.raises(UserError, match="length 6 of sequence 1: expected 0 to 5"):
        engine.truncate(6, 1)


def test_a_benchmark_of_a_batch_counts_the_tokens_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: 1e9)
    packed, ids = model("llama"), TEXTS[0].repeat(3).tolist()
    found = bench_decode(packed, BenchSettings(generate=13, repetitions=2, engine=ON_GPU, batch=3), ids=ids)
    dense, sparse = found["tests"]
    assert [(row["test"], row["mode"], row["n_batch"]) for row in found["tests"]] == [
        ("tg13 x 3", "dense", 3),
        ("tg13 x 3", "sparse", 3),
    ]
    assert dense["samples_ts"] == pytest.approx([3 * 13 * 1e9 / ns for ns in dense["samples_ns"]])
    assert dense["bytes_per_token"] == bytes_per_token(packed, {}) / 3
    assert dense["realised_sparsity"] == 0 < sparse["realised_sparsity"] < 0.7
    with pytest.raises(UserError, match="text of 39 tokens: the tests take 42"):
        bench_decode(packed, BenchSettings(generate=14, engine=ON_GPU, batch=3), ids=ids)
    for wrong in ({"batch": 9, "engine": ON_GPU}, {"batch": 2, "engine": ON_GPU, "generate": 0}):
        with pytest.raises(UserError, match="batch"):
            BenchSettings(**wrong)


@pytest.mark.parametrize("context", [9, 32])
def test_prompts_are_continued_together_as_alone(context: int) -> None:
    packed, words = model("llama"), {f"w{n}": n for n in range(300)}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    prompts = ["w5", "w7 w8 w9 w10 w11", "w250 w3"]
    options = GenerateOptions(12, temperature=0.5, seed=7)
    together = generate_together(batch_of(packed, 3, context=context, dense=True), tokenizer, prompts, options)
    single = batch_of(packed, context=context, dense=True)
    for n, prompt in enumerate(prompts):
        made = generate(single, tokenizer, prompt, replace(options, seed=7 + n)).result()
        assert (together[n].text, together[n].tokens, together[n].reason) == (made.text, made.tokens, made.reason)
        assert made.text
    engine = batch_of(packed, 3, context=context)
    assert [made.text for made in generate_together(engine, tokenizer, prompts, GenerateOptions(0))] == [""] * 3
    with pytest.raises(UserError, match=f"the context holds {context}"):
        generate_together(engine, tokenizer, ["w5 " * 40, "w3", "w4"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sequences", [1, 2])
def test_damaged_weights_are_an_error_of_the_artifact(sequences: int, temperature: float) -> None:
    packed = random_model("llama")
    packed.output_norm.fill_(float("nan"))
    with pytest.raises(ArtifactError, match="largest logit is nan"):
        batch_of(packed, sequences).decode_all([3] * sequences, [Sampler(Sampling(temperature))] * sequences)


def test_too_many_for_a_small_gpu_is_an_error(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfASmallGpu(type(kernels)):
        most_inputs = staticmethod(lambda matrix: 3)

    use(monkeypatch, OfASmallGpu())
    with pytest.raises(UserError, match="4 sequences: this GPU's shared memory takes 3 of this model at once"):
        batch_of(model("llama"), 4)


def test_mistakes_are_errors_that_say_what_to_do() -> None:
    packed = model("llama")
    for sequences in (0, 9):
        with pytest.raises(UserError, match=f"{sequences} sequences: expected 1 to 8"):
            batch_of(packed, sequences)
    with pytest.raises(UserError, match="context 65: the model was made for 64 positions"):
        batch_of(packed, 2, context=65)
    with pytest.raises(UserError, match="cache type 'f8'"):
        batch_of(packed, 2, cache_type="f8")
    engine = batch_of(packed, 2, context=4)
    with pytest.raises(UserError, match="sequence 2: expected 0 to 1"):
        engine.prefill([3], 2)
    with pytest.raises(UserError, match="prefill of 0 tokens"):
        engine.prefill([])
    with pytest.raises(UserError, match="token id 300: expected 0 to 299"):
        engine.prefill([300])
    with pytest.raises(UserError, match="token id -1"):
        engine.step_all([0, -1])
    with pytest.raises(UserError, match="1 tokens for 2 sequences"):
        engine.step(0)
    with pytest.raises(UserError, match="0 are in it and 5 more do not fit"):
        engine.prefill([3] * 5, 1)
    engine.prefill([3] * 4, 1)
    with pytest.raises(UserError, match="4 are in it and 1 more do not fit"):
        engine.step_all([3, 3])
    assert engine.positions == (0, 4)
    assert engine.activity() == {}


@pytest.mark.parametrize("dense", [False, True])
def test_a_sequence_that_stands_still_keeps_its_text(dense: bool) -> None:
    packed = model("llama")
    engine, oracle = (batch_of(packed, 3, dense=dense) for _ in range(2))
    for n, length in enumerate(LENGTHS):
        for each in (engine, oracle):
            each.prefill(TEXTS[n, :length].tolist(), n)
    for id in TEXTS[1, 5:8].tolist():
        engine.step_all([None, id, None])
    assert engine.positions == (1, 8, 8)
    chosen = engine.decode_all([None, 5, None], [None, Sampler(Sampling()), None])
    assert chosen[0] is chosen[2] is None
    assert engine.keep([*TEXTS[0, :1].tolist(), 9], 0) == 1
    assert engine.keep([*TEXTS[2, :8].tolist(), 9], 2) == 8
    engine.truncate(5, 1)
    ids = TEXTS[:3, 9].tolist()
    assert largest_difference(engine.step_all(ids), oracle.step_all(ids)) < TOLERANCE["cuda"]


def test_a_full_sequence_that_stands_still_does_not_keep_the_others_from_a_step() -> None:
    engine = batch_of(model("llama"), 2, context=6)
    engine.prefill(TEXTS[0, :6].tolist(), 0)
    engine.step_all([None, 3])
    assert engine.positions == (5, 1)
    assert engine.keep(TEXTS[0, :6].tolist(), 0) == 0, "what it holds is not known any more"
