"""Decoders with keys and values in the host's memory, against the reference's; and who is refused."""

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sparse_decoders import CONTEXT, IDS, assert_near, device_of, oracle, policy_from, sparse_model

from sparsepack.cli.app import main
from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.loading import load
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import double_sparsity
from sparsepack.runtime.cuda.attention.attention import Variant
from sparsepack.runtime.cuda.attention.kv_cache import OffloadedKvCache
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder
from sparsepack.runtime.cuda.driver.kernel_set import Kernels
from sparsepack.runtime.cuda.driver.memory import host_tensors
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import check_selects
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention

POLICY = policy_from(4)


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", 0), ("qwen3, wide heads, yarn", 1)),
        *(pytest.param(each, marks=pytest.mark.long) for each in (("llama", 1), ("mistral, sliding window", 1))),
    ],
)
def packed(request: pytest.FixtureRequest) -> PackedModel:
    variant, dense_layers = request.param
    return sparse_model(variant, POLICY, dense_layers)


def decoder(packed: PackedModel, kernels: Kernels, slots: float = 1.0) -> CudaDecoder:
    cache = partial(OffloadedKvCache, slots=slots)
    return CudaDecoder(packed, device_of(kernels), CONTEXT, 1, "f32", kernels, cache)


@pytest.mark.parametrize("slots", [1.0, 2.0, 100.0])
def test_a_text_is_read_as_from_the_card(packed: PackedModel, kernels: Kernels, slots: float) -> None:
    ours, theirs = decoder(packed, kernels, slots), oracle(packed)
    for id in IDS[:40].tolist():
        assert_near(ours.step([id], True)[0], theirs.step([id], True)[0])


def test_what_is_written_anew_is_not_taken_from_its_old_place(packed: PackedModel, kernels: Kernels) -> None:
    """By steps, dense and sparse, and after a reset."""
    ours, theirs = decoder(packed, kernels, 100.0), oracle(packed)
    for turn, (length, dense) in enumerate(((30, False), (12, True), (20, False), (0, False))):
        for one in (ours, theirs):
            one.truncate(0, length if turn else 0)
            for id in IDS[turn : turn + 8].tolist() if dense else ():
                one.step([id], False)
        for id in IDS[3 * turn : 3 * turn + 14].tolist() if turn else IDS[:40].tolist():
            assert_near(ours.step([id], True)[0], theirs.step([id], True)[0])


def test_prefill_forgets_the_places_of_what_it_writes(packed: PackedModel, kernels: Kernels) -> None:
    """Its inputs are rounded to 16 bits, so that some tokens are read in place of others that score as well."""
    ours, theirs = decoder(packed, kernels, 100.0), oracle(packed)
    for one in (ours, theirs):
        for id in IDS[:40].tolist():
            one.step([id], True)
        one.truncate(0, 5)
        one.prefill(0, IDS[5:38].flip(0))
    found, expected = (
        torch.stack([one.step([id], True)[0] for id in IDS[38:60].tolist()]).cpu() for one in (ours, theirs)
    )
    difference = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.median() <= 0.03


