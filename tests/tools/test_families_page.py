"""Families without a row: what is found of their blocks, against the rows of others, and what commands do with them."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from families_page import PAGE, make_tiny, page, rows_of_page, tiny_config, try_type
from models_for_tests import EXPERTS, TEXT, make_model

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.thresholds import ThresholdsOptions
from sparsepack.errors import CheckpointError, UserError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import FAMILIES, check_taken
from sparsepack.models.family import SITES
from sparsepack.models.found import find_family
from sparsepack.models.hf_config import token_weights

OTHER_SITES = ("granitemoehybrid", "qwen3_5_text", "cohere2")
"""Rows that name fewer layers, leave narrow matrices alone that read the same tensor, or have two sites where attention
and MLP read one."""
SHORT = CalibrateOptions(context=48, samples=4, held_out=0)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A model by its row, and by what is found of it."""
    checkpoint = open_checkpoint(make_model(tmp_path_factory.mktemp("both") / "m", request.param))
    return checkpoint, dataclasses.replace(checkpoint, family=find_family(checkpoint.config))


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in (*EXPERTS, *OTHER_SITES)])
def test_sites_are_those_of_the_row(model_type: str) -> None:
    config = tiny_config(model_type)
    row, found = FAMILIES[model_type], find_family(config)
    for layer in range(len(found.found)):
        sites = found.projections_of(layer)
        assert {site: {*names} for site, names in sites.items()} == {
            site: {*names} for site, names in row.at(config, layer).projections.items()
        }
        assert list(sites) == list(SITES)


def test_statistics_and_thresholds_are_those_of_the_row(both: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:4000])
    made = [calibrate(each, str(text), tmp_path / str(n), SHORT) for n, each in enumerate(both)]
    for by_row, by_found in zip(made[0].layers, made[1].layers, strict=True):
        same = [name for name in by_row if name.partition(".")[0] in (*SITES, "neurons", "experts")]
        assert {*by_found} == {*same}
        for name in same:
            assert torch.equal(by_row[name], by_found[name]), name
    for allocation in ("fisher", "teal"):
        options = ThresholdsOptions(sparsity=0.5, allocation=allocation, windows=2)
        tables = [find_thresholds(each, calibration, options) for each, calibration in zip(both, made, strict=True)]
        assert tables[0].rules.keys() == tables[1].rules.keys()
        for key, rule in tables[0].rules.items():
            assert tables[1].rules[key].threshold == pytest.approx(rule.threshold, rel=1e-4)
        assert tables[0].weights == tables[1].weights


@pytest.mark.parametrize(
    "model_type",
    [
        "falcon",
        "dots1",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt_neox", "starcoder2", "jamba", "phi")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("youtu", "bamba", "lfm3")),
    ],
)
def test_every_command_takes_a_family_without_a_row(model_type: str, tmp_path: Path) -> None:
    row = try_type(model_type, tmp_path)
    assert not row.has_row
    assert row.measured, row.refusals
    assert f"| {model_type} | no |" in page([row], "5")


SITES_OF: dict[str, list[dict[str, list[str]]]] = {
    "falcon": [
        {
            "attn_in": ["self_attention.query_key_value", "mlp.dense_h_to_4h"],
            "attn_out": ["self_attention.dense"],
            "mlp_mid": ["mlp.dense_4h_to_h"],
        }
    ],
    "jamba": [
        {
            "attn_in": ["mamba.in_proj"],
            "x_proj": ["mamba.x_proj"],
            "attn_out": ["mamba.out_proj"],
            "mlp_in": ["feed_forward.gate_proj", "feed_forward.up_proj"],
            "mlp_mid": ["feed_forward.down_proj"],
        },
        {
            "attn_in": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attn_out": ["self_attn.o_proj"],
            "mlp_in": ["feed_forward.experts.gate_up_proj"],
            "mlp_mid": ["feed_forward.experts.down_proj"],
        },
    ],
    "nemotron_h": [
        {"attn_in": ["mixer.in_proj"], "attn_out": ["mixer.out_proj"]},
        {
            "mlp_in": ["mixer.experts.up_proj", "mixer.shared_experts.up_proj"],
            "mlp_mid": ["mixer.experts.down_proj"],
            "down_proj": ["mixer.shared_experts.down_proj"],
        },
    ],
    "rwkv": [
        {
            "attn_in": ["attention.key"],
            "value": ["attention.value"],
            "receptance": ["attention.receptance"],
            "attn_out": ["attention.output"],
            "mlp_in": ["feed_forward.key"],
            "feed_forward_value": ["feed_forward.value"],
            "mlp_mid": ["feed_forward.receptance"],
        }
    ],
}


