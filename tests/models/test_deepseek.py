"""DeepSeek and GLM-4.7-Flash: which blocks have experts, latents of queries or none, what a checkpoint has beside."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import edit_config, make_model
from safetensors.torch import load_file, save_file

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

FILE = "model.safetensors"


def test_leading_blocks_are_dense_and_as_wide_as_the_configuration_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "m", "deepseek_v3"))
    a = checkpoint.architecture
    assert (a.dense_layers, a.dense_intermediate, a.intermediate) == ((0,), 512, 256)
    assert [block.mlp.experts is None for block in a.blocks] == [True, False, False]
    assert checkpoint.stacked_shape("mlp_mid", 0) == (256, 512)
    assert checkpoint.stacked_shape("mlp_mid", 1) == (9 * 256, 256)


def test_sites_are_those_of_the_latents(tmp_path: Path) -> None:
    both = open_checkpoint(make_model(tmp_path / "both", "deepseek_v3"))
    assert [*both.family.projections_of(0)] == ["attn_in", "attn_q_b", "attn_kv_b", "attn_out", "mlp_in", "mlp_mid"]
    assert [both.stacked_shape(site) for site in ("attn_in", "attn_q_b", "attn_kv_b", "attn_out")] == [
        (128 + 96 + 32, 256),
        (4 * (48 + 32), 128),
        (4 * (48 + 64), 96),
        (256, 4 * 64),
    ]
    alone = open_checkpoint(make_model(tmp_path / "alone", "deepseek_v2"))
    assert [*alone.family.projections_of(0)] == ["attn_in", "attn_kv_b", "attn_out", "mlp_in", "mlp_mid"]
    assert alone.stacked_shape("attn_in") == (4 * (48 + 32) + 96 + 32, 256)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_blocks_that_predict_several_tokens_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    folder = make_model(tmp_path / "m", family, num_nextn_predict_layers=1)
    plain = open_checkpoint(folder).source.shapes
    more = {"model.layers.3.eh_proj.weight": torch.ones(256, 512), "model.layers.3.enorm.weight": torch.ones(256)}
    save_file({**load_file(folder / FILE), **more}, folder / FILE, {"format": "pt"})
    capsys.readouterr()
    assert set(open_checkpoint(folder).source.shapes) == set(plain)
    said = capsys.readouterr().err
    assert re.search(
        r"a head for the prediction of several tokens \(model\.layers\.3\.\*, 2 tensors\) is left out", said
    )
    edit_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False; expected True"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5 of n_group 4 groups of 8 experts"),
        ("deepseek_v3", {"n_group": 3}, "topk_group 2 of n_group 3 groups of 8 experts"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; expected a whole number"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts is 0; expected a whole number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'; expected 'greedy'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types is .*expected dense or sparse"),
    ],
)
def test_configurations_of_other_models_are_refused_in_one_line(
    tmp_path: Path, family: str, changes: dict[str, Any], told: str
) -> None:
    folder = make_model(tmp_path / "m", family)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=told) as caught:
        _ = open_checkpoint(folder).architecture
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"latent": None}, "latent None in a deepseek_v3 model"),
        ({"dense_layers": [0, 1, 2]}, "3 layers with a dense MLP of 3"),
        ({"dense_layers": [3]}, "dense_layers holds something else"),
        ({"dense_intermediate": 0}, "dense_intermediate 0"),
        ({"head_dim": 81}, "of 81 channels"),
        ({"kv_heads": 2}, "4 heads, 2 of keys"),
        ({"delta_layers": [1]}, "delta_net None"),
    ],
)
def test_numbers_that_could_not_be_a_models_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    whole = open_checkpoint(make_model(tmp_path / "m", "deepseek_v3")).architecture
    assert Architecture.from_json(whole.to_json()) == whole
    check_numbers(whole)
    broken = Architecture.from_json({**whole.to_json(), **changes})
    with pytest.raises(ValueError, match=told):
        check_numbers(broken)