def test_prefill_of_one_text_beside_another_and_in_two_parts(packed: PackedModel, kernels: Kernels) -> None:
    """The second part reads what lies with the host. Prefill's inputs are rounded: see above."""
    ours = CudaDecoder(packed, device_of(kernels), CONTEXT, 2, "f32", kernels, OffloadedKvCache)
    theirs = [oracle(packed) for _ in range(2)]
    for sequence, ids in ((0, IDS[:21]), (1, IDS[20:37]), (1, IDS[37:44]), (0, IDS[30:48])):
        found, expected = ours.prefill(sequence, ids), theirs[sequence].prefill(0, ids)
        assert (found.cpu() - expected).norm() <= 0.02 * expected.norm()
    differences = []
    for step in range(15):
        ids = IDS[step : step + 2].tolist()
        for row, one, id in zip(ours.step(ids, True).cpu(), theirs, ids, strict=True):
            expected = one.step([id], True)[0]
            differences.append(float((row - expected).norm() / expected.norm()))
    assert sorted(differences)[15] <= 0.03


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_says_where_keys_and_values_are_or_refuses(packed: PackedModel, device: str) -> None:
    if device == "cpu":
        for backend in ("cpu", "reference"):
            with pytest.raises(UserError, match=f"offload: the {backend} backend keeps keys and values where it comp"):
                Engine(packed, device=device, context=CONTEXT, backend=backend, offload=True)
        return
    with pytest.raises(UserError, match="pack it with --attention double"):
        Engine(replace(packed, attention=None), device=device, context=CONTEXT, offload=True)
    engine = Engine(packed, device=device, context=CONTEXT, offload=True)
    assert engine.description.endswith(", keys and values in the host's memory, sparse attention from 4 tokens on")
    several = Engine(packed, device=device, context=CONTEXT, sequences=2, offload=True)
    assert several.description.endswith("in the host's memory, sparse attention from 4 tokens on")


def test_a_model_whose_windows_are_read_whole_has_nothing_to_offload(packed: PackedModel) -> None:
    assert packed.attention is not None
    check_selects(packed)
    narrow = replace(packed.architecture, sliding_windows=(3,) * packed.architecture.layers)
    with pytest.raises(UserError, match="every layer reads all that it sees, which is fewer than 4 tokens"):
        check_selects(replace(packed, architecture=narrow))
    with pytest.raises(UserError, match="pack it with --attention double"):
        check_selects(replace(packed, attention=None))


@pytest.mark.parametrize("verb", [["generate", "--prompt", "a"], ["serve"]])
def test_dense_and_offload_exclude_each_other(verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    told = CliRunner().invoke(main, [*verb, str(tmp_path / "m.gguf"), "--dense", "--offload"])
    assert told.exit_code == 2
    assert "give --dense or --offload" in " ".join(told.stderr.split())


def test_a_file_is_not_read_for_a_device_that_has_no_other_memory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the cpu backend keeps keys and values where it computes; use device cuda"):
        load(tmp_path / "not there.gguf", offload=True)


def test_memory_that_the_host_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(UserError, match=r"4503599\.7GB of the host's memory for keys and values, pinned: not"):
        host_tensors(1, (1 << 52,), torch.uint8, torch.device("cuda"))


@pytest.mark.parametrize(("processor", "shared"), [("sm_80", 163 << 10), ("sm_86", 99 << 10), ("sm_90", 227 << 10)])
@pytest.mark.parametrize("tokens", [Fraction(1, 16), Fraction(1, 4), Fraction(1, 2)])
def test_where_selecting_finds_room_attending_does(
    processor: str, shared: int, tokens: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(double_sparsity, "shared_limit", lambda device: shared)
    monkeypatch.setattr(double_sparsity, "multiprocessors", lambda device: 108)
    for context in range(2_000, 60_000, 3_700):
        policy = TokenPolicy(tokens)
        keys = torch.empty(1, 8, context, 128, dtype=torch.bfloat16, device="meta")
        cos = torch.empty(context, 64, device="meta")
        layer = LayerAttention()
        shape = AttentionShape(32, 8, 128, 1e-5, cos, cos, (layer,), 1, policy)
        dense = SimpleNamespace(shape=shape, layer=layer, keys=keys, variant=Variant(128, 4, torch.bfloat16, 3))
        of: Any = SimpleNamespace(dense=dense, policy=policy, largest_whole=policy.min_context - 1)
        of.most_read = partial(double_sparsity.DoubleSparsityParameters.most_read, of)
        for cluster in (1,) if processor != "sm_90" else double_sparsity.CLUSTERS:
            variant = double_sparsity.variant_for(of, cluster)
            selecting = double_sparsity.shared_memory_for(of, cluster, variant)
            attending = double_sparsity.shared_memory_for(of, cluster, variant, selects=False)
            assert attending.total <= selecting.total