@pytest.mark.parametrize("model_type", SITES_OF)
def test_linears_are_grouped_by_what_they_read(model_type: str) -> None:
    found = find_family(tiny_config(model_type))
    kinds = [{site: [*names] for site, names in block.projections.items()} for block in found.found]
    assert kinds[: len(SITES_OF[model_type])] == SITES_OF[model_type]


@pytest.mark.parametrize("model_type", ["granite", "gemma2", "llama"])
def test_what_a_model_does_to_its_logits_is_that_of_the_row(model_type: str) -> None:
    config = tiny_config(model_type)
    if model_type == "granite":
        config.logits_scaling = 8.0
    by_row, found = FAMILIES[model_type].multipliers(config), find_family(config).multipliers(config)
    assert found.logits == pytest.approx(by_row.logits, rel=1e-5)
    assert found.logit_cap == pytest.approx(by_row.logit_cap, rel=1e-3)


def test_a_token_has_to_do_with_the_experts_that_it_is_given_and_with_all_of_the_others() -> None:
    config = tiny_config("dots1")
    shapes = {
        "model.layers.1.mlp.experts.gate_up_proj": (4, 64, 64),
        "model.layers.1.mlp.shared_experts.gate_proj.weight": (32, 64),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (32, 64),
    }
    assert token_weights(config, shapes, 1, "mlp_in") == 2 * 64 * 64 + 2 * 32 * 64


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("gpt2", "block 0 has no Linear"),
        ("aria_text", "mlp.experts has is_transposed True; expected False"),
        ("t5", "model type 't5' is not supported"),
        ("bart", "an encoder-decoder"),
        ("deepseek_v4", r"what enters block 0 is \[1, 8, 4, 64\]; expected one stream 64 wide"),
    ],
)
def test_what_cannot_be_measured_is_one_line(model_type: str, told: str, tmp_path: Path) -> None:
    (make_model(tmp_path / "m") / "config.json").write_text(tiny_config(model_type).to_json_string())
    with pytest.raises(CheckpointError, match=told) as caught:
        open_checkpoint(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_commands_that_need_a_row_name_those_that_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny("starcoder2", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    works = "calibrate, thresholds, prune, trace"
    assert f"starcoder2 has no row: measured, not run by our engines: {works}, eval work" in capsys.readouterr().err
    for command in ("pack", "rotate", "distil", "refit", "permute"):
        with pytest.raises(UserError, match=f"have no row, which {command} needs; {works} and eval work with it"):
            check_taken(command, checkpoint.family, checkpoint.name)


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_tiny("starcoder2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.extra.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra\.weight is not understood"):
        open_checkpoint(tmp_path)
    tensors.pop("model.layers.1.mlp.c_fc.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.c_fc\.weight is missing"):
        open_checkpoint(tmp_path)


def test_experts_are_read_as_released_and_as_joined(tmp_path: Path) -> None:
    model = make_tiny("dots1", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    assert any(name.endswith("experts.0.gate_proj.weight") for name in checkpoint.source._source.shapes)  # type: ignore[attr-defined]
    for name in checkpoint.source.shapes:
        assert torch.equal(checkpoint.tensor(name), state[name]), name


def test_the_page_is_read_as_it_was_written() -> None:
    rows, version = rows_of_page(PAGE.read_text()), transformers.__version__
    assert list(rows) != sorted(rows)  # measured ones come first
    text = page(list(rows.values()), version)
    assert rows_of_page(text) == rows
    assert text.partition("| model type")[2] == PAGE.read_text().partition("| model type")[2]
