"""Choosing tokens on the GPU: the likeliest from the candidates of a product, and sampled as on the CPU."""

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix, decode_matrix
from sparsepack.runtime.cuda.decoder.step_end import pick_likeliest
from sparsepack.runtime.cuda.products.rows import RowsMatrix, embed, load_rows, new_candidates, product
from sparsepack.runtime.generation.sampling import Sampler, Sampling, sample

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")


def likeliest(matrix: RowsMatrix, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """ids, their logits and all logits."""
    x = x.cuda()
    candidates, y = new_candidates(matrix, len(x)), torch.empty(len(x), matrix.rows, device="cuda")
    ids, best = torch.full((len(x),), -1, dtype=torch.int32, device="cuda"), torch.empty(len(x), device="cuda")
    product(matrix, x, y, candidates=candidates)
    pick_likeliest(candidates, ids, best, positions)
    return ids.cpu(), best.cpu(), y.cpu()


def chosen_from(logits: Tensor) -> tuple[int, float]:
    """The choice among given logits, one a row of a matrix that is multiplied by (1, 0, 0, 0)."""
    weight = torch.zeros(len(logits), 4)
    weight[:, 0] = logits
    matrix = RowsMatrix(weight.view(torch.uint8).view(-1).cuda(), "F32", len(logits), 4, 16)
    ids, best, _ = likeliest(matrix, torch.tensor([[1.0, 0, 0, 0]]))
    return int(ids[0]), float(best[0])


@pytest.mark.parametrize("rows", [1, 5, 1000, 9999])
@pytest.mark.parametrize("vectors", [1, 2, 5, 8])
def test_the_likeliest_token_is_the_largest_logit(rows: int, vectors: int) -> None:
    matrix = load_rows(PackedMatrix(BLOCKS["Q6_K"].encode(normal(rows, 256)), MatrixFormat("Q6_K"), rows, 256), "cuda")
    ids, best, logits = likeliest(matrix, normal(vectors, 256, seed=1))
    assert torch.equal(ids.long(), logits.argmax(dim=1))
    assert torch.equal(best, logits.amax(dim=1))


def test_of_equal_logits_the_lowest_id_is_chosen() -> None:
    logits = normal(5000)
    logits[[4999, 1234, 77, 3000]] = 9
    assert chosen_from(logits) == (77, 9)
    assert chosen_from(torch.full((5000,), -3.0)) == (0, -3)
    zeros = torch.zeros(5000)
    zeros[:100] = -0.0
    assert chosen_from(zeros) == (0, 0)


def test_a_largest_logit_that_is_not_finite_is_reported() -> None:
    logits = normal(3000)
    logits[2000] = INF
    assert chosen_from(logits) == (2000, INF)
    for sign in (1, -1):
        logits[2500] = sign * NAN
        id, best = chosen_from(logits)
        assert id == 2500
        assert best != best
    assert chosen_from(torch.full((3000,), -INF)) == (0, -INF)


def test_minus_infinity_beside_numbers_is_never_chosen() -> None:
    logits = torch.full((3000,), -INF)
    logits[2999] = -1e30
    assert chosen_from(logits) == (2999, float(torch.tensor(-1e30)))


def test_positions_advance_only_where_asked() -> None:
    matrix = load_rows(PackedMatrix(BLOCKS["Q6_K"].encode(normal(50, 256)), MatrixFormat("Q6_K"), 50, 256), "cuda")
    positions = torch.tensor([4, 0, 9], dtype=torch.int32, device="cuda")
    likeliest(matrix, normal(3, 256))
    likeliest(matrix, normal(3, 256), positions)
    likeliest(matrix, normal(3, 256), positions)
    assert positions.tolist() == [6, 2, 11]


def test_tokens_follow_each_other_in_a_cuda_graph() -> None:
    packed = PackedMatrix(BLOCKS["Q6_K"].encode(normal(500, 256)), MatrixFormat("Q6_K"), 500, 256)
    matrix, weight = load_rows(packed, "cuda"), normal(256, seed=3).cuda()
    ids, positions = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    x, y, best = (torch.empty(1, n, device="cuda") for n in (256, 500, 1))
    candidates = new_candidates(matrix, 1)

    def step() -> None:
        embed(matrix, ids, x)
        product(matrix, x, y, norm=weight, eps=1e-5, candidates=candidates)
        pick_likeliest(candidates, ids, best, positions)

    step()  # compiles
    ids.zero_(), positions.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected, decoded = [0], decode_matrix(packed).double()
    for _ in range(20):
        hidden = decoded[expected[-1]]
        hidden = hidden * torch.rsqrt(hidden.square().mean() + 1e-5) * weight.cpu().double()
        expected.append(int((decoded @ hidden).argmax()))
    found = [0]
    for _ in range(20):
        graph.replay()
        found.append(int(ids))
    assert found == expected
    assert int(positions) == 20


SETTINGS = [
    Sampling(temperature, top_k, top_p, seed=7)
    for temperature in (0.3, 1.0, 5.0)
    for top_k, top_p in [(None, None), (1, None), (40, None), (10**6, 0.9), (None, 0.01), (None, 0.7), (None, 1.0)]
] + [Sampling(1e-300, None, 0.9), Sampling(1.0, 2, 0.7)]


@pytest.mark.parametrize("vocabulary", [1, 5, 1000, 4097, 50000])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sampled_tokens_are_the_samplers(sampling: Sampling, vocabulary: int) -> None:
    sampler, draws = Sampler(sampling), Sampler(sampling)
    smooth = 3 * normal(vocabulary, seed=vocabulary)
    impossible = torch.where(smooth < 0, -INF, smooth)
    impossible[0] = 1
    for logits in (smooth, smooth.round(), torch.zeros(vocabulary), impossible):
        on_device = logits.cuda()
        for _ in range(3):
            draw = torch.tensor(draws.draw(), dtype=torch.float64).cuda()
            found = sample(on_device, draw, sampling.temperature, sampling.top_k, sampling.top_p)
            assert found.shape == ()
            assert int(found) == sampler.choose(logits)


@pytest.mark.parametrize("bad", [INF, NAN, -INF])
def test_sampling_from_what_is_not_finite_still_gives_an_id(bad: float) -> None:
    logits = torch.full((300,), bad, device="cuda")
    found = sample(logits, torch.tensor(0.5, dtype=torch.float64, device="cuda"), 1.0, None, 0.9)
    assert 0 <= int(found) < 300


def test_sampling_does_not_wait_and_can_be_captured() -> None:
    logits = torch.empty(50000, device="cuda")
    draw, id = torch.zeros((), dtype=torch.float64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")

    def choose() -> None:
        id[0].copy_(sample(logits, draw, 0.8, 100, 0.9))

    logits.normal_()
    choose()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose()
    sampling = Sampling(0.8, 100, 0.9, seed=3)
    sampler, draws = Sampler(sampling), Sampler(sampling)
    for seed in range(5):
        logits.copy_(4 * normal(50000, seed=seed))
        draw.fill_(draws.draw())
        graph.replay()
        assert int(id) == sampler.choose(logits)
