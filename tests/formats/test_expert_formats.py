"""Mixtures of experts in files: zigzag with a leading dimension of experts, and what stock llama.cpp runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import plan_zigzag, write_plain, write_zigzag
from codec_cases import relative_error
from forged import edited, forge
from models_for_tests import AS_LLAMA_CPP, EXPERTS, make_model, row

from sparsepack.errors import ArtifactError, CheckpointError, PackingError
from sparsepack.formats.containers.gguf import u32
from sparsepack.formats.containers.gguf_writer import GgufPlan
from sparsepack.formats.matrix import decode_experts, decode_matrix
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.orders import zigzag
from sparsepack.formats.packed import ExpertMlp
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.stock import dequantised, stock_config
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.formats.zigzag.reader import NUMBERS
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.hf_config import architecture_of
from sparsepack.models.sites import SiteRule

KNOWN = [family for family in EXPERTS if row(family).gguf is not None]
"""Those that llama.cpp knows."""
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("qwen3_moe", {"moe_intermediate_size": 96, "num_experts": 5, "num_experts_per_tok": 3}),
    "odd, shared": (
        "qwen2_moe",
        {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 288, "num_experts": 5},
    ),
}
"""Of widths that no superblock divides, and an odd number of experts."""
NARROW = {"odd": 1, "odd, shared": 2, "deepseek_v3": 3, "deepseek_v2": 2, "glm4_moe_lite": 4, "gemma4_text, mixture": 1}
"""How many kinds of matrices are as narrow, which ggml stores otherwise: downs, those of latents and of wide heads."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("experts")
    kinds = {family: (family, {}) for family in EXPERTS} | ODD
    return {name: open_checkpoint(make_model(folder / name, of, **more)) for name, (of, more) in kinds.items()}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Checkpoint]) -> dict[str, Checkpoint]:
    """As llama.cpp takes them."""
    folder = tmp_path_factory.mktemp("known")
    made = {
        name: open_checkpoint(make_model(folder / name, name, **AS_LLAMA_CPP[name]))
        for name in KNOWN
        if name in AS_LLAMA_CPP
    }
    return checkpoints | made


def rules(checkpoint: Checkpoint) -> dict[tuple[int, str], SiteRule]:
    """Those of two sites, as far as a model has them."""
    of_both = {(0, "mlp_in"): SiteRule(0.5, sparsity=0.3), (1, "mlp_mid"): SiteRule(0.25, sparsity=0.3)}
    return {key: rule for key, rule in of_both.items() if key in checkpoint.sites}


