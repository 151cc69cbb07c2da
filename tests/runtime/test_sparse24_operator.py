"""The operator of slid weights: one operation to torch, with the values of the reference, that refuses gradients."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES, ON_CUDA
from torch import Tensor, nn

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.errors import UserError
from sparsepack.formats.orders.slide import Slide, encode, quantise_rows
from sparsepack.integration.transformers import linears as module
from sparsepack.integration.transformers.linears import Sparse24Linear
from sparsepack.models.pattern import Pattern, kept
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime import sparse24_operator
from sparsepack.runtime.cpu import machine
from sparsepack.runtime.reference import products as reference
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import prepare, sparse24_linear

try:
    SETS = machine.instruction_sets()
except UserError:
    SETS = []

TYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16]
TRACED = "aot_eager"
"""All of torch.compile but its code generator, which would call a C++ compiler for half a minute."""


def matrix(rows: int, columns: int, pattern: Pattern, dtype: torch.dtype) -> Sparse24Matrix:
    weight, how = torch.randn(rows, columns), Slide(pattern)
    return Sparse24Matrix(*encode(weight * kept(weight.abs(), pattern), how, dtype), how, columns)


def moved(m: Sparse24Matrix, device: str) -> Sparse24Matrix:
    scale = None if m.scale is None else m.scale.to(device)
    return Sparse24Matrix(m.values.to(device), m.positions.to(device), scale, m.how, m.columns)


def linear(rows: int, columns: int, dtype: torch.dtype, bias: bool = False) -> Sparse24Linear:
    m = matrix(rows, columns, Pattern(6, 8), dtype)
    found = Sparse24Linear(columns, rows, m.how, dtype, bias, torch.float32, torch.device("cpu"))
    state = {"weight": m.values, "weight_positions": m.positions}
    state |= {} if m.scale is None else {"weight_scale": m.scale}
    found.load_state_dict(state | ({"bias": torch.randn(rows)} if bias else {}))
    return found


@pytest.fixture(params=[False, True], ids=["no bfloat16", "bfloat16"])
def multiplies_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor counts as one that multiplies bfloat16, whatever it does: torch can emulate it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("of_inputs", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(24, 64, (2, 5)), (7, 37, (3,)), (16, 96, (0,)), (5, 20, ())])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_it_computes_what_the_reference_says(
    rows: int,
    columns: int,
    tokens: tuple[int, ...],
    of_inputs: torch.dtype,
    dtype: torch.dtype,
    multiplies_bfloat16: bool,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels and not SETS:
        pytest.skip("the CPU kernels were not built")
    if not kernels:
        monkeypatch.setattr(sparse24_operator, "_kernels", lambda threads: None)
    m, x, bias = matrix(rows, columns, Pattern(6, 8), dtype), torch.randn(*tokens, columns), torch.randn(rows)
    x = x.to(of_inputs)
    q, scale = reference.quantise_slide(x.reshape(-1, columns), m.how, dtype)
    expected = (reference.slide_matmul(m, q, scale) + bias).to(of_inputs).view(*tokens, rows)
    assert torch.equal(sparse24_linear(x, m, bias, []), expected)
    prepared = prepare(m, of_inputs)
    found = sparse24_linear(x, m, bias, prepared)
    if kernels and dtype == torch.int8:
        assert prepared[0].dtype == torch.int8
        assert torch.equal(found, expected)
    elif multiplies_bfloat16 and of_inputs == torch.bfloat16:
        assert prepared[0].dtype == torch.bfloat16
        assert (found.float() - expected.float()).norm() <= 2**-8 * expected.float().norm()
    else:
        assert prepared[0].dtype == torch.float32
        torch.testing.assert_close(found, expected)


@pytest.fixture(params=SETS or ["none"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if not SETS:
        pytest.skip("the CPU kernels were not built")
    monkeypatch.setenv(machine.FORCED, request.param)
    sparse24_operator._kernels.cache_clear()
    yield request.param
    sparse24_operator._kernels.cache_clear()


@pytest.mark.parametrize("by_torch", [False, True], ids=["by kernels", "many tokens by torch"])
@pytest.mark.parametrize("of_inputs", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(1, 8, 1), (5, 20, 3), (37, 100, 0), (64, 96, 257), (131, 1000, 71), (50, 4100, 9)]
)
def test_the_kernels_have_the_bits_of_the_reference_for_int8(
    rows: int,
    columns: int,
    tokens: int,
    of_inputs: torch.dtype,
    instruction_set: str,
    by_torch: bool,
    multiplies_bfloat16: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_torch and not sparse24_operator._torch_multiplies_int8():
        pytest.skip("torch has no exact product of int8 on this processor")
    monkeypatch.setattr(sparse24_operator, "_torch_multiplies_int8", lambda: by_torch)
    m, x = matrix(rows, columns, Pattern(6, 8), torch.int8), torch.randn(tokens, columns).to(of_inputs)
    x[: tokens // 3] *= 1e4
    x[1:2] = 0
    prepared = prepare(m, of_inputs)
    assert prepared[0].dtype == torch.int8
    for bias in (None, torch.randn(rows).to(of_inputs)):
        assert torch.equal(sparse24_linear(x, m, bias, prepared), sparse24_linear(x, m, bias, []))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("of_inputs", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 37), (300, 500)])
def test_the_kernels_round_inputs_as_the_reference_does(
    tokens: int, columns: int, of_inputs: torch.dtype, dtype: torch.dtype, instruction_set: str
) -> None:
    x = (torch.randn(tokens, columns) * torch.logspace(0, -6, columns)).to(of_inputs)  # FP8's subnormals, too
    wanted, wanted_scale = quantise_rows(x, dtype)
    q, scale = sparse24_operator._rounded_rows(x, dtype, scaled=False)
    assert scale is not None
    assert torch.equal(q, wanted.float())
    assert torch.equal(scale[:, 0], wanted_scale)
    assert torch.equal(sparse24_operator._rounded_rows(x, dtype, scaled=True)[0], wanted.float() * scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(spoilt: float, dtype: torch.dtype, device: str) -> None:
    """An engine that warms up runs on memory that nobody has written to."""
    m, x = moved(matrix(32, 64, Pattern(6, 8), dtype), device), torch.randn(3, 4, 64).bfloat16().to(device)
    prepared = prepare(m, x.dtype)
    wanted = sparse24_linear(x, m, None, prepared)  # of 12 tokens: more than the CPU's kernels take themselves
    x[1, 2, 17] = spoilt
    found = sparse24_linear(x, m, None, prepared)
    assert not found[1, 2].isfinite().any()
    found[1, 2] = wanted[1, 2]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (21, 100)])
def test_torch_finds_no_fault_with_it(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    m, x = moved(matrix(rows, columns, Pattern(6, 8), dtype), device), torch.randn(3, 4, columns).bfloat16()
    prepared = prepare(m, x.dtype)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    checks += ["test_schema"] if dtype != torch.float8_e4m3fn else []  # torch cannot compare FP8 tensors for it
    for bias in (None, torch.randn(rows).bfloat16().to(device)):
        arguments = (x.to(device), m.values, m.positions, m.scale, bias, prepared, 6, 8)
        torch.library.opcheck(torch.ops.sparsepack.slid_linear.default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, m: (x[..., :-8], m),
        lambda x, m: (x.long(), m),
        lambda x, m: (x, Sparse24Matrix(m.values, m.positions[:, :-1], m.scale, m.how, m.columns)),
        lambda x, m: (x, Sparse24Matrix(m.values, m.positions, None, m.how, m.columns)),
        lambda x, m: (x, Sparse24Matrix(m.values, m.positions, m.scale, Slide(Pattern(4, 6)), m.columns)),
    ],
    ids=["columns", "integers", "positions", "no scales", "another pattern"],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Tensor, Sparse24Matrix], tuple[Tensor, Sparse24Matrix]],
) -> None:
    x, m = change(torch.randn(3, 64), matrix(16, 64, Pattern(6, 8), torch.int8))
    with pytest.raises(ValueError, match="do not fit slid weights"):
        sparse24_linear(x, m, None, [])
    with pytest.raises(ValueError, match="do not fit slid weights"), torch._subclasses.FakeTensorMode() as fake:
        converted = [fake.from_tensor(t) if t is not None else None for t in (m.values, m.positions, m.scale)]
        sparse24_linear(fake.from_tensor(x), Sparse24Matrix(*converted, m.how, m.columns), None, [])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_is_refused_when_it_is_asked_for(compiled: bool) -> None:
    torch._dynamo.reset()
    run: Any = linear(16, 64, torch.int8)
    run = torch.compile(run, fullgraph=True, backend=TRACED) if compiled else run
    y = run(torch.randn(2, 64, requires_grad=True))  # as of embeddings, which nobody will train
    with pytest.raises(UserError, match="have no gradients; train the model before it is packed"):
        y.sum().backward()


def test_a_compiled_model_is_one_graph_with_the_same_values() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(linear(48, 64, torch.int8, bias=True), nn.SiLU(), linear(20, 48, torch.bfloat16))
    compiled = torch.compile(model, fullgraph=True, backend=TRACED)
    for tokens in (1, 4, 9):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), model(x))


def test_compiled_or_not_weights_are_prepared_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    calls: list[torch.dtype] = []

    def counted(matrix: Sparse24Matrix, dtype: torch.dtype) -> list[Tensor]:
        calls.append(dtype)
        return prepare(matrix, dtype)

    monkeypatch.setattr(module, "prepare", counted)
    eager, other = linear(16, 64, torch.int8), linear(16, 64, torch.int8)
    for weights, run in ((eager, eager), (other, torch.compile(other, fullgraph=True, backend=TRACED))):
        calls.clear()
        for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
            run(torch.randn(3, 64).to(dtype))
        assert calls == [torch.float32, torch.bfloat16]
        weights.load_state_dict(linear(16, 64, torch.int8).state_dict(), assign=True)
        x = torch.randn(3, 64).bfloat16()
        run(x)
        run(x)
        assert calls == [torch.float32, torch.bfloat16, torch.bfloat16]
    for copied in (copy.deepcopy(eager), pickle.loads(pickle.dumps(eager))):
        assert copied._prepared == []
        assert torch.equal(copied(x), eager(x))


@pytest.mark.slow
def test_transformers_compiles_the_tiny_model_whole(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch._dynamo.reset()
    sparsepack.prune("shipped:tiny", tmp_path / "pruned", PruneOptions(6, 8, method="magnitude"))
    pack(PackRequest(str(tmp_path / "pruned"), tmp_path / "slid", format="slide-int8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "slid", dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.randint(0, model.config.vocab_size, (2, 11))
    with torch.no_grad():
        found, wanted = (run(ids, use_cache=False).logits for run in (compiled, model))
    # A sum that rounds otherwise can move a quantised input by a step.
    assert (found - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_compiled_model_has_the_same_values_on_a_gpu(device: str, dtype: torch.dtype, mode: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(linear(104, 256, dtype, bias=True), nn.SiLU(), linear(77, 104, dtype)).to(
        device, torch.bfloat16
    )
    compiled = torch.compile(model, fullgraph=True, mode=mode, dynamic=False)
    with torch.inference_mode():
        for tokens in (1, 40):
            for _ in range(4):  # the third is captured
                x = torch.randn(tokens, 256, device=device).bfloat16()
                found, wanted = compiled(x).clone().float(), model(x).float()
                # SiLU is rounded once, not twice, and a rounding can move a quantised input by a step.
                assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_on_a_gpu_what_is_prepared_for_many_tokens_is_captured_unseen(device: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("libcusparseLt must have run with as many tokens")
    m = moved(matrix(192, 512, Pattern(6, 8), torch.int8), device)
    prepared = prepare(m, torch.bfloat16, tokens=512)
    for tokens in (1, 33, 500):
        x = torch.randn(tokens, 512, device=device).bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sparse24_linear(x, m, None, prepared)
        x.copy_(torch.randn(tokens, 512, device=device))
        graph.replay()
        assert torch.equal(y, sparse24_linear(x, m, None, prepared))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_on_a_gpu_nothing_waits(device: str) -> None:
    m = moved(matrix(192, 512, Pattern(6, 8), torch.int8), device)
    x = torch.randn(40, 512, device=device).bfloat16()
    prepared = prepare(m, x.dtype)
    wanted = sparse24_linear(x, m, None, prepared)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sparse24_linear(x, m, None, prepared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_on_a_gpu_weights_that_were_not_prepared_are_refused(device: str) -> None:
    m, x = moved(matrix(64, 256, Pattern(6, 8), torch.int8), device), torch.zeros(4, 256, device=device)
    others = prepare(m, torch.bfloat16) if torch.cuda.get_device_capability() == (9, 0) else []
    for prepared in ([], others):
        with pytest.raises(ValueError, match="are not prepared for"):
            sparse24_linear(x, m, None, prepared)
