"""Qwen3.5: blocks of two kinds in one checkpoint, and what is beside the model that is run."""

import re
from pathlib import Path

import pytest
import torch
from models_for_tests import VOCABULARY, edit_config, make_model
from safetensors.torch import load_file, save_file

from sparsepack.errors import CheckpointError
from sparsepack.models.blocks import Attention, DeltaNet
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.families import FAMILIES
from sparsepack.models.hf_model.model import load_model

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("m") / "m", "qwen3_5_text")


def test_every_fourth_block_has_attention_with_a_gate(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    mixers = [block.mixer for block in checkpoint.architecture.blocks]
    assert mixers[:3] == [DeltaNet(2, 4, 32, 64, 4)] * 3
    assert isinstance(mixers[3], Attention)
    assert mixers[3].gated
    assert mixers[3].qk_norm == "heads"
    assert checkpoint.architecture.attention_layers == (3,)
    assert [checkpoint.stacked_shape("attn_in", layer) for layer in (0, 3)] == [
        (2 * 2 * 32 + 2 * 4 * 64, 256),
        (2 * 4 * 64 + 2 * 2 * 64, 256),
    ]
    assert len(checkpoint.architecture.inv_freq) == 64 // 4 // 2
    assert [*checkpoint.architecture.blocks[0].norms] == ["attn_norm", "mlp_norm"]


def test_gates_stay_out_of_the_site_that_they_read() -> None:
    """They are a few rows, whose errors a state would keep."""
    block = FAMILIES["qwen3_5_text"].state_block
    assert block.routers("attn_in") == ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    assert not set(block.routers("attn_in")) & set(block.projections["attn_in"])
    assert FAMILIES["qwen3_5_text"].routers("attn_in") == ()
    assert [*block.norms] == ["attn_norm", "mlp_norm"]


def test_a_head_for_several_tokens_is_named_and_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = make_model(tmp_path / "m", "qwen3_5_text")
    tensors = load_file(whole / FILE)
    more = {"mtp.fc.weight": torch.ones(256, 512), "mtp.norm.weight": torch.ones(256)}
    save_file({**tensors, **more}, whole / FILE, {"format": "pt"})
    capsys.readouterr()
    found = open_checkpoint(whole)
    said = capsys.readouterr().err
    assert re.search(r"a head for the prediction of several tokens \(mtp\.\*, 2 tensors\) is left out", said)
    assert set(found.source.shapes) == set(open_checkpoint(folder).source.shapes)
    assert found.sha256 != open_checkpoint(folder).sha256
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = [load_model(each)(ids).logits for each in (found, open_checkpoint(folder))]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "self_attn|no layer has attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "expected full_attention or linear_attention"),
        ({"linear_num_value_heads": 6}, "weights and config.json do not belong together"),
    ],
)
def test_other_blocks_than_the_configuration_means_are_one_line(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    whole = make_model(tmp_path / "m", "qwen3_5_text")
    edit_config(whole, **changes)
    with pytest.raises(CheckpointError, match=told) as refusal:
        open_checkpoint(whole)
    assert "\n" not in str(refusal.value)
