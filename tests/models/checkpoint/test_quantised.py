"""Quantised releases: each scheme decoded to what an encoder of its own meant, and to what libraries read."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands_for_tests import fails, succeeds
from gguf import GGMLQuantizationType, GGUFWriter
from models_for_tests import TEXT, edit_config, make_model
from releases_for_tests import COMPRESSED, FP8, RELEASES, Release, bitsandbytes, mxfp4, packed_bits, release
from safetensors.torch import load_file, save_file

from sparsepack.data import SHIPPED_MODELS
from sparsepack.errors import UserError
from sparsepack.formats.containers.gguf import open_gguf
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.codes import numbers, unpacked
from sparsepack.models.checkpoint.quantised import quantised_source, read_methods
from sparsepack.models.checkpoint.safetensors_source import SafetensorsSource

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", num_hidden_layers=1, hidden_size=320, intermediate_size=512)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", RELEASES)
def test_a_release_is_read_as_its_encoder_meant_it(model: Path, capsys, kind: str) -> None:
    expected = release(model, RELEASES[kind])
    checkpoint = open_checkpoint(model)
    for name, values in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == checkpoint.source.dtypes[name]
        assert found.shape == checkpoint.source.shapes[name] == values.shape
        tolerance = {"rtol": 0, "atol": 0} if RELEASES[kind].exact else {"rtol": 1e-6, "atol": 1e-9}
        torch.testing.assert_close(found.float(), values.float(), **tolerance)
    assert f"weights are quantised already ({RELEASES[kind].name})" in capsys.readouterr().err
    assert not hasattr(checkpoint.config, "quantization_config")
    assert {each.name for each in checkpoint.stored_types} == {RELEASES[kind].name, "BF16"}


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_number_of_8_bits_is_what_torch_takes_it_for(kind: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(600).view(kind).view(3, -1)
    torch.testing.assert_close(numbers(every), every.float(), rtol=0, atol=0, equal_nan=True)
    finite = every[every.float().isfinite()]
    assert torch.equal(numbers(finite).signbit(), finite.float().signbit())


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_number_of_bits_are_unpacked(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, 64))
    assert torch.equal(unpacked(packed_bits(codes.numpy(), bits), bits), codes.to(torch.uint8))


def test_codes_that_end_within_a_word_are_unpacked() -> None:
    codes = torch.randint(0, 8, (2, 13))
    assert torch.equal(unpacked(packed_bits(codes.numpy(), 3), 3)[:, :13], codes.to(torch.uint8))


def test_experts_of_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.randn(3, 10, generator=generator).bfloat16()
    save_file(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}, tmp_path / "model.safetensors"
    )
    source = quantised_source(SafetensorsSource(tmp_path), {"quant_method": "mxfp4"}, tmp_path)
    assert dict(source.shapes) == {name: (3, 64, 10), f"{name}_bias": (3, 10)}
    assert torch.equal(source.tensor(name), convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(source.tensor(f"{name}_bias"), bias)


def test_a_gpt_oss_is_read_with_its_experts_in_mxfp4(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "gpt_oss", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).float().transpose(1, 2)  # [experts, outputs, inputs]
        encoded, values = mxfp4(rows.flatten(0, 1))
        shape = (*rows.shape[:2], -1)
        tensors[f"{name}_blocks"] = encoded["_packed"].view(*shape, 16)
        tensors[f"{name}_scales"] = encoded["_scale"].view(shape)
        expected[name] = values.view(rows.shape).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    checkpoint = open_checkpoint(folder)
    plain = make_model(tmp_path / "plain", "gpt_oss", num_hidden_layers=1)
    whole = load_file(plain / "model.safetensors") | {name: each.bfloat16() for name, each in expected.items()}
    save_file({name: each.contiguous() for name, each in whole.items()}, plain / "model.safetensors")
    assert len(expected) == 2
    assert same_tensors(checkpoint, open_checkpoint(plain))


def same_tensors(one: Checkpoint, other: Checkpoint) -> bool:
    shapes = one.source.shapes
    return shapes == other.source.shapes and all(torch.equal(one.tensor(n), other.tensor(n)) for n in shapes)


@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path, scale: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(2, 256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = (2.0 ** torch.randint(-8, 0, (2, 2, 3), generator=generator)).to(scale)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({name: codes, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors")
    found = quantised_source(SafetensorsSource(tmp_path), FP8, tmp_path).tensor(name)
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32))


ARGUMENTS = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "naive-quantized": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "pack-quantized, 5 bits": {"num_bits": 5, "type": "int", "strategy": "channel"},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "mxfp6-pack-quantized": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32},
}


@pytest.mark.parametrize("format", ARGUMENTS)
def test_compressed_tensors_are_read_as_the_library_reads_them(tmp_path: Path, format: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind = format.partition(",")[0]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**ARGUMENTS[format]))
    own = scheme.weights
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(160, 288, generator=generator)
    scales = {"channel": (160, 1), "tensor": (1,), "block": (2, 3)}.get(
        own.strategy, (160, 288 // (own.group_size or 1))
    )
    scale = torch.rand(scales, generator=generator) * 0.02 + 0.01
    state = {"weight": weight, "weight_scale": scale}
    if kind.startswith("mx"):
        state["weight_scale"] = 2.0 ** torch.randint(-4, 2, scales, generator=generator)
    if kind.startswith("nv"):
        state |= {
            "weight_global_scale": torch.tensor([300.0]),
            "weight_scale": (scale * 3e3).to(torch.float8_e4m3fn).float(),
        }
    if not own.symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, scales, generator=generator).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"].float()
    save_file(
        {f"model.up.{name}": value.contiguous() for name, value in stored.items()}, tmp_path / "model.safetensors"
    )
    settings = {**COMPRESSED, "format": kind, "config_groups": {"group_0": {"weights": ARGUMENTS[format]}}}
    found = quantised_source(SafetensorsSource(tmp_path), settings, tmp_path).tensor("model.up.weight")
    tolerance = 0 if kind.startswith(("int", "float", "pack")) else 2**-7  # it computes the others in bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * 1e-2)


def test_a_release_goes_the_whole_way(tmp_path: Path) -> None:
    """Calibrated, packed, scored, verified and pruned as what it means, which the file says."""
    folder, text, cal, packed = (tmp_path / name for name in ("m", "t.txt", "cal", "m.gguf"))
    shutil.copytree(SHIPPED_MODELS["shipped:tiny"], folder)
    expected = release(folder, RELEASES["fp8, blocks"])
    text.write_text(TEXT[:40_000])
    succeeds("calibrate", folder, "--text", text, "--context", 64, "--samples", 6, "-o", cal)
    succeeds("pack", folder, "--calibration", cal, "--sparsity", 0.3, "-o", packed)
    succeeds("verify", packed, "--against", folder)
    assert "note: weights are quantised already (FP8)" in succeeds("inspect", packed)
    assert "quantization_config" not in open_gguf(packed)[0].metadata["sparsepack.config"]
    figures = succeeds("eval", packed, "--perplexity", text, "--against", folder, "--context", 64, "--windows", 2)
    assert "KL, nats" in figures
    listed = succeeds("inspect", folder)
    assert re.search(r"\| FP8 +\| +21 \| +1,769,472 \| +1,769,904 \| +8\.002 \|", listed)
    pruned = tmp_path / "pruned"
    succeeds("prune", folder, "--keep", 6, "--of", 8, "--method", "magnitude", "-o", pruned)
    config = json.loads((pruned / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    weights = open_checkpoint(pruned).tensor(UP)
    assert torch.equal(weights, torch.where(weights == 0, 0, expected[UP]))


def test_experts_stored_one_by_one_are_decoded_one_by_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    expected = release(folder, RELEASES["fp8, blocks"])
    checkpoint = open_checkpoint(folder)
    found = checkpoint.tensor("model.layers.0.mlp.experts.down_proj")
    each = [expected[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(8)]
    assert torch.equal(found, torch.stack(each))
    assert checkpoint.dtype == torch.float32


def test_a_quantised_output_matrix_is_not_the_embedding(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", num_hidden_layers=1)
    expected = release(folder, RELEASES["fp8, one scale"], "lm_head.weight")
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.tied
    assert torch.equal(checkpoint.tensor("lm_head.weight"), expected["lm_head.weight"])


def test_an_embedding_stored_twice_and_quantised_is_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    release(folder, RELEASES["llm.int8"], ("lm_head.weight", "embed_tokens.weight"))
    assert open_checkpoint(folder).tied


@pytest.mark.parametrize(
    ("file", "said", "kind"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "modelopt nvfp4"),
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}, "gptq, 4 bits, version 1, shuffled"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "awq"),
    ],
)
def test_older_releases_say_beside_the_weights_how_they_are_quantised(model: Path, file, said, kind) -> None:
    expected = release(model, RELEASES[kind])
    edit_config(model, quantization_config=None)
    (model / file).write_text(json.dumps(said))
    torch.testing.assert_close(open_checkpoint(model).tensor(UP), expected[UP], rtol=1e-6, atol=1e-9)
    (model / file).unlink()
    assert f" is {'U8' if kind.startswith('m') else 'I32'}, and no quantization_config in config.json" in refused(model)


def test_plain_weights_on_a_ternary_grid_are_told(model: Path, capsys) -> None:
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if ".layers." in name and weight.dim() == 2:
            scale = torch.rand(len(weight), weight.shape[1] // 64, 1, generator=generator)
            signs = torch.randint(-1, 2, (*scale.shape[:2], 64), generator=generator)
            tensors[name] = (signs * scale).flatten(1).bfloat16()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(model).ternary
    assert "weights have three values each, -s, 0 and s" in capsys.readouterr().err
    for name, weight in tensors.items():
        if ".layers." in name and weight.dim() == 2:
            weight[0, :2] = torch.tensor([0.3, 0.4])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(model).grid is None


def test_such_a_file_beside_plain_weights_means_nothing(model: Path) -> None:
    (model / "quantize_config.json").write_text('{"bits": 4}')
    assert open_checkpoint(model).grid is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "aqlm"}, "is F8_E4M3, quantised by aqlm, which is not read; read are fp8"),
        ({"quant_method": "aqlm"}, "or unquantised; aqlm is read by transformers with the package aqlm"),
        ({**COMPRESSED, "format": "marlin-24"}, "or unquantised; compressed-tensors marlin-24 is read by vLLM"),
        ({**COMPRESSED, "format": "marlin-24"}, "quantised by compressed-tensors marlin-24, which is not read"),
        ({"quant_method": "awq"}, "which no scheme of awq that is read explains"),
        ({"quant_method": 3}, "quantization_config: quant_method: Input should be a valid string"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "quantization_config: weight_block_size.0"),
        ({"quant_method": "compressed-tensors"}, "and model.layers.0.mlp.down_proj.weight_scale, which"),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "quantised by auto-round, which is not read"),
    ],
)
def test_a_scheme_that_is_not_read_is_one_line(model: Path, settings, told: str) -> None:
    release(model, RELEASES["fp8, blocks"])
    edit_config(model, quantization_config=settings)
    assert told in refused(model)


def test_plain_weights_under_a_quantised_configuration_are_named(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised by gptq by its quantization_config, but lm_head.weight and all other" in refused(model)


@pytest.mark.parametrize(
    ("kind", "end", "change", "told"),
    [
        ("fp8, blocks", "_scale_inv", lambda t: t[:-1], "up_proj.weight_scale_inv is [3, 3] for weights [512, 320]"),
        ("fp8, blocks", "_scale_inv", None, "_scale_inv, which fp8 has beside it, is missing"),
        ("awq", ".scales", lambda t: t[:-1], "up_proj.scales is [4, 512] for codes [320, 64] and zeros [5, 64]"),
        ("gptq, 4 bits, version 1", ".g_idx", lambda t: t[:-1], "up_proj.g_idx is [319] for 320 inputs of 4 bits"),
        ("gptq, 4 bits, version 1", ".qzeros", None, "up_proj.qzeros, which gptq has beside it, is missing"),
        ("nf4", ".weight.absmax", lambda t: t[:-1], "up_proj.weight.absmax is [2559] for weights [512, 320]"),
        ("compressed int4, symmetric", "_shape", lambda t: t + 1, "up_proj.weight_shape says [513, 321] for codes"),
        ("fp8, blocks", "", lambda t: t[:-1], "up_proj.weight is [511, 320], its configuration means [512, 320]"),
    ],
)
def test_the_first_tensor_that_does_not_fit_is_named(model: Path, kind: str, end: str, change, told: str) -> None:
    release(model, RELEASES[kind])
    tensors = load_file(model / "model.safetensors")
    name = UP.removesuffix(".weight") + end if end.startswith(".") else UP + end
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, model / "model.safetensors")
    assert told in refused(model)


def test_values_that_are_none_are_told_when_they_are_read(model: Path) -> None:
    release(model, RELEASES["fp8, blocks"])
    tensors = load_file(model / "model.safetensors")
    tensors[f"{UP}_scale_inv"][0, 0] = torch.nan
    save_file(tensors, model / "model.safetensors")
    checkpoint = open_checkpoint(model)
    with pytest.raises(UserError, match=f"{UP} has values that are NaN or infinite"):
        checkpoint.tensor(UP)


@pytest.mark.parametrize(
    ("kind", "end", "group"),
    [
        ("gptq, 4 bits, version 1, shuffled", ".g_idx", 10),
        ("gptq, 4 bits, version 1, shuffled", ".g_idx", -1),
        ("compressed int4, zero points, ordered", "_g_idx", -1),
    ],
)
def test_a_group_that_is_none_is_told_when_it_is_read(model: Path, kind: str, end: str, group: int) -> None:
    release(model, RELEASES[kind])
    tensors = load_file(model / "model.safetensors")
    tensors[UP.removesuffix(".weight") + end if end.startswith(".") else UP + end][3] = group
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match="g_idx has groups from"):
        open_checkpoint(model).tensor(UP)


def test_columns_whose_groups_are_not_said_are_in_their_order(model: Path) -> None:
    expected = release(model, RELEASES["compressed int4, symmetric"])
    tensors = load_file(model / "model.safetensors")
    tensors[f"{UP}_g_idx"] = torch.full((320,), -1, dtype=torch.int32)
    save_file(tensors, model / "model.safetensors")
    assert torch.equal(open_checkpoint(model).tensor(UP), expected[UP])


@pytest.mark.parametrize("lost", [True, False])
def test_biases_of_zeros_beside_gptq_are_none_of_the_model(model: Path, lost: bool) -> None:
    expected = release(model, RELEASES["gptq, 4 bits, version 1"])
    tensors = load_file(model / "model.safetensors")
    name = UP.replace("weight", "bias")
    tensors[name] = torch.zeros(512) if lost else torch.ones(512)
    save_file(tensors, model / "model.safetensors")
    if lost:
        assert torch.equal(open_checkpoint(model).tensor(UP), expected[UP])
    else:
        assert f"the tensor {name} is not understood" in refused(model)


def test_biases_of_the_model_are_kept_beside_gptq(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen2", num_hidden_layers=2)
    release(folder, RELEASES["gptq, 4 bits, version 1"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors[name] = torch.zeros_like(tensors[name])  # as it happens
    save_file(tensors, folder / "model.safetensors")
    assert not open_checkpoint(folder).tensor(name).any()


def test_codes_that_no_table_has_are_told_when_they_are_read(model: Path) -> None:
    def short(weight: torch.Tensor):
        tensors, values = bitsandbytes("nf4", False)(weight)
        return tensors | {".weight.quant_map": tensors[".weight.quant_map"][:3]}, values

    release(model, Release(RELEASES["nf4"].settings, short, "NF4"))
    with pytest.raises(UserError, match="its NF4 tensors do not belong together"):
        open_checkpoint(model).tensor(UP)


def test_inspect_lists_how_a_model_of_no_family_is_stored(model: Path) -> None:
    release(model, RELEASES["awq"])
    edit_config(model, model_type="mamba2000")
    listed = succeeds("inspect", model)
    assert re.search(r"\| AWQ +\| +7 \| +798,720 \| +\d", listed)
    assert "no other command takes it: model type 'mamba2000' is not supported" in listed
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 3})
    assert "do not belong together" in fails("inspect", model)


def test_inspect_lists_how_a_gguf_of_no_family_is_stored(model: Path, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba2000")
    blocks = np.zeros((4, 2 * 34), np.uint8)
    writer.add_tensor("blk.0.ssm_in.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    listed = succeeds("inspect", tmp_path / "m.gguf")
    assert re.search(r"\| Q8_0 +\| +1 \| +256 \| +272 \| +8\.5 \|", listed)
    assert "no other command takes it: a GGUF of architecture 'mamba2000'" in listed


def test_every_method_is_in_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "sources.md"
    assert {method for method in read_methods() if f"`{method}`" not in page.read_text()} == set()
