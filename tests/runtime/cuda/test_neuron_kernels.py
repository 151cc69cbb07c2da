"""The kernels of MLPs by neurons on a GPU: the list, and the sums of records in its memory and in the host's."""

import pytest
import torch
from operations_for_tests import normal
from torch import Tensor

from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import neuron as codec
from sparsepack.runtime.cuda.driver.memory import host_tensors
from sparsepack.runtime.cuda.products import neurons
from sparsepack.runtime.cuda.products.neurons import (
    ActiveNeurons,
    CudaNeurons,
    add_neurons,
    list_neurons,
    load_neurons,
    new_active_neurons,
)
from sparsepack.runtime.reference import products as reference

pytestmark = pytest.mark.gpu

RELU = 1
EPS = 1e-5
CUDA = torch.device("cuda")


@pytest.fixture(params=["bulk copies", "copies of lanes"])
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the path of older GPUs."""
    if request.param == "copies of lanes":
        macros = neurons._macros
        monkeypatch.setattr(neurons, "_macros", lambda values: macros({**values, "BULK": 0}))


def packed(count: int, hidden: int, gated: bool = True) -> PackedMatrix:
    up, down = normal(count, hidden, seed=count), normal(hidden, count, seed=count + 1)
    records = codec.pack(up if gated else None, down, torch.arange(count))
    return PackedMatrix(records, MatrixFormat("Q4_K"), count, (1 + gated) * hidden)


def gates(texts: int, count: int, share: float, seed: int = 3) -> Tensor:
    """Before a ReLU that leaves about a share of them."""
    return normal(texts, count, seed=seed) - torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - share))


def listed(gate: Tensor, x: Tensor, **more: object) -> tuple[ActiveNeurons, Tensor]:
    """The list of a launch, and the norm's weight."""
    texts, count = gate.shape
    to = new_active_neurons(count, x.shape[1], texts, CUDA)
    norm = 1 + 0.1 * normal(x.shape[1], seed=9).to(CUDA)
    list_neurons(gate.to(CUDA), RELU, x.to(CUDA), norm, EPS, to, **more)  # type: ignore[arg-type]
    return to, norm


@pytest.mark.parametrize("texts", [1, 2, 8])
@pytest.mark.parametrize("share", [0.0, 0.13, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 31, 1024, 1025, 13824, 28672, 33000])
def test_the_list_has_the_active_neurons_in_ascending_order(count: int, share: float, texts: int) -> None:
    x = normal(texts, 768, seed=1) * 10.0 ** torch.arange(texts)[:, None]
    gate = gates(texts, count, share) if 0 < share < 1 else torch.full((texts, count), share - 0.5)
    gate[:, ::7] = -0.0
    total = torch.full((), 5, dtype=torch.int64, device=CUDA)
    to, norm = listed(gate, x, active=total)
    expected = (gate > 0).any(0).nonzero()[:, 0]
    assert to.counts.tolist() == [len(expected), len(expected), 0]
    assert torch.equal(to.index[: len(expected)].cpu().long(), expected)
    assert torch.equal(to.gates[:, : len(expected)].cpu(), gate.clamp_min(0)[:, expected])
    torch.testing.assert_close(to.x, reference.rms_norm(x.to(CUDA), norm, EPS))
    assert int(total) == 5 + len(expected)


def test_a_dense_list_has_every_neuron() -> None:
    gate = gates(3, 1500, 0.3)
    to, _ = listed(gate, normal(3, 256), everyone=True)
    assert to.counts.tolist() == [1500, 1500, 0]
    assert torch.equal(to.index.cpu(), torch.arange(1500, dtype=torch.int32))
    assert torch.equal(to.gates.cpu(), gate.clamp_min(0))


def test_a_gate_that_is_no_number_is_active() -> None:
    gate = torch.full((1, 100), -1.0)
    gate[0, 40] = float("nan")
    to, _ = listed(gate, normal(1, 256))
    assert int(to.counts[1]) == 1
    assert int(to.index[0]) == 40
    assert bool(to.gates[0, 0].isnan())


def expected_sum(records: PackedMatrix, to: ActiveNeurons, residual: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, and how large its terms are."""
    gated = records.columns > to.x.shape[1]
    up, down = codec.unpack(records.blocks, gated)
    down = down.double()
    full = torch.zeros(len(to.x), records.rows, dtype=torch.float64)
    count = int(to.counts[1])
    full[:, to.index[:count].cpu().long()] = to.gates[:, :count].cpu().double()
    x = to.x.cpu().double()
    if up is None:
        return residual.double() + full @ down.t(), (full.square() @ down.t().square()).sum(-1).sqrt()
    up = up.double()
    typical = ((full * (x.square() @ up.t().square()).sqrt()).square() @ down.t().square()).sum(-1).sqrt()
    return residual.double() + (full * (x @ up.t())) @ down.t(), typical


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("texts", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("count", "hidden"), [(1, 256), (700, 256), (300, 768), (129, 1280), (3000, 512), (2000, 5120), (500, 8192)]
)
def test_listed_neurons_are_added_to_the_residual(count: int, hidden: int, texts: int, gated: bool) -> None:
    records, residual = packed(count, hidden, gated), normal(texts, hidden, seed=5)
    loaded = load_neurons(records, CUDA, gated=gated)
    for share in (0.05, 0.5):
        to, _ = listed(gates(texts, count, share), normal(texts, hidden, seed=4))
        y = residual.to(CUDA)
        add_neurons(loaded, to, y, y)  # in place
        expected, typical = expected_sum(records, to, residual)
        error = (y.cpu().double() - expected).norm(dim=1)
        assert (error <= 4e-5 * typical + 1e-6 * residual.norm(dim=1)).all()
        again = torch.empty_like(y)
        add_neurons(loaded, to, residual.to(CUDA), again)
        assert torch.equal(again, y)


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("resident", [0, 1, 400, 899, 900])
@pytest.mark.parametrize("texts", [1, 3])
def test_records_in_the_hosts_memory_are_read_over_the_bus(resident: int, texts: int) -> None:
    count, hidden = 900, 1280
    records = packed(count, hidden)
    loaded = load_neurons(records, CUDA)
    (there,) = host_tensors(1, tuple(loaded.records.shape), torch.uint8, CUDA)
    there.copy_(loaded.records)
    slots = torch.zeros_like(loaded.records)  # what lies in the other memory only is not there
    slots[:resident] = loaded.records[:resident]
    there[:resident] = 0
    to, _ = listed(gates(texts, count, 0.5), normal(texts, hidden, seed=4), everyone=True)
    to.counts[0] = resident
    residual = torch.zeros(texts, hidden, device=CUDA)
    y = torch.empty_like(residual)
    add_neurons(CudaNeurons(slots, 1.0), to, residual, y, host=CudaNeurons(there, 1.0))
    expected, typical = expected_sum(records, to, residual.cpu())
    assert ((y.cpu().double() - expected).norm(dim=1) <= 4e-5 * typical).all()