@pytest.fixture(scope="module")
def files(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name, checkpoint in checkpoints.items():
        write_zigzag(checkpoint, rules(checkpoint), folder / f"{name}.gguf")
    return {name: folder / f"{name}.gguf" for name in checkpoints}


@pytest.mark.parametrize("name", [*EXPERTS, *ODD])
def test_every_tensor_comes_back_within_its_types_error(
    checkpoints: dict[str, Checkpoint], files: dict[str, Path], name: str
) -> None:
    checkpoint, packed = checkpoints[name], read_packed(files[name])
    tensor = dequantised(packed)
    for source in checkpoint.source.shapes:
        found, expected = tensor(source), checkpoint.tensor(source).float()
        assert found.shape == expected.shape
        exact = expected.dim() == 1 or source.endswith(("mlp.gate.weight", "expert_gate.weight", "router.proj.weight"))
        assert relative_error(found, expected) < (1e-7 if exact else 0.09), source
    assert packed.architecture == architecture_of(checkpoint.config, None)
    used = row(name).experts.used if name in EXPERTS else "num_experts_per_tok"  # type: ignore[union-attr]
    assert getattr(stock_config(packed), used) == getattr(checkpoint.config, used)
    assert {key: rule.limits for key, rule in packed.rules.items()} == {
        key: rule.limits for key, rule in rules(checkpoint).items()
    }
    assert verify(files[name], checkpoint).passed


def test_each_expert_is_the_zigzag_matrix_of_its_own(
    checkpoints: dict[str, Checkpoint], files: dict[str, Path]
) -> None:
    checkpoint, packed = checkpoints["odd"], read_packed(files["odd"])
    mlp = packed.layers[1].mlp
    assert isinstance(mlp, ExpertMlp)
    stored = mlp.sites["mlp_in"].matrix
    assert tuple(stored.blocks.shape) == (5, 0, 256, 144)
    assert stored.tail is not None
    assert tuple(stored.tail.shape) == (5, 192, 144)
    weight = checkpoint.tensor("model.layers.1.mlp.experts.gate_up_proj")
    for expert in range(5):
        assert torch.equal(stored.tail[expert], zigzag.pack_tail(weight[expert]))
        assert torch.equal(decode_experts(stored, expert, expert + 1)[0], decode_matrix(stored.expert(expert)))
    assert "blk.1.mlp_in.weight" not in packed.manifest["tensors"]
    assert packed.manifest["tensors"]["blk.1.mlp_in.tail.weight"] == {"shape": [5, 192, 256], "padding_rows": 0}


def test_an_expert_of_another_model_is_found(
    checkpoints: dict[str, Checkpoint], files: dict[str, Path], tmp_path: Path
) -> None:
    other = open_checkpoint(make_model(tmp_path / "m", "mixtral", seed=1))
    report = verify(files["mixtral"], other)
    assert not report.passed
    assert any("blk.0.mlp_mid.weight: relative error" in problem for problem in report.problems)


FORGED = {
    "more used than there are": ({"experts": {"count": 8, "used": 9, "normalised": True}}, "expected 1 to 8"),
    "fewer than stored": ({"experts": {"count": 7, "used": 2, "normalised": True}}, "the architecture means"),
    "no experts": ({"experts": None}, "experts None in a mixtral model"),
    "no truth": ({"experts": {"count": 8, "used": 2, "normalised": 1}}, "neither true nor false"),
    "other fields": ({"experts": {"count": 8, "used": 2}}, "normalised"),
    "shared": (
        {"experts": {"count": 7, "used": 2, "normalised": True, "shared": 1}},
        "1 shared experts in a mixtral model",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_files_that_contradict_themselves_are_refused(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, case: str
) -> None:
    changes, told = FORGED[case]
    plan = plan_zigzag(checkpoints["mixtral"], {})
    assert isinstance(plan, GgufPlan)
    forge(plan, values=edited(plan.values, NUMBERS, **changes)).write(tmp_path / "m.gguf")
    with pytest.raises(ArtifactError, match=told):
        read_packed(tmp_path / "m.gguf")


def test_offsets_inside_experts_are_refused(checkpoints: dict[str, Checkpoint]) -> None:
    rule = SiteRule(0.5, offset=torch.zeros(256))
    with pytest.raises(PackingError, match="offsets, which experts have no place for"):
        plan_zigzag(checkpoints["mixtral"], {(0, "mlp_mid"): rule})


@pytest.mark.parametrize(
    ("family", "values", "told"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, r"norm_topk_prob false: llama\.cpp always makes the weights"),
        ("olmoe", {"norm_topk_prob": True}, r"norm_topk_prob true: llama\.cpp never makes the weights"),
        ("olmoe", {"num_key_value_heads": 2}, r"4 heads, 2 of keys: llama\.cpp norms as many of them"),
        ("olmoe", {"attention_bias": True}, "llama.cpp knows no biases in olmoe models"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, values: dict[str, Any], told: str
) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", family, **values, num_hidden_layers=1))
    FORMATS["zigzag-q4_k"].check_model(checkpoint)
    with pytest.raises(PackingError, match=told):
        FORMATS["q4_k"].check_model(checkpoint)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long][: name in ("olmoe", "odd")]) for name in (*KNOWN, *ODD)]
)
def test_llama_cpp_runs_experts_with_the_same_top_tokens(
    known: dict[str, Checkpoint], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is the peer of this test")
    from plain_model import both_logits, disagreement

    checkpoint = known[name]
    states = checkpoint.family.delta_net is not None  # which keep errors
    for type, most, least in (("f32", 1e-3, 0.98), ("q4_k", 0.12 if states else 0.08, 0.8 if states else 0.9)):
        path = tmp_path / f"{type}.gguf"
        notes = write_plain(checkpoint, path, type=type)
        assert len(notes) == (type == "q4_k") * NARROW.get(name, 0)
        relative, same, clear = disagreement(*both_logits(path, checkpoint))
        assert relative < most
        assert same >= least
        assert clear >= 0.98
        assert verify(path, checkpoint).passed
    tensors = open_artifact(path).tensors
    into = [f"blk.1.{part}.weight" for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp")]
    assert {tensors[part].type for part in into if part in tensors} == {"Q4_K"}
    assert tensors["blk.1.ffn_down_exps.weight"].type == ("Q5_0" if name in ODD else "Q4_K")
    routers = ["blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate_inp_shexp.weight", "blk.1.exp_probs_b.bias"]
    assert {tensors[part].type for part in routers if part in tensors} == {"F32"}


@pytest.mark.parametrize("name", KNOWN)
def test_a_gguf_of_llama_cpps_converter_is_the_same_model(
    known: dict[str, Checkpoint], tmp_path: Path, name: str
) -> None:
    checkpoint = known[name]
    plan = FORMATS["bf16"].plan(checkpoint, PlanRequest())
    assert isinstance(plan, GgufPlan)
    foreign = {key: value for key, value in plan.values.items() if key != "sparsepack.config"}
    dataclasses.replace(plan, values=foreign).write(tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf")
    assert found.family == (known["deepseek_v3"] if name == "glm4_moe_lite" else checkpoint).family
    assert found.architecture.experts == checkpoint.architecture.experts
    assert found.architecture.blocks == checkpoint.architecture.blocks
    assert set(found.source.shapes) == set(checkpoint.source.shapes) - {"lm_head.weight"} or not checkpoint.tied
    for tensor in found.source.shapes:
        # A file has exponentials of the first; norms are folded into the second, which are not in BF16 therefore.
        tolerance = 1e-6 if tensor.endswith("A_log") else 2**-7 if ".mlp." in tensor and "gemma4" in name else 0.0
        ours, theirs = found.tensor(tensor).float(), checkpoint.tensor(tensor).float()
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), tensor


def test_blocks_of_a_gguf_that_predict_are_left_out(
    known: dict[str, Checkpoint], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path / "m", "deepseek_v3", **AS_LLAMA_CPP["deepseek_v3"], num_hidden_layers=4)
    plan = FORMATS["bf16"].plan(open_checkpoint(folder), PlanRequest())
    assert isinstance(plan, GgufPlan)
    foreign = {key: value for key, value in plan.values.items() if key != "sparsepack.config"}
    forge(plan, values={**foreign, "deepseek2.nextn_predict_layers": u32(1)}).write(tmp_path / "m.gguf")
    found, expected = open_checkpoint(tmp_path / "m.gguf"), known["deepseek_v3"]
    assert "what blocks behind the last one predict (blk.*, " in capsys.readouterr().err
    assert set(found.source.shapes) == set(expected.source.shapes)
    assert found.architecture.layers == expected.architecture.layers == 3


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("expert_gating_func", u32(1), "expert_weights_norm is true, of a softmax"),
        ("attention.key_length_mla", u32(8), r"k_b_proj\.weight is not understood in a deepseek_v3 model"),
        ("nextn_predict_layers", u32(3), "nextn_predict_layers is 3 of 3"),
        ("block_count", u32(2**32 - 1), "expected a whole number of at most 9,999"),
    ],
)
def test_forged_numbers_of_latents_are_one_line(
    known: dict[str, Checkpoint], tmp_path: Path, key: str, value: Any, told: str
) -> None:
    plan = FORMATS["f32"].plan(known["deepseek_v3"], PlanRequest())
    assert isinstance(plan, GgufPlan)
    kept = {name: each for name, each in plan.values.items() if name != "sparsepack.config"}
    forge(plan, values={**kept, f"deepseek2.{key}": value}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_gpt_oss_keeps_the_bounds_of_its_rotary_scaling(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["gpt_oss"]
    plan = FORMATS["bf16"].plan(checkpoint, PlanRequest())
    assert any("rounds the bounds" in note for note in plan.notes)
    assert isinstance(plan, GgufPlan)
    foreign = {key: value for key, value in plan.values.items() if key != "sparsepack.config"}
    dataclasses.replace(plan, values=foreign).write(tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf").architecture
    assert found.inv_freq == pytest.approx(checkpoint.architecture.inv_freq, rel=1e-6)


def test_a_gguf_with_experts_of_an_unknown_kind_is_one_line(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    plan = FORMATS["bf16"].plan(checkpoints["mixtral"], PlanRequest())
    assert isinstance(plan, GgufPlan)
    values = {key: value for key, value in plan.values.items() if key != "sparsepack.config"}
    values |= {key.replace("llama.", "qwen2."): value for key, value in values.items() if key.startswith("llama.")}
    forge(plan, values=values, architecture="qwen2").write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="a GGUF of architecture 'qwen2' with experts; expected one of"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(("key", "value"), [("expert_gating_func", 2), ("expert_group_count", 8)])
def test_a_gguf_with_another_router_is_one_line(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, key: str, value: int
) -> None:
    plan = FORMATS["bf16"].plan(checkpoints["qwen3_moe"], PlanRequest())
    assert isinstance(plan, GgufPlan)
    values = {name: each for name, each in plan.values.items() if name != "sparsepack.config"}
    forge(plan, values={**values, f"qwen3moe.{key}": u32(value)}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=f"qwen3moe.{key} is {value}, a router of another kind"):
        open_checkpoint(tmp_path / "m.gguf")
