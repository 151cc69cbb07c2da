"""The plain GGUF: stock llama.cpp loads it and computes what the stock transformers model computes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import write_plain
from forged import forge
from models_for_tests import AS_LLAMA_CPP, END, EXPERTS, LLAMA_CPP, TEXT, UNLIKE, make_model
from pairwise import each_value
from plain_model import both_logits, disagreement, load_llama

from sparsepack.errors import CheckpointError, PackingError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.containers.gguf import u32
from sparsepack.formats.containers.gguf_writer import GgufPlan
from sparsepack.formats.open import open_artifact
from sparsepack.formats.plan import PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import HEAD
from sparsepack.models.hf_config import architecture_of
from sparsepack.models.hf_model.model import load_model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is the peer of these tests")

Checkpoints, Files = dict[str, Checkpoint], dict[tuple[str, str], Path]
FULL = ("f32", "bf16", "f16")
ROUNDED = dict.fromkeys(("smollm3", "olmo2", "olmo3", "exaone4", "nemotron"), 3e-2)
ROUNDED |= {"lfm2": 4e-2, "qwen3_5_text": 8e-2}
"""How far logits are off where llama.cpp rounds activations to 8 bits, of families where that is more than 0.02.
Measured 0.026 where norms come after matrices, there are four blocks, or activations are squared, 0.030 where
convolutions multiply three vectors, and 0.062 where a state keeps errors."""


@pytest.fixture(scope="module")
def files(llama_cpp_checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files by family and kind, each written when it is asked for."""
    folder = tmp_path_factory.mktemp("plain")

    class Written(dict[tuple[str, str], Path]):
        def __missing__(self, key: tuple[str, str]) -> Path:
            family, kind = key
            self[key] = folder / f"{family}.{kind}.gguf"
            assert write_plain(llama_cpp_checkpoints[family], self[key], type=kind) == ()
            return self[key]

    return Written()


unlike_families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long][: name not in (*UNLIKE, *ROUNDED)]) for name in LLAMA_CPP]
)
"""Names, orders and keys of every family are those of float32 files, so that of other types few families are enough."""


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_llama_cpp_agrees_with_transformers_in_float32(
    llama_cpp_checkpoints: Checkpoints, files: Files, family: str
) -> None:
    relative, same, _ = disagreement(*both_logits(files[family, "f32"], llama_cpp_checkpoints[family]))
    assert relative < 1e-3  # llama.cpp keeps keys and values in float16
    assert same > 0.98


@unlike_families
def test_llama_cpp_agrees_with_transformers_on_q4_k(
    llama_cpp_checkpoints: Checkpoints, files: Files, family: str
) -> None:
    relative, same, clear = disagreement(*both_logits(files[family, "q4_k"], llama_cpp_checkpoints[family]))
    assert relative <= ROUNDED.get(family, 2e-2)
    assert same >= 0.9  # random models have no favourite: many second tokens are close
    assert clear >= 0.98 or same >= 0.98  # of soft-capped ones none leads clearly


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, name, marks=[pytest.mark.long][: name not in (*UNLIKE, *ROUNDED) or (n + of_kind) % 2])
        for of_kind, kind in enumerate(("q6_k", "q8_0"))
        for n, name in enumerate(LLAMA_CPP)
    ],
)
def test_llama_cpp_agrees_with_transformers_on_more_bits(
    llama_cpp_checkpoints: Checkpoints, files: Files, family: str, kind: str
) -> None:
    relative, same, clear = disagreement(*both_logits(files[family, kind], llama_cpp_checkpoints[family]))
    assert relative <= ROUNDED.get(family, 2e-2)
    assert same >= 0.9
    assert clear >= 0.98 or same >= 0.98


