"""Folders of planes in vLLM: layers that its own loaders fill and ranks share out, and the engine's tokens."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from folders_for_tests import sealed_again
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm_for_tests import PROMPTS, Refused, in_vllm, join, load_tensors, ready

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.errors import ArtifactError, UserError
from sparsepack.files.text import read_text
from sparsepack.formats.open import read_packed
from sparsepack.formats.orders import planes, zigzag
from sparsepack.integration.vllm import planes_method
from sparsepack.integration.vllm.config import FolderVllmConfig
from sparsepack.integration.vllm.planes_method import MOST_DECODED, PlanesLinearMethod, decoded_tokens
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.planes_operator import PlanesMatrix, has_kernels, planes_linear, prepare

TINY = "shipped:tiny"
AS_LIKELY = 0.06
"""Of the standard deviation of logits: kernels round multipliers to 8 bits, of a fused layer's rows together or of each
projection's, and an input that this takes across a threshold is read at another level."""
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SECTION = {"quant_method": "sparsepack", "format": "planes-q6_p", "levels": [2, 3, 4, 5, 6], "thresholds": "steps"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        join(tmp_path_factory.mktemp("group") / "file", 0, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as the folder `p` and the file `p.gguf`, of which a token reads 2.5 bits."""
    folder = tmp_path_factory.mktemp("tiny")
    calibrate(TINY, read_text("shipped:train"), folder / "c", CalibrateOptions(context=128, samples=8))
    own = {"output_type": "bf16", "embedding_type": "bf16"}  # the checkpoint's, which a folder keeps
    for name, format, types in (("p.gguf", "zigzag-q6_p", own), ("p", "planes-q6_p", {})):
        pack(PackRequest(TINY, folder / name, format, folder / "c", bits=2.5, score=False, **types))
    return folder


def config(*names: str) -> FolderVllmConfig:
    found = FolderVllmConfig.from_config({**SECTION, "linears": list(names)})
    found.packed_modules_mapping = FUSED
    return found


def made(rows: int, columns: int, threshold: Tensor) -> PlanesMatrix:
    weight = torch.randn(rows, columns)
    stored = planes.from_zigzag(*zigzag.pack_with_tail(weight, "Q6_P"), rows)
    return PlanesMatrix(stored, torch.rand(rows) + 0.5, threshold, torch.tensor([0.2, 0.4, 0.9, 1.6, 2.5]))


def stored(matrix: PlanesMatrix) -> dict[str, Tensor]:
    tensors = {"weight": matrix.pieces, "weight_scale": matrix.scale}
    return {**tensors, "weight_threshold": matrix.threshold, "weight_steps": matrix.steps}


def together(*matrices: PlanesMatrix) -> PlanesMatrix:
    pieces, scale = (torch.cat(parts) for parts in zip(*((m.pieces, m.scale) for m in matrices), strict=True))
    return PlanesMatrix(pieces, scale, matrices[0].threshold, matrices[0].steps)


def product(x: Tensor, matrix: PlanesMatrix, decode: bool) -> Tensor:
    prepared = prepare(matrix)
    return planes_linear(x, matrix, None, prepared.tensors, decode)


def step(monkeypatch: pytest.MonkeyPatch, queries: list[int], lengths: list[int]) -> None:
    """A step of vLLM with so many tokens of each sequence, and so many positions of each once it is done."""
    starts = torch.tensor([0, *queries]).cumsum(0)
    metadata = SimpleNamespace(query_start_loc=starts, seq_lens=torch.tensor(lengths))
    monkeypatch.setattr(planes_method, "_metadata", lambda: metadata)


@pytest.mark.usefixtures("alone")
def test_fused_parts_are_the_product_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m.attn.{part}" for part in FUSED["qkv_proj"]]
    qkv = QKVParallelLinear(96, 64, 4, 2, False, quant_config=config(*names), prefix="m.attn.qkv_proj")
    threshold = torch.rand(96)
    matrices = [made(64 * heads, 96, threshold) for heads in (4, 2, 2)]
    for shard, matrix in zip("qkv", matrices, strict=True):
        load_tensors(qkv, stored(matrix), shard)
    x, whole = torch.randn(5, 96), together(*matrices)
    assert isinstance(qkv.quant_method, PlanesLinearMethod)
    ready(qkv)
    for queries, lengths, decode in (([5], [5], False), ([1] * 5, [7] * 5, True), ([1] * 5, [1] * 5, False)):
        step(monkeypatch, queries, lengths)
        torch.testing.assert_close(qkv(x)[0], product(x, whole, decode))
    step(monkeypatch, [1, 3, 1], [9, 3, 4])
    mixed = torch.cat([product(x[:1], whole, True), product(x[1:4], whole, False), product(x[4:], whole, True)])
    torch.testing.assert_close(qkv(x)[0], mixed, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_and_row_layers_of_odd_widths(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"params_dtype": dtype, "quant_config": config("gate_proj", "up_proj", "down")}
    threshold = torch.rand(50)
    gate, up, down = made(128, 50, threshold), made(192, 50, threshold), made(77, 50, threshold)
    merged = MergedColumnParallelLinear(50, [128, 192], bias=False, prefix="gate_up_proj", **options)
    load_tensors(merged, stored(gate), 0)
    load_tensors(merged, stored(up), 1)
    x = torch.randn(3, 50).to(dtype)
    step(monkeypatch, [1, 1, 1], [5, 5, 5])
    torch.testing.assert_close(ready(merged)(x)[0], product(x, together(gate, up), True))
    for kind in (RowParallelLinear, ColumnParallelLinear):
        layer = kind(50, 77, bias=True, prefix="down", **options)
        load_tensors(layer, stored(down))
        layer.bias.data = torch.ones(77).to(dtype)
        torch.testing.assert_close(ready(layer)(x)[0], product(x, down, True) + 1, atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_threshold", "weight_steps"])
def test_tensors_that_were_not_loaded_are_named(missing: str) -> None:
    layer = RowParallelLinear(50, 77, bias=False, quant_config=config("a.down"), prefix="a.down")
    tensors = stored(made(77, 50, torch.rand(50)))
    load_tensors(layer, {name: tensor for name, tensor in tensors.items() if name != missing})
    with pytest.raises(ArtifactError, match=f"^a.down: {missing} is missing in the folder"):
        ready(layer)


@pytest.mark.usefixtures("alone")
def test_weights_are_loaded_again_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = RowParallelLinear(50, 64, bias=False, quant_config=config("down"), prefix="down"), torch.randn(2, 50)
    step(monkeypatch, [1, 1], [5, 5])
    places = set()
    for _ in range(2):
        matrix = made(64, 50, torch.rand(50))
        load_tensors(layer, stored(matrix))
        torch.testing.assert_close(ready(layer)(x)[0], product(x, matrix, True))
        places.add(layer.weight_prepared_0.data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize(("sizes", "total", "wrong"), [([96, 64], 320, 96), ([64, 100], 164, 100), ([32], 64, 32)])
def test_rows_that_ranks_cannot_share_out_are_refused_by_name(sizes: list[int], total: int, wrong: int) -> None:
    layer = nn.Module()
    layer.prefix = "model.layers.3.mlp.gate_up_proj"  # type: ignore[assignment]
    said = f"{wrong} rows of {total} for each of {total // sum(sizes)} ranks, expected a multiple of 64; take another"
    with pytest.raises(ArtifactError, match=f"^model.layers.3.mlp.gate_up_proj: {said} --tensor-parallel-size"):
        PlanesLinearMethod().create_weights(layer, 50, sizes, 50, total, torch.float32, weight_loader=None)


@pytest.mark.usefixtures("alone")
def test_parts_of_which_some_are_dense_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"differ: a.gate_proj planes, a.up_proj dense; pack the model again"):
        MergedColumnParallelLinear(64, [64, 64], quant_config=config("a.gate_proj"), prefix="a.gate_up_proj")


@pytest.mark.usefixtures("alone")
def test_what_was_never_tried_is_refused() -> None:
    running = VllmConfig()
    running.lora_config = object()  # type: ignore[assignment]
    with set_current_vllm_config(running), pytest.raises(UserError, match=r"LoRA.*not supported with planes-q6_p"):
        RowParallelLinear(64, 64, bias=False, quant_config=config("a.down"), prefix="a.down")


@pytest.mark.parametrize(
    ("queries", "lengths", "count", "expected"),
    [
        ([1, 1], [5, 9], 2, [True, True]),
        ([1, 1], [5, 9], 4, [True] * 4),
        ([3, 1], [3, 9], 4, [False, False, False, True]),
        ([1, 1], [1, 9], 2, [False, True]),
        ([3, 1], [3, 9], 6, [False, False, False, True, False, False]),
        ([1] * MOST_DECODED, [9] * MOST_DECODED, MOST_DECODED, [True] * MOST_DECODED),
        ([1] * (MOST_DECODED + 1), [9] * (MOST_DECODED + 1), MOST_DECODED + 1, [False] * (MOST_DECODED + 1)),
    ],
)
def test_decoded_tokens_are_those_that_come_alone_behind_others(
    queries: list[int], lengths: list[int], count: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    step(monkeypatch, queries, lengths)
    assert decoded_tokens(count).tolist() == expected


def test_nothing_is_decoded_where_vllm_says_nothing() -> None:
    assert decoded_tokens(3).tolist() == [False] * 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_rows_and_columns(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(11)
    threshold = torch.rand(64)
    heads, down = [made(n * 64, 64, threshold) for n in (8, 4, 4)], made(100, 36 * ranks, torch.rand(36 * ranks))
    x, y = torch.randn(3, 64), torch.randn(3, 36 * ranks)
    processes.spawn(_rank, (ranks, tmp_path, heads, down, x, y), nprocs=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for part, matrix in enumerate(heads):
        widths = [n * 64 // ranks for n in (8, 4, 4)]
        got = torch.cat([of["qkv"].split(widths, 1)[part] for of in found], 1)
        wanted = product(x, matrix, True)
        assert (got - wanted).norm() <= 0.02 * wanted.norm()  # multipliers of 8 bits, of other rows together
    for of in found:
        wanted = product(y, down, True)
        assert (of["down"] - wanted).norm() <= 0.02 * wanted.norm()


def _rank(rank: int, ranks: int, folder: Path, heads: list[PlanesMatrix], down: PlanesMatrix, *inputs: Tensor) -> None:
    torch.set_num_threads(1)  # threads of ranks that wait for each other spin
    x, y = inputs
    metadata = SimpleNamespace(query_start_loc=torch.arange(4), seq_lens=torch.full((3,), 9))
    planes_method._metadata = lambda: metadata  # type: ignore[assignment]
    with set_current_vllm_config(VllmConfig()):
        join(folder / "group", rank, ranks)
        options = {"quant_config": config("q_proj", "k_proj", "v_proj", "down"), "params_dtype": torch.float32}
        qkv = QKVParallelLinear(64, 64, 8, 4, bias=False, prefix="qkv_proj", **options)
        for shard, matrix in zip("qkv", heads, strict=True):
            load_tensors(qkv, stored(matrix), shard)
        last = RowParallelLinear(36 * ranks, 100, bias=False, input_is_parallel=False, prefix="down", **options)
        load_tensors(last, stored(down))
        torch.save({"qkv": ready(qkv)(x)[0], "down": ready(last)(y)[0]}, folder / f"{rank}.pt")


def assert_engines(tiny: Path, written: list[list[int]], margin: float) -> None:
    """Every token is the one that our engine finds the likeliest behind those before it, or one whose logit is not
    further below than `margin` standard deviations of the logits; and not what it finds where all planes are read."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "p")
    engine = Engine(read_packed(tiny / "p.gguf"), EngineOptions(backend="cpu" if has_kernels() else "reference"))
    missed, of_all_planes = [], 0
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        ids = tokenizer(prompt).input_ids
        engine.reset()
        whole = engine.prefill([*ids, *tokens[:-1]], every=True)[len(ids) - 1 :]
        of_all_planes += int((whole.argmax(1) != torch.tensor(tokens)).sum())
        engine.reset()
        logits = engine.prefill(ids)
        for token in tokens:
            missed.append(float((logits.max() - logits[token]) / logits.std()))
            logits = engine.step(token)
    others = sum(miss > 0 for miss in missed)
    print(
        f"{others} of {len(missed)} are not the likeliest, at most {max(missed):.4f} below; {of_all_planes} otherwise"
    )
    assert max(missed) <= margin
    assert of_all_planes > 2 * others


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": True}, {}, {"enforce_eager": True, "tensor_parallel_size": 2}],
    ids=["eager", "compiled", "two ranks"],
)
def test_tokens_are_those_of_the_engine(options: dict[str, Any], tiny: Path) -> None:
    """Sixteen sequences at a time: all are decoded at levels."""
    assert_engines(tiny, in_vllm(tiny / "p", PROMPTS, max_num_seqs=MOST_DECODED, **options), AS_LIKELY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_lora": True}, r"UserError: a LoRA adapter \(--enable-lora\): not supported with planes-q6_p"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            r"UserError: speculative decoding \(--speculative-config\): not supported with planes-q6_p",
        ),
        ({"change": {"levels": [3, 6]}}, r"ArtifactError: quantization_config.levels: \[3, 6\], this version"),
        ({"change": {"thresholds": "x"}}, "ArtifactError: quantization_config.thresholds: x, this version"),
    ],
    ids=["lora", "speculative", "levels", "thresholds"],
)
def test_bad_input_is_a_line_of_the_log(options: dict[str, Any], said: str, tiny: Path, tmp_path: Path) -> None:
    folder, options = Path(shutil.copytree(tiny / "p", tmp_path / "p")), dict(options)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= options.pop("change", {})
    sealed_again(folder, "config.json", json.dumps(values))
    with pytest.raises(Refused, match=said):
        in_vllm(folder, PROMPTS[:1], enforce_eager=True, **options)
