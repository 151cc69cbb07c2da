"""What a block of sparse attention needs of shared memory, and what is chosen by it: no GPU computes anything here."""

from fractions import Fraction

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.models.sparse_attention import TokenPolicy
from sparsepack.runtime.cuda.attention import attention, double_sparsity
from sparsepack.runtime.kv_cache import AttentionShape, LayerAttention

GPUS = {"RTX 30 and 40": (86, 99, 82), "A100": (80, 163, 108), "H100": (90, 227, 132)}
"""Compute capability times ten, KB of shared memory that a block may have, multiprocessors."""


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    arch, kilobytes, processors = GPUS[request.param]
    for module in (double_sparsity, attention):
        monkeypatch.setattr(module, "multiprocessors", lambda _: processors)
    monkeypatch.setattr("sparsepack.runtime.cuda.driver.device.shared_limit", lambda _: kilobytes << 10)
    monkeypatch.setattr(double_sparsity, "shared_limit", lambda _: kilobytes << 10)
    monkeypatch.setattr(double_sparsity, "architecture", lambda _: arch)
    return str(request.param)


def parameters(
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    sequences: int = 1,
    tokens: Fraction = Fraction(1, 16),
    largest_whole: int | None = None,
) -> double_sparsity.DoubleSparsityParameters:
    policy = TokenPolicy(tokens)
    layer = LayerAttention(channels=torch.arange(head_dim // 4).expand(kv_heads, -1))
    table = torch.zeros(context, head_dim // 2)
    shape = AttentionShape(heads, kv_heads, head_dim, 1e-5, table, table, (layer,), sequences, policy)
    room = torch.empty(sequences, kv_heads, context, head_dim, dtype=torch.bfloat16, device="meta")
    dense = attention.AttentionParameters.__new__(attention.AttentionParameters)
    for name, value in {"shape": shape, "layer": layer, "keys": room, "values": room}.items():
        object.__setattr__(dense, name, value)
    return double_sparsity.double_sparsity_parameters(dense, layer.channels, policy, largest_whole)


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (32, 32, 128), (28, 4, 128), (32, 8, 64), (32, 32, 80)]
)
@pytest.mark.parametrize("context", [1024, 4096, 16384])
def test_common_models_have_room_on_every_gpu(
    heads: int, kv_heads: int, head_dim: int, context: int, sequences: int, gpu: str
) -> None:
    of = parameters(heads, kv_heads, head_dim, context, sequences)
    cluster = double_sparsity.cluster_for(of)
    variant = double_sparsity.variant_for(of, cluster)
    assert double_sparsity.fits(double_sparsity.shared_memory_for(of, cluster, variant), of.dense.keys.device)
    assert cluster == 1 or gpu == "H100"


def test_a_share_or_a_context_that_has_no_room_is_one_line(gpu: str) -> None:
    with pytest.raises(UserError, match=r"a context of 600000 tokens of which 1/2 are read: .* smaller share"):
        parameters(32, 8, 128, 600_000, tokens=Fraction(1, 2))


@pytest.mark.parametrize("largest_whole", [None, 2999])
def test_room_is_for_the_most_tokens_that_a_text_of_any_length_reads(largest_whole: int | None, gpu: str) -> None:
    of = parameters(32, 8, 128, 4096, largest_whole=largest_whole)
    whole = largest_whole or of.policy.min_context - 1
    read = [seen if seen <= whole else of.policy.budget(seen) for seen in range(1, 4097)]
    assert of.most_read(4096) == max(read) == whole
    assert of.most_read(500) == 500


def test_it_pays_later_where_less_is_spared() -> None:
    def first(**changes: object) -> int:
        of = {"kv_heads": 8, "head_dim": 128, "sequences": 1, "tokens": Fraction(1, 16), **changes}
        table = torch.zeros(1, 1)
        shape = AttentionShape(
            of["kv_heads"],
            of["kv_heads"],
            of["head_dim"],
            0.0,
            table,
            table,
            (LayerAttention(channels=torch.zeros(of["kv_heads"], of["head_dim"] // 4, dtype=torch.int64)),),
            of["sequences"],
            TokenPolicy(of["tokens"]),
        )
        return double_sparsity.break_even(shape, torch.bfloat16)

    usual = first()
    assert 12_000 < usual < 14_000
    assert first(sequences=4) == pytest.approx(usual / 4, rel=0.01)
    assert first(head_dim=64) == pytest.approx(2 * usual, rel=0.01)
    assert first(tokens=Fraction(1, 2)) == pytest.approx(usual * 462 / 238, rel=0.01)
    assert first(tokens=Fraction(1)) == double_sparsity.NEVER


@pytest.mark.parametrize(("share", "most"), [("1/16", (43_000, 65_000, 520_000)), ("1/2", (25_900, 52_000, 291_000))])
def test_the_contexts_of_the_docs_are_the_longest(share: str, most: tuple[int, ...], gpu: str) -> None:
    context = most[list(GPUS).index(gpu)]
    parameters(32, 8, 128, context, tokens=Fraction(share))
    with pytest.raises(UserError):
        parameters(32, 8, 128, int(1.02 * context), tokens=Fraction(share))