def test_llama_cpp_runs_the_trained_model(shared: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared / "models/books-26m-silu")
    path = tmp_path / "m.gguf"
    write_plain(checkpoint, path)
    relative, same, clear = disagreement(*both_logits(path, checkpoint))
    assert relative <= 2e-2
    assert same >= 0.95
    assert clear >= 0.98
    written = load_llama(path).create_completion("She opened the door and", max_tokens=16, temperature=0)
    assert len(written["choices"][0]["text"]) > 20


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 128}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3": (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}},
    ),
    "yarn": ("qwen3", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 8.0}}),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.1, 2.2],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
            },
        },
    ),
    "states, three value heads a key": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "convolutions of four, an MLP as wide as it says": (
        "lfm2",
        {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "groups of experts, a latent of queries": ("deepseek_v3", {}),
    "few experts, keys and values of latents alone": ("deepseek_v2", {}),
    "as many channels of values as it likes": ("glm4_moe_lite", {}),
    "state-space models and dense MLPs": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"], "n_groups": 4},
    ),
    "experts of convolutions": ("lfm2_moe", {"conv_L_cache": 4, "num_dense_layers": 0}),
    "layers without a window first, two bases": (
        "gemma4_text",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_k_eq_v": False,
            "num_global_key_value_heads": 4,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "no rotary embedding": ("granitemoehybrid", {"position_embedding_type": "nope"}),
    "yarn, own scale": (
        "qwen2",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_unusual_models_are_the_same_in_llama_cpp_and_read_back(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    checkpoint = open_checkpoint(make_model(tmp_path / "model", family, **changes))
    path = tmp_path / "m.gguf"
    write_plain(checkpoint, path, type="f32")
    relative, same, _ = disagreement(*both_logits(path, checkpoint))
    assert relative < 1e-3
    assert same > 0.98
    assert_same_model(open_checkpoint(path), checkpoint)
    if case == "no rotary embedding":
        with pytest.raises(CheckpointError, match="no rotary embedding"):
            open_checkpoint(without_our_config(checkpoint, tmp_path / "foreign.gguf"))
    elif case != "llama3":  # whose factors tell the scaling only where it is Llama 3's own
        assert_same_model(open_checkpoint(without_our_config(checkpoint, tmp_path / "foreign.gguf")), checkpoint)


def without_our_config(checkpoint: Checkpoint, path: Path) -> Path:
    """The same file as llama.cpp's converter would write it: without our copy of config.json."""
    plan = FORMATS["f32"].plan(checkpoint, PlanRequest())
    assert isinstance(plan, GgufPlan)
    kept = {key: value for key, value in plan.values.items() if key != "sparsepack.config"}
    forge(plan, values=kept).write(path)
    return path


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare tensors exactly, but for logarithms, which llama.cpp's files have exponentials of."""
    tolerance = 1e-6 if name.endswith("A_log") else 0.0
    assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance), name


def assert_same_model(found: Checkpoint, expected: Checkpoint) -> None:
    assert set(found.source.shapes) == set(expected.source.shapes) - ({HEAD} if expected.tied else set())
    for name in found.source.shapes:
        assert_same(found.tensor(name), expected.tensor(name), name)
    ours, theirs = architecture_of(found.config, None), architecture_of(expected.config, None)
    for field in dataclasses.fields(ours):
        if field.name in ("inv_freq", "rotary_scale", "norm_eps"):
            assert getattr(ours, field.name) == pytest.approx(getattr(theirs, field.name), rel=1e-6), field.name
        elif field.name != "model_type":
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    ids = torch.arange(40)[None]
    assert torch.allclose(load_model(found)(ids).logits, load_model(expected)(ids).logits, atol=1e-4)


@each_value({"kind": FULL, "family": LLAMA_CPP})
def test_full_precision_files_are_checkpoints_again(
    llama_cpp_checkpoints: Checkpoints, files: Files, family: str, kind: str
) -> None:
    found, expected = open_checkpoint(files[family, kind]), llama_cpp_checkpoints[family]
    if kind == "f16":  # bfloat16 has smaller numbers than float16
        for name in found.source.shapes:
            assert torch.allclose(found.tensor(name).float(), expected.tensor(name).float(), atol=5e-7), name
    else:
        assert_same_model(found, expected)
    assert found.tokenizer.encode(TEXT[:2000]) == expected.tokenizer.encode(TEXT[:2000])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long][: name not in UNLIKE]) for name in LLAMA_CPP]
)
def test_full_precision_files_can_be_packed_again(
    llama_cpp_checkpoints: Checkpoints, files: Files, tmp_path: Path, family: str
) -> None:
    write_plain(open_checkpoint(files[family, "bf16"]), tmp_path / "m.gguf", type="q4_k")
    ours, again = open_artifact(files[family, "q4_k"]).stock(), open_artifact(tmp_path / "m.gguf").stock()
    for name in llama_cpp_checkpoints[family].source.shapes:
        assert_same(ours.tensor(name), again.tensor(name), name)


