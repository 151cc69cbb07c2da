"""The Triton kernel prunes as the columns do one after the other, whatever the pattern and the size of the matrix.

Without a CUDA device, TRITON_INTERPRET=1 runs the kernel on CPU tensors, slowly.
"""

import os

import pytest
import torch
from devices import needs_cuda
from pruning_cases import PATTERNS, known, tokens, weights

from sparsepack import triton_kernels
from sparsepack.calibrate import sparsegpt
from sparsepack.models.pattern import Pattern, check_pattern
from sparsepack.reconstruction import Inputs

pytest.importorskip("triton")

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CUDA and not os.environ.get("TRITON_INTERPRET"), reason="no CUDA device"),
]


def by_kernel(
    monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, inputs: Inputs, pattern: Pattern
) -> tuple[torch.Tensor, int]:
    """A matrix pruned by the kernel, and how often the kernel ran."""
    runs: list[int] = []

    def always(on: torch.Tensor, work, without: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
        runs.append(len(on))
        done: torch.Tensor = work()
        return done

    with monkeypatch.context() as patched:
        patched.setattr(sparsegpt, "run_triton", always)
        return sparsegpt.prune(weight, inputs, pattern), len(runs)


def one_by_one(monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, inputs: Inputs, pattern: Pattern) -> torch.Tensor:
    """A matrix pruned in plain torch."""
    with monkeypatch.context() as patched:
        patched.setattr(sparsegpt, "run_triton", lambda *given: None)
        return sparsegpt.prune(weight, inputs, pattern)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (12, 64), (37, 301), (70, 128), (16, 257)], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_it_is_the_plain_loop(pattern: Pattern, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = known(tokens(1000, columns).to(DEVICE)), weights(rows, columns).to(DEVICE)
    expected = one_by_one(monkeypatch, weight, inputs, pattern)
    found, runs = by_kernel(monkeypatch, weight, inputs, pattern)
    assert runs == -(-columns // (128 // pattern.of * pattern.of))
    check_pattern(found, pattern)
    same = ((found != 0) == (expected != 0)).all(1)
    assert same.float().mean() > 0.9  # a tie may fall otherwise
    assert (found[same] - expected[same]).abs().max() < 1e-3
    assert inputs.relative_error(weight, found) < 1.01 * inputs.relative_error(weight, expected) + 1e-6


def test_equal_weights_stay_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    independent = Inputs(torch.ones(24, device=DEVICE), torch.eye(24, device=DEVICE))
    found, _ = by_kernel(monkeypatch, torch.ones(3, 24, device=DEVICE), independent, Pattern(6, 8))
    assert torch.equal(found.cpu() != 0, (torch.arange(24) % 8 < 6).expand(3, -1))


def test_inputs_that_are_always_zero_take_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(500, 40)
    x[:, [2, 3, 17]] = 0
    weight = weights(9, 40).to(DEVICE)
    found, _ = by_kernel(monkeypatch, weight, known(x.to(DEVICE)), Pattern(6, 8))
    assert not found[:, [2, 3, 17]].any()
    check_pattern(found, Pattern(6, 8))


@needs_cuda
def test_a_gpu_prunes_by_it() -> None:
    triton_kernels.FAILED.discard(sparsegpt.WITHOUT)
    inputs, weight = known(tokens(6000, 1300).cuda()), weights(700, 1300).cuda()
    on_cpu = sparsegpt.prune(weight.cpu(), Inputs(inputs.moments.cpu(), inputs.products.cpu()), Pattern(6, 8))  # type: ignore[union-attr]
    found = sparsegpt.prune(weight, inputs, Pattern(6, 8))
    assert sparsegpt.WITHOUT not in triton_kernels.FAILED
    assert inputs.relative_error(weight, found) == pytest.approx(inputs.relative_error(weight, on_cpu.cuda()), rel=2e-3)
    assert torch.equal(sparsegpt.prune(weight, inputs, Pattern(6, 8)), found)
