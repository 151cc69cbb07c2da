"""Keys and values in the host's memory: the decoder's results are the oracle's, and on a GPU the cache's those of the
same cache on the card, to the last bit."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simulated
import torch
from click.testing import CliRunner
from kv_cache_backends import moved
from packed_models import random_model
from torch import Tensor

from sparsepack.cli.app import main
from sparsepack.errors import UserError
from sparsepack.load import load
from sparsepack.models.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime import reference_operations
from sparsepack.runtime.backends import check_offload
from sparsepack.runtime.batch import BatchEngine
from sparsepack.runtime.cuda.attention import Variant
from sparsepack.runtime.cuda.batch import CudaBatch
from sparsepack.runtime.cuda.decoder import CudaDecoder
from sparsepack.runtime.cuda.double import attention as double_attention
from sparsepack.runtime.cuda.double.kv_cache import DoubleKvCache
from sparsepack.runtime.cuda.double.offload import TokenPlaces
from sparsepack.runtime.cuda.double.offloaded_kv_cache import OffloadedKvCache
from sparsepack.runtime.cuda.host_memory import host_tensors
from sparsepack.runtime.cuda.kernel_set import KERNELS, Kernels
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention
from sparsepack.runtime.operations_decoder import OperationsDecoder
from sparsepack.runtime.sampling import Sampler, Sampling

CONTEXT = 64
POLICY = TokenPolicy(Fraction(1, 4), sinks=1, recent=2, min_context=4)
IDS = torch.randint(40, (CONTEXT,), generator=torch.Generator().manual_seed(4))
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["simulated", pytest.param("GPU", marks=ON_GPU)])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "GPU":
        yield KERNELS
        return
    with simulated.launches(), torch.no_grad():
        yield simulated.KERNELS


@pytest.fixture(
    scope="module", params=[("llama", 1), ("llama", 0), ("qwen3, wide heads, yarn", 1), ("mistral, sliding window", 1)]
)
def packed(request: pytest.FixtureRequest) -> PackedModel:
    variant, dense_layers = request.param
    packed = random_model(variant)
    a = packed.architecture
    random = torch.Generator().manual_seed(3)
    heavy = [
        torch.stack([torch.randperm(a.head_dim, generator=random)[:4].sort().values for _ in range(a.kv_heads)])
        for _ in range(a.layers)
    ]
    channels = (*(None,) * dense_layers, *heavy[dense_layers:])
    return replace(packed, attention=SparseAttention(POLICY, channels))


def decoder(packed: PackedModel, kernels: Kernels, places: float = 1.0) -> CudaDecoder:
    cache = partial(OffloadedKvCache, places=places)
    return CudaDecoder(packed, device_of(kernels), CONTEXT, "f32", kernels, cache)


def oracle(packed: PackedModel) -> OperationsDecoder:
    return OperationsDecoder(packed, reference_operations, torch.device("cpu"), CONTEXT, None)


def device_of(kernels: Kernels) -> torch.device:
    return torch.device("cuda" if kernels is KERNELS else "cpu")


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found.cpu() - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("places", [1.0, 2.0, 100.0])
def test_a_text_is_read_as_from_the_card(packed: PackedModel, kernels: Kernels, places: float) -> None:
    ours, theirs = decoder(packed, kernels, places), oracle(packed)
    for id in IDS[:40].tolist():
        assert_near(ours.step(id, True), theirs.step(id, True))


def test_what_is_written_anew_is_not_taken_from_its_old_place(packed: PackedModel, kernels: Kernels) -> None:
    """By steps, dense and sparse, and after a reset."""
    ours, theirs = decoder(packed, kernels, 100.0), oracle(packed)
    for turn, (length, dense) in enumerate(((30, False), (12, True), (20, False), (0, False))):
        for one in (ours, theirs):
            one.truncate(length if turn else 0)
            for id in IDS[turn : turn + 8].tolist() if dense else ():
                one.step(id, False)
        for id in IDS[3 * turn : 3 * turn + 14].tolist() if turn else IDS[:40].tolist():
            assert_near(ours.step(id, True), theirs.step(id, True))


def test_prefill_forgets_the_places_of_what_it_writes(packed: PackedModel, kernels: Kernels) -> None:
    """Its inputs are rounded to 16 bits, so that some tokens are read in place of others that score as well."""
    ours, theirs = decoder(packed, kernels, 100.0), oracle(packed)
    for one in (ours, theirs):
        for id in IDS[:40].tolist():
            one.step(id, True)
        one.truncate(5)
        one.prefill(IDS[5:38].flip(0))
    found, expected = (torch.stack([one.step(id, True) for id in IDS[38:60].tolist()]).cpu() for one in (ours, theirs))
    difference = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.median() <= 0.03


def test_prefill_of_one_text_beside_another_and_in_two_parts(packed: PackedModel, kernels: Kernels) -> None:
    """The second part reads what lies with the host. Prefill's inputs are rounded: see above."""
    ours = CudaBatch(packed, device_of(kernels), CONTEXT, 2, "f32", kernels, OffloadedKvCache)
    theirs = [oracle(packed) for _ in range(2)]
    for sequence, ids in ((0, IDS[:21]), (1, IDS[20:37]), (1, IDS[37:44]), (0, IDS[30:48])):
        found, expected = ours.prefill(sequence, ids), theirs[sequence].prefill(ids)
        assert (found.cpu() - expected).norm() <= 0.02 * expected.norm()
    differences = []
    for step in range(15):
        ids = IDS[step : step + 2].tolist()
        for row, one, id in zip(ours.step(ids, True).cpu(), theirs, ids, strict=True):
            expected = one.step(id, True)
            differences.append(float((row - expected).norm() / expected.norm()))
    assert sorted(differences)[15] <= 0.03