def test_llama_cpp_tokenises_like_transformers(llama_cpp_checkpoints: Checkpoints, files: Files) -> None:
    llama, tokenizer = load_llama(files["llama", "q4_k"]), llama_cpp_checkpoints["llama"].tokenizer
    for text in (TEXT[:3000], f"a{END}b  ä\n\n", "'s 1234"):
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text)


def test_types_of_the_matrices(llama_cpp_checkpoints: Checkpoints, files: Files, tmp_path: Path) -> None:
    types = {name: info.type for name, info in read_gguf(files["llama", "q4_k"]).tensors.items()}
    assert {types["token_embd.weight"], types["output.weight"]} == {"Q6_K"}
    assert {types["blk.0.attn_q.weight"], types["blk.1.ffn_down.weight"]} == {"Q4_K"}
    assert {types["blk.0.attn_norm.weight"], types["output_norm.weight"]} == {"F32"}
    for kind in ("q6_k", "q8_0"):
        types = {name: info.type for name, info in read_gguf(files["llama", kind]).tensors.items()}
        assert {types[name] for name in types if types[name] != "F32"} == {kind.upper()}
    write_plain(llama_cpp_checkpoints["llama"], tmp_path / "m.gguf", output_type="f16", embedding_type="q4_k")
    types = {name: info.type for name, info in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert (types["token_embd.weight"], types["output.weight"]) == ("Q4_K", "F16")


def test_chat_template_is_carried(llama_cpp_checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_plain(open_checkpoint(folder), tmp_path / "m.gguf")
    assert load_llama(tmp_path / "m.gguf").metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 320},
            {"token_embd": "Q8_0", "attn_q": "Q5_0"},
        ),
        ({"intermediate_size": 300}, {"token_embd": "Q6_K", "attn_q": "Q4_K", "ffn_down": "F16"}),
        ({"intermediate_size": 352}, {"token_embd": "Q6_K", "attn_q": "Q4_K", "ffn_down": "Q5_0"}),
    ],
)
def test_odd_widths_fall_back_as_in_llama_quantize(
    tmp_path: Path, changes: dict[str, Any], types: dict[str, str]
) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "model", **changes))
    notes = write_plain(checkpoint, tmp_path / "m.gguf")
    artifact = open_artifact(tmp_path / "m.gguf")
    for part, type in types.items():
        found = {info.type for name, info in artifact.tensors.items() if part in name}
        assert found == {type}
    assert any("needs a multiple of 256" in note for note in notes)
    assert verify(tmp_path / "m.gguf", checkpoint).problems == ()
    relative, _, _ = disagreement(*both_logits(tmp_path / "m.gguf", checkpoint))
    assert relative <= 2e-2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "groups of softmaxes": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "4 groups of experts that compete by the best of each: llama.cpp takes the two best",
    ),
    "two scales of yarn": (
        "deepseek_v3",
        {"rope_parameters": {**EXPERTS["deepseek_v3"]["rope_parameters"], "mscale": 0.5}},
        "mscale 0.5 and mscale_all_dim 1.0: in deepseek2 models llama.cpp takes both for the same",
    ),
    "a latent of queries in a lite model": (
        "glm4_moe_lite",
        {"num_hidden_layers": 26, "mlp_layer_types": ["dense"] + ["sparse"] * 25},
        "a latent of queries: in deepseek2 models of 26 layers llama.cpp knows none",
    ),
    "dense blocks behind others": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        "dense MLPs in blocks 1: in deepseek2 models llama.cpp has them in the first ones",
    ),
    "no block with a state": (
        "lfm2",
        {"layer_types": ["full_attention"] * 3},
        "attention in every block: in lfm2 models llama.cpp has states in some",
    ),
    "dense blocks among mixtures": (
        "nemotron_h",
        {},
        "dense MLPs in blocks 3: in nemotron_h_moe models llama.cpp takes every MLP for a mixture",
    ),
    "scaled experts": (
        "lfm2_moe",
        {"routed_scaling_factor": 1.5},
        "weights of experts times 1.5: llama.cpp takes 1 in lfm2moe models",
    ),
    "activation": ("llama", {"hidden_act": "relu"}, "activation 'relu': llama.cpp runs llama models with silu only"),
    "biases": ("qwen3", {"attention_bias": True}, r"blk\.0\.attn_q\.bias: llama.cpp knows no biases in qwen3"),
    "llama3 elsewhere": ("qwen2", CASES["llama3"][1], "'llama3': llama.cpp has it for llama models only, not qwen2"),
    "two sizes of heads in states": ("qwen3_5_text", {}, "heads of 32 and 64 channels in a delta net"),
    "attention at the wrong places": (
        "qwen3_5_text",
        {**AS_LLAMA_CPP["qwen3_5_text"], "layer_types": ["full_attention"] + ["linear_attention"] * 3},
        "attention in layers 0: in qwen35 models llama.cpp has it in one layer of so many",
    ),
    "yarn betas": ("llama", {"rope_parameters": CASES["yarn"][1]["rope_parameters"] | {"beta_slow": 2.0}}, "beta_slow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_run_otherwise_is_refused(tmp_path: Path, case: str) -> None:
    family, changes, said = REFUSED[case]
    checkpoint = open_checkpoint(make_model(tmp_path / "model", family, **changes))
    with pytest.raises(PackingError, match=said) as caught:
        FORMATS["q4_k"].check_model(checkpoint)
    assert "zigzag-q4_k" in str(caught.value)


def test_a_family_without_a_name_in_llama_cpp_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "model", "vaultgemma"))
    with pytest.raises(PackingError, match=r"vaultgemma models have no name in .* pack as zigzag-q4_k"):
        FORMATS["q4_k"].check_model(checkpoint)


