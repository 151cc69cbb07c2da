"""LFM2: blocks with a short convolution in place of attention, and the width of MLPs, which its configuration does not
say."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from models_for_tests import make_model

from sparsepack.errors import CheckpointError
from sparsepack.models.architecture import Architecture
from sparsepack.models.architecture_checks import check_numbers
from sparsepack.models.blocks import ShortConv
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.families import FAMILIES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("m") / "m", "lfm2"))


def test_blocks_are_of_two_kinds(checkpoint: Checkpoint) -> None:
    architecture = checkpoint.architecture
    assert [isinstance(block.mixer, ShortConv) for block in architecture.blocks] == [True, False, True]
    assert architecture.blocks[0].mixer == ShortConv(256, 3)
    assert architecture.attention_layers == (1,)
    assert checkpoint.stacked_shape("attn_in", 0) == (3 * 256, 256)
    assert checkpoint.stacked_shape("attn_in", 1) == (2 * 256, 256)
    assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_auto_adjust_ff_dim": False},
        {"block_multiple_of": 12, "intermediate_size": 301},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
    ],
    ids=str,
)
def test_mlps_are_as_wide_as_transformers_makes_them(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    config = AutoConfig.for_model("lfm2", **{"hidden_size": 32, "intermediate_size": 300, **changes})
    assert FAMILIES["lfm2"].setting(config, "intermediate_size") == Lfm2MLP(config).w1.out_features


@pytest.mark.parametrize(
    "changes",
    [{"short_conv": 0}, {"short_conv": True}, {"conv_layers": (0, 3)}, {"conv_layers": (0, 1, 2)}, {"conv_layers": ()}],
    ids=str,
)
def test_numbers_of_no_model_are_refused(checkpoint: Checkpoint, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"conv|attention"):
        check_numbers(dataclasses.replace(checkpoint.architecture, **changes))


def test_convolutions_with_biases_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "lfm2", conv_bias=True)
    with pytest.raises(CheckpointError, match="conv_bias is True; expected False"):
        open_checkpoint(folder)