def test_steps_run_ahead(packed: PackedModel, kernels: Kernels) -> None:
    greedy = Sampler(Sampling())
    ours, theirs = decoder(packed, kernels), oracle(packed)
    for one in (ours, theirs):
        for id in IDS[:15].tolist():
            one.step(id, True)
    id = other = 7
    for n in range(30):
        id, other = ours.decode_next(id, True, greedy), theirs.decode_next(other, True, greedy)
        assert id == other
        if n % 7 == 6:
            id = other = int(IDS[n])  # not what was begun ahead


def test_texts_of_different_length(packed: PackedModel, kernels: Kernels) -> None:
    ours = CudaBatch(packed, device_of(kernels), CONTEXT, 3, "f32", kernels, OffloadedKvCache)
    theirs = [oracle(packed) for _ in range(3)]
    for step in range(20):
        ids = IDS[step : step + 3].tolist()
        for row, one, id in zip(ours.step(ids, step % 3 > 0), theirs, ids, strict=True):
            assert_near(row, one.step(id, step % 3 > 0))
    for n, length in ((0, 5), (1, 13)):
        ours.truncate(n, length)
        theirs[n].truncate(length)
    for step in range(16):
        ids = IDS[step : step + 3].tolist()
        for row, one, id in zip(ours.step(ids, True), theirs, ids, strict=True):
            assert_near(row, one.step(id, True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_an_engine_says_where_keys_and_values_are_or_refuses(packed: PackedModel, device: str) -> None:
    if device == "cpu":
        for backend in ("cpu", "reference"):
            with pytest.raises(UserError, match=f"offload: the {backend} backend keeps keys and values where it comp"):
                Engine(packed, device, CONTEXT, backend=backend, offload=True)
        return
    with pytest.raises(UserError, match="pack the model with --attention double"):
        Engine(replace(packed, attention=None), device, CONTEXT, offload=True)
    engine = Engine(packed, device, CONTEXT, offload=True)
    assert engine.description.endswith(", keys and values in the host's memory, sparse attention from 4 tokens on")
    several = BatchEngine(packed, device, CONTEXT, sequences=2, offload=True)
    assert several.description.endswith("in the host's memory, sparse attention from 4 tokens on")


def test_a_model_whose_windows_are_read_whole_has_nothing_to_offload(packed: PackedModel) -> None:
    assert packed.attention is not None
    check_offload(packed)
    narrow = replace(packed.architecture, sliding_windows=(3,) * packed.architecture.layers)
    with pytest.raises(UserError, match="every layer reads all that it sees, which is fewer than 4 tokens"):
        check_offload(replace(packed, architecture=narrow))
    with pytest.raises(UserError, match="pack it with --attention double"):
        check_offload(replace(packed, attention=None))


@pytest.mark.parametrize("verb", [["generate", "--prompt", "a"], ["serve"]])
def test_dense_and_offload_exclude_each_other(verb: list[str], tmp_path: Path) -> None:
    told = CliRunner().invoke(main, [*verb, str(tmp_path / "m.gguf"), "--dense", "--offload"])
    assert told.exit_code == 2
    assert "give --dense or --offload" in " ".join(told.stderr.split())


def test_a_file_is_not_read_for_a_device_that_has_no_other_memory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the cpu backend keeps keys and values where it computes; use device cuda"):
        load(tmp_path / "not there.gguf", offload=True)


def test_memory_that_the_host_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(UserError, match=r"4503599\.6 GB of the host's memory for keys and values, pinned: not"):
        host_tensors(1, (1 << 52,), torch.uint8, torch.device("cuda"))


@pytest.mark.parametrize(("processor", "room"), [("sm_80", 163 << 10), ("sm_86", 99 << 10), ("sm_90", 227 << 10)])
@pytest.mark.parametrize("tokens", [Fraction(1, 16), Fraction(1, 4), Fraction(1, 2)])
def test_where_selecting_finds_room_attending_does(
    processor: str, room: int, tokens: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double_attention, "shared_limit", lambda device: room)
    monkeypatch.setattr(double_attention, "multiprocessors", lambda device: 108)
    for context in range(2_000, 60_000, 3_700):
        policy = TokenPolicy(tokens)
        keys = torch.empty(1, 8, context, 128, dtype=torch.bfloat16, device="meta")
        cos = torch.empty(context, 64, device="meta")
        layer = LayerAttention()
        shape = AttentionShape(32, 8, 128, 1e-5, cos, cos, (layer,), 1, policy)
        dense = SimpleNamespace(shape=shape, layer=layer, keys=keys, variant=Variant(128, 4, torch.bfloat16, 3))
        of: Any = SimpleNamespace(dense=dense, policy=policy, largest_whole=policy.min_context - 1)
        of.most_read = partial(double_attention.DoubleParameters.most_read, of)
        for cluster in (1,) if processor != "sm_90" else double_attention.CLUSTERS:
            variant = double_attention.variant_for(of, cluster)
            selecting = double_attention.room_for(of, cluster, variant)
            attending = double_attention.room_for(of, cluster, variant, selects=False)
            assert attending.total <= selecting.total


# The kernels.


def shape_of(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    policy: TokenPolicy,
    *,
    window: int = 0,
    sequences: int = 1,
    turned: bool = True,
) -> AttentionShape:
    random = torch.Generator().manual_seed(heads * head_dim)
    angles = torch.rand(context, head_dim // 2, generator=random) * 6 * turned
    heavy = [torch.randperm(head_dim, generator=random)[: head_dim // 4].sort().values for _ in range(kv_heads)]
    norms = (1 + torch.rand(head_dim, generator=random) for _ in range(2))
    layer = LayerAttention(window, *norms, torch.stack(heavy))
    return AttentionShape(heads, kv_heads, head_dim, 1e-5, angles.cos(), angles.sin(), (layer,), sequences, policy)


class Pair:
    """A cache in the host's memory, and the same on the card."""

    def __init__(self, shape: AttentionShape, type: str, places: float) -> None:
        self.shape, self.random = shape, torch.Generator(device="cuda")
        print("seed", self.random.seed())  # other inputs every run
        device, there = torch.device("cuda"), moved(shape, "cuda")
        self.ours = OffloadedKvCache(there, type, device, places=places)
        self.theirs = DoubleKvCache(there, type, device)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.drift = torch.zeros(shape.sequences, width, device="cuda")

    @property
    def places(self) -> TokenPlaces:
        (places,) = self.ours._places
        assert places is not None
        return places

    def rows(self, count: int) -> Tensor:
        """Queries like those of the row before, as in texts."""
        new = torch.randn(count, self.drift.shape[1], device="cuda", generator=self.random)
        if count == len(self.drift):
            self.drift = 0.9 * self.drift + 0.4 * new
            width = self.shape.heads * self.shape.head_dim
            new[:, :width] = self.drift[:, :width]
        return new

    def prefill(self, count: int, sequence: int = 0) -> None:
        rows = self.rows(count)
        for cache in (self.ours, self.theirs):
            cache.append(0, rows, sequence)
            cache.advance(count, sequence)

    def truncate(self, length: int, sequence: int = 0) -> None:
        for cache in (self.ours, self.theirs):
            cache.truncate(length, sequence)

    def step(self) -> None:
        rows = self.rows(self.shape.sequences)
        before = TokenPlaces(*(getattr(self.places, name).clone() for name in TokenPlaces.__dataclass_fields__))
        found, expected = (cache.step(0, rows, True) for cache in (self.ours, self.theirs))
        if self.theirs.selects(True):
            assert torch.equal(found, expected)
        else:  # another kernel, which adds in another order
            assert (found - expected).abs().max() <= 1e-5
        self.check(before)
        for cache in (self.ours, self.theirs):
            for sequence in range(self.shape.sequences):
                cache.advance(1, sequence)

    def check(self, before: TokenPlaces) -> None:
        """That places hold what they say, and were given as the simulated kernel gives them."""
        before = TokenPlaces(*(getattr(before, name).cpu() for name in TokenPlaces.__dataclass_fields__))
        after = TokenPlaces(*(getattr(self.places, name).cpu() for name in TokenPlaces.__dataclass_fields__))
        keys, values = (x.cpu() for x in (self.ours._layers[0].keys, self.ours._layers[0].values))
        for n, position in enumerate(self.ours.lengths):
            for head in range(self.shape.kv_heads):
                places = after.listed[n, head, : after.counts[n, head]].long()
                tokens = after.token_of[n, head, places].long()
                assert tokens.unique().numel() == len(tokens)
                assert torch.equal(after.keys[n, head, places], keys[n, head, tokens])
                assert torch.equal(after.values[n, head, places], values[n, head, tokens])
                simulated.give_places(before, (n, head), tokens.tolist(), position)
        for name in ("place_of", "token_of", "last_read", "missed_counts"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name


EIGHTH = TokenPolicy(Fraction(1, 8), sinks=2, recent=5, min_context=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("places", [1.0, 1.5, 2.0, 100.0])
    @pytest.mark.parametrize("type", ["bf16", "f16", "f32"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"), [(4, 4, 128), (8, 2, 64), (6, 2, 80), (7, 1, 18), (16, 1, 256)]
    )
    def test_steps_have_the_bits_of_a_cache_on_the_card(
        self, heads: int, kv_heads: int, head_dim: int, type: str, places: float
    ) -> None:
        pair = Pair(shape_of(heads, kv_heads, head_dim, 3000, EIGHTH), type, places)
        for length in (1, 6, 300, 1100, 1200):
            pair.prefill(length)
            for _ in range(6):
                pair.step()

    @pytest.mark.parametrize(
        "policy",
        [
            TokenPolicy(Fraction(1), 4, 64, 0),
            TokenPolicy(Fraction(1, 1000), 0, 1, 0),
            TokenPolicy(Fraction(1, 3), 4, 64, 500),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("window", [0, 333])
    def test_budgets_and_windows(self, policy: TokenPolicy, window: int) -> None:
        pair = Pair(shape_of(4, 2, 64, 1500, policy, window=window), "bf16", 1.0)
        if pair.ours._places[0] is None:  # a window that is always read whole
            assert 0 < window < policy.min_context
            return
        for length in (1, 100, 397, 2, 800):
            pair.prefill(length)
            for _ in range(3):
                pair.step()

    def test_long_texts_take_several_rounds(self) -> None:
        pair = Pair(shape_of(8, 2, 64, 40_000, TokenPolicy(Fraction(1, 6), 4, 64, 0)), "bf16", 1.4)
        pair.prefill(38_000)
        for _ in range(8):
            pair.step()

    def test_texts_of_different_length_end_and_begin_again(self) -> None:
        pair = Pair(shape_of(4, 2, 64, 900, EIGHTH, sequences=5), "bf16", 2.0)
        for sequence, length in enumerate((0, 1, 70, 600, 411)):
            if length:
                pair.prefill(length, sequence)
        for _ in range(12):
            pair.step()
        for sequence, length in ((3, 100), (4, 0), (2, 75)):
            pair.truncate(length, sequence)
        pair.prefill(150, 3)
        for _ in range(12):
            pair.step()

    @pytest.mark.parametrize("window", [0, 30, 70])
    @pytest.mark.parametrize("sequence", [0, 1])
    def test_many_queries_read_what_lies_with_the_host(self, sequence: int, window: int) -> None:
        shape = shape_of(4, 2, 64, 300, EIGHTH, window=window, sequences=2)
        pair, random = Pair(shape, "bf16", 1.0), torch.randn(90, 8 * 64, device="cuda")
        for first in (0, 50):
            rows = random[first : first + 50]
            caches = (pair.ours, pair.theirs)
            found, expected = (cache.attend(0, cache.append(0, rows, sequence), sequence) for cache in caches)
            assert torch.equal(found, expected)
            for cache in caches:
                cache.advance(len(rows), sequence)

    def test_what_a_step_brings_falls_once_it_has_been_read(self) -> None:
        pair = Pair(shape_of(8, 2, 64, 3000, EIGHTH, turned=False), "bf16", 2.0)
        pair.prefill(2800)
        brought = []
        for _ in range(20):
            pair.step()
            brought.append(pair.ours.fetched()[0])
        assert brought[0] >= 2 * 350
        assert sum(brought[10:]) / 10 < brought[0] / 2

    def test_the_host_s_memory_is_zero_and_keeps_what_is_written(self) -> None:
        first, second = host_tensors(2, (3, 5, 7), torch.bfloat16, torch.device("cuda"))
        assert not first.any()
        first.fill_(2)
        assert not second.any()
        assert float(first.float().sum()) == 2 * 105
