"""vLLM's layers with slid weights: loaded by its own loaders, fused and shared out, they are the weights' product."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm_for_tests import join, load_tensors, ready, slid, stored, together

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.orders.slide import VALUE_TYPES, Slide
from sparsepack.integration.vllm import linear_method
from sparsepack.integration.vllm.config import FolderVllmConfig
from sparsepack.integration.vllm.linear_method import Sparse24LinearMethod
from sparsepack.models.pattern import Pattern
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import sparse24_linear

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SIX = Pattern(6, 8)
PATTERNS = [Pattern(2, 4), Pattern(4, 6), SIX, Pattern(14, 16)]
FORMATS = {"slide-int8": torch.int8, "slide-fp8": torch.float8_e4m3fn, "slide-bf16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        join(tmp_path_factory.mktemp("group") / "file", 0, 1)
        yield
        cleanup_dist_env_and_memory()


def config(slides: dict[str, Pattern], format: str = "slide-int8") -> FolderVllmConfig:
    section = {"quant_method": "sparsepack", "format": format}
    patterns = {name: [pattern.keep, pattern.of] for name, pattern in slides.items()}
    found = FolderVllmConfig.from_config({**section, "patterns": patterns})
    found.packed_modules_mapping = FUSED
    return found


def load(layer: nn.Module, matrix: Sparse24Matrix, *shard: Any) -> None:
    load_tensors(layer, stored(matrix), *shard)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_fused_parts_are_the_product_of_all_rows(pattern: Pattern, format: str) -> None:
    heads, kv_heads, head_dim, hidden = 8, 4, 16, 128
    names = [f"m.attn.{part}" for part in FUSED["qkv_proj"]]
    quant = config(dict.fromkeys(names, pattern), format)
    qkv = QKVParallelLinear(hidden, head_dim, heads, kv_heads, False, quant_config=quant, prefix="m.attn.qkv_proj")
    matrices = [slid(n * head_dim, hidden, pattern, FORMATS[format]) for n in (heads, kv_heads, kv_heads)]
    for shard, matrix in zip("qkv", matrices, strict=True):
        load(qkv, matrix, shard)
    x = torch.randn(5, hidden)
    assert isinstance(qkv.quant_method, Sparse24LinearMethod)
    torch.testing.assert_close(ready(qkv)(x)[0], sparse24_linear(x, together(*matrices), None, []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merged_row_and_replicated_layers(dtype: torch.dtype) -> None:
    quant = config(dict.fromkeys(["gate_proj", "up_proj", "down", "one"], SIX))
    options = {"params_dtype": dtype, "quant_config": quant}
    merged = MergedColumnParallelLinear(64, [48, 48], bias=False, prefix="gate_up_proj", **options)
    gate, up = slid(48, 64, SIX), slid(48, 64, SIX)
    load(merged, gate, 0)
    load(merged, up, 1)
    x = torch.randn(3, 64).to(dtype)
    torch.testing.assert_close(ready(merged)(x)[0], sparse24_linear(x, together(gate, up), None, []))
    for kind, name in ((RowParallelLinear, "down"), (ReplicatedLinear, "one"), (ColumnParallelLinear, "down")):
        layer, m = kind(64, 40, bias=True, prefix=name, **options), slid(40, 64, SIX)
        load(layer, m)
        layer.bias.data = torch.randn(40).to(dtype)
        torch.testing.assert_close(ready(layer)(x)[0], sparse24_linear(x, m, layer.bias, []))


def test_rows_that_are_fused_in_the_folder_are_taken_as_they_are() -> None:
    merged = MergedColumnParallelLinear(
        64, [32, 32], bias=False, quant_config=config({"gate_up_proj": SIX}), prefix="gate_up_proj"
    )
    m, x = slid(64, 64, SIX), torch.randn(2, 64)
    load(merged, m)
    torch.testing.assert_close(ready(merged)(x)[0], sparse24_linear(x, m, None, []))


def test_layers_that_were_not_pruned_are_dense() -> None:
    quant = config({"m.down_proj": SIX})
    layer = RowParallelLinear(64, 32, bias=False, quant_config=quant, prefix="m.o_proj")
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert quant.get_quant_method(VocabParallelEmbedding(100, 32), "m.embed_tokens") is None


def test_names_that_vllm_changes_are_found() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    quant = config({"model.layers.0.o_proj": SIX})
    quant.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    layer = RowParallelLinear(64, 32, bias=False, quant_config=quant, prefix="language_model.model.layers.0.o_proj")
    assert isinstance(layer.quant_method, Sparse24LinearMethod)


@pytest.mark.parametrize(
    ("slides", "said"),
    [
        ({"a.gate_proj": SIX, "a.up_proj": Pattern(2, 4)}, "a.gate_proj keep 6 of 8, a.up_proj keep 2 of 4"),
        ({"a.up_proj": SIX}, "a.gate_proj dense, a.up_proj keep 6 of 8"),
    ],
)
def test_fused_parts_that_differ_are_refused_by_name(slides: dict[str, Pattern], said: str) -> None:
    with pytest.raises(ArtifactError, match=f"^a.gate_up_proj: vLLM multiplies 2 .* differ: {said}; prune them alike"):
        MergedColumnParallelLinear(64, [32, 32], quant_config=config(slides), prefix="a.gate_up_proj")


def test_a_slid_layer_that_is_no_linear_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"^lm_head: keep 6 of 8, but no Linear in vLLM"):
        config({"lm_head": SIX}).get_quant_method(VocabParallelEmbedding(100, 32), "lm_head")


@pytest.mark.parametrize(
    ("pattern", "columns", "ranks", "wanted"),
    [(SIX, 64, 2, None), (SIX, 64, 4, None), (SIX, 80, 2, 16), (SIX, 40, 4, 16), (Pattern(4, 6), 48, 4, None),
     (Pattern(4, 6), 48, 3, 6), (Pattern(2, 4), 24, 2, 8), (Pattern(8, 10), 40, 2, None), (SIX, 37, 1, None)],
    ids=str,
)  # fmt: skip
def test_widths_that_ranks_cannot_share_out_are_refused_by_name(
    pattern: Pattern, columns: int, ranks: int, wanted: int | None
) -> None:
    layer = nn.Module()
    layer.prefix = "model.layers.3.mlp.down_proj"  # type: ignore[assignment]
    method = Sparse24LinearMethod(Slide(pattern), VALUE_TYPES["I8"], 1)
    arguments = (columns // ranks, [32], columns, 32, torch.bfloat16)
    if wanted is None:
        method.create_weights(layer, *arguments, weight_loader=None)
        assert layer.weight.shape == (32, method.how.stored(columns // ranks))
        return
    said = f"{columns} inputs cannot be shared out to {ranks} ranks .* a multiple of {wanted}; take another"
    with pytest.raises(ArtifactError, match=f"^model.layers.3.mlp.down_proj: {said} --tensor-parallel-size"):
        method.create_weights(layer, *arguments, weight_loader=None)


@pytest.mark.parametrize("missing", ["weight", "weight_positions", "weight_scale"])
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_that_were_not_loaded_are_named(format: str, missing: str) -> None:
    matrix = slid(32, 64, SIX, FORMATS[format])
    if missing not in stored(matrix):
        pytest.skip("bfloat16 has no scales")
    layer = RowParallelLinear(64, 32, bias=False, quant_config=config({"a.down": SIX}, format), prefix="a.down")
    parameters = dict(layer.named_parameters())
    for name, tensor in stored(matrix).items():
        if name != missing:
            parameters[name].weight_loader(parameters[name], tensor)
    with pytest.raises(ArtifactError, match=f"^a.down: {missing} is missing or damaged"):
        ready(layer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: setattr(c, "lora_config", object()), "LoRA"),
        (lambda c: setattr(c, "speculative_config", object()), "speculative decoding"),
        (lambda c: setattr(c.offload_config.uva, "cpu_offload_gb", 1.0), "host's memory"),
        (lambda c: setattr(c.offload_config.prefetch, "offload_group_size", 2), "host's memory"),
    ],
)
def test_what_was_never_tried_with_slid_weights_is_refused(change: Any, said: str) -> None:
    asked = VllmConfig()
    change(asked)
    quant = config({"a.down": SIX})
    with set_current_vllm_config(asked):
        with pytest.raises(UserError, match=rf"{said}.*not supported with slide-int8 \(a.down\)"):
            RowParallelLinear(64, 32, bias=False, quant_config=quant, prefix="a.down")
        RowParallelLinear(64, 32, bias=False, quant_config=quant, prefix="a.other")  # dense


def test_reloaded_weights_are_prepared_anew_where_graphs_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU prepares is told by a copy of the positions, which the product then reads in their place."""
    monkeypatch.setattr(linear_method, "prepare", lambda matrix, dtype, tokens: [matrix.positions.clone()])
    seen: list[Tensor] = []

    def product(x: Tensor, matrix: Sparse24Matrix, bias: Tensor | None, prepared: list[Tensor]) -> Tensor:
        seen[:] = [matrix.values, *prepared]
        return sparse24_linear(x, replace(matrix, positions=prepared[0]), bias, [])

    monkeypatch.setattr(linear_method, "sparse24_linear", product)
    layer = RowParallelLinear(64, 32, bias=False, quant_config=config({"a.down": SIX}), prefix="a.down")
    record_metadata_for_reloading(layer)
    first, second, x = slid(32, 64, SIX), slid(32, 64, SIX), torch.randn(2, 64)
    load(layer, first)
    torch.testing.assert_close(ready(layer)(x)[0], sparse24_linear(x, first, None, []))
    places = [tensor.data_ptr() for tensor in seen]
    initialize_layerwise_reload(layer)
    load(layer, second)
    finalize_layerwise_reload(layer, None)
    assert torch.equal(layer(x)[0], sparse24_linear(x, second, None, []))
    assert [tensor.data_ptr() for tensor in seen] == places
    load(layer, first)  # in place, as kernels have it
    torch.testing.assert_close(ready(layer)(x)[0], sparse24_linear(x, first, None, []))
    assert [tensor.data_ptr() for tensor in seen] == places


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_rows_and_columns(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(11)
    heads = [slid(n * 16, 64, SIX) for n in (8, 4, 4)]
    down, x = slid(40, 128, SIX), torch.randn(5, 128)
    processes.spawn(_rank, (ranks, tmp_path, heads, down, x), nprocs=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for part, matrix in enumerate(heads):  # a rank has its heads of each part
        wanted = sparse24_linear(x[:, :64], matrix, None, [])
        widths = [n * 16 // ranks for n in (8, 4, 4)]
        got = torch.cat([of["qkv"].split(widths, 1)[part] for of in found], 1)
        assert torch.equal(got, wanted)
    for of in found:
        # Each rank's inputs have a scale of their own: as near to the weights' product, and not the same bits.
        wanted = x @ _dense(down).t()
        assert (of["down"] - wanted).norm() <= 0.02 * wanted.norm()
        # Over shared memory each rank adds the others' parts to its own, in an order of its own.
        assert (of["down"] - found[0]["down"]).norm() <= 1e-6 * wanted.norm()


def _rank(rank: int, ranks: int, folder: Path, heads: list[Sparse24Matrix], down: Sparse24Matrix, x: Tensor) -> None:
    torch.set_num_threads(1)  # threads of ranks that wait for each other spin
    with set_current_vllm_config(VllmConfig()):
        join(folder / "group", rank, ranks)
        quant = config(dict.fromkeys(["q_proj", "k_proj", "v_proj", "down_proj"], SIX))
        options = {"quant_config": quant, "params_dtype": torch.float32}
        qkv = QKVParallelLinear(64, 16, 8, 4, bias=False, prefix="qkv_proj", **options)
        for shard, matrix in zip("qkv", heads, strict=True):
            load(qkv, matrix, shard)
        last = RowParallelLinear(128, 40, bias=False, input_is_parallel=False, prefix="down_proj", **options)
        load(last, down)
        found = {"qkv": ready(qkv)(x[:, :64])[0], "down": ready(last)(x)[0]}
        torch.save(found, folder / f"{rank}.pt")


def _dense(matrix: Sparse24Matrix) -> Tensor:
    """The weights as numbers: what the identity makes of them, whose rows are quantised exactly."""
    return sparse24_linear(torch.eye(matrix.columns) * 127, matrix, None, []).t() / 127