def test_sliding_window_that_llama_cpp_ignores_is_said(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "model", "mistral", sliding_window=64))
    notes = write_plain(checkpoint, tmp_path / "m.gguf", type="bf16")
    assert len(notes) == 1
    assert "llama.cpp ignores the sliding window of 64 tokens" in notes[0]
    assert_same_model(open_checkpoint(tmp_path / "m.gguf"), checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("block_count", 2**32 - 1, "num_hidden_layers is 4294967295; expected a whole number of at most 9,999"),
        ("full_attention_interval", 0, "its keys are not understood"),
        ("ssm.state_size", 2**31, "its configuration means"),
    ],
)
def test_forged_numbers_of_states_are_one_line(
    llama_cpp_checkpoints: Checkpoints, tmp_path: Path, key: str, value: int, told: str
) -> None:
    plan = FORMATS["f32"].plan(llama_cpp_checkpoints["qwen3_5_text"], PlanRequest())
    assert isinstance(plan, GgufPlan)
    kept = {name: each for name, each in plan.values.items() if name != "sparsepack.config"}
    forge(plan, values={**kept, f"qwen35.{key}": u32(value)}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rotary_factors_read_back(tmp_path: Path, factor: float) -> None:
    scaling = CASES["llama3"][1]["rope_parameters"] | {"factor": factor, "original_max_position_embeddings": 8192}
    changes = {"rope_parameters": scaling, "max_position_embeddings": 16384}
    checkpoint = open_checkpoint(make_model(tmp_path / "model", "llama", **changes))
    assert_same_model(open_checkpoint(without_our_config(checkpoint, tmp_path / "m.gguf")), checkpoint)


def test_rotary_factors_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", **CASES["llama3"][1])
    path = without_our_config(open_checkpoint(folder), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        open_checkpoint(path)
