"""Which kernels run, and what a user is told where none can."""

import sys

import pytest
import torch
from native_build import MODULE, instruction_set_params

from sparsepack.errors import UserError
from sparsepack.formats.kinds import MatrixFormat
from sparsepack.formats.matrix import PackedMatrix
from sparsepack.formats.orders import zigzag
from sparsepack.runtime.cpu import machine, operations
from sparsepack.runtime.cpu.machine import FORCED, instruction_set, instruction_sets
from sparsepack.runtime.cpu.tile_config import tile_config


@pytest.mark.parametrize("name", instruction_set_params())
def test_every_instruction_set_of_the_machine_can_be_forced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(FORCED, name)
    assert instruction_set() == name


@pytest.mark.parametrize("forced", [None, ""])
@pytest.mark.parametrize("_", instruction_set_params()[:1])
def test_the_best_instruction_set_runs_unless_one_is_forced(
    monkeypatch: pytest.MonkeyPatch, forced: str | None, _: str
) -> None:
    if forced is None:
        monkeypatch.delenv(FORCED, raising=False)
    else:
        monkeypatch.setenv(FORCED, forced)
    assert instruction_set() == instruction_sets()[0]
    assert instruction_sets()[-1] == "scalar"


@pytest.mark.parametrize("_", instruction_set_params()[:1])
def test_an_instruction_set_that_the_machine_lacks_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch, _: str) -> None:
    monkeypatch.setenv(FORCED, "altivec")
    with pytest.raises(UserError, match=r"SPARSEPACK_ISA=altivec: not available .*; expected one of .*scalar"):
        instruction_set()


def test_without_kernels_the_user_learns_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)  # as if there were no such file
    monkeypatch.setattr(sys, "path", [])  # nor one that this checkout hides
    with pytest.raises(UserError, match=r"not built: no working C\+\+17 compiler .*install g\+\+ .*reference"):
        instruction_sets()


def test_kernels_that_do_not_load_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol: memcpy")

    monkeypatch.setattr(machine, "import_module", broken)
    with pytest.raises(UserError, match=r"cannot be loaded \(undefined symbol: memcpy\); run `pip .*reference"):
        instruction_sets()


def test_the_cpu_backend_runs_on_the_cpu_only() -> None:
    matrix = PackedMatrix(zigzag.pack(torch.ones(3, 4)), MatrixFormat("Q4_K", "zigzag"), 3, 4)
    with pytest.raises(UserError, match="device cuda: the cpu backend runs on the CPU"):
        operations.load_zigzag(matrix, "cuda")


@pytest.mark.parametrize(("rows", "span"), [(1, 1), (1024, 1), (1025, 2), (4096, 4), (20000, 4)])
@pytest.mark.parametrize("_", instruction_set_params()[:1])
def test_a_span_has_no_more_quads_than_a_matrix_that_was_never_measured(rows: int, span: int, _: str) -> None:
    assert tile_config((rows, 64), threads=1).span == span
